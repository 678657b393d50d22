"""Completions that are trained on again, or that others have written: replay, recorded rollouts, agents' logs."""

from typing import TYPE_CHECKING


__all__ = ["load_rollouts"]

if TYPE_CHECKING:
    from .reading import load_rollouts


def __getattr__(name: str):
    # Replay needs no datasets.
    if name == "load_rollouts":
        from .reading import load_rollouts

        return load_rollouts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
