"""
Recipes: flat YAML files of fields, and command lines that override them.

TRL's `TrlParser` parses both. It does not read the file: it would take `no` for false and `1e-4` for text, lose the
first of two equal keys, and check no type. So `checks.strict_yaml` reads the recipe, and its fields precede those of
the command line, as words: both then have the same types and the same messages.
"""

import argparse
import difflib
import functools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from .. import methods
from ..arguments import NOT_STREAMED, OPOScriptArguments
from ..checks import strict_yaml
from ..checks.secrets import masked
from ..config import REJECTED_FIELDS, OPOConfig, field_problems
from ..fields import hints
from .help import ShortHelp
from .words import MAPPINGS, find_accelerate_config, read_yaml, split


logger = logging.getLogger(__name__)

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a number, and not for an option
# Fields of earlier versions that public recipes set.
_OBJECTIVES = {
    "truncated_reinforce": "`objective: topr`, `positive_bounds: [0, 2]` and `negative_bounds: [0, 2]`",
    "topr": "`objective: topr`",
}
_RENAMED = {
    "torch_dtype": "`dtype`",
    "overwrite_output_dir": "gone: set `overwrite` to move an earlier run aside",
    "logging_dir": "the variable TENSORBOARD_LOGGING_DIR: set `env: {TENSORBOARD_LOGGING_DIR: folder}`",
    "warmup_ratio": "`warmup_steps`, with a fraction of all steps in (0, 1)",
}

# Fields of `trl grpo` that OPO does not have, and why.
MEANINGLESS = REJECTED_FIELDS | NOT_STREAMED


class _Parser(TrlParser):
    """
    Parser of recipes and command lines that collects all errors, one line each, without listing all options.

    Mappings are read as YAML, on the command line as in a recipe.
    """

    problems: dict[str, str]  # by field

    def error(self, message: str) -> NoReturn:
        raise ValueError("\n".join([*self.problems.values(), self._described(message)]))

    def _described(self, message: str) -> str:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        return f"{message}. Set it to a value of its type: `{self.prog} --help` lists them."

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.dest in MAPPINGS and arg_string.startswith("{"):
            return strict_yaml.read_mapping(action.dest, arg_string)
        return super()._get_value(action, arg_string)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self.problems[action.dest] = self._described(str(error))
            return action.default

    def take(self, recipe: Mapping[str, Any]) -> list[str]:
        """Turn a recipe into words of a command line, and into defaults what they cannot express, such as mappings."""
        actions = {action.dest: action for action in self._actions}
        types = {name: hint for arguments in self.dataclass_types for name, hint in hints(arguments).items()}
        words = []
        for name, value in recipe.items():
            kind, hint = actions[name].type, types[name]
            is_enum = isinstance(kind, type) and issubclass(kind, Enum)
            if value in ("", []) and (value == actions[name].default or (is_enum and value == "")):
                continue  # already the default, and no word expresses it
            items = value if isinstance(value, list) else []
            if any(item is None or isinstance(item, Mapping | list) for item in items):
                fits = hint == list[dict] and all(isinstance(item, Mapping) for item in items)
            elif items and actions[name].nargs == "+":
                texts = [*map(str, items)]
                if all(_NEGATIVE.fullmatch(text) or not text.startswith("-") for text in texts):
                    words += [f"--{name}", *texts]
                    continue
                value, fits = self._get_values(actions[name], texts), True
            elif value is not None and not isinstance(value, Mapping | list):
                words.append(f"--{name}={value}")
                continue
            else:
                fits = any((get_origin(part) or part) is type(value) for part in (hint, *get_args(hint)))
            if fits:
                self.set_defaults_with_config(**{name: value})
            else:
                self.problems[name] = self._described(f"{name}={value!r} is not allowed")
        return words


def make_parser(trainer: str) -> _Parser:
    """Parser of recipes and command lines, into script, trainer and model arguments."""
    dataclass_types: Any = _argument_classes(trainer)
    parser = _Parser(dataclass_types, prog="opo-trl train", allow_abbrev=False, add_help=False)
    parser.problems = {}
    no_value: Any = {"default": argparse.SUPPRESS}
    parser.add_argument("-h", "--help", action=ShortHelp, nargs=0, help="show the most used fields", **no_value)
    parser.add_argument("--help_all", action="help", help="show all fields", **no_value)
    return parser


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
    env: dict[str, str | int]  # environment variables that the recipe sets
    launch: dict[str, Any]  # options of `accelerate launch` in the recipe
    unknown: list[str]  # words of the command line that belong to no field
    notes: list[str]  # what a user should know about this reading

    @property
    def as_stored(self) -> dict[str, Any]:
        """The recipe, with the command line merged in, as a run's folder stores it."""
        values = {name: _plain(value) for name, value in self.values.items() if name in self.named}
        return ({"env": self.env} if self.env else {}) | self.launch | values


def read(argv: Sequence[str]) -> Fields:
    """
    Read a command line and its recipe.

    Raises:
        `ValueError`: a recipe's key is not a field, or a value has another type than its field or is out of its range;
            the message names all of these.
    """
    path, _, words = split(argv)
    recipe, trainer, problems = _read_recipe(path, words)
    env = recipe.pop("env", {})
    # What `accelerate launch` gets, such as `num_processes`, which TRL's recipes may set.
    launch = {name: recipe.pop(name) for name in [*recipe] if name not in _fields(trainer)}
    parser = make_parser(trainer)
    fields_of = {option: action.dest for action in parser._actions for option in action.option_strings}
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    named = recipe.keys() | {fields_of[option] for option in options if option in fields_of}
    notes = []
    if is_of_trl := named <= _fields_of_trl():
        words, left_out = _without_meaningless(recipe, words)
        named = named - MEANINGLESS.keys() | {"trainer"}
        notes += left_out
    namespace, unknown = parser.parse_known_args([*parser.take(recipe), *words])
    values = vars(namespace)
    if is_of_trl and values["datasets"] and values["dataset_name"]:
        notes.append(f"`datasets` is used, and dataset_name={values['dataset_name']!r} is not, as in TRL's script.")
        values["dataset_name"], named = None, named - {"dataset_name"}
    if is_of_trl and values["reward_model_name_or_path"] and values["reward_funcs"] and values["reward_weights"]:
        first, *rest = values["reward_weights"]  # in TRL's script the reward model comes first, here last
        values["reward_weights"] = [*rest, first]
    found = {name: text for kind in _argument_classes(trainer) for name, text in field_problems(kind, values).items()}
    problems += (found | parser.problems).values()
    if problems:
        words = no_options(unknown)
        raise ValueError("\n".join([*problems, *([describe_unknown(unknown, words, trainer)] if words else [])]))
    return Fields(trainer, values, named, env, launch, unknown, notes)


def no_options(unknown: Iterable[str]) -> list[str]:
    """Which words of a command line look like options, but are none of `accelerate launch`, either."""
    options = [word for word in unknown if word.startswith("--")]
    return [word for word in options if word[2:].split("=")[0].replace("-", "_") not in _launch_actions()]


def _read_recipe(path: str | Path | None, argv: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Field → value, as written; the trainer; and what is to be said of each key that is not a field."""
    recipe = {} if path is None else read_yaml(path, _kind)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--trainer", nargs="?", default=recipe.get("trainer", methods.DEFAULT))
    trainer = own.parse_known_args(argv)[0].trainer
    known = list(methods.by_trainer())
    if trainer in _OBJECTIVES and trainer not in known:  # formerly one, or taken for one
        raise ValueError(
            f"trainer={trainer!r} is an objective of `trainer: opo` now. Set {_OBJECTIVES[trainer]} instead."
        )
    if trainer not in known:
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to one of {', '.join(known)}.")
    unknown = [key for key in recipe if key not in _fields(trainer).keys() | {"env"} and key not in _launch_actions()]
    problems = [
        f"{str(path)!r} sets {key}={recipe.pop(key)!r}, but there is no such field. {hint_at_field(str(key), trainer)}"
        for key in unknown
    ]
    if variables := _variables(recipe.get("env", {})):
        recipe["env"] = variables
    return recipe, trainer, problems


@functools.cache
def _launch_actions() -> Mapping[str, argparse.Action]:
    from accelerate.commands.launch import launch_command_parser  # takes a second

    return {action.dest: action for action in launch_command_parser()._actions if action.option_strings}


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Options of `accelerate launch` as words of its command line."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    flags = {name for name in given if given[name] is True and _launch_actions()[name].nargs == 0}
    return [f"--{name}" if name in flags else f"--{name}={value}" for name, value in given.items()]


def _variables(env: Any) -> dict[str, str | int]:
    """The environment variables that a recipe sets."""
    wrong: Any = env
    if isinstance(env, dict):
        texts = {name: value for name, value in env.items() if isinstance(name, str) and isinstance(value, str)}
        possible = {name for name in texts if name and "=" not in name and "\0" not in name + texts[name]}
        wrong = {name: value for name, value in env.items() if name not in possible}
    if wrong or not isinstance(env, dict):
        fix = "Set `env` to a mapping, with names without `=` and values without NUL: `env: {NAME: value}`"
        raise ValueError(f"env={wrong!r} is not allowed. {fix}.")
    # Integers stay numbers, so that the recipe in the run's folder has no quotation marks around them.
    return {name: int(value) if re.fullmatch(r"0|[1-9]\d*", value) else value for name, value in env.items()}


def _trainers_with(name: str) -> Iterator[str]:
    """The trainers whose recipes have a field. Later ones are imported only if earlier ones do not have it."""
    for trainer in methods.by_trainer():
        with suppress(ImportError):  # of a trainer that does not fit the installed TRL
            if name in _fields(trainer):
                yield trainer


def _kind(name: str) -> strict_yaml.Kind:
    """How the value of a field is read, by its type."""
    if name == "env":
        return "text"
    hint: Any = next((_fields(trainer)[name] for trainer in _trainers_with(name)), None)
    parts = {part for outer in (hint, *get_args(hint)) for part in (outer, *get_args(outer))}
    if dict in {get_origin(part) or part for part in parts} and str in parts:
        return "plain"  # a mapping, or JSON as text
    if str in parts or any(isinstance(part, str) for part in parts):
        return "text"
    return "switch" if bool in parts else "plain"


def hint_at_field(name: str, trainer: str, further: Iterable[str] = ()) -> str:
    """What to do about a name that is not a field: use the nearest one, among the fields and `further` names."""
    if name == "padding_free":
        return "It is gone: planned micro-batches and shared prompts do its work. Remove it."
    if name == "save_failure":
        return "It is gone: a checkpoint that cannot be written ends the run. Remove it."
    if name in _RENAMED:
        return f"In Transformers 5 it is {_RENAMED[name]}."
    for other in _trainers_with(name):
        page = methods.by_trainer()[other].page
        described = f", which {page} describes" if page else ""
        return f"It belongs to `trainer: {other}`{described}; this recipe is for `trainer: {trainer}`."
    near = difflib.get_close_matches(name, {*_fields(trainer), *further}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, OPOConfig, ModelConfig, dict[str, Any]]:
    """Parse a command line; the last item of the result is the recipe with the command line's fields merged in."""
    given = read(argv)
    values = given.values
    if given.unknown:
        names = [word for word in given.unknown if word.startswith("--")] or given.unknown
        raise ValueError(describe_unknown(given.unknown, names, given.trainer))
    set_variables(given.env)
    # A run's `recipe.yaml` lacks its secrets: the Hub uses a login instead, and others are asked for.
    for name in [name for name, value in values.items() if masked(value, name)]:
        if name != "hub_token":
            said = f"{name}={values[name]!r} lacks a secret, which the run that wrote this recipe did not save"
            raise ValueError(f"{said}. Set it on the command line: `--{name} …`.")
        values[name] = None
    values["accelerate_config"] = find_accelerate_config(values["accelerate_config"], split(argv)[0])
    for note in given.notes if os.environ.get("RANK", "0") == "0" else ():
        logger.warning(note)
    script, args, model_config = (
        kind(**{field.name: values[field.name] for field in fields(kind) if field.init})
        for kind in _argument_classes(given.trainer)
    )
    return script, args, model_config, given.as_stored


def describe_unknown(words: Sequence[str], names: Sequence[str], trainer: str, further: Iterable[str] = ()) -> str:
    """What to do about `names` in words of a command line, which are neither fields nor, if given, `further` names."""
    hints_at = {name: hint_at_field(name.removeprefix("--").split("=")[0], trainer, further) for name in names}
    what = "neither a field nor an option of accelerate" if further else "not a field"
    said = "\n".join(f"{name} is {what}. {hint}" for name, hint in hints_at.items())
    return f"{' '.join(words)}: {said}"


def set_variables(env: Mapping[str, str | int]) -> None:
    """Set the environment variables of a recipe. A secret that a run did not save is already set in the shell."""
    for name, value in env.items():
        if not masked(value, name):
            os.environ[name] = str(value)
        elif name not in os.environ:
            said = f"env={{{name!r}: {value!r}}} is a secret, which the run that wrote this recipe did not save"
            raise ValueError(f"{said}. Set the variable {name} in the shell.")


def _fields_of_trl() -> set[str]:
    """The fields of TRL's script for GRPO, `trl grpo`."""
    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    return {name for kind in kinds for name in hints(kind)} | {"accelerate_config"}


def _without_meaningless(recipe: dict[str, Any], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    Take [`MEANINGLESS`] out of a recipe and a command line that `trl grpo` would also run; returns the other words,
    and a note that names what was left out. In a recipe that is written for this package, they are errors.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in MEANINGLESS:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        finder.add_argument(*spellings, nargs="?", const=True, default=argparse.SUPPRESS)
    on_line, rest = finder.parse_known_args(words)
    found = {name: recipe.pop(name) for name in MEANINGLESS if name in recipe} | vars(on_line)
    shown = "; ".join(f"{name}={value!r}: {MEANINGLESS[name]}" for name, value in found.items())
    return rest, [f"This recipe of TRL's is trained with OPO. Without meaning, and left out: {shown}."] * bool(found)


def _plain(value: Any) -> Any:
    # Copies: what a library changes in a mapping of the arguments is not what the recipe said.
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
