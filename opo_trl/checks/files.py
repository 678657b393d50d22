"""Text, JSON and JSON lines: a file is replaced as a whole, and an error of reading names it."""

import errno
import gzip
import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


# What is read of a file at most, unzipped: the log of 50,000 steps, of 1.3 kB each. As Python's objects, hostile text
# takes 40 times its size, up to 3 GB; and a row of two bytes 500 bytes, so that lines have a bound of their own.
MOST_BYTES = 2**26
MOST_LINES = 2**21


def read_text(path: Path, *, follow: bool = False, bounded: bool = True) -> str:
    """
    Read a text file, gzipped if its name ends with `.gz`; empty if there is no such file.

    Its folder may be somebody else's, in which a link leads to a private file, a pipe never ends, and two megabytes
    unzip to gigabytes. `follow`: the path may be a link, because the user has named it, or the folder is a run's own.
    `bounded`: read at most [`MOST_BYTES`] and [`MOST_LINES`].

    Raises:
        `ValueError`: the file is a link, no regular file, too large, or cannot be unzipped.
    """
    extra_flags = os.O_NONBLOCK  # or a pipe would make this wait for its writer
    if not follow:
        extra_flags |= os.O_NOFOLLOW
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra_flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{str(path)!r} is not a regular file. Remove it.")
            source = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            content = source.read(MOST_BYTES + 1 if bounded else -1)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} cannot be unzipped: {error}") from error
    except OSError as error:
        if error.errno != errno.ELOOP:  # the error of opening a link with `O_NOFOLLOW`
            raise
        raise ValueError(f"{str(path)!r} is a link, which may lead to any file. Put the file itself there.") from error
    if bounded and (len(content) > MOST_BYTES or content.count(b"\n") > MOST_LINES):
        raise ValueError(
            f"{str(path)!r} holds more than {MOST_BYTES // 2**20} MiB or {MOST_LINES:,} lines, "
            "the most that are read. Leave entries out."
        )
    return content.decode("utf-8-sig", "replace")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping; empty if there is no such file."""
    text = read_text(path)
    try:
        return parse(text) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def read_lines(path: Path, *, follow: bool = False, bounded: bool = True) -> list[dict[str, Any]]:
    """Read a JSONL file of mappings, up to a last line that a kill has cut short; empty if there is no such file."""
    entries = []
    lines = read_text(path, follow=follow, bounded=bounded).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip("\0 \t\r"):  # zeros are what a crash of the machine may leave
            continue
        try:
            entries.append(parse(line))
        except ValueError as error:
            is_cut_short = number == len(lines) and isinstance(error, json.JSONDecodeError)
            if not is_cut_short:
                raise ValueError(f"{str(path)!r} cannot be read: line {number}: {error}") from error
    return entries


def parse(text: str) -> dict[str, Any]:
    """Parse JSON that holds a mapping; a `ValueError` if it does not."""
    content = loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {text.strip()[:40]!r}, not a mapping")
    return content


def loads(text: str) -> Any:
    """Parse JSON of any form; a `ValueError` also if it is nested too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def write(path: Path, content: str | bytes) -> None:
    """Replace a file, or create it: stopped at any time, the old one or the new one is complete."""
    part = path.with_name(f"_{path.name}.part")  # with "_": not pushed to the Hub
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        part.unlink(missing_ok=True)  # that of a killed process; or a link, through which this would write
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:  # such as that of a full disk, which names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def free(path: Path) -> Path:
    """The path if nothing is there, or else the first of `path-2`, `path-3` … that is free."""
    candidate = path
    number = 1
    while os.path.lexists(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file."""
    write(path, json.dumps(content, indent=2, default=str) + "\n")


def write_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSONL file."""
    write(path, _lines(entries))


def append_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a JSONL file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(entries))


def _lines(entries: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(entry, default=str)}\n" for entry in entries)
