"""Errors of a user's functions, in one line that names the function."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


LONGEST = 200  # characters of what others have written, in a message


class RewardError(RuntimeError):
    """
    A reward function, a tool or an environment has failed: it raised what nothing handles, did not return one number
    or `None` per completion, or could not score too many completions.
    """


@contextmanager
def naming(what: str, fix: str) -> Iterator[None]:
    """
    Raise a [`RewardError`] for whatever is raised in this context, including `SystemExit`, which would end a run
    without a word.
    """
    try:
        yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RewardError(f"{what} has raised {told(error)}. {fix}") from error


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it is Python's own answer to Ctrl-C. `opo-trl train` answers in another way (`launch.signals`)."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def told(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    kind = type(error).__name__
    said = _written(str, error).strip()
    return _line(f"{kind}: {said}" if said else kind)


def shown(value: object) -> str:
    """A value as Python shows it, in one line."""
    return _line(_written(repr, value))


def _written(how: Callable[[object], str], value: object) -> str:
    try:
        return how(value)
    except BaseException:  # a user's own `__str__` or `__repr__`
        return ""


def _line(text: str) -> str:
    """At most [`LONGEST`] characters, without any that a terminal obeys."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
