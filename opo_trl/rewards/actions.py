"""
Whether an agent does what was logged: the same calls with the same arguments or, after a logged message, a message.

What a completion does is read from its tokens by TRL's `parse_response`: markers of calls may be special tokens, which
a decoded text lacks. That function returns plain text for a call that it cannot read, and is lenient with one that
does not end. Both are neither a call nor a message here. Of some families, TRL's patterns read too little, and calls
are read here (`call_forms`). docs/pivots.md shows near-misses with their verdicts.
"""

import copy
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, parse_response

from .call_forms import Call, form_read_here, pattern_of
from .limits import OutOfTime, processor_time


# Relative difference up to which numbers are the same, if one of them is not whole: enough for rounding in a text.
TOLERANCE = 1e-6

# Of processor time to read a completion. The patterns of some families take the cube of a number of spaces: 7 seconds
# for 2,000 in an argument of Qwen3.5's that does not end.
SECONDS = 2.0

SAME = "same"
MALFORMED = "malformed"

# What may stand in a call beside arguments that have tags, such as Qwen3.5's `</function>`.
_CLOSING_TAGS = re.compile(r"(?:\s|</[\w-]+>)*+")

# Python's constants, which some chat templates write in place of JSON's.
_CONSTANTS = {"True": True, "False": False, "None": None}

_HOW = (
    "Set `response_template` in its tokenizer_config.json "
    "(https://huggingface.co/docs/transformers/main/en/chat_response_parsing)"
)


class Action(NamedTuple):
    """What an agent does in a turn: its calls or, without any, what it says. Malformed, it is neither."""

    calls: list[Call]
    text: str
    is_malformed: bool = False


def action_reward(
    completion_ids: Sequence[Sequence[int]],
    action: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    overlap: Sequence[Mapping[str, float] | None] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    log_extra: Callable[[str, list[str]], None] | None = None,
    **columns: Any,
) -> list[float]:
    """
    1.0 for each completion that does what was logged, and 0.0 for any other, whatever a model writes.

    Calls are the same if they have the same name and the same arguments by type: whole numbers exactly, others within
    [`TOLERANCE`], text up to white space and the form of Unicode. Several calls may come in any order. What is said or
    thought beside them does not count. Where a message was logged, any message is the same.

    Args:
        completion_ids: tokens of the completions, `[B]` lists.
        action: the logged message of the assistant for each, with `tool_calls` if it has some.
        tools: for each, the tools that could be called, which say of which type an argument is.
        prompt_ids: for each, the tokens of its prompt, which say where a turn or thought has begun.
        overlap: for each, the parameters (`tool.parameter`) whose text only needs this share of the words, as F1.
        tokenizer: of the model. [`OPOTrainer`] passes its own.
        log_extra: TRL's function that adds a column to the table of completions: here the verdicts.

    Raises:
        `ValueError`: there is no tokenizer, or it does not say how its model writes calls.
    """
    if tokenizer is None:
        raise ValueError(
            "action_reward reads tokens and needs a tokenizer. OPOTrainer passes its own; elsewhere, use "
            "`functools.partial(action_reward, tokenizer=tokenizer)`."
        )
    reader = ActionReader(tokenizer)
    verdicts = []
    for index, ids in enumerate(completion_ids):
        tools_of_row = tools[index] if tools else None
        prompt = prompt_ids[index] if prompt_ids else None
        thresholds = overlap[index] if overlap else None
        done = reader.read(ids, prompt_ids=prompt, tools=tools_of_row)
        verdicts.append(reader.verdict(logged_action(action[index]), done, tools_of_row, thresholds or {}))
    if log_extra is not None:
        log_extra("verdict", verdicts)
    return [float(verdict == SAME) for verdict in verdicts]


def logged_action(message: Mapping[str, Any]) -> Action:
    """
    What a logged message of the assistant does: its calls, with their arguments decoded where they are JSON text, and
    what it says.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        calls.append(Call(function["name"], arguments or {}))
    return Action(calls, message.get("content") or "")


class ActionReader:
    """
    Reads what completions do, for a tokenizer.

    Raises:
        `ValueError`: the tokenizer does not say how its model writes calls, and TRL does not know its chat template.
    """

    def __init__(self, tokenizer: Any):
        """Find out how calls look: from the tokenizer's response template, or from TRL's for its chat template."""
        self.tokenizer = copy.copy(tokenizer)  # TRL reads completions otherwise if its own has a response template.
        has_own = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        if not has_own:
            try:
                add_response_schema(self.tokenizer)
            except ValueError as error:
                raise ValueError(
                    f"action_reward cannot read the calls of {tokenizer.name_or_path!r}: TRL does not know its chat "
                    f"template. {_HOW}."
                ) from error
        template = getattr(self.tokenizer, "response_template", None) or {}
        form = template.get("fields", {}).get("tool_calls")
        if template and form is None:
            raise ValueError(
                f"action_reward cannot read the calls of {tokenizer.name_or_path!r}: its `response_template` has no "
                f"field `tool_calls`. {_HOW}."
            )
        form, self._calls_in = form_read_here(form or {})
        self._parsing_tokenizer = copy.copy(self.tokenizer)
        if template:
            fields = {**template["fields"], "tool_calls": form}
            self._parsing_tokenizer.response_template = {**template, "fields": fields}
        self._begins = pattern_of(form, "open")  # of the text with which a call begins
        self._ends = pattern_of(form, "close")
        # Families that write no types: arguments are text, and the tool or the log says of which type they are.
        options_of_form = form.get("content_args") or {}
        self._has_types = options_of_form.get("value_parser", {}).get("name") != "text"
        # Of families that write each argument between tags.
        is_tagged = form.get("content") == "xml-inline"
        tag_pattern = options_of_form.get("tag_pattern") if is_tagged else None
        self._argument = re.compile(tag_pattern, re.DOTALL) if tag_pattern else None
        # The tokenizer's special texts, such as those around calls and thoughts: a message has none of them in it.
        self._marks = [mark for mark in self.tokenizer.get_added_vocab() if mark.strip()]

    def read(
        self, ids: Sequence[int], *, prompt_ids: Sequence[int] | None = None, tools: Sequence[Any] | None = None
    ) -> Action:
        """
        What a completion of the tokens `ids` does: its calls or, without any, its message. It is malformed if it
        cannot be read, a call in it does not end, it says nothing, or a message has parts of a call in it.

        `prompt_ids`, the tokens before it, say where a turn or thought has begun. `tools` say of which type an
        argument is, for models that write arguments without types.
        """
        malformed = Action([], "", is_malformed=True)
        prefix = list(prompt_ids or ())  # A parser of a `response_template` refuses all without a list.
        # With tools, Transformers reads a text as the declared type, also where the model wrote another type.
        typing_tools = None if self._has_types else list(tools or ()) or None
        try:
            with processor_time(SECONDS):
                turn = parse_response(self._parsing_tokenizer, list(ids), prefix=prefix, tools=typing_tools)
                functions = [call["function"] for call in turn.get("tool_calls") or ()]
                calls = []
                for function in functions:
                    calls += self._calls_in(function["name"], function["arguments"])
                text_of_turn = self._without_thoughts(ids, turn)
                are_whole = self._are_whole(text_of_turn)
        except (Exception, OutOfTime):  # Parsers fail in many ways on what a model may write, and a run has to go on.
            return malformed
        said = turn["content"]
        if functions:
            are_mappings = all(isinstance(call.arguments, Mapping) for call in calls)
            return Action(calls, said) if calls and are_mappings and are_whole else malformed
        # The parser returns a call that it cannot read as plain text, which has the marks of one.
        has_marks = any(mark in said for mark in self._marks) or self._begins.search(text_of_turn)
        return malformed if has_marks or not said.strip() else Action([], said)

    def _are_whole(self, text: str) -> bool:
        """
        Whether each call in a text ends, behind its own beginning, and each of its arguments: the parser also returns
        a call that does not end, and leaves out arguments that do not.
        """
        begin = self._begins.search(text)
        if begin is None:  # the parser has found one that begins in the prompt
            return False
        while begin is not None:
            end = self._ends.search(text, begin.end())
            if end is None:
                return False
            if self._argument is not None:
                beside = self._argument.sub("", text[begin.end() : end.start()])
                if not _CLOSING_TAGS.fullmatch(beside):
                    return False
            begin = self._begins.search(text, max(end.end(), begin.start() + 1))
        return True

    def _without_thoughts(self, ids: Sequence[int], turn: Mapping[str, Any]) -> str:
        """
        The text of a completion's tokens, with the special ones, but without what it thinks: `turn` is what the parser
        has read, in which all text but the content and the calls is thoughts, under a name that depends on the model.
        """
        text = self.tokenizer.decode(ids)
        for name, part in turn.items():
            if name not in ("role", "content", "tool_calls") and isinstance(part, str):
                text = text.replace(part, "", 1)
        return text

    def verdict(self, logged: Action, done: Action, tools: Sequence[Any] | None, overlap: Mapping[str, float]) -> str:
        """
        [`SAME`] if an agent did what was logged, or else in which way it did not, as text for a log. Where a message
        was logged, any message is the same.

        Calls may come in any order. `tools` declare the defaults of arguments that are left out. `overlap` has for
        some parameters (`tool.parameter`) the share of the words that their text needs, in `[0, 1]`.
        """
        if done.is_malformed:
            return MALFORMED
        if not logged.calls:
            return "a call, not a message" if done.calls else SAME
        if not done.calls:
            return "a message, not a call"
        if len(done.calls) != len(logged.calls):
            return f"{len(done.calls)} calls, not {len(logged.calls)}"
        differences = []
        for call in logged.calls:
            differences.append([self._difference(call, other, tools, overlap) for other in done.calls])
        # Pairs of a logged call and one that was done, of which as many as possible are the same.
        differs = np.array([[difference != SAME for difference in row] for row in differences])
        places, places_done = linear_sum_assignment(differs.astype(int))
        unmatched = differs[places, places_done]
        if not unmatched.any():
            return SAME
        return differences[places[unmatched].min()][places_done[unmatched].min()]

    def _difference(self, logged: Call, done: Call, tools: Sequence[Any] | None, overlap: Mapping[str, float]) -> str:
        """
        [`SAME`] if the call that was `done` is the `logged` one, or else their first difference, as text for a log:
        the name of the tool, then which arguments there are, then their values. `tools` and `overlap` are as in
        `verdict`.
        """
        if done.name != logged.name:
            return "another tool"
        defaults = _defaults(logged.name, tools)
        # An argument that is null or left out counts as its declared default, if it has one.
        expected = {**defaults, **_without_nulls(logged.arguments)}
        written = done.arguments
        if not self._has_types:
            written = {name: _typed(value, logged.arguments.get(name)) for name, value in written.items()}
            written = {name: _typed(value, expected.get(name)) for name, value in written.items()}
        arguments = {**defaults, **_without_nulls(written)}
        for name in sorted(expected.keys() ^ arguments.keys()):  # the first that only one of the calls has
            return f"{name!r} is {'missing' if name in expected else 'not in the log'}"
        for name, value in expected.items():
            least_overlap = overlap.get(f"{logged.name}.{name}")
            if not _is_same(value, arguments[name], least_overlap):
                return f"another {name!r}"
        return SAME


# The trainer calls it when it is made, so that a tokenizer whose calls cannot be read is rejected before a run.
action_reward.check_tokenizer = ActionReader  # type: ignore[attr-defined]


def _is_same(logged: Any, value: Any, least_overlap: float | None = None) -> bool:
    """
    Whether an argument's `value` is the same as the `logged` one, by the type of this one: text up to white space or,
    with `least_overlap`, if it shares this much of the words (F1, from 0 to 1); mappings and lists by their parts, of
    which a null in a mapping counts as left out; numbers up to rounding. It goes no deeper than what was logged,
    however deep the value is.
    """
    if isinstance(logged, str):
        if not isinstance(value, str):
            return False
        if least_overlap is not None and word_overlap(logged, value) >= least_overlap:
            return True
        return normalized(logged) == normalized(value)
    if isinstance(logged, Mapping):
        if not isinstance(value, Mapping):
            return False
        expected, parts = _without_nulls(logged), _without_nulls(value)
        if expected.keys() != parts.keys():
            return False
        return all(_is_same(part, parts[name]) for name, part in expected.items())
    if isinstance(logged, list):
        if not isinstance(value, list) or len(logged) != len(value):
            return False
        return all(_is_same(*parts) for parts in zip(logged, value, strict=True))
    if _is_number(logged) and _is_number(value):
        return _are_close(logged, value)
    return type(logged) is type(value) and logged == value  # by type, as `True` equals 1 in Python


def normalized(text: str) -> str:
    """
    A text as it is compared: in one form of Unicode (NFC), without line breaks at its ends and white space at the ends
    of lines. In a single line, white space at its beginning is left out, too, and several spaces are one; in several
    lines, both are kept, because they may be code. A text of nothing but white space stays as it is: it may be a
    separator, or a key to press.
    """
    if text.isspace():
        return text
    lines = unicodedata.normalize("NFC", text).strip("\r\n").splitlines()
    if len(lines) == 1:
        return " ".join(lines[0].split())
    return "\n".join(line.rstrip() for line in lines).rstrip()


def word_overlap(first: str, second: str) -> float:
    """
    F1 of the words of two texts, from 0 to 1: each word counts as often as it comes, whatever its case. 1 if neither
    text has a word.
    """
    words = [Counter(re.findall(r"\w+", text.casefold())) for text in (first, second)]
    n_common = (words[0] & words[1]).total()
    n_words = words[0].total() + words[1].total()
    return 2 * n_common / n_words if n_words else 1.0


def _defaults(name: str, tools: Sequence[Any] | None) -> dict[str, Any]:
    """
    The defaults that the tool of this `name` declares for its parameters, by parameter; empty if it declares none, or
    is not among the `tools`.
    """
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if function.get("name") != name:
            continue
        properties = (function.get("parameters") or {}).get("properties") or {}
        with_default = {}
        for parameter, schema in properties.items():
            if isinstance(schema, Mapping) and schema.get("default") is not None:
                with_default[parameter] = schema["default"]
        return with_default
    return {}


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a mapping that are not null: a null states nothing."""
    return {name: value for name, value in arguments.items() if value is not None}


def _typed(value: Any, logged: Any) -> Any:
    """
    The value of an argument whose type a model does not write, with the type of the `logged` one: text is read as JSON
    or as one of Python's constants, which some chat templates write, but not where text was logged. Where the log
    states nothing, only a null is read.
    """
    if not isinstance(value, str) or isinstance(logged, str):
        return value
    if logged is None:
        return None if value in ("null", "None") else value
    with suppress(ValueError, RecursionError):
        return _CONSTANTS[value] if value in _CONSTANTS else json.loads(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(number: float) -> bool:
    return isinstance(number, int) or number.is_integer()


def _are_close(logged: float, value: float) -> bool:
    """Whether two numbers are the same: whole ones exactly, others up to rounding; NaN is the same as NaN."""
    if _is_whole(logged) and _is_whole(value):
        return logged == value  # Two identifiers may differ in the last of many digits.
    try:
        return math.isclose(logged, value, rel_tol=TOLERANCE) or (math.isnan(logged) and math.isnan(value))
    except OverflowError:  # One is a whole number beyond what a float can be.
        return False
