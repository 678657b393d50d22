"""Tokens of recorded conversations, and which of them the policy has sampled: the chat template says so."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.utils import remove_none_values


Message = Mapping[str, Any]

# Fields by which a log says that a turn is not to be trained on: of ART, of OpenAI's fine-tuning, of axolotl.
_TRAINABLE = ("trainable", "weight", "train", "training")
# Fields in which the assistant speaks, besides its calls; most templates know only some of them.
_SPOKEN = ("content", "reasoning_content", "reasoning", "thinking", "refusal", "function_call")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")

_NOT_MARKED = "the chat template does not mark each turn of the assistant by {% generation %}"
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


class UnfaithfulError(ValueError):
    """A chat template does not render a conversation as the model has read and written it; the message says why."""


class UnmarkedError(ValueError):
    """A chat template does not mark what the assistant has written."""


def tokenizer_of(trainer: Any) -> Any:
    """The tokenizer of a trainer, which may have it in a processor of images and text."""
    processing = trainer.processing_class
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing


def marking_template(tokenizer: Any) -> str:
    """The chat template or, if that does not mark what the assistant writes, TRL's variant for training, if any."""
    template = tokenizer.get_chat_template()
    with suppress(ValueError):
        return template if has_generation_markers(template) else get_training_chat_template(tokenizer)
    return template


@dataclass
class ChatRenderer:
    """Renders conversations as a run does."""

    tokenizer: Any
    template_options: Mapping[str, Any]  # `chat_template_kwargs`
    end_token_ids: Collection[int]  # by which a turn ends

    def check_prompt(self, prompt: Sequence[Message]) -> None:
        """Raise an [`UnfaithfulError`] if a prompt of messages is not all rendered by the run's chat template."""
        rendering = _Rendering(self.tokenizer, self.template_options)
        _check_context(rendering, as_rendered(prompt), turns=())

    def tokenized(
        self, template: str, prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Any]
    ) -> dict[str, list[int]]:
        """
        A conversation as columns of recorded rollouts. In a turn of `completion`, the policy has sampled what the
        template marks, from where its generation prompt ends to the end of the turn. The prompt is all before the
        first such token.

        Raises:
            [`UnfaithfulError`]: the template leaves something out, or puts something else before a turn than the
                generation prompt with which the run asks for it.
            [`UnmarkedError`]: the template marks no turn of the assistant.
        """
        messages = as_rendered(prompt) + as_rendered(completion)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns_of_policy = [turn for turn in turns if turn >= len(prompt)]
        messages = messages[: turns_of_policy[-1] + 1]  # What follows the last turn does not count.
        _check_trainable(messages[turn] for turn in turns_of_policy)
        described_tools = remove_none_values(list(tools)) or None
        options = {"tools": described_tools, "chat_template": template, **self.template_options}
        rendering = _Rendering(self.tokenizer, options)
        _check_context(rendering, messages, turns_of_policy)
        _check_thoughts(rendering, messages, turns_of_policy)
        text = rendering.text(messages)
        tokens = rendering.tokens(messages)
        stretches = _marked_stretches(tokens["assistant_masks"])
        if not stretches:
            raise UnmarkedError(_NOT_MARKED)
        if len(stretches) != len(turns):
            raise UnfaithfulError(_NOT_MARKED)
        token_ids = tokens["input_ids"]
        mask = [0] * len(token_ids)
        stretches_of_policy = stretches[-len(turns_of_policy) :]
        for turn, stretch in zip(turns_of_policy, stretches_of_policy, strict=True):
            context = rendering.text(messages[:turn], add_generation_prompt=True)
            if not text.startswith(context):
                raise UnfaithfulError(
                    "the chat template renders something else before a turn than its generation prompt"
                )
            sampled = self._sampled_places(stretch, tokens, len(context))
            start_of_turn, _ = tokens["offset_mapping"][stretch[0]]
            _, end_of_turn = tokens["offset_mapping"][sampled[-1]]
            _check_written(messages[turn], text[start_of_turn:end_of_turn])
            for place in sampled:
                mask[place] = 1
        start = mask.index(1)
        end = sampled[-1] + 1  # of the last turn
        return {
            "prompt_ids": token_ids[:start],
            "completion_ids": token_ids[start:end],
            "completion_mask": mask[start:end],
        }

    def _sampled_places(self, stretch: list[int], tokens: Mapping[str, Any], n_context: int) -> list[int]:
        """
        Which tokens of a turn's marked ones, `stretch`, the policy has sampled: those behind the first `n_context`
        characters, up to the first that ends a turn.
        """
        sampled = []
        for place in stretch:
            first_character, _ = tokens["offset_mapping"][place]
            if first_character >= n_context:
                sampled.append(place)
                if tokens["input_ids"][place] in self.end_token_ids:
                    break
        if not sampled:
            raise UnfaithfulError("the chat template renders nothing of a turn behind its generation prompt")
        return sampled


@dataclass
class _Rendering:
    """One form in which a tokenizer renders messages: with these options of `apply_chat_template`."""

    tokenizer: Any
    options: Mapping[str, Any]

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        return self._apply(messages, {"tokenize": False, **self.options, **options})

    def tokens(self, messages: Sequence[Message]) -> Mapping[str, Any]:
        """`input_ids`, and of each token `assistant_masks` and `offset_mapping`."""
        forms = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        return self._apply(messages, {**self.options, **forms, "tokenizer_kwargs": {"return_offsets_mapping": True}})

    def _apply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except (TemplateError, TypeError) as error:  # Such as of a template that takes something else for text.
            raise UnfaithfulError(f"the chat template refuses it ({error})") from error


def _marked_stretches(mask: Sequence[int]) -> list[list[int]]:
    """The places of each stretch of ones in a mask."""
    stretches = []
    for is_marked, stretch in groupby(enumerate(mask), key=itemgetter(1)):
        if is_marked:
            stretches.append([place for place, _ in stretch])
    return stretches


def spoken(turns: Sequence[Message]) -> str:
    """What the assistant says in messages, without its calls."""
    texts = [str(turn["content"]) for turn in turns if turn["role"] == "assistant" and turn["content"]]
    return "\n".join(texts)


def empty_thoughts(tokenizer: Any, row: Mapping[str, list[int]], turns: Sequence[Message]) -> int:
    """How many of the empty thoughts that count as sampled in a row of [`ChatRenderer.tokenized`] no turn has."""
    tokens = zip(row["completion_ids"], row["completion_mask"], strict=True)
    sampled = [token for token, is_sampled in tokens if is_sampled]
    in_row = _EMPTY_THOUGHT.findall(tokenizer.decode(sampled))
    in_turns = _EMPTY_THOUGHT.findall(spoken(turns))
    return len(in_row) - len(in_turns)


def as_rendered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: without empty fields, and with the arguments of calls not as JSON."""
    rendered: list[Any] = [remove_none_values(message) for message in messages]
    for message in rendered:
        for call in message.get("tool_calls", ()):
            with suppress(KeyError, TypeError, ValueError):  # They are a mapping, or not the JSON that they should be.
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return rendered


# Checks of what a template renders


def _check_trainable(turns: Iterator[Message]) -> None:
    for turn in turns:
        if any(turn.get(name) in (False, 0) for name in _TRAINABLE):
            raise UnfaithfulError("a turn of the assistant is marked as not to be trained on")


def _check_context(rendering: _Rendering, messages: Sequence[Message], turns: Collection[int]) -> None:
    """
    Check that all messages but the policy's `turns` are rendered: the words that take the place of what they say must
    come again. What they say might also stand somewhere else.
    """
    with_words = []
    expected = []  # role, word and how often it has to come
    for index, message in enumerate(messages):
        if not isinstance(message.get("content") or "", str):
            raise UnfaithfulError(f"the content of a message of {message['role']!r} is not text")
        if index in turns:
            with_words.append(message)
            continue
        word = f"[message {index}]"
        in_other_words, count = _in_other_words(message, word)
        with_words.append(in_other_words)
        expected.append((message["role"], word, count))
    text = rendering.text(with_words)
    for role, word, count in expected:
        if text.count(word) < count:
            raise UnfaithfulError(f"the chat template leaves out something of a message of {role!r}")


def _in_other_words(message: Message, word: str) -> tuple[dict[str, Any], int]:
    """A message with a word in place of its content and of the names of its calls, and how often that is."""
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


def _check_thoughts(rendering: _Rendering, messages: Sequence[Message], turns: Sequence[int]) -> None:
    """Check that the model has read its earlier thoughts again when it was asked for the last of its `turns`."""
    *earlier, last = turns
    thoughts = [_squeezed(_thought(messages[turn])) for turn in earlier]
    if not any(thoughts):
        return
    # By the model's own template: TRL's variant may keep what that removes.
    asked = rendering.text(messages[:last], add_generation_prompt=True, chat_template=None)
    asked = _squeezed(asked)
    if any(thought not in asked for thought in thoughts):
        raise UnfaithfulError("the chat template removes an earlier thought")


def _check_written(message: Message, written: str) -> None:
    """Check that a turn of the policy is rendered with all that it says, whatever its white space."""
    content = {name: message[name] for name in _SPOKEN if message.get(name)}
    calls = message.get("tool_calls")
    if calls:
        functions = [call["function"] for call in calls]
        content["tool_calls"] = [(function["name"], function["arguments"]) for function in functions]
    unknown = message.keys() - {"role", "content", *_TRAINABLE}
    if not content and unknown:  # A model may also end a turn at once.
        raise UnfaithfulError("a turn of the assistant is empty, but for fields that are not known")
    text = _squeezed(written)
    for name, value in content.items():
        for part in _parts(value):
            if not any(_squeezed(form) in text for form in _forms(part)):
                raise UnfaithfulError(f"the chat template leaves out something of {name!r} of a turn")


def _parts(value: Any) -> Iterator[Any]:
    """The texts and numbers in a value, with the names in mappings."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def _forms(part: Any) -> tuple[str, str, str]:
    """How a template may write a text or number: plainly, in JSON or in Python."""
    in_json = json.dumps(part, ensure_ascii=False)
    return str(part), in_json.strip('"'), repr(part).strip("'")


def _thought(message: Message) -> str:
    """What the assistant thinks in a turn, in its own field or before the end of a thought in its text."""
    for name in _THOUGHTS:
        if isinstance(message.get(name), str):
            return message[name]
    in_text, _, answer = message.get("content", "").partition("</think>")
    return in_text.split("<think>")[-1] if answer else ""


def _squeezed(text: str) -> str:
    """A text without its white space, which templates change."""
    return "".join(text.split())
