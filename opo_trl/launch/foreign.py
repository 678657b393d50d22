"""Code that is not ours: a library's, or what a recipe names by a dotted path. Its errors name the field."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def library(what: str, fix: str) -> Iterator[None]:
    """Name `what`, and a fix, in any error in this context."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}. {fix}") from error


def load(field: str, name: str, what: str, example: str) -> Callable:
    """
    Import what a `field` of the recipe names by its dotted path, also from the current folder.

    `what` it can be, and an `example`, are for the message.
    """
    module, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with library(f"{field}={name!r} cannot be imported", f"Set `{field}` to {what}, such as {example}."):
        return getattr(importlib.import_module(module), attribute)
