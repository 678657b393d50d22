"""Rewards that run in the training process: an error names the function that failed ([`RewardError`])."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from trl.trainer.utils import is_async_callable

from .scoring import IsolatedReward


if TYPE_CHECKING:
    from trl import GRPOTrainer


class RewardError(RuntimeError):
    """A reward function raised, or did not return one number or `None` per completion."""


_RETURN = "Return a list with one number, or None, for each completion."


def reward_list(reward_funcs: Any) -> list[Any] | None:
    """
    Check a trainer's `reward_funcs`, one reward or several, and return the same objects in a new list.

    Returns `None` for `None`, when environments give the rewards.

    Raises:
        `TypeError`: if one of them is not a function, another callable object, a reward model or the path of one.
    """
    if reward_funcs is None:
        return None
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for index, reward in enumerate(given):
        if inspect.isclass(reward):
            what, fix = "a class", f"an instance, such as {reward.__name__}()"
        elif not (isinstance(reward, str) or callable(reward)):
            what, fix = f"of type {type(reward).__name__}", "a function, a reward model or its path"
        else:
            continue
        place = f"[{index}]" if isinstance(reward_funcs, list | tuple) else ""
        raise TypeError(
            f"reward_funcs{place}={reward!r:.200} is {what}, not a reward. Pass {fix}, or a list of these."
        )
    return given


@contextmanager
def checked(trainer: "GRPOTrainer") -> Iterator[None]:
    """
    Within this context, failures of a trainer's reward functions raise a [`RewardError`] that names the function.

    The functions are wrapped only while TRL calls them; otherwise the trainer holds the user's own objects. Reward
    models and [`IsolatedReward`] always return numbers and are not wrapped.
    """
    given: list[Any] = trainer.reward_funcs
    trainer.reward_funcs = [
        reward
        if isinstance(reward, Module | IsolatedReward)
        else _checked(reward, name, is_async=is_async_callable(reward))
        for reward, name in zip(given, trainer.reward_func_names, strict=True)
    ]
    try:
        yield
    finally:
        trainer.reward_funcs = given


def _checked(reward: Callable[..., Any], name: str, *, is_async: bool) -> Callable[..., Any]:
    async def call_async(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = await reward(**inputs)
        return _numbers(name, scores, len(inputs["completions"]))

    def call(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = reward(**inputs)
        return _numbers(name, scores, len(inputs["completions"]))

    return call_async if is_async else call


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(
            f"The reward function {name} has raised {type(error).__name__}: {error}. Fix it; for completions that it "
            "cannot score, return None."
        ) from error


def _numbers(name: str, scores: Any, n_completions: int) -> list[float | None]:
    """Convert any ordered iterable, such as a generator or an array, to one number or `None` per completion."""
    if inspect.iscoroutine(scores):
        scores.close()
        raise RewardError(
            f"The reward function {name} has returned {scores!r}, which is never awaited. Define it with `async def`."
        )
    # TRL would accept the keys of a dictionary, a set in any order, and bytes as numbers.
    unordered = isinstance(scores, str | bytes | bytearray | Mapping | Set)
    if unordered or not isinstance(scores, Iterable) or getattr(scores, "ndim", 1) == 0:
        raise RewardError(f"The reward function {name} has returned {scores!r:.200}, not a list. {_RETURN}")
    with _naming(name):  # a generator runs only now, and may be infinite
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
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise RewardError(
            f"The reward function {name} has returned {value!r:.200} for completion {index}, of type "
            f"{type(value).__name__}. {_RETURN}"
        ) from None
