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
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_free: frozenset[int] | None = None  # threads that are not restricted; `None`: no thread is restricted
lasting = False  # in a worker, the restrictions last until it ends: an answer may start threads


@contextmanager
def without_effects() -> Iterator[None]:
    """Let what runs in this context, and imports and reads files, do nothing else to the world around it."""
    global _free
    _install_hook()
    free = frozenset(thread.ident or 0 for thread in threading.enumerate()) - {threading.get_ident()}
    _free = frozenset() if lasting else free
    try:
        yield
    finally:
        _free = _free if lasting else None


@cache
def _install_hook() -> None:  # a hook cannot be removed
    sys.addaudithook(_forbid)


def _forbid(event: str, arguments: tuple) -> None:
    if _free is None or threading.get_ident() in _free:
        return
    writes = event == "open" and bool(set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & _WRITING)
    if writes or _FORBIDDEN.match(event):
        raise PermissionError(f"an answer asked for {event}")
