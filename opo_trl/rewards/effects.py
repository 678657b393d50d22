"""
Answers that are evaluated as Python change nothing: while they run, an audit hook forbids writing files, starting
processes and connecting. It is no sandbox, but stops what a model writes by chance.
"""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


_FORBIDDEN = re.compile(
    r"os\.(?!listdir|scandir|walk|fwalk|getxattr|add_dll)|subprocess\.|shutil\.|socket\.|ctypes\.|pty\.|signal\.|tempfile\."
    r"|sqlite3\.|resource\."
)
_free: frozenset[int] | None = None  # threads that are not restricted; `None`: no thread is restricted
_lasting = False


@contextmanager
def without_effects() -> Iterator[None]:
    """Let what runs in this context, and imports and reads files, do nothing else to the world around it."""
    global _free
    _install_hook()
    free = frozenset(thread.ident or 0 for thread in threading.enumerate()) - {threading.get_ident()}
    _free = frozenset() if _lasting else free
    try:
        yield
    finally:
        _free = _free if _lasting else None


def make_lasting() -> None:
    """Let the restrictions of [`without_effects`] last, once it was entered, until this process, a worker, ends."""
    global _lasting
    _lasting = True


@cache
def _install_hook() -> None:  # a hook cannot be removed
    sys.addaudithook(_forbid)


def _forbid(event: str, arguments: tuple) -> None:
    if _free is None or threading.get_ident() in _free:
        return
    if _FORBIDDEN.match(event) or (event == "open" and not _only_reads(arguments)):
        raise PermissionError(f"an answer asked for {event}")


def _only_reads(arguments: tuple) -> bool:
    _, mode, flags = arguments
    return not (set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
