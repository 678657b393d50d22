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
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import trl
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from .. import methods
from ..arguments import NOT_STREAMED, OPOScriptArguments
from ..checks import paths, strict_yaml
from ..config import REJECTED_FIELDS, RolloutConfig
from ..fields import hints
from .help import ShortHelp


logger = logging.getLogger(__name__)

# Fields of earlier versions that public recipes set.
_RENAMED = {
    "torch_dtype": "`dtype`",
    "overwrite_output_dir": "gone: set `overwrite` to delete an earlier run",
    "logging_dir": "the variable TENSORBOARD_LOGGING_DIR: set `env: {TENSORBOARD_LOGGING_DIR: folder}`",
    "warmup_ratio": "`warmup_steps`, with a fraction of all steps in (0, 1)",
}


# Fields of `trl grpo` that OPO does not have, and why.
MEANINGLESS = REJECTED_FIELDS | NOT_STREAMED


class _Parser(TrlParser):
    """Parser of recipes and command lines that reports an error in one line, without listing all options."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        raise ValueError(f"{message}. Set it to a value of its type: `{self.prog} --help` lists them.")

    def take(self, recipe: Mapping[str, Any]) -> list[str]:
        """Turn a recipe into words of a command line, and into defaults what they cannot express, such as mappings."""
        actions = {action.dest: action for action in self._actions}
        types = {name: hint for arguments in self.dataclass_types for name, hint in hints(arguments).items()}
        words = []
        for name, value in recipe.items():
            kind = actions[name].type
            is_enum = isinstance(kind, type) and issubclass(kind, Enum)
            if value in ("", []) and (value == actions[name].default or (is_enum and value == "")):
                continue  # already the default, and no word expresses it
            if isinstance(value, list) and types[name] == list[dict] and all(isinstance(v, Mapping) for v in value):
                self.set_defaults_with_config(**{name: value})
            elif isinstance(value, list) and any(item is None or isinstance(item, Mapping | list) for item in value):
                self.error(f"{name}={value!r} is not allowed")
            elif isinstance(value, list) and value and actions[name].nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif value is not None and not isinstance(value, Mapping | list):
                words.append(f"--{name}={value}")
            elif _admits(types[name], type(value)):
                self.set_defaults_with_config(**{name: value})
            else:
                self.error(f"{name}={value!r} is not allowed")
        return words


def _admits(hint: Any, kind: type) -> bool:
    return any((get_origin(part) or part) is kind for part in (hint, *get_args(hint)))


def make_parser(trainer: str, prog: str = "opo-trl train") -> _Parser:
    """Parser of recipes and command lines, into script, trainer and model arguments."""
    dataclass_types: Any = _argument_classes(trainer)
    parser = _Parser(dataclass_types, prog=prog, allow_abbrev=False, add_help=False)
    no_value: Any = {"default": argparse.SUPPRESS}
    parser.add_argument("-h", "--help", action=ShortHelp, nargs=0, help="show the most used fields", **no_value)
    parser.add_argument("--help_all", action="help", help="show all fields", **no_value)
    return parser


def _argument_classes(trainer: str) -> tuple[type, type, type]:
    return OPOScriptArguments, methods.by_trainer()[trainer].config_class, ModelConfig


def _fields(trainer: str) -> dict[str, Any]:
    """Field → type, of all that a recipe for this trainer can set."""
    return {name: hint for kind in _argument_classes(trainer) for name, hint in hints(kind).items()}


def split(argv: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Path of the recipe, whether `--debug` asks for tracebacks, and the rest of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    own, rest = parser.parse_known_args(argv)
    if isinstance(own.debug, str):
        rest += ["--debug", own.debug]
    return own.config, own.debug is True, rest


def read_recipe(path: str | Path | None, argv: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """
    Read a recipe, and determine which trainer it is for.

    Args:
        path (`str` or `Path`, *optional*):
            YAML file.
        argv (`Sequence[str]`, *optional*):
            Command line, whose `--trainer` overrides the recipe's.

    Returns:
        `tuple[dict[str, Any], str]`: field → value, as written; and the trainer, a key of [`methods.by_trainer`].

    Raises:
        `ValueError`: the file does not exist or is not a mapping, the trainer does not exist, or a key is not a field;
        the message names the key and the nearest field.
    """
    recipe = {} if path is None else _read_yaml(path)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--trainer", nargs="?", default=recipe.get("trainer", methods.DEFAULT))
    trainer = own.parse_known_args(argv)[0].trainer
    known = list(methods.by_trainer())
    if trainer not in known:
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to one of {', '.join(known)}.")
    for key in recipe.keys() - _fields(trainer).keys() - {"env"}:
        if key in _launch_actions():
            continue
        hint = hint_at_field(str(key), trainer)
        raise ValueError(f"{str(path)!r} sets {key}={recipe[key]!r}, but there is no such field. {hint}")
    if variables := _variables(recipe.get("env", {})):
        recipe["env"] = variables
    return recipe, trainer


@functools.cache
def _launch_actions() -> Mapping[str, argparse.Action]:
    from accelerate.commands.launch import launch_command_parser  # takes a second

    return {action.dest: action for action in launch_command_parser()._actions if action.option_strings}


def take_launch_options(recipe: dict[str, Any], trainer: str) -> dict[str, Any]:
    """Take out of a recipe what `accelerate launch` gets, such as `num_processes`, which TRL's recipes may set."""
    return {name: recipe.pop(name) for name in [*recipe] if name not in _fields(trainer) and name != "env"}


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Options of `accelerate launch` as words of its command line."""
    flags = {name for name, value in options.items() if value is True and _launch_actions()[name].nargs == 0}
    unset = {name for name, value in options.items() if value is None or value is False}
    given = {name: value for name, value in options.items() if name not in flags | unset}
    return [*(f"--{name}" for name in flags), *(f"--{name}={value}" for name, value in given.items())]


def _variables(env: Any) -> dict[str, str | int]:
    """The environment variables that a recipe sets."""
    if not (isinstance(env, dict) and all(isinstance(part, str) for pair in env.items() for part in pair)):
        raise ValueError(f"env={env!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env={{{name!r}: {value!r}}} cannot be set: a variable has a name without `=`, and no NUL. Set `env` "
                "to a mapping: `env: {NAME: value}`."
            )
    # Integers stay numbers, so that the recipe in the run's folder has no quotation marks around them.
    return {name: int(value) if re.fullmatch(r"0|[1-9]\d*", value) else value for name, value in env.items()}


def _read_yaml(path: str | Path) -> dict[str, Any]:
    paths.check_name("config", path)
    if not paths.is_file("config", path):
        hint = paths.hint_at_checkout(path) or "Pass the path of a recipe."
        raise ValueError(f"config={str(path)!r} does not exist, as seen from {os.getcwd()!r}. {hint}")
    return strict_yaml.read(path, lambda field: "text" if field == "env" else _kind(_type(field)))


def _trainers_with(name: str) -> Iterator[str]:
    """The trainers whose recipes have a field. Later ones are imported only if earlier ones do not have it."""
    for trainer in methods.by_trainer():
        with suppress(ImportError):  # of a trainer that does not fit the installed TRL
            if name in _fields(trainer):
                yield trainer


def _type(name: str) -> Any:
    trainer = next(_trainers_with(name), None)
    return _fields(trainer)[name] if trainer else None


def _kind(hint: Any) -> strict_yaml.Kind:
    if hint is None:
        return "plain"
    parts = {part for outer in (hint, *get_args(hint)) for part in (outer, *get_args(outer))}
    if dict in {get_origin(part) or part for part in parts} and str in parts:
        return "plain"  # a mapping, or JSON as text
    if str in parts or any(isinstance(part, str) for part in parts):
        return "text"
    return "switch" if bool in parts else "plain"


def hint_at_field(name: str, trainer: str, further: Iterable[str] = ()) -> str:
    """What to do about a name that is not a field: use the nearest one, among the fields and `further` names."""
    if name in _RENAMED:
        return f"In Transformers 5 it is {_RENAMED[name]}."
    for other in _trainers_with(name):
        page = methods.by_trainer()[other].page
        described = f", which {page} describes" if page else ""
        return f"It belongs to `trainer: {other}`{described}; this recipe is for `trainer: {trainer}`."
    near = difflib.get_close_matches(name, {*_fields(trainer), *further}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, RolloutConfig, ModelConfig, dict[str, Any]]:
    """Parse a command line; the last item of the result is the recipe with the command line's fields merged in."""
    recipe_path, _, words = split(argv)
    recipe, trainer = read_recipe(recipe_path, words)
    launch = take_launch_options(recipe, trainer)
    environment = {"env": recipe.pop("env")} if "env" in recipe else {}
    os.environ.update({name: str(value) for name, value in environment.get("env", {}).items()})
    parser = make_parser(trainer)
    fields_of = {option: action.dest for action in parser._actions for option in action.option_strings}
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    named = recipe.keys() | {fields_of.get(option, option) for option in options}
    is_of_trl = named <= _fields_of_trl()
    if is_of_trl:
        words, named = _without_meaningless(recipe, words), named - MEANINGLESS.keys()
    *parsed, unknown = parser.parse_args_into_dataclasses(
        [*parser.take(recipe), *words], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        hint = hint_at_field(unknown[0].removeprefix("--").split("=")[0], trainer)
        raise ValueError(f"{' '.join(unknown)}: there is no such field. {hint}")
    script, args, model_config = parsed
    if is_of_trl:
        named |= {"trainer"}
        if script.datasets and script.dataset_name:
            logger.warning("`datasets` is used, and dataset_name=%r is not, as in TRL's script.", script.dataset_name)
            script.dataset_name, named = None, named - {"dataset_name"}
        if script.reward_model_name_or_path and script.reward_funcs and args.reward_weights:
            args.reward_weights = _reward_model_last(args.reward_weights)
    script.accelerate_config = find_accelerate_config(script.accelerate_config, recipe_path)
    values = {f.name: getattr(part, f.name) for part in reversed(parsed) for f in fields(part) if f.init}
    merged = {name: _plain(value) for name, value in values.items() if name in named}
    return script, args, model_config, environment | launch | merged


def as_stored(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as a run's folder stores it: one of `trl grpo` without [`MEANINGLESS`], and with its trainer."""
    if not recipe.keys() - _launch_actions().keys() - {"env"} <= _fields_of_trl():
        return dict(recipe)
    stored = {name: value for name, value in recipe.items() if name not in MEANINGLESS} | {"trainer": methods.DEFAULT}
    if all(stored.get(name) for name in ("reward_model_name_or_path", "reward_funcs", "reward_weights")):
        stored["reward_weights"] = _reward_model_last(stored["reward_weights"])
    return stored


def _reward_model_last(weights: Sequence[float]) -> list[float]:
    """Weights in our order of rewards. In TRL's script the reward model comes first."""
    first, *rest = weights
    return [*rest, first]


def _fields_of_trl() -> set[str]:
    """The fields of TRL's script for GRPO, `trl grpo`."""
    kinds = (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    return {name for kind in kinds for name in hints(kind)} | {"accelerate_config"}


def _without_meaningless(recipe: dict[str, Any], words: Sequence[str]) -> list[str]:
    """
    Take [`MEANINGLESS`] out of a recipe and a command line that `trl grpo` would also run, and name each.

    In any other recipe, which is written for this package, they are errors.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in MEANINGLESS:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        finder.add_argument(*spellings, nargs="?", const=True, default=argparse.SUPPRESS)
    on_line, rest = finder.parse_known_args(words)
    found = {name: recipe.pop(name) for name in MEANINGLESS if name in recipe} | vars(on_line)
    if found and os.environ.get("RANK", "0") == "0":
        shown = "; ".join(f"{name}={value!r}: {MEANINGLESS[name]}" for name, value in found.items())
        logger.warning("This recipe of TRL's is trained with OPO. Without meaning, and left out: %s.", shown)
    return rest


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """
    Find an accelerate configuration: a file, relative to here or to the recipe's folder, or the name of one of TRL's.

    Raises:
        `ValueError`: there is no such file or name.
    """
    if name is None:
        return None
    paths.check_name("accelerate_config", name)
    places = [Path(name), Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml"]
    if recipe_path is not None:
        places.insert(1, Path(recipe_path).parent / name)
    for place in places:
        if paths.is_file("accelerate_config", place):
            return str(place.resolve())
    raise ValueError(
        f"accelerate_config={name!r} is neither a file nor one of TRL's configurations. Looked for "
        f"{', '.join(map(str, places))}. {paths.hint_at_checkout(name)}".rstrip()
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "to_dict"):  # a mapping that Transformers has turned into an object
        value = value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
