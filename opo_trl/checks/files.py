"""
Files of a run, and of others' folders that reports read.

Reading is limited in size and depth, and names the file in what is wrong. A file is replaced as a whole: a process
that is stopped leaves the old one or the complete new one.
"""

import errno
import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO


LONGEST = 2**28  # bytes that are read of a file, unzipped


def read_text(path: Path) -> str:
    """Read a text file, gzipped if its name ends with `.gz`; empty if there is no such file."""
    if not path.is_file():  # a pipe would make this wait
        return ""
    with _about(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes, the limit")
    return content.decode("utf-8-sig", "replace")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping; empty if there is no such file."""
    text = read_text(path)
    with _about(path):
        return parse(text) if path.is_file() else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of mappings, up to a last line that a kill has cut short; empty if there is no such file."""
    found, lines = [], read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip("\0 \t\r"):  # zeros are what a crash of the machine may leave
            try:
                found.append(parse(line))
            except ValueError as error:
                if number == len(lines) and isinstance(error, json.JSONDecodeError):
                    break
                with _about(path):
                    raise ValueError(f"line {number}: {error}") from error
    return found


def parse(text: str) -> dict[str, Any]:
    """Parse JSON that holds a mapping; a `ValueError` if it does not, or is nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it holds {text.strip()[:40]!r}, not a mapping")
    return content


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Name the file in what is wrong with its content."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def write(path: Path, content: str | bytes) -> None:
    """Replace a file, or create it."""
    with replacing(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: stopped at any time, old or new is complete."""
    part = path.with_name(f"_{path.name}.part")  # with "_": not pushed to the Hub
    with _writing(path):
        part.unlink(missing_ok=True)
        try:
            with part.open("xb") as file:  # never through a link that somebody has put there
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            sync(path.parent)
        finally:
            part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can tell
            raise
    finally:
        os.close(descriptor)


def free(path: Path) -> Path:
    """The path if nothing is there, or else the first of `path-2`, `path-3` … that is free."""
    further = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(2))
    return next(each for each in chain([path], further) if not os.path.lexists(each))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file in an error of the file system, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    write(path, json.dumps(content, indent=2, default=str) + "\n")


def write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    write(path, _lines(entries))


def append_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a JSONL file."""
    with _writing(path), path.open("ab") as file:
        file.write(_lines(entries).encode())


def _lines(entries: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(entry, default=str)}\n" for entry in entries)
