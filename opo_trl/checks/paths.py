"""Paths that a user has written: whether there can be such a file or folder, before anything looks for it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# Of Linux, where no file system allows more; in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_EFFECTIVE = os.access in os.supports_effective_ids


def check_name(field: str, value: Any) -> None:
    """
    Check that a path can be the name of something.

    Raises:
        `ValueError`: it is empty, has a NUL in it, or is too long.
    """
    if value is None or not isinstance(value, str | os.PathLike):
        return
    text = os.fspath(value)
    shown = repr(text if len(text) <= 100 else f"{text[:100]}…")
    if not text.strip():
        raise ValueError(f"{field}={shown} is empty. Set `{field}` to a path, or leave it out.")
    if "\0" in text:
        raise ValueError(f"{field}={shown} has a NUL in it, which no path may have. Remove it from `{field}`.")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # which could not be written into the run's description
        raise ValueError(f"{field}={shown} is not text in UTF-8. Set `{field}` to another path.") from error
    longest = max(len(os.fsencode(part)) for part in text.split(os.sep))
    if longest > _LONGEST_NAME or len(os.fsencode(os.path.abspath(text))) > _LONGEST_PATH:
        raise ValueError(
            f"{field}={shown} is too long: a name has at most {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH}. "
            f"Shorten `{field}`."
        )


def hint_at_checkout(path: str | os.PathLike) -> str:
    """What to do about a path that is missing, if it looks like one in the source checkout; else nothing."""
    if Path(path).parts[:1] not in (("recipes",), ("benchmarks",)):
        return ""
    folder = Path(path).parts[0]
    return (
        f"`{folder}/` is a folder of the source checkout, which the installed package does not hold: get the source, "
        "and run this in its root, or pass the path from there."
    )


def is_file(field: str, path: str | os.PathLike) -> bool:
    """
    Whether there is a file.

    Raises:
        `ValueError`: it may not be looked for.
    """
    with readable(field, path):
        return Path(path).is_file()


@contextmanager
def readable(field: str, path: str | os.PathLike) -> Iterator[None]:
    """Say of a field what the file system says in this context, such as that a folder above grants no permission."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{field}={str(path)!r} cannot be read: {error}. Grant permission to read it, or set `{field}` to another "
            "path."
        ) from error


def check_folder(field: str, folder: str | os.PathLike) -> None:
    """
    Check that files can be written below a folder, which need not exist.

    Raises:
        `ValueError`: a file or a link to nothing is in its place or above it, it may not be written to, or it is in
            the home of a user who does not exist.
    """
    path = Path(os.path.expanduser(folder))  # as Transformers does, which leaves an unknown user's home as it is
    if path.parts[:1] and path.parts[0].startswith("~"):
        raise ValueError(
            f"{field}={str(folder)!r} cannot be written: there is no home {path.parts[0]!r}. Choose another `{field}`."
        )
    # `os.path` takes what it may not look at for absent, and so comes to the folder that forbids it.
    place = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE)):
        what = "is not a folder"
        if os.path.isdir(place):
            what = "grants no permission to write"
        elif not os.path.exists(place):
            what = "is a link that leads nowhere"
        raise ValueError(
            f"{field}={str(folder)!r} cannot be written: {str(place)!r} {what}. Choose another `{field}`."
        )


def check_json(field: str, value: Any) -> None:
    """
    Check a field that takes a mapping, as it is or as JSON, or the path of a JSON file.

    Raises:
        `ValueError`: it is neither.
    """
    if not isinstance(value, str) or not value:
        return
    text, what = value, "JSON"
    if not value.startswith("{"):
        check_name(field, value)
        if not is_file(field, value):
            raise ValueError(
                f"{field}={value!r} does not exist, as seen from {os.getcwd()!r}. Set `{field}` to a JSON file. "
                f"{hint_at_checkout(value)}".rstrip()
            )
        with readable(field, value):
            text, what = Path(value).read_text(encoding="utf-8", errors="replace"), "a JSON file"
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats)
    except ValueError as error:
        raise ValueError(f"{field}={value!r} is not {what}: {error}. Mend it there.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{field}={value!r} holds no mapping. Write it as `{{key: value}}`.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(f"it has the key {repeated!r} twice")
    return dict(pairs)
