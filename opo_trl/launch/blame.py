"""Contexts that name the field whose library, or whose own code, has raised an error."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..rewards.errors import is_ctrl_c, told


@contextmanager
def library(
    what: str, fix: str = "`--debug` shows where.", *, own: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Name `what`, and a fix, in any error of a library in this context. Those of ours (`own`) name their field."""
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
