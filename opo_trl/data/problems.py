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
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowInvalid
from transformers import PreTrainedTokenizerBase

from ..checks.paths import hint_at_checkout, readable
from ..rewards.boxes import final_answer, find_boxes


logger = logging.getLogger(__name__)

COLUMNS = ("problem", "level", "type", "solution")
_OPTIONAL = ("level", "type")
_MARK = "####"  # before the final answer, in GSM8K
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
    columns: Mapping[str, str] | None = None,
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
        columns (`dict[str, str]`, *optional*):
            Which of the data set's columns stands for `problem`, `solution`, `level` or `type`, such as
            `{"problem": "question", "solution": "answer"}`. Each is its namesake where it is not given; without a
            column `solution`, `answer` is taken, and with answers that end in `#### 72`, `question` for the problem.
            What is taken for what is logged.

    Returns:
        `Dataset`: Rows with the columns `problem`, `level`, `type` and `solution`; level and type are `None` where the
        data set has none. A solution of another name ends in a `\boxed{}`, which holds what stands behind the last
        `####`, or all of it.

    Raises:
        `ValueError`: if the file or folder does not exist or cannot be read, a column is missing, a level is unknown,
            or no row is left.
    """
    dataset = _load(dataset_name, dataset_config, split, levels, columns or {})
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


def rename_columns(dataset: Dataset, columns: Mapping[str, str]) -> Dataset:
    """
    Rename columns of a data set: new name → name that it has.

    Raises:
        `ValueError`: it has no such column, or one of the new name already.
    """
    names = dataset.column_names
    for new, old in columns.items():
        if old not in names or (new in names and new not in columns.values()):
            raise ValueError(
                f"columns={dict(columns)!r} does not fit the data set, whose columns are {', '.join(names)}. Set "
                "`columns` to new names for some of them."
            )
    renamed = {old: new for new, old in columns.items()}
    if renamed:
        logger.warning("Took %s.", " and ".join(f"{old!r} for {new}" for old, new in renamed.items()))
    return dataset.rename_columns(renamed)


def _load(
    name: str, config: str | None, split: str, levels: Sequence[str] | None, columns: Mapping[str, str]
) -> Dataset:
    file = None if name == "arithmetic" else _local_file(name, split)
    if file is None and name != "arithmetic":
        return _take(name, load_from_hub(name, config, split), columns)
    if config is not None:
        raise ValueError(
            f"dataset_config={config!r} has no meaning for dataset_name={name!r}, which is not on the Hub. Remove it."
        )
    if file is not None:
        return _read(file, columns)
    from .arithmetic import make_problems

    problems: Any = make_problems(split, levels)  # type: ignore[arg-type]  # it checks the split itself
    return _take(name, Dataset.from_list(problems), columns)


def _sources(
    name: str | Path, names: Sequence[str], columns: Mapping[str, str], answers: Sequence[Any]
) -> dict[str, str]:
    """Which of a data set's columns stands for which of [`COLUMNS`]; `answers` are some of its column `answer`."""
    for ours, theirs in columns.items():
        if ours not in COLUMNS or theirs not in names:
            raise ValueError(
                f"columns={dict(columns)!r} does not fit dataset_name='{name}'. Set `columns` to a mapping of "
                f"{', '.join(COLUMNS)} to columns that it has: {', '.join(names)}."
            )
    found = {column: column for column in COLUMNS if column in names} | dict(columns)
    if "solution" not in found and "answer" in names:
        marked = bool(answers) and all(_MARK in str(answer) for answer in answers)
        if "problem" not in found and "question" in names and marked:
            found["problem"] = "question"
        if "problem" in found:
            found["solution"] = "answer"
    missing = [column for column in COLUMNS if column not in (*found, *_OPTIONAL)]
    if missing:
        raise ValueError(
            f"dataset_name='{name}' has no column {missing}, only {list(names)}. Rename its columns, or say which "
            "ones stand for them: `columns: {problem: …, solution: …}`."
        )
    renamed = [f"{theirs!r} for {ours}" for ours, theirs in found.items() if ours != theirs]
    if renamed:
        logger.warning("dataset_name='%s': took %s.", name, " and ".join(renamed))
    return found


def _take(name: str, dataset: Dataset, columns: Mapping[str, str]) -> Dataset:
    """The columns of problems, out of those that a data set has."""
    answers = dataset[:_MAX_NAMED]["answer"] if "answer" in dataset.column_names else []
    sources = _sources(name, dataset.column_names, columns, answers)
    if all(sources.get(column) == column for column in COLUMNS):
        return dataset.select_columns(list(COLUMNS))
    rows = dataset.select_columns(list(set(sources.values())))
    return _problem_rows([dict(row) for row in rows], sources)


def _problem_rows(rows: Sequence[Mapping[str, Any]], sources: Mapping[str, str]) -> Dataset:
    taken = [{column: row.get(sources.get(column, "")) for column in COLUMNS} for row in rows]
    if sources["solution"] != "solution":
        taken = [{**row, "solution": _in_a_box(row["solution"])} for row in taken]
    return Dataset.from_list(taken, on_mixed_types="use_json")


def _in_a_box(solution: Any) -> Any:
    """A solution that ends in its answer, or an answer by itself, as a solution in which a box holds the answer."""
    if not isinstance(solution, str) or find_boxes(solution):
        return solution
    steps, _, answer = solution.rpartition(_MARK)
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())  # of thousands
    return f"{steps}\\boxed{{{answer}}}" if answer else solution


def _local_file(name: str, split: str) -> Path | None:
    path = Path(os.path.expanduser(name))
    with readable("dataset_name", name):
        if path.is_file() and path.name.endswith(_ENDINGS):
            return path
        if path.is_dir():
            candidates = [path / f"{split}{ending}" for ending in _ENDINGS]
            for candidate in candidates:
                if candidate.is_file():
                    return candidate
            raise ValueError(
                f"dataset_name={name!r} is a folder without {split=}. Put one of {[c.name for c in candidates]} into "
                "it, or give another split."
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


def _read(file: Path, columns: Mapping[str, str]) -> Dataset:
    try:
        if file.suffix == ".parquet":
            return _take(str(file), Dataset.from_parquet(str(file)), columns)
        rows = _json_rows(file)
    except (ArrowInvalid, DatasetGenerationError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"dataset_name='{file}' cannot be read: {error.__cause__ or error}. It may be cut short: restore or "
            "replace the file."
        ) from error
    if not rows:
        raise ValueError(f"dataset_name='{file}' cannot be read: it is empty. Restore or replace the file.")
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    sources = _sources(file, names, columns, [row["answer"] for _, row in rows[:_MAX_NAMED] if "answer" in row])
    for column in _OPTIONAL:  # a row of which the others cannot be used is dropped and named
        first: dict[type, int] = {}
        for line, row in rows:
            first.setdefault(type(row.get(sources.get(column, ""))), line)
        kinds = [f"{kind.__name__} in line {line}" for kind, line in first.items() if kind is not type(None)]
        if len(kinds) > 1:
            raise ValueError(
                f"dataset_name='{file}' has mixed types in its column {column!r}: {', '.join(kinds)}. Write all of "
                "them as strings."
            )
    return _problem_rows([row for _, row in rows], sources)


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
    if not known:
        raise ValueError(
            f"levels={levels!r}: the data set has no levels. Leave it out, or set `columns: {{level: …}}`."
        )
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
