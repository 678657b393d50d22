"""
Options that an objective declares for itself, and that a recipe sets by `objective_options`.

    class Mine(Objective):
        clip: Annotated[float, POSITIVE] = 0.4
"""

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import Field, field, make_dataclass
from functools import partial
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from .fields import check_fields, hints, not_allowed
from .objective import Objective


def options_of(kind: type[Objective]) -> type | None:
    """
    The options that an objective declares, as a dataclass with their types, bounds and defaults; `None` without any.

    They are its public attributes with a type and a value that [`Objective`] does not have: `clip: float = 0.4`, or
    `clip: Annotated[float, POSITIVE] = 0.4` with a bound of `opo_trl.fields`.

    Raises:
        `ValueError`: an option has the name of a property or method of [`Objective`], such as `reduction`.
    """
    # Whatever has a type in the class, or in one that it derives from
    annotated = {name for parent in kind.__mro__ for name in inspect.get_annotations(parent)}
    for name in sorted(annotated):
        inherited = getattr(Objective, name, None)
        if isinstance(inherited, property) or callable(inherited):
            raise ValueError(
                f"`{kind.__name__}.{name}` has a type, as an option has, but replaces `Objective.{name}`. Rename the "
                "option, or remove the type."
            )
    names = {name for name in annotated if hasattr(kind, name) and not hasattr(Objective, name)}
    if not names:
        return None
    types = get_type_hints(kind, include_extras=True)
    options: list[tuple[str, Any, Field]] = []
    for name in sorted(names):
        if not name.startswith("_") and get_origin(types[name]) is not ClassVar:
            new_default = partial(deepcopy, getattr(kind, name))
            options.append((name, types[name], field(default_factory=new_default)))
    return make_dataclass(kind.__name__, options) if options else None


def checked_options(kind: type[Objective], name: str, values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """
    The value of every option of an objective; `None` if it has none.

    `name` is that of the objective in the configuration, and `values` are its `objective_options`; an option that they
    do not set has its default.

    Raises:
        `ValueError`: the objective has no such option, or a value has another type or is out of its range.
    """
    here = f"objective_options={values!r} with objective={name!r}"
    values = {} if values is None else values
    options = options_of(kind)
    if options is None:
        if values:
            raise ValueError(f"{here} has no effect: this objective has no options. Remove `objective_options`.")
        return None
    types = hints(options)
    unknown = [option for option in values if option not in types]
    if unknown:
        raise ValueError(
            f"{here} sets {', '.join(unknown)}, but its options are {', '.join(types)}. Use one of these."
        )
    checked = options(**values)
    try:
        check_fields(checked)
    except ValueError as error:
        raise ValueError(f"{here}: {error}") from error
    for option, hint in types.items():
        value = getattr(checked, option)
        if not _is_of_type(value, hint):
            type_name = hint.__name__ if isinstance(hint, type) else str(hint)
            raise ValueError(f"{here}: {not_allowed(option, value, f'a value of type {type_name}')}")
    return vars(checked)


def _is_of_type(value: Any, hint: Any) -> bool:
    """
    Whether a value has the type of a `hint`, as far as `isinstance` can tell: of `list[int]`, whether it is a list. A
    hint that is no class allows any value.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of_type(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    kind = origin or hint
    return not isinstance(kind, type) or isinstance(value, kind)
