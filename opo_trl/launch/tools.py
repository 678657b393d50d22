"""The tools and the environment of a run, found by their dotted paths. TRL checks what it is given."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from ..arguments import OPOScriptArguments
from . import foreign
from .preflight import OF_TRAINER


_NOT_TOOLS = ("reset", "get_reward")  # of the public methods of an environment


@dataclass
class Tools:
    """What the model can call: tools that belong to no environment, and the methods of environments."""

    functions: list[Callable] = field(default_factory=list)
    factory: Callable | None = None  # makes environments
    offered: list[Callable] = field(default_factory=list)  # the functions, and the methods of an environment

    @property
    def for_trainer(self) -> dict[str, Any]:
        """Arguments of a trainer; none for a run without tools, whose trainer need not know them."""
        named = {"tools": self.functions or None, "environment_factory": self.factory}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def for_template(self) -> dict[str, Any]:
        """Arguments of a chat template, which describes the tools in the prompt."""
        return {"tools": self.offered} if self.offered else {}

    @property
    def for_rewards(self) -> tuple[str, ...]:
        """Further arguments of a reward function, besides the dataset's columns."""
        return (*OF_TRAINER, *(["environments"] if self.factory else []))


def load_tools(script: OPOScriptArguments) -> Tools:
    """Find the tools and the environment of a run; a `ValueError` if one of them does not exist."""
    functions = [foreign.load("tools", name, "a function", "my_tools.calculate") for name in script.tools or []]
    if (name := script.environment_factory) is None:
        return Tools(functions, offered=functions)
    factory = foreign.load("environment_factory", name, "a class", "my_game.Game")
    environment = factory()
    members = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    methods = [name for name in members if name not in _NOT_TOOLS and not name.startswith("_")]
    return Tools(functions, factory, [*functions, *(getattr(environment, name) for name in methods)])


def check_conversations(tools: Tools, data: Dataset) -> None:
    """Check that prompts are conversations, where there are tools: TRL describes none in a prompt of text."""
    if tools.for_trainer and isinstance(data[0]["prompt"], str):
        fix = "Set `prompt_style` to 'chat', or write each prompt as messages"
        raise ValueError(f"`tools` and `environment_factory` need conversations, but the prompts are text. {fix}.")
