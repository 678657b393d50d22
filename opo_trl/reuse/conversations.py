"""Tokens of recorded conversations, and which of them the policy has sampled: the chat template says so."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.utils import remove_none_values


# Fields by which a log says that a turn is not to be trained on: of ART, of OpenAI's fine-tuning, of axolotl.
_TRAINABLE = ("trainable", "weight", "train", "training")
# Fields in which the assistant speaks, besides its calls; most templates know only some of them.
_SPOKEN = ("content", "reasoning_content", "reasoning", "thinking", "refusal", "function_call")

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>")


class UnfaithfulError(ValueError):
    """A chat template does not render a conversation as the model has read and written it; the message says why."""


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


def tokenized(
    trainer: Any, template: str, prompt: Sequence[Any], completion: Sequence[Any], tools: Sequence[Any]
) -> dict[str, list[int]]:
    """
    A conversation as columns of recorded rollouts. In a turn of `completion`, the policy has sampled what the template
    marks, from where its generation prompt ends to the end of the turn. The prompt is all before the first such token.

    Raises:
        [`UnfaithfulError`]: the template leaves something out, or puts something else before a turn than the
            generation prompt with which the run asks for it.
    """
    messages = [*as_rendered(prompt), *as_rendered(completion)]
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    own = [place for place in turns if place >= len(prompt)]
    messages = messages[: own[-1] + 1]  # what follows the last turn does not count
    if any(messages[turn].get(name) in (False, 0) for turn in own for name in _TRAINABLE):
        raise UnfaithfulError("a turn of the assistant is marked as not to be trained on")
    options = {"tools": remove_none_values([*tools]) or None, "chat_template": template}
    options |= trainer.chat_template_kwargs
    render = partial(_rendered, tokenizer_of(trainer), options)
    _check_read(render, messages, own)
    _check_thoughts(render, messages, own)
    text = render(messages)
    with_marks = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = render(messages, **with_marks, tokenizer_kwargs={"return_offsets_mapping": True})
    ids, characters = rendered["input_ids"], rendered["offset_mapping"]
    stretches = groupby(enumerate(rendered["assistant_masks"]), key=itemgetter(1))
    marked = [[place for place, _ in stretch] for is_marked, stretch in stretches if is_marked]
    if len(marked) != len(turns):
        said = "the chat template does not mark each turn of the assistant by {% generation %}"
        if marked:
            raise UnfaithfulError(said)
        fix = "Mark it, or record `completion_ids` with a mask"
        raise ValueError(f"rollouts={trainer.args.rollouts!r}: {said}. {fix}.")
    mask = [0] * len(ids)
    for turn, places in zip(own, marked[-len(own) :], strict=True):
        context = render(messages[:turn], add_generation_prompt=True)
        if not text.startswith(context):
            raise UnfaithfulError("the chat template renders something else before a turn than its generation prompt")
        behind = [place for place in places if characters[place][0] >= len(context)]
        end = next((i for i, place in enumerate(behind, 1) if ids[place] in trainer.eos_token_ids), None)
        sampled = behind[:end]
        if not sampled:
            raise UnfaithfulError("the chat template renders nothing of a turn behind its generation prompt")
        _check_written(messages[turn], text[characters[places[0]][0] : characters[sampled[-1]][1]])
        for place in sampled:
            mask[place] = 1
    own_tokens = [place for place, is_own in enumerate(mask) if is_own]
    start, end = own_tokens[0], own_tokens[-1] + 1
    return {"prompt_ids": ids[:start], "completion_ids": ids[start:end], "completion_mask": mask[start:end]}


def check_prompt(trainer: Any, prompt: Sequence[Any]) -> None:
    """Raise an [`UnfaithfulError`] if a prompt of messages is not all rendered by the run's chat template."""
    render = partial(_rendered, tokenizer_of(trainer), trainer.chat_template_kwargs)
    _check_read(render, as_rendered(prompt), own=())


def spoken(turns: Sequence[Mapping[str, Any]]) -> str:
    """What the assistant says in messages, without its calls."""
    return "\n".join(str(turn["content"]) for turn in turns if turn["role"] == "assistant" and turn["content"])


def empty_thoughts(tokenizer: Any, row: Mapping[str, list[int]], turns: Sequence[Mapping[str, Any]]) -> int:
    """How many of the empty thoughts that count as sampled in a row of [`tokenized`] are not in its turns."""
    sampled = [token for token, is_own in zip(row["completion_ids"], row["completion_mask"], strict=True) if is_own]
    in_row, in_turns = (len(_EMPTY_THOUGHT.findall(text)) for text in (tokenizer.decode(sampled), spoken(turns)))
    return in_row - in_turns


def _rendered(tokenizer: Any, options: Mapping[str, Any], messages: Sequence[Any], **more: Any) -> Any:
    """A conversation as text or, by `more` options, in another form."""
    try:
        return tokenizer.apply_chat_template(messages, **{"tokenize": False, **options, **more})
    except (TemplateError, TypeError) as error:  # of a template that takes something else for text
        raise UnfaithfulError(f"the chat template refuses it ({error})") from error


def as_rendered(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: without empty fields, and with the arguments of calls not as JSON."""
    turns: Any = [remove_none_values(message) for message in messages]
    for call in chain.from_iterable(turn.get("tool_calls", ()) for turn in turns):
        with suppress(KeyError, TypeError, ValueError):  # they are a mapping, or not the JSON that they should be
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turns


def _check_read(render: Callable[[Sequence[Any]], str], messages: Sequence[Any], own: Collection[int]) -> None:
    """
    Check that all messages but the policy's `own` are rendered: the words that take the place of what they say must
    come again. What they say might also stand somewhere else.
    """
    marked, expected = [], []
    for place, message in enumerate(messages):
        if not isinstance(message.get("content") or "", str):
            raise UnfaithfulError(f"the content of a message of {message['role']!r} is not text")
        if place not in own:
            word = f"[message {place}]"
            message, count = _in_other_words(message, word)
            expected.append((message["role"], word, count))
        marked.append(message)
    text = render(marked)
    for role, word, count in expected:
        if text.count(word) < count:
            raise UnfaithfulError(f"the chat template leaves out something of a message of {role!r}")


def _in_other_words(message: Mapping[str, Any], word: str) -> tuple[dict[str, Any], int]:
    """A message with a word in place of its content and of the names of its calls, and how often that is."""
    changed, calls = dict(message), [*message.get("tool_calls", ())]
    if message.get("content"):
        changed["content"] = word
    if calls:
        changed["tool_calls"] = [{**call, "function": {**call["function"], "name": word}} for call in calls]
    if message.get("function_call"):  # of OpenAI's first API
        changed["function_call"] = {"name": word, "arguments": "{}"}
    return changed, bool(message.get("content")) + len(calls) + bool(message.get("function_call"))


def _check_thoughts(render: Callable[..., str], messages: Sequence[Mapping[str, Any]], own: Sequence[int]) -> None:
    """Check that the model has read its earlier thoughts again when it was asked for the last of its turns, `own`."""
    thoughts = [thought for turn in own[:-1] if (thought := _squeezed(_thought(messages[turn])))]
    if thoughts:  # by the model's own template: TRL's variant may keep what that removes
        asked = _squeezed(render(messages[: own[-1]], add_generation_prompt=True, chat_template=None))
        if any(thought not in asked for thought in thoughts):
            raise UnfaithfulError("the chat template removes an earlier thought")


def _check_written(message: Mapping[str, Any], written: str) -> None:
    """Check that a turn of the policy is rendered with all that it says, whatever its white space."""
    said = {name: message[name] for name in _SPOKEN if message.get(name)}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if not said and message.keys() - {"role", "content", *_TRAINABLE}:  # a model may also end a turn at once
        raise UnfaithfulError("a turn of the assistant is empty, but for fields that are not known")
    text = _squeezed(written)
    for name, value in said.items():
        for part in _parts(value):
            forms = (str(part), json.dumps(part, ensure_ascii=False).strip('"'), repr(part).strip("'"))
            if not any(_squeezed(form) in text for form in forms):
                raise UnfaithfulError(f"the chat template leaves out something of {name!r} of a turn")


def _parts(value: Any) -> Iterator[Any]:
    """The texts and numbers in a value, with the names in mappings."""
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _thought(message: Mapping[str, Any]) -> str:
    """What the assistant thinks in a turn, in its own field or before the end of a thought in its text."""
    in_text, _, rest = message.get("content", "").partition("</think>")
    fields = (message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((field for field in fields if isinstance(field, str)), in_text.split("<think>")[-1] if rest else "")


def _squeezed(text: str) -> str:
    """A text without its white space, which templates change."""
    return "".join(text.split())
