"""
How a command ends that cannot do what it was asked to.

Exit status 2: nothing was started and no file was touched; the message names the field, its value and what to do.
Exit status 1: a run that had started has failed. Its checkpoints are left alone, and it can go on from them.
"""

import os
import sys
import traceback


def refuse(program: str, error: Exception, *, debug: bool, status: int = 2) -> int:
    """Say in one message why a program ends, with the traceback if `debug`; returns the exit status."""
    if status == 1 or os.environ.get("RANK", "0") == "0":  # each process of a launch refuses the same
        if debug:
            traceback.print_exception(error)
        print(f"{program}: error: {error}", file=sys.stderr)
    return status
