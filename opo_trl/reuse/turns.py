"""
A recorded conversation as what the model has read and written, turn by turn.

A chat template may change what stood before as soon as another turn follows: Qwen3's drops earlier thoughts. Then no
single text of a conversation is what the model saw. So each turn is rendered by itself: its context is the template's
generation prompt after the messages before it, and its own tokens are what follows, up to the end of the turn. Turns
whose contexts continue each other are one row; others are rows of their own.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from trl.trainer.utils import remove_none_values

from .conversations import (
    Message,
    UnfaithfulError,
    as_rendered,
    check_context,
    check_turn,
    is_trained,
    messages_in_other_words,
)


_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


def context(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, template_options: Mapping[str, Any]
) -> tuple[str, list[int]]:
    """
    What a model reads before it writes the turn after `messages`: the text of the chat template with its generation
    prompt, and the tokens of that text. `template_options` are the run's `chat_template_kwargs`.

    Raises:
        [`UnfaithfulError`]: the template refuses the messages, or leaves something of them out.
    """
    template = ChatTemplate(tokenizer, tools, template_options)
    rendered = as_rendered(messages)
    template.check(rendered)
    text = template.context(rendered)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return text, ids


def check_prompt(tokenizer: Any, prompt: Sequence[Message], template_options: Mapping[str, Any]) -> None:
    """Raise an [`UnfaithfulError`] if a prompt of messages is not all rendered by the run's chat template."""
    ChatTemplate(tokenizer, None, template_options).check(as_rendered(prompt))


@dataclass
class TurnRow:
    """
    A text of which the policy has written some turns: of each, by its place among the messages, where it begins and
    ends in the text. With a `reason`, the text is not what the model has read and written.
    """

    text: str
    turns: dict[int, tuple[int, int]] = field(default_factory=dict)
    reason: str | None = None

    def tokens(self, tokenizer: Any) -> dict[str, list[int]]:
        """The columns of recorded rollouts: the prompt is all before the first token that the policy has written."""
        encoding = tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = encoding["input_ids"]
        mask = [0] * len(token_ids)
        for place, (first_character, last_character) in enumerate(encoding["offset_mapping"]):
            is_text = last_character > first_character
            if is_text and self._is_in_turn(first_character):
                mask[place] = 1
        start = mask.index(1)
        return {
            "prompt_ids": token_ids[:start],
            "completion_ids": token_ids[start:],
            "completion_mask": mask[start:],
        }

    def _is_in_turn(self, character: int) -> bool:
        return any(start <= character < end for start, end in self.turns.values())


def rows(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    template_options: Mapping[str, Any],
    end_token_ids: Collection[int],
    first: int = 0,
) -> list[TurnRow]:
    """
    The rows of a conversation. The policy has written the assistant's turns from the message with the place `first`
    on, but for those that are marked as not to be trained on. A turn ends with the first of `end_token_ids` or, if the
    template writes none of them, with its text.
    """
    template = ChatTemplate(tokenizer, tools, template_options)
    rendered = as_rendered(messages)
    ends = [end for end in tokenizer.convert_ids_to_tokens(list(end_token_ids)) if end]
    rows_of_turns: list[TurnRow] = []
    row = TurnRow("")
    for place, message in enumerate(rendered):
        if place < first or message["role"] != "assistant" or not is_trained(message):
            continue
        try:
            text_before = template.context(rendered[:place])
            text_of_turn = template.turn(rendered[: place + 1], text_before, ends)
        except UnfaithfulError as error:
            row = TurnRow("", {place: (0, 0)}, reason=str(error))
            rows_of_turns.append(row)
            continue
        continues = row.reason is None and row.turns and text_before.startswith(row.text)
        if not continues:
            row = TurnRow("")
            rows_of_turns.append(row)
        row.text = text_before + text_of_turn
        row.turns[place] = (len(text_before), len(row.text))
    for row in rows_of_turns:
        if row.reason is None:
            row.reason = _why_unfaithful(template, rendered, row)
    return rows_of_turns


def n_added_thoughts(row: TurnRow, messages: Sequence[Message]) -> int:
    """How many of the empty thoughts in the policy's turns of a row none of its messages has."""
    in_row = [row.text[start:end] for start, end in row.turns.values()]
    in_messages = [messages[turn].get("content") or "" for turn in row.turns]
    return _n_empty_thoughts(in_row) - _n_empty_thoughts(in_messages)


def _n_empty_thoughts(texts: Sequence[str]) -> int:
    return sum(len(_EMPTY_THOUGHT.findall(text)) for text in texts)


def _why_unfaithful(template: "ChatTemplate", messages: Sequence[Message], row: TurnRow) -> str | None:
    """What of the messages is not in the text of a row; `None` if all is."""
    try:
        last_turn = max(row.turns)
        # The messages around the row's turns; the turns themselves are checked below, in the row's own text.
        template.check(messages[: last_turn + 1], row.turns)
        for turn, (start, end) in row.turns.items():
            # A thought may begin in the generation prompt.
            opening = "<think>" if row.text[:start].rstrip().endswith("<think>") else ""
            check_turn(messages[turn], opening + row.text[start:end])
    except UnfaithfulError as error:
        return str(error)
    return None


@dataclass
class ChatTemplate:
    """The chat template of a tokenizer, with the tools of a conversation and the options of a run."""

    tokenizer: Any
    tools: Sequence[Any] | None
    options: Mapping[str, Any]

    def context(self, messages: Sequence[Message]) -> str:
        """The text of messages, and the generation prompt."""
        return self.text(messages, add_generation_prompt=True)

    def turn(self, messages: Sequence[Message], text_before: str, ends: Sequence[str]) -> str:
        """
        The text of the last message behind its context, up to and with the first of the texts that end a turn.

        Raises:
            [`UnfaithfulError`]: it does not begin with its context, or is empty.
        """
        text = self.text(messages)
        if not text.startswith(text_before):
            raise UnfaithfulError("the chat template renders something else before a turn than its generation prompt")
        text_of_turn = text.removeprefix(text_before).rstrip()
        if not text_of_turn:
            raise UnfaithfulError("the chat template renders nothing of a turn behind its generation prompt")
        lengths = [len(text_of_turn)]
        for end in ends:
            before_end, end_in_text, _ = text_of_turn.partition(end)
            if end_in_text:
                lengths.append(len(before_end) + len(end))
        return text_of_turn[: min(lengths)]

    def check(self, messages: Sequence[Message], turns: Collection[int] = ()) -> None:
        """
        Check that the text of messages has all that they say, but for the policy's `turns`.

        Raises:
            [`UnfaithfulError`]: it has not.
        """
        with_words, expected = messages_in_other_words(messages, turns)
        last_is_turn = len(messages) - 1 in turns
        text_with_words = self.text(with_words, add_generation_prompt=not last_is_turn)
        check_context(text_with_words, expected)

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of messages."""
        tools = remove_none_values(list(self.tools or ())) or None
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **self.options, **options)
        except (TemplateError, TypeError) as error:  # Such as of a template that takes something else for text.
            raise UnfaithfulError(f"the chat template refuses it ({error})") from error
