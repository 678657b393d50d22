"""Check paths from recipes and command lines before anything opens them."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# Linux's limits, in bytes.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_EFFECTIVE = os.access in os.supports_effective_ids


def check_name(field: str, value: Any) -> None:
    """Check that a path is a possible name: not empty, not too long, and UTF-8 without a NUL."""
    if not isinstance(value, str | os.PathLike):
        return
    text = os.fspath(value)
    content = os.path.abspath(text).encode(errors="replace")
    is_long = len(content) > _LONGEST_PATH or max(map(len, content.split(b"/"))) > _LONGEST_NAME
    problems = {
        "is empty. Set `{}` to a path, or leave it out": not text.strip(),
        "contains a NUL character, which no path can. Remove it from `{}`": "\0" in text,
        # It could not be saved in the run folder.
        "is not valid UTF-8. Set `{}` to another path": text != text.encode(errors="replace").decode(),
        f"is too long: a name may have {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}. Shorten `{{}}`": is_long,
    }
    for problem in (problem for problem, holds in problems.items() if holds):
        shown = repr(text if len(text) <= 100 else f"{text[:100]}…")
        raise ValueError(f"{field}={shown} {problem.format(field)}.")


def path(text: str) -> Path:
    """A path on the command line, for `argparse`; `~` is the home folder, which no shell replaces after a `=`."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty. Pass a path, or leave the option out")
    return Path(os.path.expanduser(text))


def is_local(name: str) -> bool:
    """Whether a name can only be that of a file or folder. On the Hub it is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def absent(field: str, path: str | os.PathLike, fix: str) -> ValueError:
    """What to say of a path that does not exist; the `fix`, unless [`hint_at_checkout`] knows a better one."""
    seen = f"{field}={str(path)!r} does not exist, as seen from {os.getcwd()!r}"
    return ValueError(f"{seen}. {hint_at_checkout(path) or fix}")


def hint_at_checkout(path: str | os.PathLike) -> str:
    """The fix for a missing path that looks like one of the package's recipes, or of the source; otherwise empty."""
    path = Path(path)
    if path.parts[:1] == ("recipes",):
        within = path.relative_to("recipes")
        if (Path(__file__).parents[1] / path).is_file():
            return f"It is one of the package's recipes: `opo-trl recipes {within}` copies it to here."
        return "`opo-trl recipes` lists the package's recipes, and copies them to `recipes/`."
    if path.parts[:1] == ("benchmarks",):
        return (
            "`benchmarks/` is part of the source checkout, not of the installed package: get the source and run this "
            "command in its root, or pass the path of that file."
        )
    return ""


def check_file(field: str, path: str | os.PathLike, fix: str) -> None:
    """Check that a path is one of a file."""
    check_name(field, path)
    if not is_file(field, path):
        raise absent(field, path, fix)


def is_file(field: str, path: str | os.PathLike) -> bool:
    """Whether a path is a file, which needs permission to look."""
    with readable(field, path):
        return Path(path).is_file()


@contextmanager
def readable(field: str, path: str | os.PathLike) -> Iterator[None]:
    """Report a file system error in this context by field, such as a missing permission on a parent folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{field}={str(path)!r} cannot be read: {error}. Grant permission to read it, or set `{field}` to another "
            "path."
        ) from error


def check_folder(field: str, folder: str | os.PathLike) -> None:
    """Check that files can be written in a folder, which need not exist."""
    check_name(field, folder)
    path = Path(os.path.expanduser(folder))  # as Transformers does; an unknown user's home stays as it is
    # `os.path` reports what it may not see as missing, so this ends at the folder that denies permission.
    place = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    if str(path).startswith("~"):
        problem = f"there is no home directory {path.parts[0]!r}"
    elif not os.path.isdir(place):
        problem = f"{str(place)!r} is {'not a folder' if os.path.exists(place) else 'a broken link'}"
    elif not os.access(place, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE):
        problem = f"{str(place)!r} grants no permission to write"
    else:
        return
    raise ValueError(f"{field}={str(folder)!r} cannot be written: {problem}. Choose another `{field}`.")


def check_json(field: str, value: Any) -> None:
    """Check a field that takes a mapping, the same as JSON text, or the path of a JSON file."""
    if not isinstance(value, str) or not value:
        return
    text, what = value, "JSON"
    if not value.startswith("{"):
        check_file(field, value, f"Set `{field}` to a JSON file.")
        with readable(field, value):
            text, what = Path(value).read_text(encoding="utf-8", errors="replace"), "a JSON file"
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}={value!r} is not {what}: {error}. Fix it there.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{field}={value!r} is not a mapping. Write it as `{{key: value}}`.")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"duplicate key {duplicates[0]!r}")
    return dict(pairs)
