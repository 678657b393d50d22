"""
How a command reports an error.

Exit status 2: nothing was started and no file was touched. The message names the field, its value and the fix.
Exit status 1: work under way failed. The checkpoints of a training are intact, and it can resume from them.
"""

import io
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from .secrets import mask_text
from .text import printable, shortened


_PATIENCE = 10.0  # seconds; launchers look at their processes more often


def report_error(program: str, error: Exception, *, debug: bool, status: int | None = None) -> int:
    """Print why a program ends, after the traceback if `debug`; returns the exit status."""
    status = status or getattr(error, "exit_status", 2)
    rank, processes = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    repeats = rank.isdecimal() and processes.isdecimal() and 0 < int(rank) < int(processes)
    if status != 1 and repeats:
        # A rejected command fails alike in every process, and the launcher ends this one when the first has ended. But
        # what one machine or GPU lacks, this process alone can tell.
        time.sleep(_PATIENCE)
    if debug:
        print(mask_text("".join(traceback.format_exception(error))), file=sys.stderr)
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    print(f"{program}: error: {printable(shortened(mask_text(said)))}", file=sys.stderr)
    return status


@contextmanager
def under_way() -> Iterator[None]:
    """An error of the file system in this block ends the command with status 1: its work has begun."""
    try:
        yield
    except OSError as error:
        error.exit_status = 1  # type: ignore[attr-defined]
        raise


def never_fail_to_print() -> None:
    """Print what the encoding of standard output or error lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
