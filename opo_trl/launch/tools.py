"""
The tools and the environment of a run: found by their dotted paths, and checked before any work starts.

TRL finds most mistakes when it renders the first prompt, or when the model first calls a tool.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl import chat_template_utils as templates

from ..arguments import OPOScriptArguments
from ..config import OPOConfig
from . import foreign
from .preflight import OF_TRAINER


_NOT_TOOLS = ("reset", "get_reward")  # of the public methods of an environment


@dataclass
class Tools:
    """What the model can call: tools that belong to no environment, and the methods of environments."""

    functions: list[Callable] = field(default_factory=list)
    factory: Callable | None = None  # makes environments
    environment: Any = None  # one of them, which tells what they offer

    @property
    def offered(self) -> list[Callable]:
        """The functions, and the environment's public methods."""
        members = inspect.getmembers(type(self.environment), inspect.isfunction) if self.factory else []
        names = [name for name, _ in members if name not in _NOT_TOOLS and not name.startswith("_")]
        return [*self.functions, *(getattr(self.environment, name) for name in names)]

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


def load_tools(script: OPOScriptArguments, args: OPOConfig) -> Tools:
    """
    Find the tools and the environment of a run.

    Raises:
        `ValueError`: one of them does not exist or cannot be called by a model, nothing gives a reward, or a field
            cannot be combined with tools or has no effect without them.
    """
    functions = [_load_tool(name) for name in script.tools or []]
    found = Tools(functions, *_load_environment(script.environment_factory))
    kind = type(found.environment)
    if not (script.reward_funcs or script.reward_model_name_or_path or hasattr(kind, "get_reward")):
        lacking = f"{kind.__name__} has no" if found.factory else "there is no `environment_factory` with a"
        fix = "Name a function in `reward_funcs`, or give the environment that method"
        raise ValueError(f"reward_funcs={script.reward_funcs} leaves no reward: {lacking} method `get_reward`. {fix}.")
    if not (functions or found.factory):
        limit = args.max_tool_calling_iterations
        if limit is not None:
            fix = "Set `tools` or `environment_factory`, or remove it"
            raise ValueError(f"max_tool_calling_iterations={limit} has no effect without tools. {fix}.")
        return found
    asked = f"environment_factory={script.environment_factory!r}" if found.factory else f"tools={script.tools!r}"
    if script.prompt_style == "plain":
        fix = "Set `prompt_style` to 'chat', or to 'dataset' for prompts that are messages"
        raise ValueError(f"{asked} needs conversations, but prompt_style='plain' makes text. {fix}.")
    if args.max_completion_length is None:
        raise ValueError(f"{asked} needs a limit for a conversation and its calls. Set `max_completion_length`.")
    names = [tool.__name__ for tool in found.offered]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{asked} offers {twice[0]!r} twice, so that one is never called. Rename one of them.")
    return found


def _load_tool(name: str) -> Callable:
    wanted = "the dotted path of a function"
    tool = foreign.load("tools", name, wanted, example="my_tools.calculate")
    if not inspect.isroutine(tool):
        kind = "a class" if inspect.isclass(tool) else f"of type {type(tool).__name__}"
        fix = f"Set `tools` to {wanted}; a class whose methods are tools is an `environment_factory`"
        raise ValueError(f"tools={name!r} is {kind}, not a function. {fix}.")
    _check_described(f"tools={name!r}", tool)
    return tool


def _load_environment(name: str | None) -> tuple[Callable | None, Any]:
    """The factory of a dotted path, and an environment that it makes."""
    if name is None:
        return None, None
    named, example = f"environment_factory={name!r}", "my_games.Guessing"
    factory = foreign.load("environment_factory", name, "the dotted path of a class, or of a function", example)
    fix = "It is called without arguments: give each a default, or fix it."
    with foreign.own_code(f"{named} cannot be created", fix):
        environment = factory()
    kind = type(environment)
    if not inspect.isfunction(getattr(kind, "reset", None)):
        fix = "Add `def reset(self, **row)`, which returns what to add to the prompt, or None"
        raise ValueError(f"{named} makes a {kind.__name__} without a method `reset` for every start. {fix}.")
    if hasattr(kind, "get_reward"):
        _check_call(named, "get_reward", environment.get_reward, [])
    for tool in Tools([], factory, environment).offered:
        _check_described(f"{named}, method {tool.__name__!r}", tool)
    return factory, environment


def _check_described(named: str, tool: Callable) -> None:
    """Check that a tool can be described in a prompt, by its docstring and its type hints."""
    fix = "Give it a docstring with an `Args:` section and type hints. Begin names of what are not tools with `_`."
    with foreign.own_code(f"{named} cannot be described to the model", fix):  # type hints are evaluated
        get_json_schema(tool)


def _check_call(named: str, method: str, call: Callable, columns: Sequence[str]) -> None:
    try:
        inspect.signature(call).bind(**dict.fromkeys(columns))
    except TypeError as error:
        given = f"the columns {', '.join(columns)}, by keyword" if columns else "no arguments"
        fix = f"It is called with {given}. Change its arguments{', such as to `**row`' if columns else ''}"
        raise ValueError(f"{named}: `{method}` cannot be called: {error}. {fix}.") from error


def check_tool_template(found: Tools, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer's chat template renders tools and calls, and that calls in a completion can be parsed."""
    if not found.offered:
        return
    named = f"model_name_or_path={tokenizer.name_or_path!r}: its chat template"
    if not templates.supports_tool_calling(tokenizer):
        fix = "Choose a model that was trained to call tools, or give its tokenizer a chat template that renders them"
        raise ValueError(f"{named} does not render calls of tools and their results. {fix}.")
    parsed = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    try:
        if not parsed:
            templates.add_response_schema(copy.deepcopy(tokenizer))
        if not templates.is_chat_template_prefix_preserving(tokenizer):
            templates.get_training_chat_template(tokenizer)
    except ValueError as error:
        lacking = "is none whose calls TRL can parse, and the tokenizer has no `response_template`"
        if parsed:
            lacking = "renders a message differently once others follow, and TRL has no other for it"
        raise ValueError(
            f"{named} {lacking}. Use that of the model's release, or set `response_template` in tokenizer_config.json "
            "(https://huggingface.co/docs/transformers/main/en/chat_response_parsing)."
        ) from error


def check_rows(found: Tools, script: OPOScriptArguments, data: Dataset, source: str) -> None:
    """Check that the rows of a dataset, of the field `source`, are conversations with which environments can begin."""
    if not (found.offered or found.factory):
        return
    if isinstance(data[0]["prompt"], str):
        fix = 'Write each prompt as messages: [{"role": "user", "content": …}]'
        raise ValueError(f"{source} has prompts of text, not conversations. {fix}.")
    if found.factory is not None:
        named = f"environment_factory={script.environment_factory!r}"
        _check_call(named, "reset", found.environment.reset, data.column_names)
