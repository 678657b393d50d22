"""
How a command reports an error.

Exit status 2: nothing was started and no file was touched. The message names the field, its value and the fix.
Exit status 1: a running training failed. Its checkpoints are intact, and it can resume from them.
"""

import os
import sys
import traceback

from .secrets import mask_text
from .text import printable, shortened


def report_error(program: str, error: Exception, *, debug: bool, status: int = 2) -> int:
    """Print why a program ends, after the traceback if `debug`; returns the exit status."""
    rank, processes = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    repeats = rank.isdecimal() and processes.isdecimal() and 0 < int(rank) < int(processes)
    if status == 1 or not repeats:  # a rejected command fails alike in every process
        if debug:
            print(mask_text("".join(traceback.format_exception(error))), file=sys.stderr)
        print(f"{program}: error: {printable(shortened(mask_text(str(error))))}", file=sys.stderr)
    return status
