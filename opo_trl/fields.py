"""
The fields of a configuration: their help, their bounds, and the place where each is checked by itself.

Combinations of fields are checked in `config.OPOConfig._check_…`, and what needs the model or the data in
`OPOTrainer.__init__`.

    @documented
    @dataclass
    class Config:
        \"\"\"
        Parameters:
            > Parameters that control the target

            alpha (`float`, *optional*, defaults to `0.4`):
                Escort exponent, in `[0, 1]`.
        \"\"\"

        alpha: Annotated[float, FRACTION] = 0.4

A docstring in TRL's style is the only description of a field: [`documented`] makes it the help of the command line.
The bound cannot be part of a field's metadata, all of which `HfArgumentParser` passes on to argparse.
"""

import functools
import importlib
import inspect
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml


@dataclass(frozen=True)
class Bound:
    """What the number in a field must be. NaN is nothing."""

    text: str
    holds: Callable[[float], bool]


POSITIVE = Bound("a positive finite number", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Bound("a finite number, 0 or more", lambda x: 0 <= x < math.inf)
COUNT = Bound("an integer of at least 1", lambda x: 1 <= x < math.inf and x == int(x))
COUNT_OR_ZERO = Bound("an integer of at least 0", lambda x: 0 <= x < 2**31 and x == int(x))
NONE_OR_ONE = Bound("0 or 1", lambda x: x in (0, 1))
FRACTION = Bound("a number in [0, 1]", lambda x: 0 <= x <= 1)
SHARE = Bound("a number in (0, 1]", lambda x: 0 < x <= 1)
PART = Bound("a number in (0, 1)", lambda x: 0 < x < 1)

# MiB of a process that scores completions. With 60, math-verify silently fails to parse right answers; with 384,
# 10,000 boxes no longer fit.
LEAST_WORKER_MEMORY = 512
WORKER_MEMORY = Bound(
    f"an integer of at least {LEAST_WORKER_MEMORY}, in MiB",
    lambda x: LEAST_WORKER_MEMORY <= x < math.inf and x == int(x),
)

# Bounds of fields of TRL and Transformers: of those that would silently train something else if they were out of range
_BOUNDS_OF_INHERITED = {
    "max_steps": Bound("an integer of at least 1, or to -1 to use `num_train_epochs`", lambda x: x >= 1 or x == -1),
    "num_train_epochs": POSITIVE,
    "temperature": POSITIVE,
    "top_p": SHARE,
    "beta": NOT_NEGATIVE,
}


# Help


def described(kind: type) -> dict[str, dict[str, str]]:
    """
    Heading → field → description, from the docstring of a dataclass in TRL's style: the section `Parameters:` has
    lines `    > Heading`, each followed by fields, `    name (type):`, and their descriptions, indented by 8.
    """
    headings: dict[str, dict[str, str]] = {}
    section, name = "", ""
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        if line and not line.startswith(" "):
            section = line
        elif section != "Parameters:":
            continue
        elif line.startswith("    > "):
            of_heading = headings.setdefault(line.removeprefix("    > "), {})
        elif item := re.match(r" {4}(\w+) \(`", line):
            name = item[1]
            of_heading[name] = ""
        elif line.startswith(" " * 8):
            of_heading[name] = f"{of_heading[name]} {line.strip()}".strip()
    return headings


Kind = TypeVar("Kind", bound=type)


def documented(kind: Kind) -> Kind:
    """Give the fields of a dataclass, for the command line, the help that its docstring has."""
    by_name: dict[str, Field] = {field.name: field for field in fields(kind)}
    for of_heading in described(kind).values():
        for name, text in of_heading.items():
            by_name[name].metadata = MappingProxyType({"help": text.replace("%", "%%")})
    return kind


# Types, defaults and bounds


def default(of: Field) -> Any:
    """Default of a field of a dataclass."""
    return of.default if of.default_factory is MISSING else of.default_factory()


def defaults(kind: Any) -> dict[str, Any]:
    """Field of a dataclass → its default."""
    return {field.name: default(field) for field in fields(kind)}


@functools.cache
def hints(kind: Any) -> Mapping[str, Any]:
    """Field of a dataclass → its type, without its bound."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


@functools.cache
def _bounds(kind: Any) -> Mapping[str, Bound]:
    """Field of a dataclass → its bound, of those that have one."""
    bounds = dict(_BOUNDS_OF_INHERITED)  # of fields of TRL and Transformers, whose types have none
    for name, hint in get_type_hints(kind, include_extras=True).items():
        # A type such as `Annotated[int, COUNT]` has its bound as metadata.
        if metadata := getattr(hint, "__metadata__", ()):
            bounds[name] = metadata[0]
    return bounds


@functools.cache
def _number_types(kind: Any) -> Mapping[str, tuple[type, bool]]:
    """
    Field of a dataclass → its type, and whether it may be `None`: of those whose type is `float`, `int` or `bool`, and
    nothing else besides `None`.
    """
    number_types: dict[str, tuple[type, bool]] = {}
    for name, hint in hints(kind).items():
        is_union = get_origin(hint) in (Union, UnionType)
        types = {*get_args(hint)} if is_union else {hint}
        for number_type in (float, int, bool):
            if types - {NoneType} == {number_type}:
                number_types[name] = number_type, NoneType in types
    return number_types


# Checks


def require(condition: bool, name: str, value: object, allowed: object) -> None:
    """Unless a condition holds, raise a `ValueError` that names a field, its value and what to set it to."""
    if not condition:
        raise ValueError(not_allowed(name, value, allowed))


def not_allowed(name: str, value: object, allowed: object) -> str:
    """Message for a field, its value and what to set it to."""
    return f"{name}={value!r} is not allowed. Set `{name}` to {allowed}."


def field_problems(kind: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """
    Field of a dataclass → message about its value, of the fields among these `values` whose value is not allowed,
    whatever the others are. `None`, and a field without a value, are not checked here.
    """
    problems = {}
    for name in hints(kind):
        value = values.get(name)
        allowed = None if value is None else _what_is_allowed(kind, name, value)
        if allowed is not None:
            problems[name] = not_allowed(name, value, allowed)
    return problems


def _what_is_allowed(kind: Any, name: str, value: Any) -> str | None:
    """
    What the field `name` of the dataclass `kind` has to be instead of this value; `None` if the value is fine. The
    value is not `None`: whether a field may be that, [`check_fields`] decides.
    """
    hint = hints(kind)[name]
    bound = _bounds(kind).get(name)
    number_types = _number_types(kind)
    number_type = number_types[name][0] if name in number_types else None
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if get_origin(hint) is Literal and value not in get_args(hint):
        return f"one of {', '.join(get_args(hint))}"
    if bound and not (is_number and bound.holds(value)):
        return bound.text
    if number_type is int and not (is_number and float(value).is_integer()):
        return "an integer"
    if number_type is float and not is_number:
        return "a number"
    if number_type is bool and isinstance(value, str):  # "false" would be true
        return "true or false"
    return None


_DECLARED_NUMBER = re.compile(r"(?:Annotated\[)?(int|float)(?: \| None)?(?:, ([A-Z_]+)\])?")


def number_problem(name: str, declared: str, value: Any) -> str | None:
    """
    What is wrong with the text of a number; `None` if it is fine, or the field is not `declared` as a number. This
    needs the field's type as its source has it, and no import of its class.
    """
    # Such as `Annotated[float | None, POSITIVE]`: the type of the number, and the name of its bound
    declaration = _DECLARED_NUMBER.fullmatch(declared)
    if declaration is None or not isinstance(value, str):
        return None
    number_type, usual = (int, "an integer") if declaration[1] == "int" else (float, "a number")
    # That of a field of TRL or Transformers, or the bound of this module that the declaration names
    bound = _BOUNDS_OF_INHERITED.get(name) or globals().get(declaration[2])
    allowed = bound.text if bound else usual
    try:
        number = number_type(value)
    except ValueError:
        return not_allowed(name, value, allowed)
    return None if bound is None or bound.holds(number) else not_allowed(name, number, allowed)


def check_fields(arguments: Any) -> None:
    """
    Check each field of a configuration by itself; a `ValueError` names all that are wrong. A number gets the type of
    its field, and its default in place of a `None` that the field cannot have.
    """
    kind: Any = type(arguments)
    if problems := field_problems(kind, vars(arguments)):
        raise ValueError("\n".join(problems.values()))
    usual = defaults(kind)
    for name, (number_type, may_be_none) in _number_types(kind).items():
        value = getattr(arguments, name)
        if number_type is bool or (value is None and may_be_none):
            continue
        if value is None:
            setattr(arguments, name, usual[name])
        # Converted only if the default is of another type: some fields of Transformers, each a fraction or a count,
        # are declared as `float` but have an integer as default, and may keep one.
        elif type(value) is not type(usual[name]):
            setattr(arguments, name, number_type(value))


def mapping_of(name: str, value: Any) -> dict[str, Any] | None:
    """
    The value of a field that is a mapping, or its YAML as a command line has it, read as in a recipe.

    Raises:
        `ValueError`: it is neither a mapping nor `None`.
    """
    try:
        mapping = yaml.load(value, YAMLLoader) if isinstance(value, str) else value
    except yaml.YAMLError:
        mapping = value  # which is rejected, as it is text
    require(mapping is None or isinstance(mapping, dict), name, value, "a mapping, such as `{name: value}`")
    return mapping


class YAMLLoader(yaml.SafeLoader):
    """Reads YAML of recipes and command lines: rejects equal keys, and reads `1e-4` as a number, too."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """PyYAML's node of a mapping; a `YAMLError` if two keys are equal, of which PyYAML would keep the last."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                raise yaml.YAMLError(f"duplicate key {name!r}. Remove one.")
            names.add(name)
        return node


YAMLLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), [*"-+.0123456789"]
)


def load(name: str, path: str, allowed: str, example: str) -> Any:
    """
    Import what a field names by its dotted path, also from the current folder, and which can be called.

    Raises:
        `ValueError`: it cannot be imported or called; the message says what is `allowed`, with an `example`.
    """
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    fix = f"Set `{name}` to {allowed}, such as {example}"
    try:
        imported = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ValueError(f"{name}={path!r} cannot be imported: {type(error).__name__}: {error}. {fix}.") from error
    if not callable(imported):
        raise ValueError(f"{name}={path!r} cannot be called: it is a {type(imported).__name__}. {fix}.")
    return imported
