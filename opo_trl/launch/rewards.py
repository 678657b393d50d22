"""The reward functions of a run. To add one, add it to [`REWARDS`]; a recipe can also name any by its dotted path."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from trl import rewards
from trl.rewards import get_soft_overlong_punishment

from ..arguments import OPOScriptArguments
from ..config import RolloutConfig
from ..data.arithmetic import arithmetic_reward
from ..data.few_shot import first_line_reward
from ..data.gym import gym_reward
from ..rewards.accuracy import accuracy_reward, format_reward
from ..rewards.scoring import IsolatedReward
from . import dotted


# Name in `reward_funcs` → function.
REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "format_reward": format_reward,
    "arithmetic_reward": arithmetic_reward,
    "first_line_reward": first_line_reward,
    "gym_reward": gym_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    # Under the name and with the limits of TRL's script.
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
_ISOLATED = (accuracy_reward, gym_reward)


def load_reward(name: str) -> Callable:
    """
    Find a reward function by its name in [`REWARDS`] or its dotted import path.

    Raises:
        `ValueError`: there is no such function; the message lists the names.
    """
    if name in REWARDS:
        return REWARDS[name]
    wanted = f"one of {', '.join(REWARDS)}, or to the dotted path of a function"
    reward = dotted.load("reward_funcs", name, wanted, example="my_rewards.length_reward")
    if inspect.isclass(reward):
        raise ValueError(f"reward_funcs={name!r} is a class, not a function. Set `reward_funcs` to {wanted}.")
    return reward


def load_rewards(script: OPOScriptArguments, args: RolloutConfig) -> list:
    """
    The reward functions of a run, a reward model last.

    Raises:
        `ValueError`: a function does not exist, only one of `soft_overlong_punishment` and `overlong_cache` is set, or
            the number of weights differs from the number of rewards.
    """
    _check(script, args)
    found: list = []
    for name in script.reward_funcs or []:
        if name == "soft_overlong_punishment":
            found.append(get_soft_overlong_punishment(args.max_completion_length, script.overlong_cache))
        else:
            found.append(_isolated(load_reward(name), script))
    return [*found, script.reward_model_name_or_path] if script.reward_model_name_or_path else found


def _check(script: OPOScriptArguments, args: RolloutConfig) -> None:
    length, cache = args.max_completion_length, script.overlong_cache
    names = script.reward_funcs or []
    if ("soft_overlong_punishment" in names) != (cache is not None):
        raise ValueError(
            f"reward_funcs={names} and overlong_cache={cache}: `soft_overlong_punishment` and "
            "`overlong_cache` need each other. Set both, or neither."
        )
    if cache is not None and not (length and 0 < cache <= length):
        raise ValueError(
            f"overlong_cache={cache} is not allowed. Set `overlong_cache` to a positive number up to "
            f"max_completion_length={length}."
        )
    n_rewards = len(names) + bool(script.reward_model_name_or_path)
    if args.reward_weights is not None and len(args.reward_weights) != n_rewards:
        raise ValueError(
            f"reward_weights={args.reward_weights} does not fit {n_rewards} rewards. Set `reward_weights` to one "
            "number for each of `reward_funcs`, and one for `reward_model_name_or_path`, or leave it out."
        )


def _isolated(reward: Callable, script: OPOScriptArguments) -> Callable:
    """Rewards that parse what a model writes, and may hang on it, in worker processes. Others as they are."""
    if reward not in _ISOLATED or not script.reward_workers:
        return reward
    workers = max(script.reward_workers // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    limits: Any = {"timeout": script.reward_timeout, "memory": script.reward_memory}
    return IsolatedReward(reward, workers=workers, **limits)
