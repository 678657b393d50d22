"""
From problems to the prompts that the trainer takes.

Unusable rows are never dropped silently: a warning counts them.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..checks.text import without_white_space
from ..rewards.boxes import final_answer, find_boxes
from .prompt_ids import PROMPT_IDS


logger = logging.getLogger(__name__)

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

Style = Literal["chat", "plain"]


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each with its `role`."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(message, Mapping) and message.get("role") for message in prompt)


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
    is_scored_elsewhere = "entry" in dataset.column_names  # by reasoning-gym, which reads this column, no solution
    needs_box = style == "chat" and any(map(_has_box, dataset["solution"]))
    rows = []
    unusable = {}  # index of a row → its problem, for the warning
    for index, row in enumerate(dataset):
        problem = row.pop("problem")
        messages = problem if is_chat(problem) else [{"role": "user", "content": problem}]
        answer = row["solution"]
        if not is_scored_elsewhere:
            answer = _answer(answer, needs_box=needs_box)
        has_answer = is_scored_elsewhere or answer is not None
        question = messages[-1]["content"]
        if not (has_answer and _has_text(question)):
            unusable[index] = shown(problem)
            continue
        prompt = problem if style == "plain" else _with_instruction(messages, instruction)
        rows.append({**row, "prompt": prompt, "solution": answer})
    _without(dataset, unusable, "have no text as problem, or no final answer")
    return Dataset.from_list(rows)


def _has_box(solution: Any) -> bool:
    return isinstance(solution, str) and bool(find_boxes(solution))


def _has_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _answer(solution: Any, *, needs_box: bool) -> str | None:
    """
    The final answer of a solution: what is in its last box or, if it has none and needs none, all of it. `None` if
    that is empty or no text.
    """
    if needs_box or _has_box(solution):
        solution = final_answer(solution) if isinstance(solution, str) else None
    return solution if _has_text(solution) else None


def _with_instruction(messages: list[dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A conversation with the instruction, unless it is empty, after a blank line at the end of its last message."""
    *earlier, last = messages
    content = f"{last['content']}\n\n{instruction}" if instruction else last["content"]
    return [*earlier, {**last, "content": content}]


def without_overlap(held_out: Dataset, training: Dataset) -> Dataset:
    """
    Drop the held-out problems that are also in the training set, ignoring white space. Both have a column `problem`
    or, without it, `prompt`. If no row is left, this raises a `ValueError`.
    """
    name = "problem" if "problem" in training.column_names else "prompt"
    trained = {without_white_space(str(problem)) for problem in training[name]}
    overlap = {}
    for index, problem in enumerate(held_out[name]):
        if without_white_space(str(problem)) in trained:
            overlap[index] = shown(problem)
    return _without(held_out, overlap, "of the held-out set are in the training set")


def tokenize_prompts(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """
    Tokens of each prompt as the model gets it: a text as it is, a conversation by the chat template, which
    `chat_template_kwargs` are for. The prompts are all of one kind.
    """
    options = {"add_generation_prompt": True, "tokenize": False, **(chat_template_kwargs or {})}
    texts = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        texts.append(prompt if is_text else tokenizer.apply_chat_template(prompt, **options))
    # A chat template has written the special tokens into its text; a prompt of text gets those of the tokenizer.
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
    prompts = list(dataset["prompt"])
    if PROMPT_IDS in dataset.column_names:
        ids_of_prompts = list(dataset[PROMPT_IDS])
    else:
        ids_of_prompts = tokenize_prompts(prompts, tokenizer, chat_template_kwargs)
    too_long = {}
    for index, ids in enumerate(ids_of_prompts):
        if len(ids) > max_prompt_length:
            too_long[index] = f"{shown(prompts[index])}: {len(ids)} tokens"
    return _without(dataset, too_long, f"are longer than {max_prompt_length=} tokens")


def _without(dataset: Dataset, dropped: dict[int, str], why: str) -> Dataset:
    """
    The dataset without the rows in `dropped` (index → what to show of the row), which `why` says what is wrong with. A
    warning counts these and shows the first; if no row is left, a `ValueError` does.
    """
    if dropped:
        first, *_ = dropped.values()
        problem = f"{len(dropped)} of {len(dataset)} rows {why}, the first {first}"
        if len(dropped) == len(dataset):
            raise ValueError(f"{problem}. None is left: change the data, the limit or the split.")
        logger.warning("%s. They are dropped.", problem)
    return dataset.select([index for index in range(len(dataset)) if index not in dropped])


def shown(prompt: Any) -> str:
    """
    The first 60 characters of a prompt or problem, or of its last message, for a warning or error. Not its row: that
    is no longer the row of a file once rows are selected or shuffled.
    """
    text = prompt[-1].get("content") if is_chat(prompt) else prompt
    return repr(str(text)[:60])
