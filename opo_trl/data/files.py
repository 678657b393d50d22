"""
Rows of a dataset as they are stored: in local files, in a folder made by the `datasets` library, or on the Hub.

Local files are read here: `load_dataset` turns the text 007 of a table into 7 and NA into nothing, and in JSON the
text "4" beside the number 4 into one type; it also takes a replaced file of the same age from its cache.
"""

import csv
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
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
    file = local_file(dataset_name, split)
    if file is not None:
        return _read(file)
    name = os.path.expanduser(dataset_name)
    try:
        if not _saved(Path(name)):
            return load_dataset(name, dataset_config, split=split)
        saved = load_from_disk(name)
        return saved if isinstance(saved, Dataset) else saved[split]
    except (KeyError, OSError, ValueError, DatasetGenerationError) as error:
        raise ValueError(
            f"dataset_name={name!r} with {split=} cannot be loaded: {error.__cause__ or error}. Set "
            "`dataset_name` to an existing folder or dataset on the Hub, and the split to one of its splits."
        ) from error


def is_single_file(dataset_name: str) -> bool:
    """Whether a dataset is one local file, which has no splits."""
    return dataset_name.endswith(_ENDINGS) and Path(os.path.expanduser(dataset_name)).is_file()


def files_of(folder: Path) -> list[Path]:
    """
    The JSON lines and parquet files in a local folder, in order; none if it has a split `train`, or is the `datasets`
    library's. A warning names the files that are not read.
    """
    with readable("dataset_name", folder):
        files = sorted(file for file in folder.glob("[!.]*") if not file.is_dir())
    rows = [file for file in files if file.name.endswith(_OF_ROWS)]
    if _saved(folder) or any(file.name in _names("train") or file.match("train-*-of-*") for file in files):
        return []
    if rows and (others := ", ".join(file.name for file in files if file not in rows)):
        logger.warning(f"{str(folder)!r}: rows are read from {len(rows)} of {len(files)} files; not from {others}.")
    return rows


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
            if found := next(filter(Path.is_file, map(path.joinpath, _names(split))), None):
                return found
            if (path / "README.md").exists() or any(path.rglob("*-of-*")) or _saved(path):
                return None
            fix = f"Put one of {_names(split)} into it, or set another split"
            raise ValueError(f"dataset_name={name!r} is a folder without {split=}. {fix}.")
        if path.exists():
            fix = f"Convert it to one of {list(_ENDINGS)}"
            raise ValueError(f"dataset_name={name!r} is not in a readable format. {fix}.")
    if is_local(name) or name.endswith(_ENDINGS):
        raise absent("dataset_name", name, "Pass an existing file or folder, or a dataset on the Hub.")
    return None


def _names(split: str) -> list[str]:
    return [f"{split}{ending}" for ending in _ENDINGS]


def _saved(folder: Path) -> bool:
    """Whether a folder was made by `save_to_disk`."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _read(file: Path) -> Dataset:
    with readable("dataset_name", file):  # so that an error below is one of its content
        file.open("rb").close()
    cause: Exception
    try:
        if file.suffix == ".parquet":
            return Dataset(ParquetFile(file).read())
        content = (gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes())
        text = content.decode("utf-8-sig")  # Windows writes a signature
        rows = _table_rows(text, file.suffix) if file.suffix in (".csv", ".tsv") else _json_rows(text)
        if not rows:
            raise ValueError("it is empty. Restore or replace the file")
        names = dict.fromkeys(name for row in rows for name in row)
        return Dataset.from_dict({name: column([row.get(name) for row in rows]) for name in names})
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        cause, said = error, f"line {line} is not in UTF-8 ({error}). Save it as UTF-8"
    except (pa.ArrowInvalid, EOFError, OSError, zlib.error) as error:
        cause, said = error, f"{error}. It may be truncated: restore or replace the file"
    except (OverflowError, ValueError) as error:
        cause, said = error, str(error)
    raise ValueError(f"dataset_name='{file}' cannot be read: {said}.") from cause


def column(values: Sequence[Any]) -> pa.Array:
    """Values of one type as they are; of several as JSON, so that each keeps its own."""
    if len({type(value) for value in values} - {type(None)}) < 2:
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):  # lists or mappings of several types
            return pa.array(values)
    # Encoded here: `Dataset.from_list(…, on_mixed_types="use_json")` would mistake the text "4" for the number 4.
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.json_())


def _table_rows(text: str, suffix: str) -> list[Row]:
    """The rows of a table with a header, all values as text."""
    header = text.partition("\n")[0]
    delimiter = "\t" if suffix == ".tsv" else ";" if ";" in header and "," not in header else ","  # Excel's
    csv.field_size_limit(max(len(text), csv.field_size_limit()))
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[Row] = []
    try:
        names = table.fieldnames or []
        if len(set(names)) < len(names):
            raise csv.Error(f"two columns have one name, of {names}")
        for row in table:
            if None in row or None in row.values():
                raise csv.Error(f"it does not have {len(names)} values, one for each column")
            row.pop("", None)  # the index that pandas writes
            rows.append(row)
    except csv.Error as error:
        fix = "Put values with commas, quotes or line breaks into quotes, and write a quote in them twice"
        raise ValueError(f"line {table.line_num}: {error}. {fix}") from error
    return rows


def _json_rows(text: str) -> list[Row]:
    """The rows of JSON lines, or of a file that is one JSON list."""
    is_list = text.lstrip().startswith("[")
    rows = []
    for number, line in enumerate([text] if is_list else text.split("\n"), 1):
        try:
            if line.strip():
                rows.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON ({error}). Fix that line") from error
    rows = [*enumerate(rows[0][1], 1)] if is_list else rows
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is {row!r}, not an object. Write rows as `{{"column": value}}`')
    return [row for _, row in rows]
