"""
How families of models write the calls of tools, where TRL's response templates read too little of it: LFM2, Gemma 4
and GPT-OSS.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


def form_read_here(form: Mapping[str, Any]) -> tuple[Mapping[str, Any], Callable[[str, Any], list[Call]]]:
    """
    The `form` in which a response template says that calls are written, changed where it reads too little of what a
    family writes, and what makes calls of the name and the arguments that it reads.
    """
    begins = form.get("open_pattern", "")
    if form.get("content") == "xml-inline" and "tool_call_start" in begins:
        return _LFM2, _calls_in_python
    if "call:" in begins and form.get("content_args") == _OF_GEMMA:
        # The name of a tool may have a hyphen or a dot.
        begins = begins.replace(r"\w+", r"[^\s{]+")
        return {**form, "open_pattern": begins, "content": "text", "content_args": {}}, _call_of_gemma
    if begins == _TRL_GPT_OSS_BEGINS:
        return {**form, "open_pattern": _GPT_OSS_BEGINS}, _call
    return form, _call


def pattern_of(form: Mapping[str, Any], side: str) -> re.Pattern[str]:
    """
    The pattern of what calls begin with (`side` is "open") or end with ("close"). `form` is how a response template
    says that calls are written: it has either as a text, as several, or as a pattern (`open_pattern`,
    `close_pattern`).
    """
    literals = form.get(side)
    if literals is None:
        # With nothing to look for, no call has begun, and all have ended: a pattern that matches nowhere, or anywhere.
        return re.compile(form.get(f"{side}_pattern", r"(?!)" if side == "open" else r""), re.DOTALL)
    texts = [literals] if isinstance(literals, str) else sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)))


def _call(name: str, arguments: Any) -> list[Call]:
    """A call whose arguments the response template has read."""
    return [Call(name, arguments)]


# GPT-OSS's chat template writes the tool's name before the channel, as TRL's form has it. In OpenAI's format, which
# the model has learnt, it may also stand behind.
_TRL_GPT_OSS_BEGINS = r"to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>"
_GPT_OSS_BEGINS = (
    r"(?:<\|channel\|>commentary\s+)?to=functions\.(?P<name>[^\s<]+)(?:<\|channel\|>commentary)?\s*"
    r"(?:<\|constrain\|>)?json<\|message\|>"
)

# LFM2 and LFM2.5 write the calls of a turn as a list in Python. TRL's form takes parts of text for ends of calls, and
# what is no literal for text.
_LFM2 = {
    "open": "<|tool_call_start|>",
    "close": "<|tool_call_end|>",
    "repeats": True,
    "content": "text",
    "transform": {"type": "function", "function": {"name": "", "arguments": "{content}"}},
}
_PYTHON_PARTS = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")|(?P<name>[\w.\-/$@:]++)(?P<behind>\s*+[(=])?""", re.DOTALL
)
_BACKSLASH = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567")  # what may follow a backslash in Python's text


def _calls_in_python(_: str, text: str) -> list[Call]:
    """
    The calls of a list in Python, such as `[book(city='Rome', nights=2)]`. Arguments are literals of Python, or have
    JSON's `true`, `false` and `null`; text may have line breaks. Names are any: `from` is one, or `get-weather`.

    Raises:
        `ValueError`, `SyntaxError` and others: the text is anything else.
    """
    tree = ast.parse(_PYTHON_PARTS.sub(_part_in_python, text.strip()), mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("no list")
    return [_call_in_python(node) for node in tree.elts]


def _part_in_python(part: re.Match[str]) -> str:
    """
    A part of calls as Python's parser takes it: text with escapes for its line breaks and for backslashes that escape
    nothing, and names of tools and arguments in hexadecimal digits, as they may be none of Python's.
    """
    if part["text"] is not None:
        place = part.start()
        before = part.string[max(place - 1, 0) : place]
        if before.isalnum():
            raise ValueError("an apostrophe that is not escaped, or text with a prefix")
        text = _BACKSLASH.sub(_escaping_something, part["text"])
        return text.replace("\n", "\\n").replace("\r", "\\r")
    if part["behind"] is None:
        return part[0]
    return f"_{part['name'].encode().hex()}{part['behind']}"


def _escaping_something(pair: re.Match[str]) -> str:
    """A backslash and what follows it, with a second backslash if the first one escapes nothing."""
    return pair[0] if pair[1] in _ESCAPES else "\\" + pair[0]


def _name_in_python(identifier: str) -> str:
    """The name that `_part_in_python` has written in hexadecimal digits."""
    return bytes.fromhex(identifier.removeprefix("_")).decode()


def _call_in_python(node: ast.expr) -> Call:
    """The call that a node of Python's syntax is. A `ValueError` if it is none, or has arguments without a name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        value = _WithoutNamesOfJSON().visit(keyword.value)
        arguments[_name_in_python(keyword.arg)] = ast.literal_eval(value)
    if len(arguments) < len(node.keywords):
        raise ValueError("an argument is given twice")
    return Call(_name_in_python(node.func.id), arguments)


class _WithoutNamesOfJSON(ast.NodeTransformer):
    """Replaces JSON's constants, which are names in Python. A `KeyError` for any other name."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


# Gemma 4's text stands between marks of its own, names have no quotes, and null may be Python's.
_OF_GEMMA = {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True}
_GEMMA_PARTS = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|"(?:[^"\\]|\\.)*+"|(?P<word>[^\s{}\[\],:"<]++)(?P<colon>\s*+:)?""", re.DOTALL
)


def _call_of_gemma(name: str, text: str) -> list[Call]:
    """A call whose arguments are written as Gemma 4 does: `{city:<|"|>Rome<|"|>,nights:2}`."""
    return [Call(name, json.loads(_GEMMA_PARTS.sub(_part_in_json, text)))]


def _part_in_json(part: re.Match[str]) -> str:
    """A part of Gemma 4's arguments in JSON."""
    if part["text"] is not None:
        return json.dumps(part["text"])
    if part["colon"] is not None:
        return json.dumps(part["word"]) + part["colon"]
    return "null" if part["word"] == "None" else part[0]
