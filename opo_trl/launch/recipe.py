"""
Recipes: flat YAML files of fields, and command lines that override them.

TRL's `TrlParser` parses both: the value of a recipe has the type that the same word has on a command line. It does not
read the file, since it would take `no` for false and the last of two equal keys; `checks.strict_yaml` does.
"""

import argparse
import copy
import difflib
import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import trl
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from .. import methods
from ..arguments import NOT_STREAMED, OPOScriptArguments
from ..checks import strict_yaml
from ..checks.secrets import masked
from ..config import REJECTED_FIELDS, OPOConfig, field_problems
from ..fields import default, hints
from ..objectives import GRPO


logger = logging.getLogger(__name__)

# Objectives that were trainers once, or are taken for one.
_OBJECTIVES = {
    "truncated_reinforce": "`objective: topr`, `positive_bounds: [0, 2]` and `negative_bounds: [0, 2]`",
    "topr": "`objective: topr`",
    "grpo": "`objective: grpo`, `gspo`, `dapo` or another loss of TRL's",
}
# Fields of earlier versions that public recipes set, and what to do.
_GONE = {
    "torch_dtype": "In Transformers 5 it is `dtype`.",
    "overwrite_output_dir": "It is gone from Transformers 5: set `overwrite` to move an earlier run aside.",
    "logging_dir": "In Transformers 5 it is a variable: set `env: {TENSORBOARD_LOGGING_DIR: folder}`.",
    "warmup_ratio": "In Transformers 5 it is `warmup_steps`, with a fraction of all steps in (0, 1).",
    "padding_free": "It is gone: planned micro-batches and shared prompts do its work. Remove it.",
    "save_failure": "It is gone: a checkpoint that cannot be written ends the run. Remove it.",
    "streaming": "It is gone: datasets are loaded completely. Remove it.",
    "watches": "It is gone: a callback can set `control.should_training_stop` (docs/subclassing.md). Remove it.",
}
# Fields of `trl grpo` that OPO does not have, and why.
MEANINGLESS = REJECTED_FIELDS | NOT_STREAMED


class _Parser(TrlParser):
    """Collects what is wrong with each field, and reads words in braces as mappings, where a field takes these."""

    def __init__(self, trainer: str):
        usage = "opo-trl train [RECIPE] [--field value …] [--plan] [--debug]"
        kinds: Any = _argument_classes(trainer)
        super().__init__(kinds, prog="opo-trl train", usage=usage, allow_abbrev=False)
        self.types = _fields(trainer)
        self.problems: dict[str, str] = {}  # by field

    def error(self, message: str) -> NoReturn:
        raise ValueError("\n".join([*self.problems.values(), self._described(message)]))

    def _described(self, message: str) -> str:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        return f"{message}. Set it to a value of its type: `{self.prog} --help` lists them."

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if arg_string.startswith("{") and _takes(dict, self.types.get(action.dest)):
            return strict_yaml.read_mapping(action.dest, arg_string)
        return super()._get_value(action, arg_string)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.problems[action.dest] = self._described(str(error))
            return action.default

    def take(self, recipe: Mapping[str, Any]) -> None:
        """Make the values of a recipe, in the types of their fields, the defaults of the command line."""
        actions = {action.dest: action for action in reversed(self._actions)}  # `--field` precedes `--no_field`
        for name, value in recipe.items():
            action: Any = actions[name]
            items = value if action.nargs == "+" and isinstance(value, list) else [value]
            if all(isinstance(item, str) for item in items):
                value = self._get_values(action, items)
            elif value is not None and not (
                all(isinstance(item, action.type) for item in items)
                if action.nargs == "+"
                else _takes(type(value), self.types[name])
            ):
                self.problems[name] = self._described(f"{name}={value!r} is not allowed")
            self.set_defaults_with_config(**{name: value})


def _takes(kind: type, hint: Any) -> bool:
    """Whether a field whose type is `hint` takes a list or mapping; its items may be mappings, too."""
    parts = {part for outer in (hint, *get_args(hint)) for part in (outer, *get_args(outer))}
    return kind in {get_origin(part) or part for part in parts}


make_parser = _Parser  # of recipes and command lines, into script, trainer and model arguments


def _argument_classes(trainer: str) -> tuple[type, type, type]:
    return OPOScriptArguments, methods.by_trainer()[trainer].config_class, ModelConfig


def _fields(trainer: str) -> dict[str, Any]:
    """Field → type, of all that a recipe for this trainer can set."""
    return {name: hint for kind in _argument_classes(trainer) for name, hint in hints(kind).items()}


@dataclass(frozen=True)
class Fields:
    """What a recipe and the command line over it say, each value with the type of its field."""

    trainer: str  # a key of [`methods.by_trainer`]
    values: dict[str, Any]  # every field of the trainer's three dataclasses, with its default if it is not set
    named: set[str]  # the fields that are set
    env: dict[str, str]  # environment variables that the recipe sets
    launch: dict[str, Any]  # options of `accelerate launch` in the recipe
    unknown: list[str]  # words of the command line that belong to no field: further options of `accelerate launch`
    notes: list[str]  # what a user should know about this reading
    path: str | None  # of the recipe
    plan: bool  # whether to stop before training, with the plan

    @property
    def as_stored(self) -> dict[str, Any]:
        """The recipe, with the command line merged in, as a run's folder stores it."""
        # Copies: what a library changes in a mapping of the arguments is not what the recipe said.
        values = {name: copy.deepcopy(value) for name, value in self.values.items() if name in self.named}
        return ({"env": self.env} if self.env else {}) | self.launch | values


def read(argv: Sequence[str]) -> Fields:
    """
    Read a command line, `[RECIPE] --field value …`, and its recipe.

    Raises:
        `ValueError`: a name is neither a field nor an option of `accelerate launch`, or a value has another type than
            its field or is out of its range; the message names all of these.
    """
    own, words = _split(argv)
    if own.config is not None and not Path(own.config).is_file():
        fix = "`opo-trl recipes` lists the package's recipes, and copies them."
        raise ValueError(f"config={own.config!r} does not exist. {fix}")
    recipe = {} if own.config is None else strict_yaml.read(own.config)
    if own.trainer is not None:
        recipe["trainer"] = own.trainer
    trainer = _check_trainer(recipe.get("trainer") or methods.DEFAULT)
    parser, env = _Parser(trainer), recipe.pop("env", None) or {}
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise ValueError(f"env={env!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")
    others = {name: recipe.pop(name) for name in [*recipe] if name not in parser.types}
    launch = {name: value for name, value in others.items() if name in _launch_actions()} if others else {}
    problems = [
        f"{own.config!r} sets {name}={value}, but there is no such field. {hint_at_field(name, trainer)}"
        for name, value in others.items()
        if name not in launch
    ]
    parser.take(recipe)
    namespace, unknown = parser.parse_known_args(words)
    values, options = vars(namespace), {word.split("=")[0] for word in words}
    named = {action.dest for action in parser._actions if options & {*action.option_strings}} | recipe.keys()
    notes = _as_in_trl(trainer, values, named) if named <= _fields_of_trl() else []
    found = {name: text for kind in _argument_classes(trainer) for name, text in field_problems(kind, values).items()}
    problems += (found | parser.problems).values()
    for word in unknown:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in _launch_actions():
            hint = hint_at_field(name, trainer)
            problems.append(f"{word} is neither a field nor an option of `accelerate launch`. {hint}")
    if problems:
        raise ValueError("\n".join(problems))
    values["accelerate_config"] = find_accelerate_config(values["accelerate_config"], own.config)
    return Fields(trainer, values, named, env, launch, unknown, notes, own.config, own.plan)


def _split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the command itself, with the path of the recipe, and the words that set fields."""
    parser = argparse.ArgumentParser("opo-trl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--trainer")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    own, words = parser.parse_known_args(["--config", *argv] if argv and not argv[0].startswith("-") else argv)
    return own, words + (["--debug", own.debug] if isinstance(own.debug, str) else [])


def _check_trainer(trainer: str) -> str:
    known = methods.by_trainer()
    if trainer in known:
        return trainer
    if instead := _OBJECTIVES.get(trainer):
        raise ValueError(f"trainer={trainer!r} is an objective of `trainer: opo` now. Set {instead} instead.")
    raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to one of {', '.join(known)}.")


@functools.cache
def _launch_actions() -> Mapping[str, argparse.Action]:
    from accelerate.commands.launch import launch_command_parser  # takes a second

    return {action.dest: action for action in launch_command_parser()._actions if action.option_strings}


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Options of `accelerate launch`, as a recipe sets them, as words of its command line."""
    flags = {name for name in options if _launch_actions()[name].nargs == 0}
    words = [f"--{name}={value}" for name, value in options.items() if value is not None and name not in flags]
    return words + [f"--{name}" for name in flags if str(options[name]).lower() in ("true", "yes")]


def hint_at_field(name: str, trainer: str) -> str:
    """What to do about a name that is not a field."""
    if name in _GONE:
        return _GONE[name]
    for other, method in methods.by_trainer().items():
        with suppress(ImportError):  # of a trainer that does not fit the installed TRL
            if name in _fields(other):
                described = f", which {method.page} describes" if method.page else ""
                return f"It belongs to `trainer: {other}`{described}; this recipe is for `trainer: {trainer}`."
    near = difflib.get_close_matches(name, {*_fields(trainer), *_launch_actions()}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def arguments(given: Fields) -> tuple[OPOScriptArguments, OPOConfig, ModelConfig]:
    """The arguments of a run: script, trainer and model. Sets the recipe's environment variables."""
    if given.unknown:
        raise ValueError(f"{' '.join(given.unknown)} belongs to no field. Options of accelerate go to the launcher.")
    set_variables(given.env)
    values = dict(given.values)
    # A run's `recipe.yaml` lacks its secrets: the Hub uses a login instead, and others are asked for.
    for name in [name for name, value in values.items() if masked(value, name)]:
        if name != "hub_token":
            said = f"{name}={values[name]!r} lacks a secret, which the run that wrote this recipe did not save"
            raise ValueError(f"{said}. Set it on the command line: `--{name} …`.")
        values[name] = None
    for note in given.notes if os.environ.get("RANK", "0") == "0" else ():
        logger.warning(note)
    script, args, model_config = (
        kind(**{field.name: values[field.name] for field in fields(kind) if field.init})
        for kind in _argument_classes(given.trainer)
    )
    return script, args, model_config


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, OPOConfig, ModelConfig, dict[str, Any]]:
    """The arguments that a command line asks for, and the recipe with the command line's fields merged in."""
    given = read(argv)
    stored = given.as_stored
    return *arguments(given), stored


def set_variables(env: Mapping[str, str]) -> None:
    """Set the environment variables of a recipe. A secret that a run did not save is already set in the shell."""
    for name, value in env.items():
        if not masked(value, name):
            os.environ[name] = value
        elif name not in os.environ:
            said = f"env={{{name!r}: {value!r}}} is a secret, which the run that wrote this recipe did not save"
            raise ValueError(f"{said}. Set the variable {name} in the shell.")


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """Find an accelerate configuration: a file, relative to here or to the recipe, or the name of one of TRL's."""
    if name is None:
        return None
    places = [Path(name), Path(recipe_path or "").parent / name]
    places.append(Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml")
    for place in places:
        if place.is_file():
            return str(place.resolve())
    sought = ", ".join(map(str, dict.fromkeys(places)))
    raise ValueError(f"accelerate_config={name!r} is neither a file nor one of TRL's: looked for {sought}.")


@functools.cache
def _fields_of_trl() -> set[str]:
    """The fields of TRL's script for GRPO, `trl grpo`."""
    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    return {name for kind in kinds for name in hints(kind)} | {"accelerate_config"}


def _as_in_trl(trainer: str, values: dict[str, Any], named: set[str]) -> list[str]:
    """
    Make of what a recipe of `trl grpo` says what it means here, in place; returns notes on what is left out.

    In a recipe with fields of this package, what has no meaning is an error.
    """
    notes, meaningless = [], dict(MEANINGLESS)
    if not values["loss_type"]:
        meaningless |= dict.fromkeys(GRPO.fields, "it belongs to a loss of TRL's, which `loss_type` selects")
    if left_out := {name: values[name] for name in meaningless if name in named}:
        shown = "; ".join(f"{name}={value!r}: {meaningless[name]}" for name, value in left_out.items())
        notes.append(f"This recipe of TRL's is trained with OPO. Without meaning, and left out: {shown}.")
    if values["datasets"] and values["dataset_name"]:
        notes.append(f"`datasets` is used, and dataset_name={values['dataset_name']!r} is not, as in TRL's script.")
        left_out["dataset_name"] = values["dataset_name"]
    if values["reward_model_name_or_path"] and values["reward_funcs"] and values["reward_weights"]:
        first, *rest = values["reward_weights"]  # in TRL's script the reward model comes first, here last
        values["reward_weights"] = [*rest, first]
    defaults = {each.name: default(each) for kind in _argument_classes(trainer) for each in fields(kind)}
    values.update({name: defaults[name] for name in left_out})
    named.difference_update(left_out)
    named.add("trainer")
    return notes
