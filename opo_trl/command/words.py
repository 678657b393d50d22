"""
Recipes and command lines as words, and what is wrong with them, before libraries are imported, which takes seconds.

    opo-trl train [RECIPE] --field value … --option_of_accelerate value …

What the fields of TRL and Transformers, and the options of accelerate, are called is read in their installed source.
`recipe` then gives values the types of their fields, with these libraries.
"""

import argparse
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from .. import WAITS_FOR_A_PORT
from ..checks import secrets
from ..fields import YAMLLoader, number_problem
from ..report.run_files import another_run, is_run


# Class that declares fields → its file. A class stands after those that it is derived from.
_DECLARED = {
    "TrainingArguments": "transformers/training_args.py",
    "_BaseConfig": "trl/trainer/base_config.py",
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "ModelConfig": "trl/trainer/model_config.py",
    "ScriptArguments": "trl/scripts/utils.py",
    "Masked": "opo_trl/checks/secrets.py",
    "ObjectiveConfig": "opo_trl/config.py",
    "OPOConfig": "opo_trl/config.py",
    "OPOScriptArguments": "opo_trl/command/arguments.py",
}
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


@dataclass(frozen=True)
class Words:
    """A command line and its recipe, as written."""

    options: argparse.Namespace  # the command's own, such as `config`, the recipe's path
    of_training: list[str]  # the whole command line, but for options of `accelerate launch`
    of_fields: list[str]  # words of the command line that set fields, or that nobody knows
    of_accelerate: list[str]  # words of the command line that are options of `accelerate launch`
    recipe: dict[str, Any]  # the recipe, without what follows: name → text, `None`, a list of these, or a mapping
    env: dict[str, str]  # environment variables that the recipe sets
    launch: dict[str, Any]  # options of `accelerate launch` that the recipe sets

    def value(self, name: str) -> Any:
        """The value of a field as the command line or else the recipe has it; `None` if it is not set."""
        return _values_as_written(self).get(name)


def read_words(argv: Sequence[str]) -> Words:
    """
    Read a command line, `[RECIPE] --field value …`, and its recipe, and divide both into fields, options of
    `accelerate launch` and environment variables. A `ValueError` if the recipe is no YAML of fields.
    """
    options, words = _split_off_own_options(argv)
    recipe = {} if options.config is None else read_file(options.config)
    if options.trainer is not None:
        recipe["trainer"] = options.trainer
    _check_trainer(recipe.get("trainer") or "opo")
    env = recipe.pop("env", None) or {}
    if not isinstance(env, dict):
        raise ValueError(f"env={env!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")
    of_training, _ = _split_off_accelerate(argv)
    of_fields, of_accelerate = _split_off_accelerate(words)
    # What is no field has to be an option of accelerate, which is checked later.
    launch = {name: value for name, value in recipe.items() if not _is_field(name)}
    recipe = {name: value for name, value in recipe.items() if name not in launch}
    return Words(options, of_training, of_fields, of_accelerate, recipe, env, launch)


def check_words(words: Words) -> None:
    """
    Check what can be checked of a run without a library: the names and numbers of its fields, and its folder.

    Raises:
        `ValueError`: names all fields that are wrong, or the folder, which holds another run.
    """
    problems = problems_of_words(words)
    if problems:
        raise ValueError("\n".join(problems))
    values = _values_as_written(words)
    folder = str(values.get("output_dir") or "trainer_output")
    may_hold_a_run = "overwrite" in values or "resume_from_checkpoint" in values  # it is checked with all settings
    if not may_hold_a_run and is_run(Path(folder).expanduser()):
        raise another_run(folder)


def problems_of_words(words: Words) -> list[str]:
    """
    What is wrong with a recipe and a command line, in a sentence each: names that are neither fields nor options of
    `accelerate launch`, and values of number fields that are none or out of range.
    """
    problems = [
        f"{words.options.config!r} sets {name}={value}, but there is no such field. {_fix_of_unknown_name(name)}"
        for name, value in words.launch.items()
        if name not in options_of_accelerate()
    ]
    for name, group in _options_with_values(words.of_fields):
        if name and not _is_field(name):  # options of accelerate are not among these words
            problems.append(
                f"{group[0]} is neither a field nor an option of `accelerate launch`. {_fix_of_unknown_name(name)}"
            )
    for name, value in _values_as_written(words).items():
        problem = number_problem(name, fields()[name], value) if name in fields() else None
        if problem:
            problems.append(problem)
    return problems


def _values_as_written(words: Words) -> dict[str, Any]:
    """
    Field → its value as the recipe and the command line over it have it, without its type: text, or of several words
    a list.
    """
    values = dict(words.recipe)
    for name, group in _options_with_values(words.of_fields):
        _, has_value, value = group[0].partition("=")
        of_option = [value] if has_value else group[1:]
        values[name] = of_option[0] if len(of_option) == 1 else of_option
    return values


def _split_off_own_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """
    The options that the command itself reads, with the recipe's path as `config`, and the other words: fields and
    options of accelerate.
    """
    parser = argparse.ArgumentParser("opo-trl train", add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--trainer")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is Transformers' field
    parser.add_argument("--help", "-h", nargs="?", const="ours", choices=["ours", "all"])
    has_path = bool(argv) and not argv[0].startswith("-")
    options, words = parser.parse_known_args(["--config", *argv] if has_path else argv)
    if isinstance(options.debug, str):
        # The field gets its value back. Nobody reads `options.debug`: whether an error shows its traceback is decided
        # by whether `--debug` is among the words, with a value or without.
        words += ["--debug", options.debug]
    return options, words


def _options_with_values(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """
    The name of each option, without dashes or value, and its words: the option itself and those up to the next one.
    Words before the first option come with an empty name.
    """
    name = ""
    group: list[str] = []
    for word in words:
        if word.startswith("--"):
            if group:
                yield name, group
            name, group = word.removeprefix("--").split("=")[0].replace("-", "_"), []
        group.append(word)
    if group:
        yield name, group


def _split_off_accelerate(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """
    The words of a command line without options of `accelerate launch`, and the words of these. A name that is both is
    a field.
    """
    of_training: list[str] = []
    of_accelerate: list[str] = []
    for name, group in _options_with_values(words):
        is_of_accelerate = name in options_of_accelerate() and not _is_field(name)
        (of_accelerate if is_of_accelerate else of_training).extend(group)
    return of_training, of_accelerate


def _check_trainer(trainer: str) -> None:
    """Check the field `trainer`, which has one value."""
    if trainer == "async_opo":
        raise ValueError(f"trainer={trainer!r} {WAITS_FOR_A_PORT}")
    if trainer != "opo":
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to opo, or remove it.")


def read_file(path: str | Path) -> dict[str, Any]:
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
    values = {}
    # Text, so that the field decides on the type; a mapping, `None` and a list of mappings have those of YAML.
    for (name, as_text), value in zip(written.items(), typed.values(), strict=True):
        first = value[0] if isinstance(value, list) and value else value
        has_types = isinstance(first, dict | None)
        values[name] = value if has_types and name != "env" else as_text
    return values


def _is_field(name: str) -> bool:
    """Whether a word names a field; `no_x` sets the field `x` to false."""
    return name in fields() or name.removeprefix("no_") in fields()


@functools.cache
def fields() -> Mapping[str, str]:
    """
    Field → its type as its declaration has it, of all that a recipe can set. The types are empty, and the classes of
    fields imported, with a release whose source is arranged in another way.
    """
    types: dict[str, str] = {}
    bases: set[str] = set()
    for name, file in _DECLARED.items():
        # The class's bases, and its lines up to the next class or function
        pattern = rf"^class {name}(?:\((.*?)\))?:$(.*?)(?:^(?:@|class|def)|\Z)"
        declaration = re.search(pattern, _source(file), re.MULTILINE | re.DOTALL)
        if declaration is None:
            return _fields_of_imported_classes()
        bases.update(re.findall(r"\w+", declaration[1] or ""))
        types.update(re.findall(r"^    (\w+): (.+?)(?: =.*)?$", declaration[2], re.MULTILINE))
    return types if bases <= _DECLARED.keys() else _fields_of_imported_classes()


def _fields_of_imported_classes() -> dict[str, str]:
    """[`fields`] by the classes themselves, without their types."""
    from trl import ModelConfig

    from ..config import OPOConfig
    from .arguments import OPOScriptArguments

    kinds: tuple[Any, ...] = (OPOScriptArguments, OPOConfig, ModelConfig)
    return {field.name: "" for kind in kinds for field in dataclasses.fields(kind)}


@functools.cache
def options_of_accelerate() -> Set[str]:
    """Options of `accelerate launch`, without dashes."""
    # The calls that add one name it first, or after a letter.
    return {*re.findall(r'add_argument\((?:\s*"-\w",)?\s*"--(\w+)"', _source("accelerate/commands/launch.py"))}


def _source(file: str) -> str:
    """The text of a file of an installed package, which is not imported; empty if there is none."""
    package, _, rest = file.partition("/")
    path = Path(str(find_spec(package).origin)).parent / rest
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def launch_words(options: Mapping[str, Any], flags: Set[str]) -> list[str]:
    """
    Options of `accelerate launch` (name → value in a recipe) as words of its command line. One of its `flags`, which
    have no value there, is a word if its value is true.
    """
    words = []
    for name, value in options.items():
        if name not in flags:
            words.append(f"--{name}={value}")
        elif str(value).lower() in ("true", "yes", "t", "y", "1"):
            words.append(f"--{name}")
    return words


def _fix_of_unknown_name(name: str) -> str:
    """What to do about a name that is not a field: what it is called now, or what it may be a misspelling of."""
    if name in _REPLACED:
        return _REPLACED[name]
    near = difflib.get_close_matches(name, {*fields(), *options_of_accelerate()}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """
    The path of an accelerate configuration, `None` if none is named. The name is a file, relative to here or to the
    recipe, or one of TRL's configurations; a `ValueError` if it is neither.
    """
    if name is None:
        return None
    of_trl = Path(str(find_spec("trl").origin)).parent / "accelerate_configs" / f"{name}.yaml"
    for place in (Path(name), Path(recipe_path or "").parent / name, of_trl):
        if place.is_file():
            return str(place.resolve())
    raise ValueError(f"accelerate_config={name!r} is neither a file, from here or the recipe, nor one of TRL's.")


def set_variables(env: Mapping[str, str]) -> None:
    """Set the environment variables of a recipe. A secret that a run did not save stays as it is set in the shell."""
    os.environ.update({name: value for name, value in env.items() if not secrets.lost(value)})
