"""
Rows of a dataset as they are stored: in local files, in a folder made by the `datasets` library, or on the Hub.

Local files are not read by `load_dataset("json" | "parquet" | "csv")`, because that

- turns the text "4" into the number 4 in a JSON column with one number, a JSON column of dates into timestamps, and in
  CSV the text "007" into 7 and "NA" into nothing;
- counts lines from the last block of 10 MB, and names none where one is in another encoding or not an object;
- caches by modification time, so that a file replaced by one of the same age (`rsync -t`) comes from the cache.
"""

import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from datasets.utils.json import ujson_loads
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile

from ..checks.paths import absent, is_local, readable


logger = logging.getLogger(__name__)

_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv", ".tsv")
_OF_ROWS = (".jsonl", ".jsonl.gz", ".parquet")  # which hold nothing else

Row = Mapping[str, Any]


def load_rows(dataset_name: str, dataset_config: str | None = None, split: str = "train") -> Dataset:
    """
    Load a split with all of its columns.

    `dataset_name` is a local file (`.jsonl`, `.jsonl.gz`, `.json`, `.parquet`, `.csv` or `.tsv`; `split` is then
    ignored); a local folder: with a file `{split}` of one of these endings, tried in this order, made by
    `save_to_disk`, or copied from the Hub; or a dataset on the Hub. `dataset_config` is for the Hub, or such a copy.

    Raises:
        `ValueError`: it does not exist, cannot be read or has no such split.
    """
    source = local_file(dataset_name, split)
    return _load_with_library(dataset_name, dataset_config, split) if source is None else _read(source)


def is_single_file(dataset_name: str) -> bool:
    """Whether a dataset is one local file, which has no splits."""
    return dataset_name.endswith(_ENDINGS) and Path(os.path.expanduser(dataset_name)).is_file()


def files_of(folder: Path) -> list[Path]:
    """
    The files of rows in a local folder, in order; none if it has a split `train`, or is the `datasets` library's.

    In a folder with JSON lines or parquet, only those are read: other files usually hold settings. A warning names
    them.
    """
    with readable("dataset_name", folder):
        files = sorted(file for file in folder.glob("[!.]*") if not file.is_dir())
    candidates = [file for file in files if file.name.endswith(_ENDINGS)]
    splits = (file.name in _names("train") or re.match(r"train-\d+-of-", file.name) for file in candidates)
    if _saved(folder) or any(splits):
        return []
    rows = [file for file in candidates if file.name.endswith(_OF_ROWS)]
    rows = rows or ([] if _is_of_library(folder) else candidates)
    if rows and (others := [file.name for file in files if file not in rows]):
        named = ", ".join(others[:10]) + (", …" if len(others) > 10 else "")
        logger.warning(f"{str(folder)!r}: rows are read from {len(rows)} of {len(files)} files; not from {named}.")
    return rows


def _names(split: str) -> list[str]:
    return [f"{split}{ending}" for ending in _ENDINGS]


def _load_with_library(name: str, config: str | None, split: str) -> Dataset:
    name = os.path.expanduser(name)
    try:
        if not _saved(Path(name)):
            return load_dataset(name, config, split=split)
        saved = load_from_disk(name)
        if isinstance(saved, Dataset):
            return saved
        if split not in saved:
            raise ValueError(f"it has the splits {', '.join(saved)}")
        return saved[split]
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"dataset_name={name!r} with {split=} cannot be loaded: {error.__cause__ or error}. Set "
            "`dataset_name` to an existing folder or dataset on the Hub, and the split to one of its splits."
        ) from error


def _saved(folder: Path) -> bool:
    """Whether a folder was made by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _is_of_library(folder: Path) -> bool:
    return any(folder.glob("README.md")) or any(folder.rglob("*-of-*")) or _saved(folder)


def local_file(name: str, split: str) -> Path | None:
    """
    The local file that has a split of a dataset; `None` for what the `datasets` library finds and reads.

    Raises:
        `ValueError`: it is in no readable format, has no such split, or is a path that does not exist.
    """
    path = Path(os.path.expanduser(name))
    with readable("dataset_name", name):
        if path.is_file() and path.name.endswith(_ENDINGS):
            return path
        if path.is_dir():
            candidates = _names(split)
            if found := next(filter(Path.is_file, map(path.joinpath, candidates)), None):
                return found
            if _is_of_library(path):
                return None
            raise ValueError(
                f"dataset_name={name!r} is a folder without {split=}. Put one of {candidates} into it, or set another "
                "split."
            )
        if path.exists():
            raise ValueError(
                f"dataset_name={name!r} is not in a readable format. Convert it to one of {list(_ENDINGS)}."
            )
    if is_local(name) or name.endswith(_ENDINGS):
        raise absent("dataset_name", name, "Pass an existing file or folder, or a dataset on the Hub.")
    return None


def _read(file: Path) -> Dataset:
    with readable("dataset_name", file):  # so that an error below is one of its content
        file.open("rb").close()
    try:
        if file.suffix == ".parquet":
            table = ParquetFile(file).read()
            _check_names(table.column_names)
            return Dataset(table)
        text = _text((gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes()))
        rows = _table_rows(text, file.suffix) if file.suffix in (".csv", ".tsv") else _json_rows(text)
        if not rows:
            raise ValueError("it is empty. Restore or replace the file.")
        names = dict.fromkeys(name for row in rows for name in row)
        return Dataset.from_dict({name: column([row.get(name) for row in rows]) for name in names})
    except (ArrowInvalid, EOFError, OSError, zlib.error) as error:
        cause, said = error, f"{error}. It may be truncated: restore or replace the file."
    except (OverflowError, UnicodeEncodeError) as error:  # an integer of more than 64 bits; half a surrogate pair
        cause, said = error, f"{error}. Write larger integers as text or floats, and text in UTF-8."
    except ValueError as error:
        cause, said = error, str(error)
    raise ValueError(f"dataset_name='{file}' cannot be read: {said}") from cause


def column(values: Sequence[Any]) -> pa.Array:
    """Values of one type as they are; of several as JSON, so that each keeps its own."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) < 2:
        with suppress(ArrowInvalid, pa.ArrowTypeError):  # lists or mappings of several types
            return pa.array(values)
    # Encoded here: `Dataset.from_list(…, on_mixed_types="use_json")` would mistake the text "4" for the number 4.
    encoded = [None if value is None else json.dumps(value) for value in values]
    for text in filter(None, encoded):
        try:
            ujson_loads(text)
        except ValueError as error:
            raise OverflowError(f"{text:.60}: {error}") from error
    return pa.array(encoded, pa.json_())


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # Windows writes a signature
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not in UTF-8 ({error}). Save it as UTF-8.") from error


def _table_rows(text: str, suffix: str) -> list[Row]:
    """The rows of a table with a header, all values as text."""
    first = text.partition("\n")[0]
    delimiter = "\t" if suffix == ".tsv" else ";" if ";" in first and "," not in first else ","  # Excel's
    csv.field_size_limit(max(len(text), csv.field_size_limit()))
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    try:
        names = next(lines, [])
        _check_names(names)
        for values in filter(None, lines):
            if len(values) != len(names):
                raise csv.Error(f"it has {len(values)} values for {len(names)} columns")
            # The index that pandas writes has no name.
            rows.append({name: value for name, value in zip(names, values, strict=True) if name})
    except csv.Error as error:
        raise ValueError(
            f"line {lines.line_num}: {error}. Put values with commas, quotes or line breaks into quotes, and write a "
            "quote in them twice."
        ) from error
    return rows


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name, of {names}. Rename one.")


def _json_rows(text: str) -> list[Row]:
    """The rows of JSON lines, or of a file that is one JSON list."""
    is_list = text.lstrip().startswith("[")
    rows = {}
    for number, line in enumerate([text] if is_list else io.StringIO(text, newline=None), 1):
        try:
            if line.strip():
                rows[number] = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON ({error}). Fix that line.") from error
    if is_list:
        rows = dict(enumerate(rows[1], 1))
    for number, row in rows.items():
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is {row!r}, not an object. Write rows as `{{"column": value}}`.')
    return list(rows.values())
