"""
Recipes: flat YAML files of fields, and command lines that override them.

TRL's `TrlParser` parses both: the value of a recipe has the type that the same word has on a command line. It does not
read the file: PyYAML would make false of `no`, 8 of `010`, and keep the last of two equal keys. Here the value of a
field is text until its type is known, and equal keys are an error. Only within a mapping, such as `generation_kwargs`,
do values have the types that YAML gives them.
"""

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import torch
from trl import ModelConfig, TrlParser

from ..checks import secrets
from ..config import OPOConfig
from ..fields import field_problems, hints
from .arguments import OPOScriptArguments
from .help import help_text
from .run_folder import same_completions
from .words import find_accelerate_config, problems_of_words, read_words, set_variables


Kind = TypeVar("Kind")
_ARGUMENT_CLASSES: tuple[type, type, type] = (OPOScriptArguments, OPOConfig, ModelConfig)


class _Parser(TrlParser):
    """Raises a `ValueError` for a value of a wrong type."""

    def __init__(self):
        super().__init__(_ARGUMENT_CLASSES, prog="opo-trl train", allow_abbrev=False, add_help=False)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument --(\w+)\S*: ", r"\1: ", message)
        raise ValueError(f"{message}. Set it to a value of its type: `{self.prog} --help` lists them.")


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
            its field or is out of its range.
    """
    words = read_words(argv)
    if words.options.help is not None:
        print(help_text(of_others=words.options.help == "all"))
        sys.exit()
    problems = problems_of_words(words)
    if not problems:
        values, named, unknown = _parse_values(words.recipe, words.of_fields)
        problems = _problems_of_values(values, named)
    if problems:
        raise ValueError("\n".join(problems))
    values["accelerate_config"] = find_accelerate_config(values["accelerate_config"], words.options.config)
    return Fields(values, named, words.env, words.launch, [*words.of_accelerate, *unknown])


def _parse_values(recipe: Mapping[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], set[str], list[str]]:
    """
    Give the values of a recipe, and of the words of a command line over it, the types of their fields.

    Returns:
        `tuple[dict[str, Any], set[str], list[str]]`: the values of all fields, the names of those that are set, and
        the words that belong to no field.
    """
    parser = _Parser()
    words_of_recipe: list[str] = []
    # Text becomes words of a command line, from which the parser makes the type of the field.
    for name, value in recipe.items():
        items = value if isinstance(value, list) else [value]
        is_text = bool(items) and all(isinstance(item, str) for item in items)
        if not is_text or (isinstance(value, list) and _is_text_or_list(name)):
            # It has its type already, as within a mapping, or is a list where a command line has only one word.
            parser.set_defaults_with_config(**{name: value})
        elif isinstance(value, list):
            words_of_recipe += [f"--{name}", *value]
        else:
            words_of_recipe.append(f"--{name}={value}")
    all_words = [*words_of_recipe, *words]
    namespace, unknown = parser.parse_known_args(all_words)
    options = {word.split("=")[0] for word in all_words}  # and values, which are no option's name
    named = {action.dest for action in parser._actions if options & {*action.option_strings}}
    return vars(namespace), named | recipe.keys(), unknown


def _is_text_or_list(name: str) -> bool:
    """Whether a field is a text or a list, such as `report_to`: its parser takes no list."""
    for kind in _ARGUMENT_CLASSES:
        types = get_args(hints(kind).get(name))
        if str in types and any(get_origin(part) is list for part in types):
            return True
    return False


def _problems_of_values(values: Mapping[str, Any], named: set[str]) -> list[str]:
    """
    What is wrong with values, each by itself, and with fields of LoRA that are set without `use_peft`. `named` are the
    fields that the recipe or the command line sets.
    """
    problems: dict[str, str] = {}
    for kind in _ARGUMENT_CLASSES:
        problems |= field_problems(kind, values)
    if "use_peft" not in named:  # a recipe that sets `use_peft: false` turns adapters off on purpose
        for name in named:
            if name.startswith("lora_") or name in ("use_dora", "use_rslora"):
                problems[name] = f"{name}={values[name]!r} has no effect without `use_peft: true`."
    return [*problems.values()]


def parse(
    argv: Sequence[str], config_class: type[OPOConfig] = OPOConfig
) -> tuple[OPOScriptArguments, OPOConfig, ModelConfig, dict[str, Any]]:
    """
    The arguments that a command line and its recipe ask for, of the script, the trainer and the model, and the recipe
    with the command line merged in, as a run stores it. Sets the recipe's environment variables.
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
    # A run that resumes on another number of processes keeps its completions per optimizer step and rollout.
    values |= same_completions(values, recipe.as_stored)
    script = _dataclass_from(OPOScriptArguments, values)
    args = _dataclass_from(config_class, values)
    model_config = _dataclass_from(ModelConfig, values)
    return script, args, model_config, recipe.as_stored


def _dataclass_from(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """A dataclass of this kind, made with the values of its fields; `values` also has those of other dataclasses."""
    names = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})
