"""
Rewards: from completions to numbers, isolated from the training process.

To add a reward, write a function `(completions, **columns) -> list[float | None]` in its own module here, and
add it to `REWARDS` in `opo_trl/command/named_rewards.py` for recipes. Recipes also accept the dotted path of any
function.
"""

__all__ = ["accuracy_reward", "action_reward"]


def __getattr__(name: str):
    # Workers import this package before the module of their reward, which may not need SymPy.
    if name == "accuracy_reward":
        from .accuracy import accuracy_reward

        return accuracy_reward
    if name == "action_reward":
        from .actions import action_reward

        return action_reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
