r"""Where the answer of a completion is: after its reasoning, in `\boxed{…}`."""

import re
from typing import Any, NamedTuple


Completion = str | list[dict[str, Any]]

MARK = "####"  # before the final answer, in GSM8K


# A box with its opening brace or, as in `\boxed 2`, with a bare number or letter; and the braces that open and close,
# with escaped ones matched separately, because `\{` and `\}` are text. The look-ahead in the second-to-last line also
# finds the box in `\\boxed{2}`, a doubly escaped answer.
_BRACES = re.compile(
    r"""\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?P<open>\{)|(?P<bare>(?:-?\d+(?:[.,]\d+)*|[A-Za-z])(?![\w/^{}+*-]|[.,]\d))|)
    |\\(?!\\(?:boxed|fbox))[\\{}]
    |[{}]""",
    re.VERBOSE,
)

# What joins boxes into one answer. Not an empty line: the second box then repeats or replaces the first.
_JOINT = re.compile(r"(?:[ \t,;$]|\n(?!\s*\n)|and|or|\\text\s*\{[^{}]*\b(?:and|or)\s*\}|\\q?quad|\\[,;:!() ])*")


class Box(NamedTuple):
    r"""
    One `\boxed` or `\fbox` in a text: from its backslash to after its last character, and the place of its content;
    `None` if its brace is never closed, or nothing follows it.
    """

    start: int
    end: int
    content: slice | None


def find_boxes(text: str) -> list[Box]:
    r"""
    Find every `\boxed{…}` and `\fbox{…}`, including nested ones, in time and memory linear in the text.

    They are ordered by start, complete or not. `\boxed 2` is also complete.
    """
    boxes: list[Box] = []
    open_braces: list[tuple[int, int] | None] = []  # start of the box and of its content; `None` for other braces
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            open_braces.append(None)
        elif match["open"]:
            open_braces.append(match.span())
        elif token == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                start, content_start = opening
                boxes.append(Box(start, match.end(), slice(content_start, match.start())))
        elif "box" in token:  # without a brace: `\boxed 2`, or nothing that could be its content
            content = slice(*match.span("bare")) if match["bare"] else None
            boxes.append(Box(match.start(), match.end(), content))
    for opening in open_braces:  # never closed
        if opening is not None:
            start, content_start = opening
            boxes.append(Box(start, content_start, None))
    return sorted(boxes, key=lambda box: box.start)


def final_answer(solution: str) -> str | None:
    r"""
    Return the final answer of a solution: the content of its last complete box, or of its last boxes.

    Boxes separated only by commas, "and", "or", `$` and white space are one answer, a list: `\boxed{-2}$ and
    $\boxed{1}` is `-2, 1`, as in about 20 rows of MATH. So a completion that offers several answers does not match any
    single one of them. Duplicates count once. Without a complete box, or if the last one is empty, there is no answer.
    """
    complete = [box for box in find_boxes(solution) if box.content is not None]
    if not complete:
        return None
    first = len(complete) - 1  # the first of the boxes that are one answer
    while first > 0 and _JOINT.fullmatch(solution, complete[first - 1].end, complete[first].start):
        first -= 1
    contents = [solution[box.content].strip() for box in complete[first:]]
    if not contents[-1]:
        return None
    parts = [content for content in contents if content]
    return ", ".join(dict.fromkeys(parts))  # each of them once


def text_of(completion: Completion) -> str:
    """
    A completion as text; of a conversation, that of the last message, which has none if it only calls tools. Of a
    message in parts, the texts are joined.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if not content or isinstance(content, str):
        return content or ""
    texts = [part.get("text") or "" for part in content]
    return "".join(texts)


def without_reasoning(text: str) -> str:
    """
    The text after the last `</think>`, or all of it if it has none; empty if a `<think>` at the start of a line is not
    closed, since reasoning that does not end has no answer.
    """
    rest = text.rpartition("</think>")[2]
    # Only at the start of a line: within one, the tag may be mentioned.
    return "" if re.search(r"^[ \t]*<think>", rest, re.MULTILINE) else rest
