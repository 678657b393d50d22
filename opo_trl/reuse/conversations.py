"""Recorded conversations: their messages as chat templates take them, and whether a template renders all of them."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import ProcessorMixin

from ..checks.text import without_white_space


Message = Mapping[str, Any]

# Fields by which a log says that a turn is not to be trained on: of ART, of OpenAI's fine-tuning, of axolotl.
_TRAINABLE = ("trainable", "weight", "train", "training")
# Fields in which the assistant speaks, besides its calls; most templates know only some of them.
_SPOKEN = ("content", "reasoning_content", "reasoning", "thinking", "refusal", "function_call")


class UnfaithfulError(ValueError):
    """A chat template does not render a conversation as the model has read and written it; the message says why."""


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, which may have it in a processor of images and text."""
    processing = trainer.processing_class
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing


def spoken(turns: Sequence[Message]) -> str:
    """What the assistant says in messages, without its calls."""
    texts = [str(turn["content"]) for turn in turns if turn["role"] == "assistant" and turn["content"]]
    return "\n".join(texts)


def is_trained(turn: Message) -> bool:
    """Whether a turn of the assistant is the policy's: no field says that it is not to be trained on."""
    return all(turn.get(name) not in (False, 0) for name in _TRAINABLE)


def as_rendered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """
    Copies of messages as chat templates take them: without fields that are `None`, and with the arguments of calls as
    mappings, where a log has them as JSON text. A call without arguments may have empty text or null there; those that
    are null are kept.
    """
    rendered: list[Any] = [without_none(message) for message in messages]
    for message in rendered:
        if "tool_calls" in message:
            message["tool_calls"] = [_as_rendered_call(call) for call in message["tool_calls"]]
    return rendered


def _as_rendered_call(call: Any) -> Any:
    """A copy of a call for [`as_rendered`]; what is not a call as OpenAI writes it, as it is."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = without_none(call["function"])
    # Arguments that are a mapping already, or not the JSON that they should be, stay as they are.
    with suppress(TypeError, ValueError):
        arguments = json.loads(function.get("arguments") or "{}")
        function["arguments"] = {} if arguments is None else arguments
    return {**without_none(call), "function": function}


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message, a call or a tool that are not `None`; what is in them stays as it is."""
    return {name: value for name, value in fields.items() if value is not None}


# Checks of what a template renders


@dataclass
class Expected:
    """What a chat template has to render of one message, in which a word takes the place of what it says."""

    role: str
    word: str
    count: int  # how often the word has to be in the text, at least
    arguments: Sequence[Any]  # of the message's calls, which are rendered as they are


def messages_in_other_words(
    messages: Sequence[Message], turns: Collection[int]
) -> tuple[list[Message], list[Expected]]:
    """
    Messages for a check whether a chat template renders all of them, and what has then to be in their text.

    In each message, a word of its own takes the place of its content and of the names of its calls: what it really
    says might also stand somewhere else in the text, so that it would not be missed. The messages at the places in
    `turns`, the policy's, stay as they are, and nothing is expected of them.

    Raises:
        [`UnfaithfulError`]: the content of a message is not text.
    """
    with_words = []
    expected = []
    for place, message in enumerate(messages):
        if not isinstance(message.get("content") or "", str):
            raise UnfaithfulError(f"the content of a message of {message['role']!r} is not text")
        if place in turns:
            with_words.append(message)
            continue
        word = f"[message {place}]"
        in_other_words, count = _in_other_words(message, word)
        with_words.append(in_other_words)
        functions = [call["function"] for call in message.get("tool_calls", ())]
        arguments = [function["arguments"] for function in functions]
        expected.append(Expected(message["role"], word, count, arguments))
    return with_words, expected


def _in_other_words(message: Message, word: str) -> tuple[dict[str, Any], int]:
    """
    A copy of a message with a word in place of its content and of the names of its calls, and how often the word is in
    it.
    """
    changed = dict(message)
    count = 0
    if message.get("content"):
        changed["content"] = word
        count += 1
    calls = message.get("tool_calls")
    if calls:
        changed["tool_calls"] = [{**call, "function": {**call["function"], "name": word}} for call in calls]
        count += len(calls)
    if message.get("function_call"):  # of OpenAI's first API
        changed["function_call"] = {"name": word, "arguments": "{}"}
        count += 1
    return changed, count


def check_context(text_with_words: str, expected: Sequence[Expected]) -> None:
    """
    Raise an [`UnfaithfulError`] if a chat template has left something out: `text_with_words` is what it renders of the
    messages of [`messages_in_other_words`], which says what is `expected` in it.

    Each message's word has to be there as often as in the message, and all names and values in the arguments of its
    calls, whose white space does not count.
    """
    text = without_white_space(text_with_words)
    for message in expected:
        is_rendered = text_with_words.count(message.word) >= message.count
        if not is_rendered or not all(_is_in(text, part) for part in _parts(message.arguments)):
            raise UnfaithfulError(f"the chat template leaves out something of a message of {message.role!r}")


def check_turn(message: Message, written: str) -> None:
    """
    Raise an [`UnfaithfulError`] if `written`, the text that a chat template renders of the assistant's `message`,
    lacks something that it says, thinks or calls. White space does not count.
    """
    content = {name: message[name] for name in _SPOKEN if message.get(name)}
    calls = message.get("tool_calls")
    if calls:
        functions = [call["function"] for call in calls]
        content["tool_calls"] = [(function["name"], function["arguments"]) for function in functions]
    unknown = message.keys() - {"role", "content", *_TRAINABLE}
    # A message may be empty, as a model may end a turn at once; but then what it said may be in an unknown field.
    if not content and unknown:
        raise UnfaithfulError("a turn of the assistant is empty, but for fields that are not known")
    text = without_white_space(written)
    for name, value in content.items():
        if not all(_is_in(text, part) for part in _parts(value)):
            raise UnfaithfulError(f"the chat template leaves out something of {name!r} of a turn")


def _parts(value: Any) -> Iterator[Any]:
    """The texts, numbers and other single values in a value, at any depth; of mappings, the names as well."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _is_in(text: str, part: Any) -> bool:
    """
    Whether `text`, which has no white space, contains a single value in one of the forms in which templates write it:
    plain, in JSON (with other letters as they are, or escaped), or as in Python (with an apostrophe as it is, or
    escaped).
    """
    in_json = json.dumps(part, ensure_ascii=False)
    in_ascii = json.dumps(part)
    in_apostrophes = str(part).replace("\\", "\\\\").replace("'", "\\'")
    in_apostrophes = in_apostrophes.replace("\n", "\\n").replace("\r", "\\r")
    forms = (str(part), in_json.strip('"'), in_ascii.strip('"'), repr(part).strip("'"), in_apostrophes)
    return any(without_white_space(form) in text for form in forms)
