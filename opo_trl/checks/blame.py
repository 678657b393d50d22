"""Report a library's error in terms of the fields that cause it."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError


# What libraries raise about options that they cannot use.
LIBRARY_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    OSError,
    ImportError,
    RuntimeError,
    StrictDataclassError,
    TemplateError,  # of a chat template
    re.error,  # an invalid pattern in `lora_target_modules`
)


def given(arguments: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    return {
        field.name: getattr(arguments, field.name)
        for field in fields(arguments)
        if getattr(arguments, field.name)
        != (field.default if field.default_factory is MISSING else field.default_factory())
    }


@contextmanager
def blamed(named: Mapping[str, Any], attempt: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """
    Turn a library's error in this context into one about our fields.

    `named` are the fields that are set, with their values; `attempt` does what runs in the context with such fields.

    Raises:
        `ValueError`: names each field without which `attempt` succeeds, its value and what the library said. An error
            that already names a field and its fix, or that no single field causes, passes unchanged.
    """
    try:
        yield
    except LIBRARY_ERRORS as error:
        said = str(error).strip() or type(error).__name__
        names_its_fix = any(f"{name}=" in said for name in named) and re.search(r"[Ss]et |[Rr]emove |Choose ", said)
        if isinstance(error, ValueError) and names_its_fix:
            raise
        said = said if said.endswith((".", "!", "?")) else f"{said}."
        causes = [name for name in named if _succeeds(attempt, {n: v for n, v in named.items() if n != name})]
        if not causes:
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"{type(error).__name__}: {said}") from error
        values = " and ".join(f"{name}={named[name]!r}" for name in causes)
        fix = " or ".join(f"`{name}`" for name in causes)
        raise ValueError(f"{values} cannot be used: {said} Set {fix} to something else, or leave it out.") from error


def _succeeds(attempt: Callable[[dict[str, Any]], object], named: dict[str, Any]) -> bool:
    try:
        attempt(named)
    except LIBRARY_ERRORS:
        return False
    return True
