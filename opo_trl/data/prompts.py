"""
From problems to the prompts that the trainer takes.

Unusable rows are never dropped silently: a warning counts them.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..rewards.boxes import final_answer, find_boxes


logger = logging.getLogger(__name__)

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

Style = Literal["chat", "plain"]


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each with its `role`."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(t, Mapping) and t.get("role") for t in prompt)


def to_prompts(dataset: Dataset, *, style: Style = "chat", instruction: str = INSTRUCTION) -> Dataset:
    r"""
    Turn problems into prompts, and solutions into the answers that a reward function compares with.

    Args:
        dataset (`Dataset`):
            Rows with the columns `problem`, text or messages, and `solution`, from [`load_problems`].
        style (`str`, *optional*, defaults to `"chat"`):
            `"chat"`: a conversation whose last message ends with the instruction. A solution without a box cannot be
            used, unless none has one. `"plain"`: the problem unchanged, for a model without a chat template.
        instruction (`str`, *optional*):
            What the user message asks for after the problem; nothing if it is empty. `"plain"` ignores it.

    Returns:
        `Dataset`: Rows with the columns `prompt`, `solution` (the final answer, but for reasoning-gym), and others.

    Raises:
        `ValueError`: if no row can be used.
    """
    rows, unusable = [], {}
    scored_elsewhere = "entry" in dataset.column_names  # by reasoning-gym
    in_boxes = style == "chat" and any(isinstance(s, str) and find_boxes(s) for s in dataset["solution"])
    for index, row in enumerate(dataset):
        problem, answer = row.pop("problem"), row["solution"]
        if not scored_elsewhere and isinstance(answer, str) and (in_boxes or find_boxes(answer)):
            answer = final_answer(answer)
        has_answer = scored_elsewhere or (isinstance(answer, str) and answer.strip())
        messages = problem if is_chat(problem) else [{"role": "user", "content": problem}]
        text = messages[-1]["content"]
        if isinstance(text, str) and text.strip() and has_answer:
            asked = [*messages[:-1], {**messages[-1], "content": "\n\n".join(filter(None, (text, instruction)))}]
            rows.append({**row, "prompt": problem if style == "plain" else asked, "solution": answer})
        else:
            unusable[index] = shown(problem)
    _without(dataset, unusable, "have no text as problem, or no final answer")
    return Dataset.from_list(rows)


def without_overlap(held_out: Dataset, training: Dataset) -> Dataset:
    """
    Drop the held-out problems that are also in the training set, ignoring white space. Both have a column `problem`
    or, without it, `prompt`. If no row is left, this raises a `ValueError`.
    """
    name = "problem" if "problem" in training.column_names else "prompt"
    trained, held = (["".join(str(problem).split()) for problem in rows[name]] for rows in (training, held_out))
    seen = {*trained}
    overlap = {i: shown(held_out[name][i]) for i, text in enumerate(held) if text in seen}
    return _without(held_out, overlap, "of the held-out set are in the training set")


def tokenize_prompts(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Tokens of each prompt as the model gets it; see [`drop_long_prompts`] for the arguments."""
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **(chat_template_kwargs or {})}
    texts: list[Any] = [p if isinstance(p, str) else tokenizer.apply_chat_template(p, **options) for p in prompts]
    return tokenizer(text=texts, add_special_tokens=isinstance(prompts[0], str))["input_ids"]


def drop_long_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """
    Drop the prompts that are longer than a limit. TRL neither truncates prompts nor limits their length.

    `dataset` has the column `prompt`; `tokenizer` and `chat_template_kwargs` are those of the trainer, so that a
    length is that of what the model gets. A `ValueError` if no row is left.
    """
    prompts: list[Any] = list(dataset["prompt"])
    lengths = [len(ids) for ids in tokenize_prompts(prompts, tokenizer, chat_template_kwargs)]
    too_long = {i: f"{shown(prompts[i])}: {n} tokens" for i, n in enumerate(lengths) if n > max_prompt_length}
    return _without(dataset, too_long, f"are longer than {max_prompt_length=} tokens")


def _without(dataset: Dataset, dropped: dict[int, str], what: str) -> Dataset:
    """The other rows. A warning counts those that are dropped and shows the first; if none is left, an error does."""
    if dropped:
        said = f"{len(dropped)} of {len(dataset)} rows {what}, the first {next(iter(dropped.values()))}"
        if len(dropped) == len(dataset):
            raise ValueError(f"{said}. None is left: change the data, the limit or the split.")
        logger.warning("%s. They are dropped.", said)
    return dataset.select([index for index in range(len(dataset)) if index not in dropped])


def shown(prompt: Any) -> str:
    """A prompt or problem in a message: its row is no longer that of a file once rows are selected or shuffled."""
    return repr(str(prompt[-1].get("content") if is_chat(prompt) else prompt)[:60])
