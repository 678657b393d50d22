"""
The definition of a configuration field: type, bound, default and help.

    alpha: Annotated[float, FRACTION] = setting(0.4, "Escort exponent, in [0, 1]: …")

The bound cannot be part of the field's metadata: `HfArgumentParser` passes all of it on to argparse.
"""

import functools
import importlib
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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

# Of TRL and Transformers, only the fields with whose nonsense a run would train something else without a word.
_INHERITED = {
    "max_steps": Bound("an integer of at least 1, or to -1 to use `num_train_epochs`", lambda x: x >= 1 or x == -1),
    "num_train_epochs": POSITIVE,
    "temperature": POSITIVE,
    "top_p": SHARE,
    "beta": NOT_NEGATIVE,
}


def setting(default: Any, text: str) -> Any:
    """A field with its default, or a function that makes it anew each time, and its help on the command line."""
    how: Any = {"default_factory": default} if callable(default) else {"default": default}
    return field(**how, metadata={"help": text})


def default(of: Field) -> Any:
    """Default of a field of a dataclass."""
    return of.default if of.default_factory is MISSING else of.default_factory()


@functools.cache
def hints(kind: Any) -> Mapping[str, Any]:
    """Field of a dataclass → its type, without its bound."""
    found = get_type_hints(kind)
    return {each.name: found[each.name] for each in fields(kind)}


@functools.cache
def _bounds(kind: Any) -> Mapping[str, Bound]:
    own = {name: getattr(hint, "__metadata__", ()) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return {**_INHERITED, **{name: bounds[0] for name, bounds in own.items() if bounds}}


def require(condition: bool, name: str, value: object, wanted: object) -> None:
    """Unless a condition holds, raise a `ValueError` that names a field, its value and what to set it to."""
    if not condition:
        raise ValueError(_not_allowed(name, value, wanted))


def _not_allowed(name: str, value: object, wanted: object) -> str:
    return f"{name}={value!r} is not allowed. Set `{name}` to {wanted}."


def load(name: str, path: str, wanted: str, example: str) -> Any:
    """
    Import what a field names by its dotted path, also from the current folder, and which can be called. `wanted` it
    can be, and an `example`, are for the message of a `ValueError`.
    """
    module, _, attribute = path.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    fix = f"Set `{name}` to {wanted}, such as {example}"
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        said = f"{name}={path!r} cannot be imported: {type(error).__name__}: {error}"
        raise ValueError(f"{said}. {fix}.") from error
    if not callable(found):
        raise ValueError(f"{name}={path!r} cannot be called: it is a {type(found).__name__}. {fix}.")
    return found


@functools.cache
def _kinds(kind: Any) -> Mapping[str, tuple[type, bool]]:
    """Field → `float`, `int` or `bool`, and whether it may be `None`, of the fields that are nothing else."""
    found = {}
    for name, hint in hints(kind).items():
        types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        only = next((each for each in (float, int, bool) if {each} == {*types} - {NoneType}), None)
        if only is not None:
            found[name] = only, NoneType in types
    return found


def field_problems(kind: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """Field → what is wrong with it by itself: the one place where a field is checked."""
    found = {}
    for name, hint in hints(kind).items():
        value, bound = values.get(name), _bounds(kind).get(name)
        words = get_args(hint) if get_origin(hint) is Literal else ()
        of_kind, _ = _kinds(kind).get(name, (None, True))
        if value is None:
            continue
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if words and value not in words:
            found[name] = _not_allowed(name, value, f"one of {', '.join(words)}")
        elif bound and not (is_number and bound.holds(value)):
            found[name] = _not_allowed(name, value, bound.text)
        elif of_kind is int and not (is_number and float(value).is_integer()):
            found[name] = _not_allowed(name, value, "an integer")
        elif of_kind is float and not is_number:
            found[name] = _not_allowed(name, value, "a number")
        elif of_kind is bool and isinstance(value, str):  # "false" would be true
            found[name] = _not_allowed(name, value, "true or false")
    return found


def check_fields(arguments: Any) -> None:
    """
    Check each field of a configuration by itself; a `ValueError` names all that are wrong. A number gets the type of
    its field, and its default in place of a `None` that the field cannot have.
    """
    kind: Any = type(arguments)
    if found := field_problems(kind, vars(arguments)):
        raise ValueError("\n".join(found.values()))
    usual = {each.name: default(each) for each in fields(kind)}
    for name, (of_kind, may_be_none) in _kinds(kind).items():
        value = getattr(arguments, name)
        if of_kind is bool or (value is None and may_be_none):
            continue
        if value is None:
            setattr(arguments, name, usual[name])
        # The default of some fields of Transformers, each a fraction or a count, is an integer.
        elif type(value) is not type(usual[name]):
            setattr(arguments, name, of_kind(value))
