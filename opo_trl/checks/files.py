"""
Reading and writing files in a folder that may come from somebody else, such as the folder of a run.

The folder is the user's choice, and may be a link. What lies in it is not trusted: a file may be a link to a private
one, a pipe that never ends, gigabytes behind a megabyte of gzip, or JSON of another form. So every file of a run is
read and written here: regular files only, never through a link, and within limits. A file is replaced as a whole: a
process that is stopped leaves the old one or the complete new one.
"""

import errno
import gzip
import json
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .text import printable, quoted


LONGEST = 256 * 2**20  # bytes that are read into memory at once: a JSON file, or all lines of a log
_LONGEST_STREAM = 16 * 2**30  # bytes of a JSONL file that is read line by line
_LONGEST_LINE = 64 * 2**20
_MOST_LINES = 2**20  # that are kept in memory
_DEPTH = 64  # of lists and mappings in each other

# JSON leaves these characters as they are, and many readers end a line at them.
_LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})


@dataclass(frozen=True)
class Kind:
    """A kind of value in a JSON file, in words and as a test."""

    says: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


NUMBER = Kind("a number", _is_number)  # NaN is one
STEP = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 2**53)
SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and not (value < 0 or value > 1))
COUNT = Kind("a whole number, 1 or more", lambda value: type(value) is int and 0 < value < 2**53)
TEXT = Kind("text", lambda value: isinstance(value, str))
_LIST = Kind("a list", lambda value: isinstance(value, list))
_MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))

# What a file has to look like: a kind; a list with the form of its elements; or a mapping of names to forms, where
# "name?" may be missing or null, and "*" stands for all other names.
Form = Kind | list | Mapping[str, Any]

ENTRY: Mapping[str, Any] = {"step": STEP}  # a line of `log.jsonl` or `completions.jsonl`


# Reading


def read_text(path: Path) -> str:
    """Read a text file; empty if there is none."""
    return _read(path).decode("utf-8", "replace")


def read_json(path: Path, form: Form | None = None, *, linked: bool = False) -> dict[str, Any]:
    """
    Read a JSON file that holds a mapping; empty if there is no such file.

    `linked`: whether the file may be a link, as in the folder of a model. A `ValueError` names file and place if the
    file is not a mapping of this form.
    """
    content = _read(path, linked=linked, missing=b"{}")
    with _about(path):
        return parse(content, form or {})


def read_lines(path: Path, form: Form = ENTRY) -> list[dict[str, Any]]:
    """Read a JSONL file as a whole, like [`lines`]."""
    found = list(islice(lines(path, form, longest=LONGEST), _MOST_LINES + 1))
    if len(found) > _MOST_LINES:
        raise ValueError(f"{_named(path)} has more than {_MOST_LINES:,} lines, the limit.")
    return found


def lines(path: Path, form: Form = ENTRY, *, longest: int = _LONGEST_STREAM) -> Iterator[dict[str, Any]]:
    """
    The lines of a JSONL file, gzipped if its name ends with `.gz`, up to a last line that a kill has cut short.

    A `ValueError` names file and line if one is not a mapping of this form.
    """
    file = _opened(path, "rb")
    if file is None:
        return
    with file, _about(path):
        source: Any = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        for number, raw in enumerate(iter(lambda: source.readline(_LONGEST_LINE + 1), b""), 1):
            if len(raw) > _LONGEST_LINE:
                raise ValueError(f"line {number} is longer than {_LONGEST_LINE:,} bytes, the limit")
            if source.tell() > longest:
                raise ValueError(f"there are more than {longest:,} bytes in it, the limit")
            if not raw.strip():
                continue
            try:
                entry = parse(raw, form)
            except ValueError as error:
                if _is_cut_short(raw, error):
                    return
                raise ValueError(f"line {number}: {error}") from error
            yield entry


def _is_cut_short(raw: bytes, error: ValueError) -> bool:
    """Whether a kill has ended the last line before its end, or a crash of the machine has filled it with zeros."""
    if raw.endswith(b"\n"):
        return False
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data"
    return not raw.strip(b"\0") or (raw.startswith(b"{") and isinstance(error, json.JSONDecodeError))


def tail(path: Path, size: int = 2**16) -> str:
    """The last bytes of a text file, decoded; empty if there is none."""
    file = _opened(path, "rb")
    if file is None:
        return ""
    with file:
        file.seek(max(os.fstat(file.fileno()).st_size - size, 0))
        return file.read(size).decode("utf-8", "replace")


def _read(path: Path, *, linked: bool = False, missing: bytes = b"") -> bytes:
    file = _opened(path, "rb", linked=linked)
    if file is None:
        return missing
    with file:
        content = file.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise ValueError(f"{_named(path)} has more than {LONGEST:,} bytes, the limit.")
    return content


def _opened(path: Path, mode: Literal["rb", "ab"], *, linked: bool = False) -> BinaryIO | None:
    """Open a regular file; `None` if there is none to read."""
    # A pipe does not make this wait for its other end.
    more = os.O_NONBLOCK | (0 if linked else os.O_NOFOLLOW)
    try:
        file = open(path, mode, opener=lambda name, flags: os.open(name, flags | more, 0o666))  # noqa: SIM115
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    except (FileNotFoundError, NotADirectoryError):
        if mode == "rb":
            return None
        raise
    except OSError as error:
        # A link; a pipe or a socket; to read, a folder.
        if error.errno not in (errno.ELOOP, errno.ENXIO, *([errno.EISDIR] if mode == "rb" else [])):
            raise
    raise ValueError(f"{_named(path)} is a link, or not a regular file. Put the file itself there, or remove it.")


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Name the file in what is wrong with its content."""
    try:
        yield
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        said = str(error).rstrip(".")
        raise ValueError(f"{_named(path)} cannot be read: {said}. Restore that file, or remove it.") from error


def _named(path: Path) -> str:
    return repr(printable(str(path)))


def parse(content: bytes, form: Form) -> dict[str, Any]:
    """Parse JSON that holds a mapping; a `ValueError` if it does not, or is of another form."""
    text = content.decode("utf-8-sig")
    if not text.strip():
        raise ValueError("it is empty")
    try:
        parsed = json.loads(text)
        if _depth(parsed) > _DEPTH:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"lists and mappings are nested more than {_DEPTH} deep") from None
    _check_form(parsed, form, "")
    return parsed


def _depth(content: Any) -> int:
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return 1 + max(map(_depth, inner)) if inner else 0


def _check_form(content: Any, form: Form, place: str) -> None:
    kind = form if isinstance(form, Kind) else _LIST if isinstance(form, list) else _MAPPING
    if not kind.fits(content):
        raise ValueError(f"{place or 'it'} is {quoted(content)}, not {kind.says}")
    if isinstance(form, list):
        for number, element in enumerate(content):
            _check_form(element, form[0], f"{place}[{number}]")
    forms: Mapping[str, Any] = form if isinstance(form, Mapping) else {}
    for name, inner in forms.items():
        key = name.removesuffix("?")
        if name == "*":
            for other in content.keys() - forms.keys():
                _check_form(content[other], inner, f"{place}.{quoted(other)}")
        elif key == name and key not in content:
            raise ValueError(f"{place or 'it'} has no {name!r}")
        elif key == name or content.get(key) is not None:
            _check_form(content[key], inner, f"{place}.{key}".lstrip("."))


# Writing


def write(path: Path, content: str | bytes) -> None:
    """Replace a file, or create it. A link of that name is replaced, and what it points to stays as it is."""
    with replacing(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends: stopped at any time, old or new is complete."""
    part = path.with_name(f"_{path.name[:100]}.{secrets.token_hex(4)}.part")  # with "_": not pushed to the Hub
    with _writing(path):
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise


def sync(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk, as far as its file system can tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
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
    write(path, b"".join(map(_line, entries)))


def append_lines(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a JSONL file."""
    with _writing(path), open_to_append(path) as file:
        file.write(b"".join(map(_line, entries)))


def _line(entry: Mapping[str, Any]) -> bytes:
    written = json.dumps(entry, default=str, ensure_ascii=False).translate(_LINE_ENDS) + "\n"
    # JSON's own escape for half a surrogate pair, which UTF-8 cannot encode, is also Python's.
    return written.encode("utf-8", "backslashreplace")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file at its end, or create it."""
    file = _opened(path, "ab")
    assert file is not None
    return file


def rewind(path: Path, step: int) -> None:
    """Drop the lines of a JSONL file after `step`, which a resumed run will write again."""
    with replacing(path) as file:
        # A run that starts over needs to read nothing.
        file.writelines(_line(entry) for entry in (lines(path) if step >= 0 else ()) if entry["step"] <= step)


def inner_folder(folder: Path, name: str) -> Path:
    """A folder within a folder, created if there is none; a `ValueError` if a link or something else is there."""
    path = folder / name
    with suppress(FileExistsError):
        path.mkdir(parents=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise ValueError(f"{_named(path)} is a link or a file, not a folder. Remove it.")
    return path
