"""Code that is not ours: a library's, or what a recipe names by a dotted path. Its errors name the field."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..rewards.errors import told


@contextmanager
def library(
    what: str, fix: str = "`--debug` shows where.", *, own: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Name `what`, and a fix, in any error of a library in this context. Those of ours (`own`) name their field."""
    try:
        yield
    except own:
        raise
    except Exception as error:
        said = str(error).strip().rstrip(".") or "no message"
        raise ValueError(f"{what}: {type(error).__name__}: {said}. {fix}") from error


@contextmanager
def own_code(what: str, fix: str) -> Iterator[None]:
    """Name `what`, and a fix, in whatever a user's own code raises in this context; it may also exit."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(f"{what} ({told(error)}). {fix}") from error


def load(field: str, name: str, what: str, example: str) -> Callable:
    """
    Import what a `field` of the recipe names, a function or class, also from the current folder.

    `what` it can be, and an `example`, are for the message.
    """
    module, _, attribute = name.rpartition(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with own_code(f"{field}={name!r} cannot be imported", f"Set `{field}` to {what}, such as {example}."):
            found = getattr(importlib.import_module(module), attribute)
            if not callable(found):
                raise TypeError(f"{found!r} is not a function")
    finally:
        sys.path.pop(0)
    return found
