"""
Recipes: flat YAML files of fields, and command lines that override them.

TRL's `TrlParser` parses both: the value of a recipe has the type that the same word has on a command line. It does not
read the file: PyYAML would make false of `no`, 8 of `010`, and keep the last of two equal keys. Here the value of a
field is text until its type is known, and equal keys are an error. Only within a mapping, such as `generation_kwargs`,
do values have the types that YAML gives them.
"""

import argparse
import copy
import difflib
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import trl
import yaml
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig, TrlParser

from .. import WAITS_FOR_A_PORT
from ..checks import secrets
from ..config import OPOConfig
from ..fields import YAMLLoader, field_problems, hints
from .arguments import OPOScriptArguments
from .help import help_text
from .run_folder import same_completions


Kind = TypeVar("Kind")
_ARGUMENT_CLASSES: tuple[type, type, type] = (OPOScriptArguments, OPOConfig, ModelConfig)
# Fields of Transformers 4 and of TRL's script that recipes set, and what to do.
_REPLACED = {
    "torch_dtype": "In Transformers 5 it is `dtype`.",
    "overwrite_output_dir": "Transformers 5 has none: set `overwrite` to move an earlier run aside.",
    "logging_dir": "In Transformers 5 it is a variable: set `env: {TENSORBOARD_LOGGING_DIR: folder}`.",
    "warmup_ratio": "In Transformers 5 it is `warmup_steps`, with a fraction of all steps in (0, 1).",
    "datasets": "Write the mixture to one file, and set `dataset_name` to it.",
    "test_split_size": "Set `test_fraction` to the share of problems to hold out.",
    "streaming": "Datasets are loaded completely. Remove it.",
}


class _Parser(TrlParser):
    """Raises a `ValueError` for a value of a wrong type."""

    def __init__(self):
        super().__init__(_ARGUMENT_CLASSES, prog="opo-trl train", allow_abbrev=False, add_help=False)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        raise ValueError(f"{message}. Set it to a value of its type: `{self.prog} --help` lists them.")


def _fields() -> dict[str, Any]:
    """Field → type, of all that a recipe can set."""
    return {name: hint for kind in _ARGUMENT_CLASSES for name, hint in hints(kind).items()}


@dataclass(frozen=True)
class Fields:
    """What a recipe and the command line over it say, each value with the type of its field."""

    values: dict[str, Any]  # every field of the three dataclasses, with its default if it is not set
    named: set[str]  # the fields that are set
    env: dict[str, str]  # environment variables that the recipe sets
    launch: dict[str, Any]  # options of `accelerate launch` in the recipe
    unknown: list[str]  # words of the command line that belong to no field: further options of `accelerate launch`

    @property
    def as_stored(self) -> dict[str, Any]:
        """The recipe, with the command line merged in, as a run's folder stores it."""
        values = {name: value for name, value in self.values.items() if name in self.named}
        return ({"env": self.env} if self.env else {}) | self.launch | values


def read(argv: Sequence[str]) -> Fields:
    """
    Read a command line, `[RECIPE] --field value …`, and its recipe. With `--help`, print that and exit.

    Raises:
        `ValueError`: a name is neither a field nor an option of `accelerate launch`, or a value has another type than
            its field or is out of its range; the message names all unknown names and values out of range.
    """
    options, words = _split_command_line(argv)
    if options.help is not None:
        print(help_text(of_others=options.help == "all"))
        sys.exit()
    recipe = {} if options.config is None else _read_file(options.config)
    if options.trainer is not None:
        recipe["trainer"] = options.trainer
    _check_trainer(recipe.get("trainer") or "opo")
    env = recipe.pop("env", None) or {}
    if not isinstance(env, dict):
        raise ValueError(f"env={env!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")

    types = _fields()
    of_recipe = {name: value for name, value in recipe.items() if name in types}
    others = {name: value for name, value in recipe.items() if name not in types}
    launch_options = _launch_actions() if others else {}
    launch = {name: value for name, value in others.items() if name in launch_options}
    problems = [
        f"{options.config!r} sets {name}={value}, but there is no such field. {_hint(name)}"
        for name, value in others.items()
        if name not in launch
    ]
    values, named, unknown = _parse_values(of_recipe, words)
    problems += _problems_of_values(values, named)
    problems += _problems_of_words(unknown)
    if problems:
        raise ValueError("\n".join(problems))
    values["accelerate_config"] = find_accelerate_config(values["accelerate_config"], options.config)
    return Fields(values, named, env, launch, unknown)


def _split_command_line(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, with the recipe's path as `config`, and the other words."""
    parser = argparse.ArgumentParser("opo-trl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--trainer")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    parser.add_argument("--help", "-h", nargs="?", const="ours", choices=["ours", "all"])
    has_path = bool(argv) and not argv[0].startswith("-")
    options, words = parser.parse_known_args(["--config", *argv] if has_path else argv)
    if isinstance(options.debug, str):
        # The field gets its value back. What stays in `options.debug` is not read: `cli.main` looks for `--debug` in
        # the words themselves.
        words += ["--debug", options.debug]
    return options, words


def _check_trainer(trainer: str) -> None:
    """Check the field `trainer`, which has one value."""
    if trainer == "async_opo":
        raise ValueError(f"trainer={trainer!r} {WAITS_FOR_A_PORT}")
    if trainer != "opo":
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to opo, or remove it.")


def _parse_values(recipe: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], set[str], list[str]]:
    """
    Give the values of a recipe, and of the words of a command line over it, the types of their fields.

    Returns:
        `tuple[dict[str, Any], set[str], list[str]]`: the values of all fields, the names of those that are set, and
        the words that belong to no field.
    """
    parser = _Parser()
    words_of_recipe: list[str] = []
    for name, value in recipe.items():
        items = value if isinstance(value, list) else [value]
        is_text = bool(items) and all(isinstance(item, str) for item in items)
        if not is_text:  # it has its type already, as within a mapping
            parser.set_defaults_with_config(**{name: value})
        elif isinstance(value, list):
            words_of_recipe += [f"--{name}", *value]
        else:
            words_of_recipe.append(f"--{name}={value}")
    all_words = [*words_of_recipe, *words]
    namespace, unknown = parser.parse_known_args(all_words)
    options = {word.split("=")[0] for word in all_words}
    named = {action.dest for action in parser._actions if options & {*action.option_strings}}
    return vars(namespace), named | recipe.keys(), unknown


def _problems_of_values(values: Mapping[str, Any], named: set[str]) -> list[str]:
    """What is wrong with values by themselves, and adapters that no field turns on."""
    problems: dict[str, str] = {}
    for kind in _ARGUMENT_CLASSES:
        problems |= field_problems(kind, values)
    if "use_peft" not in named:  # a recipe that sets `use_peft: false` turns adapters off on purpose
        for name in named:
            if name.startswith("lora_") or name in ("use_dora", "use_rslora"):
                problems[name] = f"{name}={values[name]!r} has no effect without `use_peft: true`."
    return [*problems.values()]


def _problems_of_words(unknown: Sequence[str]) -> list[str]:
    """Words of a command line that are neither a field nor an option of accelerate."""
    problems = []
    for word in unknown:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in _launch_actions():
            problems.append(f"{word} is neither a field nor an option of `accelerate launch`. {_hint(name)}")
    return problems


def _read_file(path: str | Path) -> dict[str, Any]:
    """
    Read a YAML file of fields: name → text, `None`, a list of these, or a mapping; of `env`, all values are text.

    Raises:
        `ValueError`: the file is not valid YAML, or not one mapping of fields without equal keys.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        typed = yaml.load(text, YAMLLoader)
        written = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"config={str(path)!r} has no `field: value` lines. Write one field per line.")
    fields = {}
    for (name, as_text), value in zip(written.items(), typed.values(), strict=True):
        first = value[0] if isinstance(value, list) and value else value
        has_types = isinstance(first, dict | None)
        fields[name] = value if has_types and name != "env" else as_text
    return fields


@functools.cache
def _launch_actions() -> Mapping[str, argparse.Action]:
    from accelerate.commands.launch import launch_command_parser  # takes a second

    return {action.dest: action for action in launch_command_parser()._actions if action.option_strings}


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Options of `accelerate launch`, as a recipe sets them, as words of its command line."""
    flags = {name for name in options if _launch_actions()[name].nargs == 0}
    words = [f"--{name}={value}" for name, value in options.items() if name not in flags]
    return words + [f"--{name}" for name in flags if string_to_bool(options[name])]


def _hint(name: str) -> str:
    """What to do about a name that is not a field."""
    if name in _REPLACED:
        return _REPLACED[name]
    near = difflib.get_close_matches(name, {*_fields(), *_launch_actions()}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """Find an accelerate configuration: a file, relative to here or to the recipe, or the name of one of TRL's."""
    if name is None:
        return None
    of_trl = Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml"
    for place in (Path(name), Path(recipe_path or "").parent / name, of_trl):
        if place.is_file():
            return str(place.resolve())
    raise ValueError(f"accelerate_config={name!r} is neither a file, from here or the recipe, nor one of TRL's.")


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, OPOConfig, ModelConfig, dict[str, Any]]:
    """
    The arguments that a command line asks for, script, trainer and model, and the recipe with its fields merged in.
    Sets the recipe's environment variables.
    """
    recipe = read(argv)
    if recipe.unknown:
        raise ValueError(f"{' '.join(recipe.unknown)} belongs to no field. Options of accelerate go to the launcher.")
    set_variables(recipe.env)
    values = copy.deepcopy(recipe.values)  # what a library changes in a mapping is not what the recipe said
    if secrets.lost(values.get("hub_token")):  # a run's `recipe.yaml` lacks it, and the Hub uses a login instead
        values["hub_token"] = None
    if "use_cpu" not in recipe.named and not torch.accelerator.is_available():
        values["use_cpu"] = True  # Transformers would only say that this has to be set
    values |= same_completions(values, recipe.as_stored)
    script = _made(OPOScriptArguments, values)
    args = _made(OPOConfig, values)
    model_config = _made(ModelConfig, values)
    return script, args, model_config, recipe.as_stored


def _made(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """A dataclass of arguments with the values of its fields, among those of others."""
    names = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})


def set_variables(env: Mapping[str, str]) -> None:
    """Set the environment variables of a recipe. A secret that a run did not save stays as it is set in the shell."""
    os.environ.update({name: value for name, value in env.items() if not secrets.lost(value)})
