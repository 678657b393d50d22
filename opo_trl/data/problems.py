r"""
Problems with their solutions, by level and fraction: embedded, from local files or from the Hub.

    problems = load_problems("DigitalLearningGmbH/MATH-lighteval", levels=["Level 3"], fraction=0.1)
    prompts = drop_long_prompts(to_prompts(problems), tokenizer, max_prompt_length=512)

A dataset in a file or on the Hub needs no code: `columns` maps its columns. To embed another one in the package, add
a function to [`EMBEDDED`].
"""

import gzip
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from ..checks.paths import hint_at_checkout, readable
from ..rewards.boxes import find_boxes
from .arithmetic import make_problems
from .guessing import make_games


logger = logging.getLogger(__name__)

# Name → function of split and levels (all of them if `None`) that returns rows with the columns below.
EMBEDDED: dict[str, Callable[[Any, Sequence[str] | None], list[dict[str, str]]]] = {
    "arithmetic": make_problems,
    "guessing": make_games,
}

COLUMNS = ("problem", "level", "type", "solution")
_OPTIONAL = ("level", "type")
_MARK = "####"  # before the final answer, in GSM8K
_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")

Row = Mapping[str, Any]


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
            A name in [`EMBEDDED`], such as `"arithmetic"`; a local file (`.jsonl`, `.jsonl.gz`, `.json` or `.parquet`;
            `split` is then ignored); a local folder with a file `{split}` of one of these endings, tried in this
            order; or a dataset on the Hub, such as `"DigitalLearningGmbH/MATH-lighteval"` for MATH.
        dataset_config (`str`, *optional*):
            Configuration of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load.
        levels (`list[str]`, *optional*):
            Levels to keep, such as `["Level 3"]`. All of them if `None`.
        fraction (`float`, *optional*, defaults to `1.0`):
            Fraction of the selected levels to keep, in (0, 1]: a random subset of `round(fraction * n)` rows. With the
            same seed, a larger fraction contains a smaller one.
        seed (`int`, *optional*, defaults to `42`):
            Seed of the random subset.
        columns (`dict[str, str]`, *optional*):
            Maps `problem`, `solution`, `level` or `type` to columns of the dataset, such as
            `{"problem": "question", "solution": "answer"}`. By default each is the column of the same name. Without a
            column `solution`, `answer` is used, and if the answers end in `#### 72` as in GSM8K, `question` for the
            problem. Renamed columns are logged.

    Returns:
        `Dataset`: Rows with the columns `problem`, `level`, `type` and `solution`; level and type are `None` where the
        dataset has none. A solution from a column of another name gets a `\boxed{}` around its answer: the text after
        the last `####`, or all of it.

    Raises:
        `ValueError`: if the file or folder does not exist or cannot be read, a column is missing or has mixed types, a
            level is unknown, or no row is left.
    """
    dataset = _load(dataset_name, dataset_config, split, levels, columns or {})
    if levels is not None:
        dataset = _select_levels(dataset, levels)
    return _select_fraction(dataset, fraction, seed)


def load_from_hub(dataset_name: str, dataset_config: str | None, split: str) -> Dataset:
    """
    Load a split of a dataset unchanged, with [`~datasets.load_dataset`].

    Raises:
        `ValueError`: if it does not exist, cannot be reached or has no such split.
    """
    try:
        return load_dataset(dataset_name, dataset_config, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"dataset_name={dataset_name!r} with {split=} cannot be loaded: {error.__cause__ or error}. Set "
            "`dataset_name` to an existing folder or dataset on the Hub, and the split to one of its splits."
        ) from error


def rename_columns(dataset: Dataset, columns: Mapping[str, str]) -> Dataset:
    """
    Rename columns of a dataset: new name → old name.

    Raises:
        `ValueError`: if it has no such column, or already has one of the new names.
    """
    names = dataset.column_names
    for new, old in columns.items():
        if old not in names or (new in names and new not in columns.values()):
            raise ValueError(
                f"columns={dict(columns)!r} does not fit the dataset, whose columns are {', '.join(names)}. Set "
                "`columns` to new names for some of them."
            )
    renamed = {old: new for new, old in columns.items()}
    if renamed:
        logger.warning("Took %s.", " and ".join(f"{old!r} for {new}" for old, new in renamed.items()))
    return dataset.rename_columns(renamed)


def _load(
    name: str, config: str | None, split: str, levels: Sequence[str] | None, columns: Mapping[str, str]
) -> Dataset:
    source = EMBEDDED.get(name) or _local_file(name, split)
    if source is None:
        return _to_problems(name, load_from_hub(name, config, split), columns)
    if config is not None:
        raise ValueError(
            f"dataset_config={config!r} is only for datasets on the Hub, and dataset_name={name!r} is not one. "
            "Remove it."
        )
    if isinstance(source, Path):
        return _read(source, columns)
    return _to_problems(name, Dataset.from_list(source(split, levels)), columns)


def _sources(
    name: str | Path, names: Sequence[str], columns: Mapping[str, str], answers: Sequence[Any]
) -> dict[str, str]:
    """Map [`COLUMNS`] to columns of a dataset; `answers` are some of its column `answer`."""
    for ours, theirs in columns.items():
        if ours not in COLUMNS or theirs not in names:
            raise ValueError(
                f"columns={dict(columns)!r} does not fit dataset_name='{name}'. Set `columns` to a mapping of "
                f"{', '.join(COLUMNS)} to its columns: {', '.join(names)}."
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
            f"dataset_name='{name}' has no column {missing}, only {list(names)}. Rename its columns, or map them: "
            "`columns: {problem: …, solution: …}`."
        )
    renamed = [f"{theirs!r} for {ours}" for ours, theirs in found.items() if ours != theirs]
    if renamed:
        logger.warning("dataset_name='%s': took %s.", name, " and ".join(renamed))
    return found


def _to_problems(name: str, dataset: Dataset, columns: Mapping[str, str]) -> Dataset:
    answers = dataset[:10]["answer"] if "answer" in dataset.column_names else []
    sources = _sources(name, dataset.column_names, columns, answers)
    if all(sources.get(column) == column for column in COLUMNS):
        return dataset.select_columns(list(COLUMNS))
    rows = dataset.select_columns(list(set(sources.values())))
    return _problem_rows([dict(row) for row in rows], sources)


def _problem_rows(rows: Iterable[Row], sources: Mapping[str, str]) -> Dataset:
    problems = [{column: row.get(sources.get(column, "")) for column in COLUMNS} for row in rows]
    if sources["solution"] != "solution":
        problems = [{**problem, "solution": _boxed(problem["solution"])} for problem in problems]
    return Dataset.from_dict({column: _column([problem[column] for problem in problems]) for column in COLUMNS})


def _column(values: list[Any]) -> pa.Array:
    """Plain values of one type as they are; others as JSON, so that `to_prompts` can name the rows it drops."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) < 2 and not kinds & {list, dict}:
        return pa.array(values)
    # Encoded here: `Dataset.from_list(…, on_mixed_types="use_json")` would mistake the text "4" for the number 4.
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.json_())


def _boxed(solution: Any) -> Any:
    """Put a box around the answer of a solution: the text after `####`, or all of it."""
    if not isinstance(solution, str) or find_boxes(solution):
        return solution
    steps, _, answer = solution.rpartition(_MARK)
    answer = re.sub(r"(?<=\d),(?=\d{3}\b)", "", answer.strip())  # 1,000 → 1000
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
                "it, or set another split."
            )
        if path.exists():
            raise ValueError(
                f"dataset_name={name!r} is not in a readable format. Convert it to one of {list(_ENDINGS)}."
            )
    # A Hub id is `dataset` or `owner/dataset`.
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(_ENDINGS):
        raise ValueError(
            f"dataset_name={name!r} does not exist. Pass an existing file or folder, or a dataset on the Hub. "
            f"{hint_at_checkout(name)}".rstrip()
        )
    return None


# Local files are not read by `load_dataset("json" | "parquet" | "csv")`, because that
# - turns the text "4" into the number 4 in a JSON column with one number, a JSON column of dates into timestamps, and
#   in CSV the text "007" into 7 and "NA" into nothing;
# - counts lines from the last block of 10 MB, and names none where one is in another encoding or not an object;
# - caches by modification time, so that a file replaced by one of the same age (`rsync -t`) comes from the cache.
def _read(file: Path, columns: Mapping[str, str]) -> Dataset:
    with readable("dataset_name", file):  # so that an error below is one of its content
        file.open("rb").close()
    try:
        if file.suffix == ".parquet":
            return _to_problems(str(file), Dataset(ParquetFile(file).read()), columns)
        rows = _json_rows(file)
    except (ArrowInvalid, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"dataset_name='{file}' cannot be read: {error}. It may be truncated: restore or replace the file."
        ) from error
    if not rows:
        raise ValueError(f"dataset_name='{file}' cannot be read: it is empty. Restore or replace the file.")
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    answers = [row["answer"] for row in list(rows.values())[:10] if "answer" in row]
    sources = _sources(file, names, columns, answers)
    _check_types(file, rows, sources)
    try:
        return _problem_rows(rows.values(), sources)
    except (OverflowError, UnicodeEncodeError) as error:  # an integer of more than 64 bits; half a surrogate pair
        raise ValueError(
            f"dataset_name='{file}' cannot be read: {error}. Write problems and solutions as strings in UTF-8."
        ) from error


def _json_rows(file: Path) -> dict[int, Row]:
    """Line number → row. In a file that is one JSON list, elements are counted instead of lines."""
    content = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
    is_list = content.lstrip().startswith(b"[")
    rows = {}
    for number, line in enumerate([content] if is_list else content.splitlines(), 1):
        try:
            if line.strip():
                rows[number] = json.loads(line.decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"dataset_name='{file}' cannot be read: line {number} is not JSON in UTF-8 ({error}). Fix that line."
            ) from error
    if is_list:
        rows = dict(enumerate(rows[1], 1))
    for number, row in rows.items():
        if not isinstance(row, dict):
            raise ValueError(
                f"dataset_name='{file}' cannot be read: line {number} is {row!r}, not an object. Write rows as "
                '`{"problem": …}`.'
            )
    return rows


def _check_types(file: Path, rows: Mapping[int, Row], sources: Mapping[str, str]) -> None:
    """A column of a dataset has one type, apart from `None`."""
    for source in (sources[column] for column in _OPTIONAL if column in sources):
        first: dict[str, int] = {}
        for line, row in rows.items():
            if (value := row.get(source)) is not None:
                first.setdefault(type(value).__name__, line)
        if len(first) > 1:
            kinds = ", ".join(f"{kind} in line {line}" for kind, line in first.items())
            raise ValueError(
                f"dataset_name='{file}' has mixed types in its column {source!r}: {kinds}. Write all of "
                "them as strings."
            )


def _select_levels(dataset: Dataset, levels: Sequence[str]) -> Dataset:
    known = sorted({level for level in dataset["level"] if level is not None})
    if not known:
        raise ValueError(
            f"levels={levels!r}: the dataset has no levels. Leave `levels` out, or set `columns: {{level: …}}`."
        )
    unknown = [level for level in levels if level not in known]
    if isinstance(levels, str) or not levels or unknown:
        raise ValueError(f"levels={levels!r} must be a list of existing levels: {known}.")
    return dataset.select([index for index, level in enumerate(dataset["level"]) if level in levels])


def _select_fraction(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} is outside (0, 1]. Use 1.0 for all rows.")
    size = round(fraction * len(dataset))
    if size == 0:
        raise ValueError(f"fraction={fraction} of {len(dataset)} rows leaves none. Use a larger one, or more levels.")
    return dataset if size == len(dataset) else dataset.shuffle(seed=seed).select(range(size))
