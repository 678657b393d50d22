"""
The reward functions, tools and environment of a run, which a recipe names by their dotted paths.

To add a reward function with a name of its own, add it to [`REWARDS`].
"""

import inspect
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
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}


def load_reward(name: str) -> Callable:
    """Find a reward function by its name in [`REWARDS`] or its dotted import path."""
    wanted = f"one of {', '.join(REWARDS)}, or to the dotted path of a function"
    reward = REWARDS.get(name) or load("reward_funcs", name, wanted, "my_rewards.length_reward")
    require(not inspect.isclass(reward), "reward_funcs", name, "a function: a class would have to be made first")
    return reward


def load_rewards(script: OPOScriptArguments, args: OPOConfig) -> list:
    """The reward functions of a run, a reward model last; a `ValueError` if one does not exist."""
    names, model = script.reward_funcs or [], script.reward_model_name_or_path
    length, cache = args.max_completion_length, script.overlong_cache
    needs_cache = "soft_overlong_punishment" in names
    if needs_cache or cache is not None:
        wanted = f"a number up to max_completion_length={length}, and `reward_funcs` to hold soft_overlong_punishment"
        require(needs_cache and bool(cache and length and cache <= length), "overlong_cache", cache, wanted)
    workers = max(script.reward_workers // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
    limits: Any = {"workers": workers, "timeout": script.reward_timeout, "memory": script.reward_memory}
    found: list[Any] = []
    for name in names:
        if name == "soft_overlong_punishment":
            found.append(get_soft_overlong_punishment(length, cast(int, cache)))
        else:
            reward = load_reward(name)
            # Some parse what a model writes, and may hang on it.
            isolated = script.reward_workers and reward in (accuracy_reward, gym_reward)
            found.append(IsolatedReward(reward, **limits) if isolated else reward)
    weights = args.reward_weights
    if model and names and weights:  # the first is that of the model, as in TRL
        args.reward_weights = [*weights[1:], weights[0]]
    return [*found, *([model] if model else [])]


def check_columns(rewards: Sequence[Any], data: Dataset, *, environments: bool) -> None:
    """Check that TRL can call the reward functions with the columns of a dataset, or of recorded rollouts."""
    if RECORDED in data.column_names:
        data = as_scored(data)
    given = ["prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"]
    given += ["environments"] * environments
    columns = sorted({*data.column_names} - {"prompt", "completion"})
    for reward in rewards:
        function = reward.reward if isinstance(reward, IsolatedReward) else reward
        if not callable(function):  # a reward model
            continue
        try:
            inspect.signature(function).bind(**dict.fromkeys([*given, *columns]))
        except (ValueError, TypeError) as error:
            named = f"reward_funcs={getattr(function, '__name__', type(function).__name__)!r}"
            called = f"It is called by keyword, with {', '.join(given)} and the columns {columns}"
            fix = "Map columns (`columns: {solution: …}`), or let the function take `**columns`"
            raise ValueError(f"{named} cannot be called: {error}. {called}. {fix}.") from error


def load_tools(script: OPOScriptArguments) -> dict[str, Any]:
    """Find the tools and the environment of a run: arguments of the trainer."""
    found: dict[str, Any] = {}
    if script.tools:
        found["tools"] = [load("tools", name, "a function", "my_tools.calculate") for name in script.tools]
    if name := script.environment_factory:
        found["environment_factory"] = load("environment_factory", name, "a class", "my_game.Game")
    return found
