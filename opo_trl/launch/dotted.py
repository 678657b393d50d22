"""What a recipe names by a dotted import path: rewards, tools, environments."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from . import blame


def load(field: str, name: str, what: str, example: str) -> Callable:
    """
    Import what a `field` of the recipe names, a function or class, also from the current folder.

    `what` it can be, and an `example`, are for the message.
    """
    module, _, attribute = name.rpartition(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with blame.own_code(f"{field}={name!r} cannot be imported", f"Set `{field}` to {what}, such as {example}."):
            found = getattr(importlib.import_module(module), attribute)
            if not callable(found):
                raise TypeError(f"{found!r} is not a function")
    finally:
        sys.path.pop(0)
    return found
