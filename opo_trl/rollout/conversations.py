"""Tokens of recorded conversations, and which of them the policy has sampled: the chat template says so."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.trainer.utils import remove_none_values


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
    A conversation as columns of recorded rollouts. The prompt is all that comes before the first token that the
    template marks in `completion`; what it marks after the end of a turn was not sampled.
    """
    rendered = trainer._tokenizer.apply_chat_template(
        [_as_rendered(message) for message in (*prompt, *completion)],
        tools=remove_none_values([*tools]) or None,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **trainer.chat_template_kwargs,
    )
    ids, mask, ended = rendered["input_ids"], [], False
    for token, written in zip(ids, rendered["assistant_masks"], strict=True):
        mask.append(int(written and not ended))
        ended = bool(written) and (ended or token in trainer.eos_token_ids)
    starts = [place for place, (before, own) in enumerate(zip([0, *mask], mask, strict=False)) if own > before]
    asked, spoken = (sum(turn["role"] == "assistant" for turn in part) for part in (prompt, completion))
    if len(starts) != asked + spoken:
        said = "the chat template does not mark each turn of the assistant by {% generation %}. Mark it"
        raise ValueError(f"rollouts={trainer.args.rollouts!r}: {said}, or record `completion_ids` with a mask.")
    own = slice(starts[asked], len(mask) - mask[::-1].index(1))
    return {"prompt_ids": ids[: own.start], "completion_ids": ids[own], "completion_mask": mask[own]}


def _as_rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: with the arguments of calls not as JSON."""
    turn: Any = remove_none_values(message)
    for call in turn.get("tool_calls", ()):
        with suppress(KeyError, TypeError, ValueError):  # they are a mapping, or not the JSON that they should be
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return turn
