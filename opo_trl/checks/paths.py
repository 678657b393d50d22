"""Check paths from recipes and command lines before anything opens them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_local(name: str) -> bool:
    """Whether a name can only be that of a file or folder. On the Hub it is `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def absent(field: str, path: str | os.PathLike, fix: str) -> ValueError:
    """What to say of a path that does not exist, and the `fix`."""
    return ValueError(f"{field}={str(path)!r} does not exist, as seen from {os.getcwd()!r}. {fix}")


def check_file(field: str, path: str | os.PathLike, fix: str) -> None:
    """Check that a path is one of a file."""
    with readable(field, path):
        if not Path(path).is_file():
            raise absent(field, path, fix)


@contextmanager
def readable(field: str, path: str | os.PathLike) -> Iterator[None]:
    """Report a file system error in this context by field, such as a missing permission on a parent folder."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{field}={str(path)!r} cannot be read: {error}. Set `{field}` to another path.") from error


def check_folder(field: str, folder: str | os.PathLike) -> None:
    """Check that files can be written in a folder, which need not exist."""
    path = Path(os.path.expanduser(folder)).absolute()
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    effective = os.access in os.supports_effective_ids
    if not (os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK, effective_ids=effective)):
        said = f"{str(place)!r} is not a folder, or grants no permission to write"
        raise ValueError(f"{field}={str(folder)!r} cannot be written: {said}. Choose another `{field}`.")
