"""
Rewards that cannot take the run down: [`IsolatedReward`] scores each completion in a worker process. A function that
scores in the training process can, and then says so by its name ([`RewardError`]).

What a model under training writes can make a scorer hang in native code, fill the memory or end its process. In a
worker that costs one completion its score, and the run nothing.

Workers come from a fork server, which is started clean and imports the reward's module once: neither threads nor CUDA
of the training process are forked, a killed worker is replaced at once, and all of them hash strings alike, on which
the order of sets depends. They never import the script that is run. Python has one fork server for a process: where
something else has started it before, workers hold what that has imported as well.
"""

import inspect
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool


if TYPE_CHECKING:
    from trl import GRPOTrainer


logger = logging.getLogger(__name__)

START_LIMIT = 120  # seconds that a worker may take to start, imports from a slow file system included

# Then a worker is replaced: math-verify's parser remembers 2 to 10 kB of each answer, which in days reaches the limit.
# A new one scores its first 1,000 completions a fifth slower.
COMPLETIONS_OF_A_WORKER = 10_000

# MiB. With 60, math-verify takes right answers for none, without a word; with 384, 10,000 boxes no longer fit.
LEAST_MEMORY = 512

Row = dict[str, list[Any]]  # what the reward function is called with for one completion

_TIMED_OUT = object()

# A scheduler that wants a job to save and end tells all of its processes, workers and fork server, too: not their
# completion's fault. 255 stands for whatever code, where the fork server is gone.
_TOLD_TO_END = (-signal.SIGTERM, 255)
_hiding = threading.Lock()


class RewardError(RuntimeError):
    """A reward function has raised, or has not returned one number, or `None`, for each completion."""


_RETURN = "Let it return a list of one number, or None, for each completion."


def reward_list(reward_funcs: Any) -> list[Any] | None:
    """
    What a trainer was given as `reward_funcs`, as a new list.

    Args:
        reward_funcs:
            A reward, or a list or tuple of rewards: functions, other callable objects, reward models or their paths.

    Returns:
        `list` or `None`: the same objects; `None` for `None`, where environments give the rewards.

    Raises:
        `TypeError`: names what is no reward.
    """
    if reward_funcs is None:
        return None
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    for index, reward in enumerate(given):
        if inspect.isclass(reward):
            what, fix = "a class", f"an object of it, such as {reward.__name__}()"
        elif not (isinstance(reward, str) or callable(reward)):
            what, fix = f"of type {type(reward).__name__}", "a function, a reward model or the path of one"
        else:
            continue
        place = f"[{index}]" if isinstance(reward_funcs, list | tuple) else ""
        raise TypeError(f"reward_funcs{place}={reward!r:.200} is {what}, not a reward. Pass {fix}, or a list of such.")
    return given


@contextmanager
def checked(trainer: "GRPOTrainer") -> Iterator[None]:
    """
    Within this context, a trainer's reward functions say by name what is wrong with them: [`RewardError`].

    Only while TRL calls them are they wrapped: at any other time the trainer holds the objects that it was given.
    Reward models and [`IsolatedReward`] give numbers, and are left alone.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer whose `reward_funcs` are about to be called.
    """
    # Workers import this module, and need neither.
    from torch.nn import Module
    from trl.trainer.utils import is_async_callable

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
            f"The reward function {name} has raised {type(error).__name__}: {error}. Fix it; where it cannot score "
            "a completion, let it return None for that one."
        ) from error


def _numbers(name: str, scores: Any, n_completions: int) -> list[float | None]:
    """One number, or `None`, for each completion, of whatever has them in an order: also a generator or an array."""
    if inspect.iscoroutine(scores):
        scores.close()
        raise RewardError(
            f"The reward function {name} has returned {scores!r}, which nobody awaits. Define it with `async def`."
        )
    # TRL would take the keys of a dictionary, a set in any order, and bytes for numbers.
    unordered = isinstance(scores, str | bytes | bytearray | Mapping | Set)
    if unordered or not isinstance(scores, Iterable) or getattr(scores, "ndim", 1) == 0:
        raise RewardError(f"The reward function {name} has returned {scores!r:.200}, not a list. {_RETURN}")
    with _naming(name):  # a generator runs only here, and may have no end
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
        if isinstance(number, str | bytes | bytearray):  # which `float` would read
            raise TypeError
        return None if number is None else float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise RewardError(
            f"The reward function {name} has returned {value!r:.200} for completion {index}, of type "
            f"{type(value).__name__}. {_RETURN}"
        ) from None


class IsolatedReward:
    """
    A reward function that scores each completion in a worker process, with limits on time and memory.

    It is a reward function itself, for `reward_funcs` of any trainer of TRL's. [`RolloutTrainer`] and [`OPOTrainer`]
    log what could not be scored as well, and end the run when it is too much (`max_reward_failure_rate`).

    A completion that takes longer than the limit, exceeds the memory, ends its worker or makes the function raise
    scores `None`: it is unscorable, not wrong, and takes no part in training (where other reward functions do score
    it, TRL counts the missing one as 0). The worker is killed, wherever it hangs, and replaced. One warning per call
    counts such completions and shows the first one's error.

    TRL 1.16 calls a reward function once per rollout, with all completions of the process and after the last one is
    there. So completions are scored in parallel with each other, and not while others are still being generated.

    Args:
        reward (`Callable`):
            Reward function as TRL calls them, which scores each completion by itself: it is called with lists of one
            completion and its columns, and without `trainer_state`, `log_extra` and `log_metric`. It must be
            importable from a module other than the script that is run; columns must be picklable.
        workers (`int`, *optional*, defaults to `4`):
            Number of worker processes, at least 1. They start at the first call, and end with this process, with
            [`close`], or when this object is no longer used.
        timeout (`float`, *optional*, defaults to `30.0`):
            Wall-clock limit for one completion in seconds, positive. `accuracy_reward` gives up by itself after 20
            seconds of processor time at most, unless it hangs in native code.
        memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate in MiB, at least 512: Linux's RLIMIT_DATA, which unlike the address space
            does not count the libraries' code. Without effect on macOS.

    Attributes:
        timeouts (`int`), errors (`int`):
            Completions of the last call that were not scored in time; and that raised, ran out of memory or ended
            their worker. One that ends it at once may count as not in time: the pool has not yet noticed who had it.

    Raises:
        `ValueError`: a limit out of its range, or a function that cannot be sent to a worker.
        `RuntimeError`: when called, the workers cannot start.

    Example:

    ```python
    >>> reward = IsolatedReward(accuracy_reward, workers=8)
    >>> reward([r"So \\boxed{\\frac12}.", r"So \\boxed{2}."], solution=["0.5", "0.5"])
    [1.0, 0.0]
    ```
    """

    def __init__(self, reward: Callable[..., Any], *, workers: int = 4, timeout: float = 30.0, memory: int = 2048):
        for name, value in (("workers", workers), ("timeout", timeout)):
            if not value > 0:
                raise ValueError(f"{name}={value} is not allowed. Set `{name}` to a positive number.")
        if not memory >= LEAST_MEMORY:
            raise ValueError(f"memory={memory} is not allowed. Set `memory` to {LEAST_MEMORY} or more.")
        try:
            with _without_main():
                pickle.dumps(reward)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward={reward!r} cannot be sent to a worker process ({error}). Pass a function that is defined at "
                "the top level of a module other than the script that is run, and under its own name."
            ) from error
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        self.reward, self.workers, self.timeout, self.memory = reward, workers, timeout, memory
        self.timeouts = self.errors = 0
        self._pool: ProcessPool | None = None
        self._end: Callable[[], Any] = lambda: None

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        n = len(completions)
        columns = {name: c for name, c in columns.items() if isinstance(c, list | tuple) and len(c) == n}
        columns["completions"] = completions
        outcomes = list(self._outcomes([{name: [c[i]] for name, c in columns.items()} for i in range(n)]))
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        self.timeouts = sum(outcome is _TIMED_OUT for outcome in outcomes)
        self.errors = len(errors)
        if self.timeouts or errors:
            first = f", the first one with {errors[0].strip()}" if errors else ""
            logger.warning(
                f"{self.__name__} could not score {self.timeouts + len(errors)} of {n} completions: {self.timeouts} "
                f"took longer than {self.timeout} seconds, {len(errors)} failed{first}."
            )
        return [outcome if isinstance(outcome, float) else None for outcome in outcomes]

    def close(self) -> None:
        """End the workers. Another call starts new ones."""
        self._end()

    def _outcomes(self, rows: list[Row]) -> Iterator[Any]:
        """Each row's score, `_TIMED_OUT`, or what went wrong as a string."""
        futures = self._schedule(rows)
        for i in range(len(rows)):
            for tries in (1, 2):
                try:
                    # Rows start in this order, so that this one is next when those before it are done.
                    outcome = futures[i].result(self.timeout + START_LIMIT)
                except ProcessExpired as error:
                    outcome = f"its worker ending with code {error.exitcode}"
                    if error.exitcode in _TOLD_TO_END and tries == 1:
                        futures[i : i + 1] = self._schedule(rows[i : i + 1])
                        continue
                except (BrokenProcessPool, CancelledError, TimeoutError) as error:
                    outcome = _TIMED_OUT
                    if not (isinstance(error, TimeoutError) and futures[i].done()):
                        # A worker that dies at once, before the pool knows what it works on, breaks the pool. It need
                        # not be this row's, which is therefore tried again.
                        outcome = "its workers ending"
                        self.close()
                        futures[i + tries - 1 :] = self._schedule(rows[i + tries - 1 :])
                        continue
                break
            yield outcome

    def _schedule(self, rows: list[Row]) -> list[ProcessFuture]:
        cpu_seconds = self.timeout * (os.cpu_count() or 1)
        return [
            self._running().schedule(_score, (self.reward, row, cpu_seconds), timeout=self.timeout) for row in rows
        ]

    def _running(self) -> ProcessPool:
        if self._pool is not None and self._pool.active:
            return self._pool
        self.close()
        context = _Context()
        context.set_forkserver_preload([__name__, getattr(self.reward, "__module__", __name__)])
        self._pool = pool = ProcessPool(
            self.workers,
            COMPLETIONS_OF_A_WORKER,
            initializer=_limit,
            initargs=(self.memory, self.reward),
            context=context,
        )
        self._end = weakref.finalize(self, _stop, pool)
        try:
            pool.schedule(_ready).result(START_LIMIT)
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise RuntimeError(
                f"The worker processes of {self.__name__} do not start, as they say above. Make its module "
                f"{self.reward.__module__!r} one that a new process can import."
            ) from error
        return pool


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the script that is run: a worker would import it, though it may have no guard, or need minutes."""
    with _hiding:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj):
        with _without_main():
            return ForkServerProcess._Popen(process_obj)


class _Context(ForkServerContext):
    Process = _Process


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


# In the workers


def _limit(memory: int, reward: Callable[..., Any]) -> None:
    """Set the limits of a worker; `reward` is passed so that its module is imported before any limit counts."""
    import resource  # POSIX only, as the fork server is

    # Pebble's own handler would wait for native code to come back to Python.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limit, (_, hard) = memory * 2**20, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _ready() -> None: ...


def _score(reward: Callable[..., Any], row: Row, cpu_seconds: float) -> float | str | None:
    # Ends a worker that hangs when the training process has been killed, and with it the limit on the wall clock.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        [reward_of_row] = reward(**row)
        return None if reward_of_row is None else float(reward_of_row)
    # Whatever it is must not end the worker, and an exception might not survive being sent.
    except BaseException as error:
        return "".join(traceback.format_exception_only(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
