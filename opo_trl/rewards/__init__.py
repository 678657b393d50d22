"""
Rewards: from completions to numbers, isolated from the training process.

To add a reward, write a function `(completions, **columns) -> list[float | None]` in its own module here, and
add it to `REWARDS` in `opo_trl/launch/rewards.py` for recipes. Recipes also accept the dotted path of any function.
"""

from typing import TYPE_CHECKING


__all__ = ["accuracy_reward", "format_reward"]

# MiB of a worker. With 60, math-verify silently fails to parse right answers; with 384, 10,000 boxes no longer fit.
LEAST_MEMORY = 512

if TYPE_CHECKING:
    from .accuracy import accuracy_reward, format_reward


def __getattr__(name: str):
    # Workers import this package before the module of their reward, which may not need SymPy.
    if name in __all__:
        from . import accuracy

        return getattr(accuracy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
