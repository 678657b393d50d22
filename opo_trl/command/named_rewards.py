"""
The reward functions, tools and environment of a run, which a recipe names by their dotted paths.

To add a reward function with a name of its own, add it to [`REWARDS`].
"""

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from datasets import Dataset
from trl import rewards
from trl.rewards import get_soft_overlong_punishment

from ..config import OPOConfig
from ..data.arithmetic import arithmetic_reward
from ..data.few_shot import first_line_reward
from ..data.gym import gym_reward
from ..fields import load, require
from ..reuse.reading import RECORDED
from ..reuse.recorded import as_scored
from ..rewards.accuracy import accuracy_reward
from ..rewards.actions import action_reward
from ..rewards.scoring import IsolatedReward
from .arguments import OPOScriptArguments


logger = logging.getLogger(__name__)

_OF_TRL = "get_soft_overlong_punishment"
_FREE_OF_IT = 1280 - 256  # tokens

# Name in `reward_funcs` → function.
REWARDS: dict[str, Callable] = {
    "accuracy_reward": accuracy_reward,
    "action_reward": action_reward,
    "arithmetic_reward": arithmetic_reward,
    "first_line_reward": first_line_reward,
    "gym_reward": gym_reward,
    "reasoning_accuracy_reward": rewards.reasoning_accuracy_reward,
    "think_format_reward": rewards.think_format_reward,
    # Under the name and with the limits of TRL's script.
    _OF_TRL: get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}


def load_reward(name: str) -> Callable:
    """
    Find a reward function by its name in [`REWARDS`] or its dotted import path. A `ValueError` if there is none, or it
    is a class.
    """
    allowed = f"one of {', '.join(REWARDS)}, soft_overlong_punishment, or to the dotted path of a function"
    reward = REWARDS.get(name) or load("reward_funcs", name, allowed, "my_rewards.length_reward")
    require(not inspect.isclass(reward), "reward_funcs", name, "a function: a class would have to be made first")
    return reward


def load_rewards(script: OPOScriptArguments, args: OPOConfig) -> list:
    """
    The reward functions of a run, a reward model last; those that parse what a model writes are isolated in workers. A
    `ValueError` if one does not exist, or `overlong_cache` does not fit. With a reward model, `reward_weights` of
    `args` are put into the same order.
    """
    names, model = script.reward_funcs or [], script.reward_model_name_or_path
    length, cache = args.max_completion_length, script.overlong_cache
    needs_cache = "soft_overlong_punishment" in names
    if needs_cache or cache is not None:
        fits = bool(cache and length and cache <= length)
        allowed = f"a number up to max_completion_length={length}, and `reward_funcs` to hold soft_overlong_punishment"
        require(needs_cache and fits, "overlong_cache", cache, allowed)
    if _OF_TRL in names and length and length <= _FREE_OF_IT:
        logger.warning(
            f"{_OF_TRL!r} has TRL's limits: it punishes completions of more than {_FREE_OF_IT:,} tokens, and "
            f"max_completion_length={length} allows none. `soft_overlong_punishment` takes the limit of the run."
        )
    # `reward_workers` are those of a node, which its processes share.
    workers = max(script.reward_workers // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    limits: Any = {"workers": workers, "timeout": script.reward_timeout, "memory": script.reward_memory}
    reward_funcs: list[Any] = []
    for name in names:
        if name == "soft_overlong_punishment":
            reward_funcs.append(get_soft_overlong_punishment(length, cast(int, cache)))
        else:
            reward = load_reward(name)
            # Some parse what a model writes, and may hang on it.
            isolated = script.reward_workers and reward in (accuracy_reward, gym_reward)
            reward_funcs.append(IsolatedReward(reward, **limits) if isolated else reward)
    weights = args.reward_weights
    if model and names and weights:  # the first weight of a recipe is that of the model, as in TRL
        args.reward_weights = [*weights[1:], weights[0]]
    return [*reward_funcs, model] if model else reward_funcs


def check_columns(rewards: Sequence[Any], data: Dataset, *, environments: bool) -> None:
    """
    Check that TRL can call the reward functions, by keyword, with what it gives them and the columns of a dataset, or
    of recorded rollouts. `environments`: whether it also gives them environments.
    """
    if RECORDED in data.column_names:
        data = as_scored(data)
    of_trl = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    if environments:
        of_trl.append("environments")
    columns = sorted({*data.column_names} - {"prompt", "completion"})
    for reward in rewards:
        function = reward.reward if isinstance(reward, IsolatedReward) else reward
        if not callable(function):  # a reward model
            continue
        try:
            inspect.signature(function).bind(**dict.fromkeys([*of_trl, *columns]))
        except (ValueError, TypeError) as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise ValueError(
                f"reward_funcs={name!r} cannot be called: {error}. "
                f"It is called by keyword, with {', '.join(of_trl)} and the columns {columns}. "
                "Map columns (`columns: {solution: …}`), or let the function take `**columns`."
            ) from error


def load_tools(script: OPOScriptArguments) -> dict[str, Any]:
    """Find the tools and the environment of a run: arguments of the trainer."""
    tools: dict[str, Any] = {}
    if script.tools:
        tools["tools"] = [load("tools", name, "a function", "my_tools.calculate") for name in script.tools]
    if script.environment_factory:
        path = script.environment_factory
        tools["environment_factory"] = load("environment_factory", path, "a class", "my_game.Game")
    return tools
