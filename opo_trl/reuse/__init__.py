"""Completions that are trained on again, or that others have written: replay, recorded rollouts, agents' logs."""

from typing import TYPE_CHECKING


__all__ = ["load_rollouts", "to_pivots"]

if TYPE_CHECKING:
    from .pivots import to_pivots
    from .reading import load_rollouts


def __getattr__(name: str):
    """Import a public function only when it is used: replay, in the same package, needs no `datasets`."""
    if name == "load_rollouts":
        from .reading import load_rollouts

        return load_rollouts
    if name == "to_pivots":
        from .pivots import to_pivots

        return to_pivots
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
