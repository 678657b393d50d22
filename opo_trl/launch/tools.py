"""The tools and the environment of a run, found by their dotted paths. TRL checks what it is given."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from ..arguments import OPOScriptArguments
from ..fields import load
from .preflight import OF_TRAINER


@dataclass
class Tools:
    """What the model can call: tools that belong to no environment, and the methods of environments."""

    for_trainer: dict[str, Any] = field(default_factory=dict)  # arguments of a trainer, if there are any
    for_template: dict[str, Any] = field(default_factory=dict)  # of a chat template, which describes the tools
    for_rewards: tuple[str, ...] = OF_TRAINER  # what a reward function gets, besides the dataset's columns


def load_tools(script: OPOScriptArguments) -> Tools:
    """Find the tools and the environment of a run; a `ValueError` if one of them does not exist."""
    found, offered = Tools(), []
    if script.tools:
        offered = [load("tools", name, "a function", "my_tools.calculate") for name in script.tools]
        found.for_trainer["tools"] = [*offered]
    if name := script.environment_factory:
        factory: Callable = load("environment_factory", name, "a class", "my_game.Game")
        environment = factory()
        methods = dict(inspect.getmembers(environment, inspect.ismethod))
        offered += [methods[name] for name in methods if name not in ("reset", "get_reward") and name[0] != "_"]
        found.for_trainer["environment_factory"] = factory
        found.for_rewards = (*OF_TRAINER, "environments")
    if offered:
        found.for_template["tools"] = offered
    return found


def check_conversations(tools: Tools, data: Dataset) -> None:
    """Check that prompts are conversations, where there are tools: TRL describes none in a prompt of text."""
    if tools.for_trainer and isinstance(data[0]["prompt"], str):
        fix = "Set `prompt_style` to 'chat', or write each prompt as messages"
        raise ValueError(f"`tools` and `environment_factory` need conversations, but the prompts are text. {fix}.")
