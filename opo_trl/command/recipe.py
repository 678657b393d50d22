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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import trl
import yaml
from transformers.hf_argparser import string_to_bool
from trl import ModelConfig, TrlParser

from .. import WAITS_FOR_A_PORT
from ..checks import secrets
from ..config import OPOConfig
from ..fields import field_problems, hints
from .arguments import OPOScriptArguments
from .run_folder import same_completions


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
        usage = "opo-trl train [RECIPE] [--field value …] [--plan] [--debug]"
        super().__init__(_ARGUMENT_CLASSES, prog="opo-trl train", usage=usage, allow_abbrev=False)

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
    Read a command line, `[RECIPE] --field value …`, and its recipe.

    Raises:
        `ValueError`: a name is neither a field nor an option of `accelerate launch`, or a value has another type than
            its field or is out of its range; the message names all unknown names and values out of range.
    """
    own_options = argparse.ArgumentParser("opo-trl train", add_help=False, allow_abbrev=False)
    own_options.add_argument("--config")
    own_options.add_argument("--trainer")
    own_options.add_argument("--plan", action="store_true")
    own_options.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    has_path = bool(argv) and not argv[0].startswith("-")
    own, words = own_options.parse_known_args(["--config", *argv] if has_path else argv)
    words += ["--debug", own.debug] if isinstance(own.debug, str) else []

    recipe = {} if own.config is None else _read_file(own.config)
    if own.trainer is not None:
        recipe["trainer"] = own.trainer
    trainer = recipe.get("trainer") or "opo"
    if trainer == "async_opo":
        raise ValueError(f"trainer={trainer!r} {WAITS_FOR_A_PORT}")
    if trainer != "opo":
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to opo, or remove it.")
    if not isinstance(env := recipe.pop("env", None) or {}, dict):
        raise ValueError(f"env={env!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")

    parser, types = _Parser(), _fields()
    others = {name: recipe.pop(name) for name in [*recipe] if name not in types}
    launch = {name: value for name, value in others.items() if name in _launch_actions()} if others else {}
    problems = [
        f"{own.config!r} sets {name}={value}, but there is no such field. {_hint(name)}"
        for name, value in others.items()
        if name not in launch
    ]
    for name, value in reversed(recipe.items()):
        items = value if isinstance(value, list) else [value]
        if items and all(isinstance(item, str) for item in items):
            words = [f"--{name}={value}", *words] if isinstance(value, str) else [f"--{name}", *value, *words]
        else:
            parser.set_defaults_with_config(**{name: value})
    namespace, unknown = parser.parse_known_args(words)
    values, options = vars(namespace), {word.split("=")[0] for word in words}
    named = {action.dest for action in parser._actions if options & {*action.option_strings}} | recipe.keys()
    found: dict[str, str] = {}
    for kind in _ARGUMENT_CLASSES:
        found |= field_problems(kind, values)
    if "use_peft" not in named:  # a recipe that sets `use_peft: false` turns adapters off on purpose
        adapters = [name for name in named if name.startswith("lora_") or name in ("use_dora", "use_rslora")]
        found |= {name: f"{name}={values[name]!r} has no effect without `use_peft: true`." for name in adapters}
    problems += found.values()
    for word in unknown:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in _launch_actions():
            problems.append(f"{word} is neither a field nor an option of `accelerate launch`. {_hint(name)}")
    if problems:
        raise ValueError("\n".join(problems))
    values["accelerate_config"] = find_accelerate_config(values["accelerate_config"], own.config)
    return Fields(values, named, env, launch, unknown)


class _Loader(yaml.SafeLoader):
    """Rejects equal keys, and reads `1e-4` as a number, too."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise yaml.YAMLError(f"duplicate key {twice[0]!r}. Remove one.")
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), [*"-+.0123456789"]
)


def _read_file(path: str | Path) -> dict[str, Any]:
    """
    Read a YAML file of fields: name → text, `None`, a list of these, or a mapping; of `env`, all values are text.

    Raises:
        `ValueError`: the file is not valid YAML, or not one mapping of fields without equal keys.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        typed, written = yaml.load(text, _Loader), yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"config={str(path)!r} has no `field: value` lines. Write one field per line.")
    fields = {}
    for (name, as_text), value in zip(written.items(), typed.values(), strict=True):
        has_types = isinstance(value[0] if isinstance(value, list) and value else value, dict | None)
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
    given = read(argv)
    if given.unknown:
        raise ValueError(f"{' '.join(given.unknown)} belongs to no field. Options of accelerate go to the launcher.")
    set_variables(given.env)
    values = copy.deepcopy(given.values)  # what a library changes in a mapping is not what the recipe said
    if secrets.lost(values.get("hub_token")):  # a run's `recipe.yaml` lacks it, and the Hub uses a login instead
        values["hub_token"] = None
    if "use_cpu" not in given.named and not torch.accelerator.is_available():
        values["use_cpu"] = True  # Transformers would only say that this has to be set
    values |= same_completions(values, given.as_stored)
    script, args, model_config = (
        kind(**{field.name: values[field.name] for field in fields(kind) if field.init}) for kind in _ARGUMENT_CLASSES
    )
    return script, args, model_config, given.as_stored


def set_variables(env: Mapping[str, str]) -> None:
    """Set the environment variables of a recipe. A secret that a run did not save stays as it is set in the shell."""
    os.environ.update({name: value for name, value in env.items() if not secrets.lost(value)})
