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

from .conversations import (
    Message,
    UnfaithfulError,
    as_rendered,
    check_context,
    check_turn,
    is_trained,
    messages_in_other_words,
    without_none,
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
    """
    Raise an [`UnfaithfulError`] if the run's chat template leaves out something of a prompt of messages.
    `template_options` are the run's `chat_template_kwargs`.
    """
    ChatTemplate(tokenizer, None, template_options).check(as_rendered(prompt))


@dataclass
class TurnRow:
    """A text of which the policy has written some turns: one row of a conversation to train on."""

    text: str
    # Of each turn, by its place among the messages of the conversation, where it begins and ends in the text.
    turns: dict[int, tuple[int, int]] = field(default_factory=dict)
    reason: str | None = None  # why the text is not what the model has read and written, if it is not

    def tokens(self, tokenizer: Any) -> dict[str, list[int]]:
        """
        The text's tokens, as columns of recorded rollouts. The mask is 1 for the tokens that the policy has written,
        whose first character is in one of its turns; the prompt is all before the first of them.
        """
        encoding = tokenizer(self.text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = encoding["input_ids"]
        mask = [0] * len(token_ids)
        end_before = 0  # of the token before
        for place, (first_character, end) in enumerate(encoding["offset_mapping"]):
            # Some tokenizers leave spaces out of these places, so that a token of spaces only seems to be empty.
            start = end_before if first_character == end else first_character
            is_text = end > start  # else a token that stands for no character
            if is_text and self._is_in_turn(start):
                mask[place] = 1
            end_before = end
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
    The rows of a conversation, each a text that the chat template renders and that the model has read and written: a
    turn continues the row of the turn before if its context begins with that row's text, or else begins a row.

    The policy has written the assistant's turns from the message with the place `first` on, but for those that are
    marked as not to be trained on. A turn ends with the first of `end_token_ids` or, if the template writes none of
    them, with its text. Turns that the template does not render as they were are rows with a `reason`.
    """
    template = ChatTemplate(tokenizer, tools, template_options)
    rendered = as_rendered(messages)
    # The texts of these tokens; an id that the tokenizer does not know has none.
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
            # This row has no text, and its reason makes the next turn begin another one.
            row = TurnRow("", {place: (0, 0)}, reason=str(error))
            rows_of_turns.append(row)
            continue
        # The first turn has no row before it: `row` is empty then, and in no list.
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
    """
    How many empty thoughts (`<think></think>`) the chat template has added to the policy's turns of a row: those in
    the text of the turns, less those in the content of their messages.
    """
    in_row = [row.text[start:end] for start, end in row.turns.values()]
    in_messages = [messages[turn].get("content") or "" for turn in row.turns]
    return _n_empty_thoughts(in_row) - _n_empty_thoughts(in_messages)


def _n_empty_thoughts(texts: Sequence[str]) -> int:
    return sum(len(_EMPTY_THOUGHT.findall(text)) for text in texts)


def _why_unfaithful(template: "ChatTemplate", messages: Sequence[Message], row: TurnRow) -> str | None:
    """
    What the chat template leaves out of the `messages` of a conversation, up to the last turn of this row, as a text
    that says it; `None` if nothing.
    """
    try:
        last_turn = max(row.turns)
        # This checks all messages but the row's turns, which are checked below, in the row's own text.
        template.check(messages[: last_turn + 1], row.turns)
        for turn, (start, end) in row.turns.items():
            # A thought may begin in the generation prompt, before the turn; the message has its tag all the same.
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
        The text of the last of the `messages`, the assistant's turn: what the template renders after `text_before`,
        which is the context that the model read, up to and with the first of `ends`, the texts of tokens that end a
        turn, or all of it if there is none.

        Raises:
            [`UnfaithfulError`]: the text of the messages does not begin with `text_before`, or ends with it.
        """
        text = self.text(messages)
        if not text.startswith(text_before):
            raise UnfaithfulError("the chat template renders something else before a turn than its generation prompt")
        text_of_turn = text.removeprefix(text_before).rstrip()
        if not text_of_turn:
            raise UnfaithfulError("the chat template renders nothing of a turn behind its generation prompt")
        lengths = [len(text_of_turn)]  # up to each end that is in the text, and of all of it; the shortest counts
        for end in ends:
            before_end, end_in_text, _ = text_of_turn.partition(end)
            if end_in_text:
                lengths.append(len(before_end) + len(end))
        return text_of_turn[: min(lengths)]

    def check(self, messages: Sequence[Message], turns: Collection[int] = ()) -> None:
        """
        Check that the template renders all that the messages say and call, but for those at the places in `turns`, the
        policy's, which are not checked.

        Raises:
            [`UnfaithfulError`]: it leaves something out.
        """
        # A word of its own in place of what each message says cannot stand in the text of another one.
        with_words, expected = messages_in_other_words(messages, turns)
        # A generation prompt may only follow where the assistant has not just spoken.
        last_is_turn = len(messages) - 1 in turns
        text_with_words = self.text(with_words, add_generation_prompt=not last_is_turn)
        check_context(text_with_words, expected)

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """
        What the template renders of messages, with the conversation's tools and the run's options; `options` are
        further ones, such as `add_generation_prompt`. An [`UnfaithfulError`] if the template refuses the messages.
        """
        # Templates expect `None` for no tools.
        tools = [_as_rendered_tool(tool) for tool in self.tools or ()] or None
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **self.options, **options)
        except (TemplateError, TypeError) as error:  # A `TypeError` if it takes something else for text.
            raise UnfaithfulError(f"the chat template refuses it ({error})") from error


def _as_rendered_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tool as chat templates take it: without fields that are `None`, but with all of its parameters."""
    rendered = without_none(tool)
    if isinstance(tool.get("function"), Mapping):
        rendered["function"] = without_none(tool["function"])
    return rendered
