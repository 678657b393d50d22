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
    files = [Path(name), *(Path(name, f"{split}{ending}") for ending in _ENDINGS)]
    if file := next((file for file in files if is_single_file(str(file))), None):
        return _read(file)
    if name.endswith(_ENDINGS) or any(Path(name, f"train{ending}").is_file() for ending in _ENDINGS):
        raise ValueError(f"dataset_name={name!r} does not exist, or is a folder without a file for {split=}.")
    if Path(name).is_file():
        fix = "Load it in a script of yours, and write its rows as JSON lines, to a file that ends in .jsonl"
        raise ValueError(f"dataset_name={name!r} is a kind of file that is not read. {fix}.")
    if not _saved(Path(name)):
        return load_dataset(name, dataset_config, split=split)
    saved = load_from_disk(name)
    if not isinstance(saved, Dataset) and split not in saved:
        raise ValueError(f"dataset_name={name!r} has no {split=}, but {', '.join(saved)}.")
    return saved if isinstance(saved, Dataset) else saved[split]


def is_single_file(dataset_name: str) -> bool:
    """Whether a dataset is one local file, which has no splits."""
    return dataset_name.endswith(_ENDINGS) and Path(os.path.expanduser(dataset_name)).is_file()


def files_of(folder: Path) -> list[Path]:
    """
    The JSON lines and parquet files in a local folder, in order; none if it has a split `train`, or is the `datasets`
    library's.
    """
    if _saved(folder) or any(folder.glob("train.*")) or any(folder.glob("train-*-of-*")):
        return []
    return sorted(file for file in folder.glob("[!.]*") if file.name.endswith((".jsonl", ".jsonl.gz", ".parquet")))


def _saved(folder: Path) -> bool:
    """Whether a folder was made by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read(file: Path) -> Dataset:
    if file.suffix == ".parquet":
        return Dataset(ParquetFile(file).read())
    content = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
    try:
        text = content.decode("utf-8-sig")  # Windows writes a signature
        rows = _table_rows(text, file.suffix) if file.suffix in (".csv", ".tsv") else _json_rows(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"dataset_name='{file}' cannot be read: {error}.") from error
    if odd := [(number, row) for number, row in enumerate(rows, 1) if not isinstance(row, Mapping)]:
        number, row = odd[0]
        fix = "Write an object with columns"
        raise ValueError(f"dataset_name='{file}' cannot be read: row {number} is {row!r:.60}. {fix}.")
    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_dict({name: column([row.get(name) for row in rows]) for name in names})


def column(values: Sequence[Any]) -> pa.Array:
    """Values of one type as they are; of several as JSON, so that each keeps its own."""
    if len({type(value) for value in values} - {type(None)}) < 2:
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):  # lists or mappings of several types
            return pa.array(values)
    # Encoded here: `Dataset.from_list(…, on_mixed_types="use_json")` would mistake the text "4" for the number 4.
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.json_())


def _table_rows(text: str, suffix: str) -> list[dict[str, Any]]:
    """The rows of a table with a header, all values as text."""
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if suffix == ".tsv" else ",", strict=True)
    rows = []
    for row in table:
        if None in row or None in row.values():
            raise csv.Error(f"line {table.line_num} does not have one value for each column. Put commas into quotes")
        rows.append(row)
    return rows


def _json_rows(text: str) -> list[Mapping[str, Any]]:
    """The objects of JSON lines, or of a file that is one JSON list."""
    decoder, rows, end = json.JSONDecoder(), [], _SPACE.match(text).end()
    while end < len(text):
        row, end = decoder.raw_decode(text, end)
        rows.append(row)
        end = _SPACE.match(text, end).end()
    return rows[0] if len(rows) == 1 and isinstance(rows[0], list) else rows
