"""
Rows of a dataset as they are stored: in local files, in a folder made by the `datasets` library, or on the Hub.

JSON and tables are read here: `load_dataset` turns the text 007 of a table into 7 and NA into nothing, and in JSON the
text "4" beside the number 4 into one type.
"""

import csv
import gzip
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, load_dataset, load_from_disk
from pyarrow.parquet import ParquetFile


_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv")
_SPACE = re.compile(r"\s*")


def load_rows(dataset_name: str, dataset_config: str | None = None, split: str = "train") -> Dataset:
    """
    Load a split with all of its columns.

    `dataset_name` is a local file (`.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.csv` or `.tsv`; `split` is then
    ignored); a local folder: with a file `{split}` of one of these endings, tried in this order, made by
    `save_to_disk`, or copied from the Hub; or a dataset on the Hub. `dataset_config` is for the Hub, or such a copy.
    What `load_dataset` raises is left as it is.

    Raises:
        `ValueError`: a file does not exist, is of another kind or cannot be read, or a folder has a file for another
            split only.
    """
    name = os.path.expanduser(dataset_name)
    folder = Path(name)
    files_of_split = [str(folder / f"{split}{ending}") for ending in _ENDINGS]
    for file in (name, *files_of_split):
        if is_single_file(file):
            return _read(Path(file))
    has_training_file = any((folder / f"train{ending}").is_file() for ending in _ENDINGS)
    if has_training_file or name.endswith(_ENDINGS):
        raise ValueError(f"dataset_name={name!r} does not exist, or is a folder without a file for {split=}.")
    if folder.is_file():
        raise ValueError(
            f"dataset_name={name!r} is a kind of file that is not read. "
            "Load it in a script of yours, and write its rows as JSON lines, to a file that ends in .jsonl."
        )
    if not _is_saved(folder):  # a name on the Hub, or a folder copied from there
        return load_dataset(name, dataset_config, split=split)
    saved = load_from_disk(name)
    if isinstance(saved, Dataset):  # saved without splits
        return saved
    if split not in saved:
        raise ValueError(f"dataset_name={name!r} has no {split=}, but {', '.join(saved)}.")
    return saved[split]


def is_single_file(dataset_name: str) -> bool:
    """Whether a dataset is one local file, which has no splits."""
    return dataset_name.endswith(_ENDINGS) and Path(os.path.expanduser(dataset_name)).is_file()


def files_of(folder: Path) -> list[Path]:
    """
    The JSON lines and parquet files in a local folder, ordered by name, without hidden ones. None if the folder is a
    dataset as a whole: with files of a split `train`, or made by `save_to_disk`.
    """
    training_files = [*folder.glob("train.*"), *folder.glob("train-*-of-*")]
    if training_files or _is_saved(folder):
        return []
    endings = (".jsonl", ".jsonl.gz", ".parquet")
    return sorted(file for file in folder.glob("[!.]*") if file.name.endswith(endings))


def _is_saved(folder: Path) -> bool:
    """Whether a folder was made by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read(file: Path) -> Dataset:
    """
    The rows of a parquet, table or JSON file, perhaps compressed, as a dataset; a column that a row lacks is `None`.
    A `ValueError` names a table or JSON file that is not valid, or has rows that are not objects.
    """
    if file.suffix == ".parquet":
        return Dataset(ParquetFile(file).read())
    content = file.read_bytes()
    if file.suffix == ".gz":
        content = gzip.decompress(content)
    try:
        text = content.decode("utf-8-sig")  # without the byte-order mark that programs on Windows write
        is_table = file.suffix in (".csv", ".tsv")
        rows = _table_rows(text, file.suffix) if is_table else _json_rows(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"dataset_name='{file}' cannot be read: {error}.") from error
    names: dict[str, None] = {}  # in the order in which they come
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(
                f"dataset_name='{file}' cannot be read: row {number} is {row!r:.60}. Write an object with columns."
            )
        names.update(dict.fromkeys(row))
    columns = {}
    for name in names:
        try:
            columns[name] = column([row.get(name) for row in rows])
        except UnicodeEncodeError as error:
            numbers = [number for number, row in enumerate(rows, 1) if _has_half_characters(row.get(name))]
            raise ValueError(
                f"dataset_name='{file}' cannot be read: {name!r} of row {numbers[0]} has half of a character, "
                rf"{error.object[error.start]!r}, where a text was cut off. Write \ufffd in its place."
            ) from error
    return Dataset.from_dict(columns)


def _has_half_characters(value: Any) -> bool:
    """Whether a value of a JSON file has a text with one half of a pair of surrogates, which is no character."""
    return re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)) is not None


def column(values: Sequence[Any]) -> pa.Array:
    """
    A column of a dataset, of which each value is read as it is here. Values of several types are JSON, and so are
    those that Arrow would change: each mapping would get the names of all others, in one order, and 1 beside 0.5 would
    be 1.0.
    """
    types = {type(value) for value in values}
    types.discard(type(None))
    if len(types) < 2:
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):  # raised by lists or mappings that hold several types
            array = pa.array(values)
            if types.isdisjoint((dict, list)) or _are_the_same(array, values):
                return array
    return _as_json(values)


def _are_the_same(array: pa.Array, values: Sequence[Any]) -> bool:
    """Whether lists and mappings are read from an array as they are, with their names in the same order."""
    return all(repr(read.as_py()) == repr(value) for read, value in zip(array, values, strict=True))


def _as_json(values: Sequence[Any]) -> pa.Array:
    # Encoded here: `Dataset.from_list(…, on_mixed_types="use_json")` would mistake the text "4" for the number 4.
    encoded = [None if value is None else json.dumps(value) for value in values]
    return pa.array(encoded, pa.json_())


def _table_rows(text: str, suffix: str) -> list[dict[str, Any]]:
    """
    The rows of a table with a header, all values as text. `suffix` is `".csv"` or `".tsv"`. A `csv.Error` for a row
    with more or fewer values than the header.
    """
    delimiter = "\t" if suffix == ".tsv" else ","
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    for row in table:
        # `DictReader` has surplus values under the name `None`, and `None` as each missing value.
        if None in row or None in row.values():
            raise csv.Error(f"line {table.line_num} does not have one value for each column. Put commas into quotes")
        rows.append(row)
    return rows


def _json_rows(text: str) -> list[Mapping[str, Any]]:
    """
    The values of JSON texts one after the other, as in JSON lines, or the items of one JSON list. Whether they are
    objects is not checked here. A `ValueError` says in which line a text begins that is not JSON.
    """
    decoder = json.JSONDecoder()
    rows = []
    start = _after_space(text, 0)
    while start < len(text):
        try:
            row, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # The error names a later line if a text is cut off, as JSON may have line breaks.
            line = text.count("\n", 0, start) + 1
            raise ValueError(f"{error}, in the text that begins in line {line}. Correct or remove it") from error
        rows.append(row)
        start = _after_space(text, end)
    if len(rows) == 1 and isinstance(rows[0], list):
        return rows[0]
    return rows


def _after_space(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()
