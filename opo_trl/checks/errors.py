"""
How a command reports an error.

Exit status 2: nothing was started and no file was touched. The message names the field, its value and the fix.
Exit status 1: a running training failed. Its checkpoints are intact, and it can resume from them.
"""

import os
import re
import sys
import traceback


_LONGEST_VALUE = 200  # characters of a value in a message

# A text as `repr` writes it (an apostrophe inside a word begins none), or a bracket around a list or mapping.
_TOKEN = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[\[{}\]]""", re.DOTALL)


def report_error(program: str, error: Exception, *, debug: bool, status: int = 2) -> int:
    """Print why a program ends, after the traceback if `debug`; returns the exit status."""
    # A rejected command fails alike in every process, so the first one says why.
    if status == 1 or os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0":
        if debug:
            traceback.print_exception(error)
        print(f"{program}: error: {shortened(str(error))}", file=sys.stderr)
    return status


def shortened(message: str) -> str:
    """A message in which no quoted text, list or mapping has more than 200 characters, and no word many more."""
    parts, end, depth, start = [], 0, 0, 0
    for token in _TOKEN.finditer(message):
        if depth == 0:
            parts.append(message[end : token.start()])
            start = token.start()
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        depth, end = max(depth, 0), token.end()
        if depth == 0:
            parts.append(_cut(message[start:end]))
    parts.append(message[start if depth else end :])
    return re.sub(r"(\S{250})\S+", r"\1…", "".join(parts))  # names are not quoted


def _cut(literal: str) -> str:
    return literal if len(literal) <= _LONGEST_VALUE else f"{literal[:_LONGEST_VALUE]}…{literal[-1]}"
