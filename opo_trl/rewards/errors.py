"""What a user's functions raise or return, checked and named in one line."""

import inspect
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ..checks.text import one_line, quoted


_RETURN = "Return a list with one number, or None, for each completion."


class RewardError(RuntimeError):
    """
    A reward function, a tool or an environment has failed: it raised what nothing handles, did not return one number
    or `None` per completion, or could not score too many completions.
    """


class CountingReward:
    """
    A reward that always returns numbers, and counts what it could not score in its last call. Trainers know
    [`IsolatedReward`] by this class, without importing what workers need.
    """

    timeouts = errors = 0


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Name a reward function if this context raises anything, even `SystemExit`, which would end a run silently."""
    try:
        yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise RewardError(
            f"The reward function {name} has raised {told(error)}. Fix it; for completions that it cannot score, "
            "return None."
        ) from cause_of(error)


def numbers(name: str, scores: Any, n_completions: int) -> list[float | None]:
    """Convert any ordered iterable, such as a generator or an array, to one number or `None` per completion."""
    if inspect.iscoroutine(scores):
        scores.close()
        raise RewardError(
            f"The reward function {name} has returned {quoted(scores)}, which is never awaited. Define it with `async "
            "def`."
        )
    # TRL would accept the keys of a dictionary, a set in any order, and bytes as numbers.
    unordered = isinstance(scores, str | bytes | bytearray | Mapping | Set)
    if unordered or not isinstance(scores, Iterable) or getattr(scores, "ndim", 1) == 0:
        raise RewardError(f"The reward function {name} has returned {quoted(scores)}, not a list. {_RETURN}")
    with naming(name):  # a generator runs only now, and may be infinite
        values = list(islice(scores, n_completions + 1))
    if len(values) != n_completions:
        count = len(scores) if isinstance(scores, Sized) else len(values)
        raise RewardError(
            f"The reward function {name} has returned {count} values for {n_completions} completions. {_RETURN}"
        )
    return [_number(name, value, index) for index, value in enumerate(values)]


def _number(name: str, value: Any, index: int) -> float | None:
    try:
        number = value.item() if hasattr(value, "ndim") else value  # of an array or tensor with one element
        if isinstance(number, str | bytes | bytearray):  # `float` would parse these
            raise TypeError
        return None if number is None else float(number)
    except Exception:
        raise RewardError(
            f"The reward function {name} has returned {quoted(value)} for completion {index}, of type "
            f"{type(value).__name__}. {_RETURN}"
        ) from None


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it is Python's own answer to Ctrl-C. `opo-trl train` answers in another way (`launch.signals`)."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def cause_of(error: BaseException) -> BaseException | None:
    """The cause to raise from: `contextlib` takes a `RuntimeError` from a `StopIteration` for that of a generator."""
    return None if isinstance(error, StopIteration) else error


def told(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    kind = type(error).__name__
    try:
        said = str(error).strip()
    except BaseException:  # a user's own `__str__`
        said = ""
    return one_line(f"{kind}: {said}" if said else kind)
