"""Attributes of somebody else's object, replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards."""
    attributes = vars(holder)
    originals = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(originals)
