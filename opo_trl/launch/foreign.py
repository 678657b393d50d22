"""A user's code, which a recipe names by its dotted path."""

import importlib
import os
import sys
from collections.abc import Callable


def load(field: str, name: str, what: str, example: str) -> Callable:
    """
    Import what a `field` of the recipe names, also from the current folder.

    `what` it can be, and an `example`, are for the message.
    """
    module, _, attribute = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        said = f"{field}={name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ValueError(f"{said}. Set `{field}` to {what}, such as {example}.") from error
