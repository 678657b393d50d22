"""The reward functions of a run. To add one, add it to [`REWARDS`]; a recipe can also name any by its dotted path."""

import inspect
import os
from collections.abc import Callable

from trl import rewards
from trl.rewards import get_soft_overlong_punishment

from ..arguments import OPOScriptArguments
from ..checks.ranges import require
from ..config import OPOConfig
from ..data.arithmetic import arithmetic_reward
from ..data.few_shot import first_line_reward
from ..data.gym import gym_reward
from ..rewards.accuracy import accuracy_reward
from ..rewards.scoring import IsolatedReward
from . import foreign


# Name in `reward_funcs` → function.
REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "arithmetic_reward": arithmetic_reward,
    "first_line_reward": first_line_reward,
    "gym_reward": gym_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    # Under the name and with the limits of TRL's script.
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
# They parse what a model writes, and may hang on it, so worker processes run them.
_ISOLATED = (accuracy_reward, gym_reward)


def load_reward(name: str) -> Callable:
    """Find a reward function by its name in [`REWARDS`] or its dotted import path."""
    if name in REWARDS:
        return REWARDS[name]
    wanted = f"one of {', '.join(REWARDS)}, or to the dotted path of a function"
    reward = foreign.load("reward_funcs", name, wanted, example="my_rewards.length_reward")
    if inspect.isclass(reward):
        raise ValueError(f"reward_funcs={name!r} is a class, not a function. Set `reward_funcs` to {wanted}.")
    return reward


def load_rewards(script: OPOScriptArguments, args: OPOConfig) -> list:
    """
    The reward functions of a run, a reward model last.

    Raises:
        `ValueError`: a function does not exist, only one of `soft_overlong_punishment` and `overlong_cache` is set, or
            the number of weights differs from the number of rewards.
    """
    length, cache = args.max_completion_length, script.overlong_cache
    names, model = script.reward_funcs or [], script.reward_model_name_or_path
    if ("soft_overlong_punishment" in names) != (cache is not None):
        named = f"reward_funcs={names} and overlong_cache={cache}"
        raise ValueError(f"{named}: `soft_overlong_punishment` and the cache need each other. Set both, or neither.")
    fits = cache is None or bool(length and 0 < cache <= length)
    require(fits, "overlong_cache", cache, f"a positive number up to max_completion_length={length}")
    weights, n_rewards = args.reward_weights, len(names) + bool(model)
    if weights is not None and len(weights) != n_rewards:
        fix = "Set `reward_weights` to one number for each function, and one for a reward model, or leave it out"
        raise ValueError(f"reward_weights={weights} does not fit {n_rewards} rewards. {fix}.")
    return [*(_made(name, script, args) for name in names), *([model] if model else [])]


def _made(name: str, script: OPOScriptArguments, args: OPOConfig) -> Callable:
    if name == "soft_overlong_punishment":
        return get_soft_overlong_punishment(args.max_completion_length, script.overlong_cache)
    reward = load_reward(name)
    if reward not in _ISOLATED or not script.reward_workers:
        return reward
    workers = max(script.reward_workers // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    return IsolatedReward(reward, workers=workers, timeout=script.reward_timeout, memory=script.reward_memory)
