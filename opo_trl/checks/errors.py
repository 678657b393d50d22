"""
How a command reports an error.

Exit status 2: nothing was started and no file was touched. The message names the field, its value and the fix.
Exit status 1: work under way failed. The checkpoints of a training are intact, and it can resume from them.
"""

import os
import sys
import time
import traceback

from .secrets import mask_text
from .text import printable


def report_error(program: str, error: Exception, *, debug: bool, status: int = 2) -> int:
    """Print why a program ends, after the traceback if `debug`; returns the exit status."""
    if status == 2 and os.environ.get("RANK", "0") != "0":
        # A rejected command fails alike in every process, and the launcher ends this one when the first has ended. But
        # what one machine or GPU lacks, this process alone can tell.
        time.sleep(10)
    if debug:
        print(mask_text("".join(traceback.format_exception(error))), file=sys.stderr)
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    print(f"{program}: error: {printable(mask_text(said))}", file=sys.stderr)
    return status
