"""Report a library's error in terms of the fields that it is about."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from ..fields import default


def given(arguments: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    defaults = {field.name: default(field) for field in fields(arguments)}
    return {name: value for name, own in defaults.items() if (value := getattr(arguments, name)) != own}


@contextmanager
def blamed(fields: Mapping[str, Any]) -> Iterator[None]:
    """
    Turn a library's error in this context into one about our fields.

    `fields` are those that the context reads and that are set, with their values.

    Raises:
        `ValueError`: names the fields that the library's message mentions by name, key or value, or all if there are
            at most two, with their values and what the library said. An error that already names a field and its fix
            passes unchanged.
    """
    try:
        yield
    except Exception as error:
        said = str(error).strip() or type(error).__name__
        names_its_fix = any(f"{name}=" in said for name in fields) and re.search(r"[Ss]et |[Rr]emove |Choose ", said)
        if isinstance(error, ValueError) and names_its_fix:
            raise
        said = said if said.endswith((".", "!", "?")) else f"{said}."
        causes = [name for name in fields if _mentions(said, name, fields[name])]
        causes = causes or [*fields][: 2 if len(fields) < 3 else 0]
        if not causes:
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"{type(error).__name__}: {said}") from error
        values = " and ".join(f"{name}={fields[name]!r}" for name in causes)
        fix = " or ".join(f"`{name}`" for name in causes)
        raise ValueError(f"{values} cannot be used: {said} Set {fix} to something else, or leave it out.") from error


def _mentions(said: str, name: str, value: Any) -> bool:
    words = [name, *(map(str, value) if isinstance(value, Mapping) else [value] if isinstance(value, str) else [])]
    return any(word and re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", said) for word in words)
