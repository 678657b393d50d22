"""
Recipes: flat YAML files of fields, and command lines that override them.

A recipe is read as the command line that it stands for, so that both have the same types, and the same messages when a
value is not of its type.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import trl
from trl import ModelConfig, ScriptArguments, TrlParser

from ..checks import paths, written
from ..checks.ranges import require
from ..config import OPOConfig, RolloutConfig
from ..data import INSTRUCTION
from ..evaluate import Decoding


# Fields of earlier versions that public recipes set.
_RENAMED = {
    "torch_dtype": "`dtype`",
    "overwrite_output_dir": "gone: set `overwrite` to delete an earlier run",
    "logging_dir": "the variable TENSORBOARD_LOGGING_DIR: set `env: {TENSORBOARD_LOGGING_DIR: folder}`",
    "warmup_ratio": "`warmup_steps`, with a share of all steps in (0, 1)",
}

CONFIGS: dict[str, type[RolloutConfig]] = {"opo": OPOConfig, "grpo": RolloutConfig}


@dataclass
class OPOScriptArguments(ScriptArguments):
    """
    Arguments of the training script, beside those of [`OPOConfig`] and [`~trl.ModelConfig`].

    Args:
        trainer (`str`, *optional*, defaults to `"opo"`):
            `"opo"`: [`OPOTrainer`]; `"grpo"`: [`RolloutTrainer`] with TRL's losses, for GRPO, GSPO, DAPO and the like.
        reward_funcs (`list[str]`, *optional*, defaults to `["accuracy_reward"]`):
            Reward functions: `accuracy_reward`, `format_reward`, `arithmetic_reward`, TRL's
            `reasoning_accuracy_reward`, `think_format_reward` and `soft_overlong_punishment`, or dotted import paths.
            The first one decides what counts as solved in every accuracy.
        reward_workers (`int`, *optional*, defaults to `4`):
            Worker processes of a node that score completions by `accuracy_reward`, shared by its training processes,
            at least one each; 0 scores in the training processes. The other rewards always do, but for functions that
            are an [`IsolatedReward`] of their own.
        reward_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds that a worker has for one completion, which is else unscorable, not wrong.
        reward_memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate for it in MiB, at least 512; see [`IsolatedReward`].
        overlong_cache (`int`, *optional*):
            Tokens before `max_completion_length` over which `soft_overlong_punishment` falls from 0 to -1.
        reward_model_name_or_path (`str`, *optional*):
            Reward model to add to the reward functions.
        columns (`dict[str, str]`, *optional*):
            Which of the data set's columns stands for which of ours, such as `{problem: question, solution: answer}`;
            see [`load_problems`]. With `prompt_style: dataset`, new name → name that it has.
        levels (`list[str]`, *optional*):
            Levels of the training problems; `None` takes all.
        fraction (`float`, *optional*, defaults to `1.0`):
            Share of these problems to train on, in `(0, 1]`.
        subset_seed (`int`, *optional*, defaults to `42`):
            Seed that chooses the share, and the problems of validation and report.
        prompt_style (`str`, *optional*, defaults to `"chat"`):
            `"chat"`: a user message of the problem and `instruction`; `"plain"`: the problem as it is; `"dataset"`:
            the data set has a `prompt` column of its own and is taken as it is.
        instruction (`str`, *optional*):
            What the chat prompt asks for.
        max_prompt_length (`int`, *optional*):
            Longest prompt in tokens; longer ones are left out and counted.
        validation_levels (`list[str]`, *optional*), validation_size (`int`, *optional*, defaults to `100`):
            Levels and number of the test split's problems that are solved every `validation_steps`.
        validation_steps (`int`, *optional*):
            Optimizer steps between two validations; `None` validates not at all.
        validation_decoding (`str`, *optional*, defaults to `"sampled"`):
            `"greedy"` or `"sampled"`.
        report_levels (`list[str]`, *optional*), report_size (`int`, *optional*, defaults to `500`):
            Levels, and number of the test split's problems of each, whose accuracies before and after training are
            reported, greedy and sampled. `None` reports none.
        report_samples (`int`, *optional*, defaults to `1`):
            Completions sampled for each of these problems; from 2 on, pass@k is reported as well.
        overwrite (`bool`, *optional*, defaults to `False`):
            Delete an earlier run in `output_dir`.
        accelerate_config (`str`, *optional*):
            Accelerate configuration that `opo-trl train` launches with: a file, as seen from the current folder or
            from the recipe's, or a name of TRL's (`single_gpu`, `multi_gpu`, `zero2`, …).
    """

    trainer: Literal["opo", "grpo"] = field(default="opo", metadata={"help": "OPO, or TRL's losses."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy_reward"], metadata={"help": "Reward functions, by name or dotted path."}
    )
    reward_model_name_or_path: str | None = field(default=None, metadata={"help": "Reward model to add."})
    reward_workers: int = field(default=4, metadata={"help": "Worker processes for accuracy_reward; 0 for none."})
    reward_timeout: float = field(default=30.0, metadata={"help": "Seconds that a worker has for one completion."})
    reward_memory: int = field(default=2048, metadata={"help": "Memory of a worker in MiB."})
    overlong_cache: int | None = field(
        default=None, metadata={"help": "Tokens over which soft_overlong_punishment falls to -1."}
    )
    columns: dict | str | None = field(
        default=None, metadata={"help": "Which column of the data set stands for problem, solution, level and type."}
    )
    levels: list[str] | None = field(default=None, metadata={"help": "Levels of the training problems."})
    fraction: float = field(default=1.0, metadata={"help": "Share of the training problems, in (0, 1]."})
    subset_seed: int = field(default=42, metadata={"help": "Seed that chooses problems."})
    prompt_style: Literal["chat", "plain", "dataset"] = field(
        default="chat", metadata={"help": "How a problem becomes a prompt."}
    )
    instruction: str = field(default=INSTRUCTION, metadata={"help": "What the chat prompt asks for."})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Longest prompt in tokens."})
    validation_levels: list[str] | None = field(default=None, metadata={"help": "Levels of the validation problems."})
    validation_size: int = field(default=100, metadata={"help": "Number of validation problems."})
    validation_steps: int | None = field(default=None, metadata={"help": "Optimizer steps between validations."})
    validation_decoding: Decoding = field(default="sampled", metadata={"help": "Decoding of validation."})
    report_levels: list[str] | None = field(default=None, metadata={"help": "Levels reported before and after."})
    report_size: int = field(default=500, metadata={"help": "Problems per reported level."})
    report_samples: int = field(default=1, metadata={"help": "Completions sampled per reported problem."})
    overwrite: bool = field(default=False, metadata={"help": "Delete an earlier run in output_dir."})
    accelerate_config: str | None = field(default=None, metadata={"help": "Accelerate configuration to launch with."})

    def __post_init__(self):
        paths.check_json("columns", self.columns)
        if isinstance(self.columns, str):
            self.columns = json.loads(self.columns)
        pairs: Any = self.columns.items() if isinstance(self.columns, dict) else [(self.columns, None)]
        plain = self.columns is None or all(isinstance(name, str) for pair in pairs for name in pair)
        require(plain, "columns", self.columns, "a mapping of names: `columns: {problem: question}`")


class _Parser(TrlParser):
    """Parser of recipes and command lines that says in one line what is wrong, instead of listing all options."""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        raise ValueError(f"{message}. Set it to a value of its type: `{self.prog} --help` lists them.")

    def take(self, recipe: Mapping[str, Any]) -> list[str]:
        """Words that say what a recipe says. What no word can say becomes a default: mappings and empty values."""
        actions = {action.dest: action for action in self._actions}
        hints = {name: hint for arguments in self.dataclass_types for name, hint in get_type_hints(arguments).items()}
        words = []
        for name, value in recipe.items():
            kind = actions[name].type
            names = isinstance(kind, type) and issubclass(kind, Enum)
            if value in ("", []) and (value == actions[name].default or (names and value == "")):
                continue  # as it is without the field, and no word says it
            if isinstance(value, list) and any(item is None or isinstance(item, Mapping | list) for item in value):
                self.error(f"{name}={value!r} is not allowed")
            elif isinstance(value, list) and actions[name].nargs == "+":
                words += [f"--{name}", *map(str, value)]
            elif value is not None and not isinstance(value, Mapping | list):
                words.append(f"--{name}={value}")
            elif _admits(hints[name], type(value)):
                self.set_defaults_with_config(**{name: value})
            else:
                self.error(f"{name}={value!r} is not allowed")
        return words


def _admits(hint: Any, kind: type) -> bool:
    return any((get_origin(part) or part) is kind for part in (hint, *get_args(hint)))


def make_parser(trainer: str, prog: str = "opo-trl train") -> _Parser:
    """Parser of recipes and command lines, into script, trainer and model arguments."""
    dataclass_types: Any = _argument_classes(trainer)
    return _Parser(dataclass_types, prog=prog, allow_abbrev=False)


def _argument_classes(trainer: str) -> tuple[type, type, type]:
    return OPOScriptArguments, CONFIGS[trainer], ModelConfig


def _fields(trainer: str) -> set[str]:
    return {f.name for arguments in _argument_classes(trainer) for f in dataclasses.fields(arguments)}


def _hints(trainer: str) -> dict[str, Any]:
    own = {name: hint for kind in _argument_classes(trainer) for name, hint in get_type_hints(kind).items()}
    return {**own, "env": str}  # in whatever it holds


def split(argv: Sequence[str]) -> tuple[str | None, bool, list[str]]:
    """Path of the recipe, whether `--debug` asks for tracebacks, and all else of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--debug", nargs="?", const=True)  # with a value, it is the field of Transformers'
    own, fields = parser.parse_known_args(argv)
    if isinstance(own.debug, str):
        fields += ["--debug", own.debug]
    return own.config, own.debug is True, fields


def read_recipe(path: str | Path | None, argv: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """
    Read a recipe, and find out which trainer it is for.

    Args:
        path (`str` or `Path`, *optional*):
            YAML file.
        argv (`Sequence[str]`, *optional*):
            Command line, whose `--trainer` overrides the recipe's.

    Returns:
        `tuple[dict[str, Any], str]`: field → value, as written; and a key of [`CONFIGS`].

    Raises:
        `ValueError`: the file does not exist or is no mapping, there is no such trainer, or a key is no field; the
        message names the key and the nearest field.
    """
    recipe = {} if path is None else _read_yaml(path)
    trainer = recipe.get("trainer", "opo")
    for place, word in enumerate(argv):  # the last one holds, as for every option
        if word == "--trainer" and place + 1 < len(argv):
            trainer = argv[place + 1]
        elif word.startswith("--trainer="):
            trainer = word.partition("=")[2]
    if trainer not in list(CONFIGS):
        raise ValueError(f"trainer={trainer!r} does not exist. Set `trainer` to one of {', '.join(CONFIGS)}.")
    for key in recipe.keys() - _fields(trainer) - {"env"}:
        hint = hint_at_field(str(key), trainer)
        raise ValueError(f"{str(path)!r} sets {key}={recipe[key]!r}, but there is no such field. {hint}")
    variables = recipe.get("env", {})
    plain = isinstance(variables, dict) and all(isinstance(part, str) for pair in variables.items() for part in pair)
    if not plain:
        raise ValueError(f"env={variables!r} is not allowed. Set `env` to a mapping: `env: {{NAME: value}}`.")
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env={{{name!r}: {value!r}}} cannot be set: a variable has a name without `=`, and no NUL. Set `env` "
                "to a mapping: `env: {NAME: value}`."
            )
    if variables:  # whole numbers as such, which look better in the recipe of the run's folder
        recipe["env"] = {name: int(v) if re.fullmatch(r"0|[1-9]\d*", v) else v for name, v in variables.items()}
    return recipe, trainer


def _read_yaml(path: str | Path) -> dict[str, Any]:
    paths.check_name("config", path)
    if not paths.is_file("config", path):
        hint = paths.hint_at_checkout(path) or "Pass the path of a recipe."
        raise ValueError(f"config={str(path)!r} does not exist, as seen from {os.getcwd()!r}. {hint}")
    hints = {name: hint for trainer in CONFIGS for name, hint in _hints(trainer).items()}
    return written.read(path, lambda field: _kind(hints.get(field)))


def _kind(hint: Any) -> written.Kind:
    if hint is None:
        return "plain"
    parts = {part for outer in (hint, *get_args(hint)) for part in (outer, *get_args(outer))}
    if dict in {get_origin(part) or part for part in parts} and str in parts:
        return "plain"  # a mapping, or JSON as text
    if str in parts or any(isinstance(part, str) for part in parts):
        return "text"
    return "switch" if bool in parts else "plain"


def hint_at_field(name: str, trainer: str, further: Iterable[str] = ()) -> str:
    """What to do about a name that is no field: use the nearest one, of the fields and of `further` names."""
    if name in _RENAMED:
        return f"In Transformers 5 it is {_RENAMED[name]}."
    other = next((other for other in CONFIGS if name in _fields(other)), None)
    if other:
        return f"It belongs to `trainer: {other}`, and this is for `trainer: {trainer}`."
    near = difflib.get_close_matches(name, {*_fields(trainer), *further}, n=1)
    return f"Did you mean `{near[0]}`?" if near else "Remove it."


def parse(argv: Sequence[str]) -> tuple[OPOScriptArguments, RolloutConfig, ModelConfig, dict[str, Any]]:
    """Parse a command line; the last item of the result is the recipe with the command line's fields merged in."""
    recipe_path, _, fields = split(argv)
    recipe, trainer = read_recipe(recipe_path, fields)
    environment = {"env": recipe.pop("env")} if "env" in recipe else {}
    os.environ.update({name: str(value) for name, value in environment.get("env", {}).items()})
    named = recipe.keys() | {a[2:].split("=")[0].replace("-", "_") for a in fields if a.startswith("--")}
    parser = make_parser(trainer)
    *parsed, unknown = parser.parse_args_into_dataclasses(
        [*parser.take(recipe), *fields], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        hint = hint_at_field(unknown[0].removeprefix("--").split("=")[0], trainer)
        raise ValueError(f"{' '.join(unknown)}: there is no such field. {hint}")
    script, args, model_config = parsed
    script.accelerate_config = find_accelerate_config(script.accelerate_config, recipe_path)
    values = {f.name: getattr(part, f.name) for part in reversed(parsed) for f in dataclasses.fields(part)}
    merged = {name: _plain(value) for name, value in values.items() if name in named}
    return script, args, model_config, environment | merged


def find_accelerate_config(name: str | None, recipe_path: str | None) -> str | None:
    """
    Find an accelerate configuration: a file, as seen from here or from the recipe's folder, or a name of TRL's.

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
    if hasattr(value, "to_dict"):  # what Transformers has made of a mapping
        value = value.to_dict()
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
