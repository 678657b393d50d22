"""
Topics of configuration fields, declared where a field is defined: `alpha: Annotated[float, OBJECTIVE]`.

They cannot be part of the field's metadata: `HfArgumentParser` passes all of it on to argparse.
"""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


# Topics: what a field can decide.
DATA, MODEL, SAMPLING, REWARDS, OBJECTIVE, OPTIMIZER = "data", "model", "sampling", "rewards", "objective", "optimizer"


@functools.cache
def hints(arguments: Any) -> Mapping[str, Any]:
    """Field of a dataclass → its type, without what `Annotated` adds."""
    found = get_type_hints(arguments)
    return {field.name: found[field.name] for field in fields(arguments)}


@functools.cache
def deciding(arguments: Any, topic: str) -> list[str]:
    """Fields of a dataclass that are annotated with a topic, such as [`OBJECTIVE`]."""
    found = get_type_hints(arguments, include_extras=True)
    return [name for name in hints(arguments) if topic in getattr(found[name], "__metadata__", ())]


def choices(arguments: type) -> dict[str, tuple[Any, ...]]:
    """Field of a dataclass → the values that it can have, for each field that is a `Literal`."""
    return {name: get_args(hint) for name, hint in hints(arguments).items() if get_origin(hint) is Literal}
