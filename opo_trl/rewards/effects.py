"""
Answers that are evaluated as Python change nothing: in a worker that scores them, an audit hook forbids writing files,
starting processes and connecting. It is no sandbox, but stops what a model writes by chance.
"""

import os
import re
import sys
from functools import cache


_FORBIDDEN = re.compile(
    r"os\.(?!listdir|scandir|walk|fwalk|getxattr|add_dll)|subprocess\.|shutil\.|socket\.|ctypes\.|pty\.|signal\.|tempfile\."
    r"|sqlite3\.|resource\."
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
in_worker = False  # of an `IsolatedReward`; the training process has to write


@cache
def forbid() -> None:
    """Let this process, if it is a worker, import and read files, but do nothing else to the world around it."""
    if in_worker:
        sys.addaudithook(_raise_if_forbidden)  # cannot be removed: an answer may have started threads


def _raise_if_forbidden(event: str, arguments: tuple) -> None:
    writes = event == "open" and bool(set(arguments[1] or "") & set("wax+") or (arguments[2] or 0) & _WRITING)
    if writes or _FORBIDDEN.match(event):
        raise PermissionError(f"an answer asked for {event}")
