"""Text, JSON and JSON lines: a file is replaced as a whole, and an error of reading names it."""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """Read a text file, gzipped if its name ends with `.gz`; empty if there is no such file."""
    if not path.is_file():  # a pipe would make this wait
        return ""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig", "replace")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a mapping; empty if there is no such file."""
    try:
        return parse(read_text(path)) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file of mappings, up to a last line that a kill has cut short; empty if there is no such file."""
    found, lines = [], read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found += [parse(line)] if line.strip("\0 \t\r") else []  # zeros are what a crash of the machine may leave
        except ValueError as error:
            if number < len(lines) or not isinstance(error, json.JSONDecodeError):
                raise ValueError(f"{str(path)!r} cannot be read: line {number}: {error}") from error
    return found


def parse(text: str) -> dict[str, Any]:
    """Parse JSON that holds a mapping; a `ValueError` if it does not."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"it holds {text.strip()[:40]!r}, not a mapping")
    return content


def write(path: Path, content: str | bytes) -> None:
    """Replace a file, or create it: stopped at any time, the old one or the new one is complete."""
    part = path.with_name(f"_{path.name}.part")  # with "_": not pushed to the Hub
    try:
        with part.open("wb") as file:
            file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
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
    further = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], further) if not os.path.lexists(each))


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
