r"""
Data sets: problems by level and fraction, from the Hub or from local files, and the prompts made of them.

The way from a name to what the trainer takes:

    problems = load_problems("DigitalLearningGmbH/MATH-lighteval", levels=["Level 3"], fraction=0.1)
    prompts = drop_long_prompts(to_prompts(problems), tokenizer, max_prompt_length=512)

A row that cannot be used is never dropped silently: one warning counts the dropped rows and names them.
"""

import gzip
import json
import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowInvalid
from transformers import PreTrainedTokenizerBase

from .boxes import final_answer, find_boxes
from .paths import hint_at_checkout


logger = logging.getLogger(__name__)

COLUMNS = ("problem", "level", "type", "solution")
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."

Style = Literal["chat", "plain"]

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_MAX_NAMED = 10


def load_problems(
    dataset_name: str,
    *,
    dataset_config: str | None = None,
    split: str = "train",
    levels: Sequence[str] | None = None,
    fraction: float = 1.0,
    seed: int = 42,
) -> Dataset:
    """
    Load problems with their solutions, and select by level and fraction.

    Args:
        dataset_name (`str`):
            Where the problems are: a local file (`.jsonl`, `.jsonl.gz`, `.json` or `.parquet`; `split` then selects
            nothing); a local folder that holds `{split}` with one of these endings, tried in this order;
            `"arithmetic"` for the embedded task; else a data set on the Hub. For MATH use
            `"DigitalLearningGmbH/MATH-lighteval"`.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load.
        levels (`list[str]`, *optional*):
            Levels to keep, such as `["Level 3"]`. All of them if `None`.
        fraction (`float`, *optional*, defaults to `1.0`):
            Part of the selected levels to keep, in (0, 1]: a random subset of `round(fraction * n)` rows. With the
            same seed, a smaller fraction is contained in a larger one.
        seed (`int`, *optional*, defaults to `42`):
            Seed of the random subset.

    Returns:
        `Dataset`: Rows with the columns `problem`, `level`, `type` and `solution`.

    Raises:
        `ValueError`: if the file or folder does not exist or cannot be read, a column is missing, a level is unknown,
            or no row is left.
    """
    dataset = _load(dataset_name, dataset_config, split, levels)
    _check_columns(dataset_name, dataset.column_names)
    dataset = dataset.select_columns(list(COLUMNS))
    if levels is not None:
        dataset = _select_levels(dataset, levels)
    return _select_fraction(dataset, fraction, seed)


def load_from_hub(dataset_name: str, dataset_config: str | None, split: str) -> Dataset:
    """
    Load a split of a data set as it is, with [`~datasets.load_dataset`].

    Raises:
        `ValueError`: it does not exist, cannot be reached or has no such split.
    """
    try:
        return load_dataset(dataset_name, dataset_config, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"dataset_name={dataset_name!r} with {split=} cannot be loaded: {error.__cause__ or error}. Set "
            "`dataset_name` to a folder or a data set on the Hub that exists, and the split to one that it has."
        ) from error


def _load(name: str, config: str | None, split: str, levels: Sequence[str] | None) -> Dataset:
    file = None if name == "arithmetic" else _local_file(name, split)
    if file is None and name != "arithmetic":
        return load_from_hub(name, config, split)
    if config is not None:
        raise ValueError(
            f"dataset_config={config!r} has no meaning for dataset_name={name!r}, which is not on the Hub. Remove it."
        )
    if file is not None:
        return _read(file)
    from .arithmetic import make_problems

    return Dataset.from_list(make_problems(split, levels))  # type: ignore[arg-type]  # it checks the split itself


def _check_columns(name: str | Path, columns: Sequence[str]) -> None:
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise ValueError(
            f"dataset_name='{name}' has no column {missing}, only {list(columns)}. Rename its columns, or give other "
            "data."
        )


def _local_file(name: str, split: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_file() and path.name.endswith(_ENDINGS):
        return path
    if path.is_dir():
        candidates = [path / f"{split}{ending}" for ending in _ENDINGS]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise ValueError(
            f"dataset_name={name!r} is a folder without {split=}. Put one of {[c.name for c in candidates]} into it, "
            f"or give another split."
        )
    if path.exists():
        raise ValueError(
            f"dataset_name={name!r} is not a file that can be read. Convert it to one of {list(_ENDINGS)}."
        )
    # A Hub id is `data_set` or `owner/data_set`.
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_ENDINGS):
        raise ValueError(
            f"dataset_name={name!r} does not exist. Give an existing file or folder, or a data set on the Hub. "
            f"{hint_at_checkout(name)}".rstrip()
        )
    return None


def _read(file: Path) -> Dataset:
    try:
        if file.suffix == ".parquet":
            return Dataset.from_parquet(str(file))
        rows = _json_rows(file)
    except (ArrowInvalid, DatasetGenerationError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"dataset_name='{file}' cannot be read: {error.__cause__ or error}. It may be cut short: restore or "
            "replace the file."
        ) from error
    if not rows:
        raise ValueError(f"dataset_name='{file}' cannot be read: it is empty. Restore or replace the file.")
    _check_columns(file, list(dict.fromkeys(name for _, row in rows for name in row)))
    for column in ("level", "type"):  # a row of which the others cannot be used is dropped and named
        first: dict[type, int] = {}
        for line, row in rows:
            first.setdefault(type(row.get(column)), line)
        kinds = [f"{kind.__name__} in line {line}" for kind, line in first.items() if kind is not type(None)]
        if len(kinds) > 1:
            raise ValueError(
                f"dataset_name='{file}' has mixed types in its column {column!r}: {', '.join(kinds)}. Write all of "
                "them as strings."
            )
    return Dataset.from_list(
        [{column: row.get(column) for column in COLUMNS} for _, row in rows], on_mixed_types="use_json"
    )


def _json_rows(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Number of the line and content of each row; a list in one piece counts its elements instead."""
    content = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
    is_list = content.lstrip().startswith(b"[")
    rows = []
    for number, line in enumerate([content] if is_list else content.splitlines(), 1):
        try:
            rows += [(number, json.loads(line.decode("utf-8")))] if line.strip() else []
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"dataset_name='{file}' cannot be read: line {number} is not JSON in UTF-8 ({error}). Mend that line."
            ) from error
    if is_list:
        rows = list(enumerate(rows[0][1], 1))
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(
                f"dataset_name='{file}' cannot be read: line {number} is {row!r}, not an object. Write rows as "
                '`{"problem": …}`.'
            )
    return rows


def _select_levels(dataset: Dataset, levels: Sequence[str]) -> Dataset:
    known = sorted({level for level in dataset["level"] if level is not None})
    unknown = [level for level in levels if level not in known]
    if isinstance(levels, str) or not levels or unknown:
        raise ValueError(f"levels={levels!r} must be a list of levels out of those that exist: {known}.")
    return dataset.select([index for index, level in enumerate(dataset["level"]) if level in levels])


def _select_fraction(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} is outside (0, 1]. Use 1.0 for all rows.")
    size = round(fraction * len(dataset))
    if size == 0:
        raise ValueError(f"fraction={fraction} of {len(dataset)} rows leaves none. Use a larger one, or more levels.")
    return dataset if size == len(dataset) else dataset.shuffle(seed=seed).select(range(size))


def to_prompts(dataset: Dataset, *, style: Style = "chat", instruction: str = INSTRUCTION) -> Dataset:
    r"""
    Turn problems into prompts, and their solutions into what a reward function compares with.

    Args:
        dataset (`Dataset`):
            Rows with the columns `problem`, `level`, `type` and `solution`, from [`load_problems`].
        style (`str`, *optional*, defaults to `"chat"`):
            `"chat"`: a conversation of one user message, the problem and the instruction. `"plain"`: the problem as it
            is, for a model without a chat template. In this style a solution may do without a box, and is then kept
            whole; in the other the answer is asked for in a box, and a solution without one cannot be used.
        instruction (`str`, *optional*):
            What the user message asks for after the problem; by default step-by-step reasoning and a final answer in
            `\boxed{}`. Without effect in the style `"plain"`.

    Returns:
        `Dataset`: Rows with the columns `prompt`, `solution` (the final answer), `level` and `type`.

    Raises:
        `ValueError`: if the style is unknown or no row can be used.
    """
    if style not in ("chat", "plain"):
        raise ValueError(f"style={style!r} must be 'chat' or 'plain'.")
    rows, unusable = [], []
    for index, row in enumerate(dataset):
        reason = _why_unusable(row, style)
        if reason:
            unusable.append(_named(index, row["problem"], reason))
            continue
        problem = row["problem"]
        prompt = problem if style == "plain" else [{"role": "user", "content": f"{problem}\n\n{instruction}"}]
        answer = _answer(row["solution"], style)
        rows.append({"prompt": prompt, "solution": answer, "level": row["level"], "type": row["type"]})
    if not rows:
        first = unusable[0].strip() if unusable else "there is none"
        raise ValueError(
            f"dataset has no row that can be used in style={style!r}: {first}. Give other data, or for solutions "
            f"without a box style='plain'."
        )
    _warn_of_dropped(unusable, len(dataset), "cannot be used")
    return Dataset.from_list(rows)


def _answer(solution: str, style: Style) -> str | None:
    if style == "plain" and not find_boxes(solution):
        return solution if solution.strip() else None
    return final_answer(solution)


def _why_unusable(row: dict[str, Any], style: Style) -> str | None:
    for column in ("problem", "solution"):
        if not isinstance(row[column], str):
            return f"its {column} is of type {type(row[column]).__name__}, not a string"
    if not row["problem"].strip():
        return "its problem is empty"
    return None if _answer(row["solution"], style) else "its solution has no final answer"


def without_overlap(held_out: Dataset, training: Dataset) -> Dataset:
    """
    Drop the held-out problems that are also in the training set.

    Args:
        held_out (`Dataset`): Rows with the column `problem`.
        training (`Dataset`): Rows with the column `problem`.

    Returns:
        `Dataset`: The rows of `held_out` whose problem, up to white space, is not in `training`.

    Raises:
        `ValueError`: if no row is left.
    """
    seen = {_without_space(problem) for problem in training["problem"]}
    overlap = [_without_space(problem) in seen for problem in held_out["problem"]]
    named = [_named(i, held_out[i]["problem"], "") for i, overlaps in enumerate(overlap) if overlaps]
    return _keep(held_out, overlap, named, "of the held-out set are in the training set", "held_out")


def _without_space(problem: Any) -> str:
    return "".join(str(problem).split())


def prompt_lengths(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[int]:
    """Tokens of each prompt as the model gets it; see [`drop_long_prompts`] for the arguments."""
    if isinstance(prompts[0], str):
        ids: Any = tokenizer(text=prompts)["input_ids"]
    else:
        tokenized: Any = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **(chat_template_kwargs or {})
        )
        ids = tokenized["input_ids"]
    return [len(prompt_ids) for prompt_ids in ids]


def drop_long_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Dataset:
    """
    Drop the prompts that are longer than a limit. TRL truncates none, and has no limit of its own.

    Args:
        dataset (`Dataset`):
            Rows with the column `prompt`, from [`to_prompts`].
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer that the trainer uses.
        max_prompt_length (`int`):
            Longest prompt to keep, in tokens of the prompt as the model gets it: with the chat template applied, and
            with the start of the answer that the template adds.
        chat_template_kwargs (`dict[str, Any]`, *optional*):
            The trainer's `chat_template_kwargs`, such as `{"enable_thinking": False}`, which adds four tokens to a
            prompt of Qwen3.

    Returns:
        `Dataset`: The rows whose prompt has at most `max_prompt_length` tokens.

    Raises:
        `ValueError`: if no row is left.
    """
    prompts: list[Any] = list(dataset["prompt"])
    lengths = prompt_lengths(prompts, tokenizer, chat_template_kwargs)
    too_long = [length > max_prompt_length for length in lengths]
    named = [
        _named(i, prompts[i] if isinstance(prompts[i], str) else prompts[i][-1]["content"], f"{lengths[i]} tokens")
        for i, long in enumerate(too_long)
        if long
    ]
    return _keep(dataset, too_long, named, f"are longer than {max_prompt_length=} tokens", "max_prompt_length")


def _keep(dataset: Dataset, dropped: list[bool], named: list[str], what: str, field: str) -> Dataset:
    if all(dropped):
        raise ValueError(f"{field}: all {len(dataset)} rows {what}. Change it, or the data.")
    _warn_of_dropped(named, len(dataset), what)
    return dataset.select([index for index, drop in enumerate(dropped) if not drop])


def _named(index: int, problem: Any, reason: str) -> str:
    return f"  row {index} ({str(problem)[:60]!r}){': ' if reason else ''}{reason}"


def _warn_of_dropped(named: list[str], total: int, what: str) -> None:
    if named:
        shown = named[:_MAX_NAMED] + [f"  and {len(named) - _MAX_NAMED} more"] * (len(named) > _MAX_NAMED)
        logger.warning("%d of %d rows %s and are dropped:\n%s", len(named), total, what, "\n".join(shown))
