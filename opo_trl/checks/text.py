"""
Untrusted text, made safe to show in messages, tables and pages; and how a command reports an error.

Exit status 2: nothing was started and no file was touched. The message names the field, its value and the fix.
Exit status 1: work under way failed. The checkpoints of a training are intact, and it can resume from them.
"""

import re
import sys
import traceback

from .secrets import mask_text


# Control characters except tab and line feed, other ends of lines, marks that reverse the direction of writing, and
# halves of surrogate pairs, which cannot be encoded.
_INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text with characters that control a terminal, or that no file or page can hold, as escapes such as `\\x1b`."""
    text = text.replace("\r\n", "\n")
    return _INVISIBLE.sub(lambda character: character[0].encode("unicode_escape").decode(), text)


def one_line(text: str, longest: int = 200) -> str:
    """Printable text in one line, cut to a number of characters."""
    words = printable(text[: 4 * longest]).split()  # cut first, as white space and escapes change its length
    line = " ".join(words)
    return line if len(line) <= longest else f"{line[:longest]}…"


def without_white_space(text: str) -> str:
    """A text without its white space, which chat templates change and datasets write differently."""
    return "".join(text.split())


def report_error(program: str, error: Exception, *, debug: bool, status: int = 2) -> int:
    """Print why a program ends, after the traceback if `debug`; returns the exit status."""
    if debug:
        lines = traceback.format_exception(error)
        print(mask_text("".join(lines)), file=sys.stderr)
    notes = getattr(error, "__notes__", ())
    message = " ".join([str(error), *notes])
    print(f"{program}: error: {printable(mask_text(message))}", file=sys.stderr)
    return status
