"""
From problems to the prompts that the trainer takes.

Unusable rows are never dropped silently: a warning counts and names them.
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

_MAX_NAMED = 10


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each with its `role` and something that chat templates render."""
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def not_of_chat(prompt: Any) -> Any:
    """What keeps a prompt from being a list of messages: one of its turns, or all of it."""
    turns = prompt if isinstance(prompt, list) else []
    return next((turn for turn in turns if not _is_message(turn)), prompt)


def _is_message(turn: Any) -> bool:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return False
    # Templates render a mapping as the answer of a tool, and a number as nothing.
    contents = str | list | (Mapping if turn["role"] in ("tool", "ipython") else str)
    others = ("tool_calls", "reasoning_content", "thinking")
    return isinstance(turn.get("content"), contents) or any(map(turn.get, others))


def to_prompts(dataset: Dataset, *, style: Style = "chat", instruction: str = INSTRUCTION) -> Dataset:
    r"""
    Turn problems into prompts, and solutions into the answers that a reward function compares with.

    Args:
        dataset (`Dataset`):
            Rows with the columns `problem`, `level`, `type` and `solution`, from [`load_problems`].
        style (`str`, *optional*, defaults to `"chat"`):
            `"chat"`: a conversation with one user message, the problem and the instruction. A solution without a box
            cannot be used, unless none has one: then they are taken for final answers. `"plain"`: the problem
            unchanged, for a model without a chat template. A solution without a box is kept unchanged.
        instruction (`str`, *optional*):
            What the user message asks for after the problem; nothing if it is empty. `"plain"` ignores it.

    Returns:
        `Dataset`: Rows with the columns `prompt`, `solution` (the final answer), `level` and `type`. Rows of
        reasoning-gym keep their solution, and what its scorer reads.

    Raises:
        `ValueError`: if the style is unknown or no row can be used.
    """
    if style not in ("chat", "plain"):
        raise ValueError(f"style={style!r} must be 'chat' or 'plain'.")
    rows, unusable = [], []
    scored_elsewhere = [name for name in dataset.column_names if name in ("task", "entry")]
    in_boxes = style == "chat" and any(isinstance(s, str) and find_boxes(s) for s in dataset["solution"])
    for row in dataset:
        answer, reason = (row["solution"], "") if scored_elsewhere else _answer(row, in_boxes)
        if reason:
            unusable.append(f"{shown(row['problem'])}: {reason}")
            continue
        kept = {name: row[name] for name in ("level", "type", *scored_elsewhere)}
        asked = [{"role": "user", "content": "\n\n".join(filter(None, (row["problem"], instruction)))}]
        rows.append({"prompt": row["problem"] if style == "plain" else asked, "solution": answer, **kept})
    if not rows:
        first = unusable[0] if unusable else "it is empty"
        raise ValueError(
            f"dataset has no row that can be used in style={style!r}: {first}. Use other data, or map its columns."
        )
    _warn_of_dropped(unusable, len(dataset), "cannot be used")
    return Dataset.from_list(rows)


def _answer(row: dict[str, Any], in_boxes: bool) -> tuple[str, str]:
    """The answer of a row, and why the row cannot be used."""
    for column in ("problem", "solution"):
        if not isinstance(row[column], str):
            return "", f"its {column} is of type {type(row[column]).__name__}, not a string"
    if not row["problem"].strip():
        return "", "its problem is empty"
    solution = row["solution"]
    answer = final_answer(solution) if in_boxes or find_boxes(solution) else solution
    return (answer, "") if answer and answer.strip() else ("", "its solution has no final answer")


def without_overlap(held_out: Dataset, training: Dataset) -> Dataset:
    """
    Drop the held-out problems that are also in the training set, ignoring white space. Both have a column `problem`
    or, without it, `prompt`. If no row is left, this raises a `ValueError`.
    """
    name = "problem" if "problem" in training.column_names else "prompt"
    seen = {without_space(problem) for problem in training[name]}
    overlap = {i: shown(text) for i, text in enumerate(held_out[name]) if without_space(text) in seen}
    return _drop(held_out, overlap, "of the held-out set are in the training set", "dataset_test_split")


def without_space(problem: Any) -> str:
    """What makes two problems the same."""
    return "".join(str(problem).split())


def tokenize_prompts(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """
    Tokens of each prompt as the model gets it; see [`drop_long_prompts`] for the arguments.

    Raises:
        `ValueError`: the chat template cannot render a prompt, or renders nothing.
    """
    texts: list[Any] = []
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **(chat_template_kwargs or {})}
    fix = "Change the prompt, or the tokenizer's chat_template.jinja"
    for prompt in prompts:
        try:
            texts.append(prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, **options))
        except Exception as error:
            roles = [turn["role"] for turn in prompt] if is_chat(prompt) else []
            raise ValueError(
                f"prompt: {shown(prompt)}, with the roles {roles!r}, cannot be rendered by the chat template of "
                f"{tokenizer.name_or_path!r}: {error}. {fix}."
            ) from error
    ids = tokenizer(text=texts, add_special_tokens=isinstance(prompts[0], str))["input_ids"]
    if [] in ids:
        prompt = shown(prompts[ids.index([])])
        raise ValueError(f"prompt: {prompt} has no tokens with the tokenizer of {tokenizer.name_or_path!r}. {fix}.")
    return ids


def drop_long_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """
    Drop the prompts that are longer than a limit. TRL neither truncates prompts nor limits their length.

    Args:
        dataset (`Dataset`), tokenizer (`PreTrainedTokenizerBase`):
            Rows with the column `prompt`, from [`to_prompts`], and the trainer's tokenizer.
        max_prompt_length (`int`):
            Longest prompt to keep, in tokens as the model gets it: with the chat template applied, including the start
            of the answer that the template adds.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            The trainer's, such as `{"enable_thinking": False}`, which adds four tokens to a prompt of Qwen3.

    Raises:
        `ValueError`: if no row is left.
    """
    prompts: list[Any] = list(dataset["prompt"])
    lengths = [len(ids) for ids in tokenize_prompts(prompts, tokenizer, chat_template_kwargs)]
    too_long = {i: f"{shown(prompts[i])}: {n} tokens" for i, n in enumerate(lengths) if n > max_prompt_length}
    return _drop(dataset, too_long, f"are longer than {max_prompt_length=} tokens", "max_prompt_length")


def _drop(dataset: Dataset, dropped: dict[int, str], what: str, field: str) -> Dataset:
    if len(dropped) == len(dataset):
        raise ValueError(f"{field}: all {len(dataset)} rows {what}. Change `{field}` or the data.")
    _warn_of_dropped([*dropped.values()], len(dataset), what)
    return dataset.select([index for index in range(len(dataset)) if index not in dropped])


def shown(prompt: Any) -> str:
    """A prompt or problem in a message: its row is no longer that of a file once rows are selected or shuffled."""
    return repr(str(prompt[-1].get("content") if is_chat(prompt) else prompt)[:60])


def _warn_of_dropped(named: list[str], total: int, what: str) -> None:
    if named:
        more = [f"and {len(named) - _MAX_NAMED} more"] if len(named) > _MAX_NAMED else []
        lines = "\n".join(f"  {line}" for line in named[:_MAX_NAMED] + more)
        logger.warning("%d of %d rows %s and are dropped:\n%s", len(named), total, what, lines)
