"""Paths that a user has written: whether there can be such a file or folder, before anything looks for it."""

import json
import os
from pathlib import Path
from typing import Any


# Of Linux, where no file system allows more; in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


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


def check_folder(field: str, folder: str | os.PathLike) -> None:
    """
    Check that files can be written below a folder, which need not exist.

    Raises:
        `ValueError`: a file is in its place or above it, or it may not be written to.
    """
    path = Path(folder).expanduser()
    place = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        what = "grants no permission to write" if place.is_dir() else "is not a folder"
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
        if not Path(value).is_file():
            raise ValueError(
                f"{field}={value!r} does not exist, as seen from {os.getcwd()!r}. Set `{field}` to a JSON file. "
                f"{hint_at_checkout(value)}".rstrip()
            )
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
