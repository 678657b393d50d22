"""Contexts that name the field behind an error, which a library or the user's own code has raised."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..rewards.errors import is_ctrl_c, told


@contextmanager
def library(
    what: str, fix: str = "`--debug` shows where.", *, own: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """
    Name `what`, and a fix, in any error that a library raises in this context.

    `own` are errors of ours, which name their field already.
    """
    try:
        yield
    except own:
        raise
    except Exception as error:
        said = str(error).strip().rstrip(".") or "no message"
        raise ValueError(f"{what}: {type(error).__name__}: {said}. {fix}") from error


@contextmanager
def own_code(what: str, fix: str) -> Iterator[None]:
    """Name `what`, and a fix, in whatever a user's own code raises in this context; it may also exit."""
    try:
        yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ValueError(f"{what} ({told(error)}). {fix}") from error
