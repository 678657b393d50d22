"""Text of others, as messages, tables and pages show it."""

import re
import reprlib
from typing import Any


# Control characters except tab and line feed, other ends of lines, marks that reverse the direction of writing, and
# halves of surrogate pairs, which cannot be encoded.
_INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_LONGEST_VALUE = 200  # characters of a value in a message

# A text as `repr` writes it (an apostrophe inside a word begins none), or a bracket around a list or mapping.
_TOKEN = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[\[{}\]]""", re.DOTALL)

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 160


def printable(text: str) -> str:
    """Text with characters that control a terminal, or that no file or page can hold, as escapes such as `\\x1b`."""
    return _INVISIBLE.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def one_line(text: str, longest: int = 200) -> str:
    """Printable text in one line, cut to a number of characters."""
    line = " ".join(printable(text[: 4 * longest]).split())
    return line if len(line) <= longest else f"{line[:longest]}…"


def quoted(value: Any) -> str:
    """A value in a message: its `repr`, cut where it is long."""
    return one_line(_SHORT.repr(value))


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
