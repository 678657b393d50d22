"""What a user's reward functions raise or return."""

from typing import Any

from ..checks.text import one_line


class RewardError(RuntimeError):
    """
    A reward function has failed: it raised an error, did not return one number or `None` per completion, or could not
    score too many completions.
    """


class CountingReward:
    """
    A reward that always returns numbers, and counts what it could not score in its last call. Trainers know
    [`IsolatedReward`] by this class, without importing what workers need.
    """

    timeouts = errors = 0


def numbers(scores: Any, n_completions: int) -> list[float | None]:
    """
    Convert what a reward returns, a list, generator, array or tensor, to one number or `None` per completion. An error
    of another number of values, or of one that is no number.
    """
    values = [None if score is None else float(score) for score in scores]
    if len(values) != n_completions:  # PyTorch would give a single value to all completions
        raise ValueError(f"{len(values)} values for {n_completions} completions")
    return values


def error_text(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    kind = type(error).__name__
    message = str(error).strip()
    return one_line(f"{kind}: {message}" if message else kind)
