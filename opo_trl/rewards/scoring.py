"""
Rewards that cannot take the run down: [`IsolatedReward`] scores each completion in a worker process.

Completions of a model in training can make a scorer hang in native code, fill the memory or crash its process. In a
worker, that costs one completion its score.

Workers are forked from a fork server, a process that starts clean and imports the reward's module once. So they
inherit neither threads nor CUDA from the training process, a killed worker is replaced in milliseconds, and all
workers hash strings alike, which determines the order of sets. They never import the main script. Each has a guard, a
process that ends it and what it has started when the training process ends, however it does.
"""

import functools
import inspect
import logging
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, NoReturn

import psutil
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from ..checks.ranges import require
from . import LEAST_MEMORY, effects
from .errors import CountingReward, RewardError, numbers, told


logger = logging.getLogger(__name__)

START_LIMIT = 120  # seconds for a worker to start, including imports from a slow file system

# Workers are replaced after this many completions, because math-verify's parser caches 2 to 10 kB per answer, which in
# days would reach the memory limit. A new worker scores its first 1,000 completions a fifth slower.
COMPLETIONS_OF_A_WORKER = 10_000

_GUARD_INTERVAL = 0.2  # seconds

Row = dict[str, list[Any]]  # what the reward function is called with for one completion

_TIMED_OUT = object()

# A scheduler that asks a job to save and exit signals all its processes, including workers and the fork server. That
# is not the fault of a completion. The code is 255 if the fork server is gone, which would report the real one.
_TOLD_TO_END = (-signal.SIGTERM, 255)
_hiding = threading.Lock()


class IsolatedReward(CountingReward):
    """
    A reward function that scores each completion in a worker process, with limits on time and memory.

    It works in `reward_funcs` of every TRL trainer. [`OPOTrainer`] and [`OPOTrainer`] also log how many
    completions were unscored, and stop the run if there are too many (`max_reward_failure_rate`).

    A completion scores `None` if it exceeds the time or memory limit, ends its worker or makes the function raise. It
    is then unscored rather than wrong, and excluded from training (if other reward functions score it, TRL counts the
    missing score as 0). A worker that exceeds the time limit is killed, even in native code, and replaced. One warning
    per call counts these completions and shows the first error.

    Args:
        reward (`Callable`):
            Reward function with TRL's signature that scores each completion independently: it is called with lists of
            one completion and its columns, without `trainer_state`, `log_extra`, `log_metric` and `environments`. It
            must be importable from a module other than the main script; columns must be picklable.
        workers (`int`, *optional*, defaults to `4`):
            Number of worker processes, at least 1. They start at the first call, and end with this process, with
            [`close`], or when this object is garbage-collected.
        timeout (`float`, *optional*, defaults to `30.0`):
            Wall-clock limit per completion in seconds, positive.
        memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate in MiB, at least 512: Linux's RLIMIT_DATA, which unlike the address space
            does not count the code of libraries. Ignored on macOS.

    Attributes:
        timeouts (`int`), errors (`int`):
            Completions of the last call that were not scored in time; and that raised, ran out of memory or ended
            their worker. A worker that dies at once may count as a timeout.

    Raises:
        `ValueError`: if a limit is out of range, or the function cannot be sent to a worker.
        [`RewardError`]: if the workers cannot start, at the first call.

    Example:

    ```python
    >>> reward = IsolatedReward(accuracy_reward, workers=8)
    >>> reward([r"So \\boxed{\\frac12}.", r"So \\boxed{2}."], solution=["0.5", "0.5"])
    [1.0, 0.0]
    ```
    """

    def __init__(self, reward: Callable[..., Any], *, workers: int = 4, timeout: float = 30.0, memory: int = 2048):
        for name, value in (("workers", workers), ("timeout", timeout)):
            require(value > 0, name, value, "a positive number")
        require(memory >= LEAST_MEMORY, "memory", memory, f"{LEAST_MEMORY} or more")
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
            raise ValueError(f"reward={reward!r} is asynchronous, but nothing awaits it in a worker. Remove `async`.")
        try:
            with _without_main():
                pickle.dumps(reward)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward={reward!r} cannot be sent to a worker process ({error}). Pass a function that is defined at "
                "the top level of a module other than the main script, under its own name."
            ) from error
        self.__name__ = _name(reward)
        self.reward, self.workers, self.timeout, self.memory = reward, workers, timeout, memory
        self._pool: ProcessPool | None = None
        self._end: Callable[[], Any] = lambda: None  # ends the pool, if there is one

    def __reduce__(self):
        # Another process gets one without workers, and starts its own.
        limits = {"workers": self.workers, "timeout": self.timeout, "memory": self.memory}
        return functools.partial(IsolatedReward, self.reward, **limits), ()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        n = len(completions)
        # `trainer_state` and the like are not columns, and could not be pickled. Nor need an environment be.
        columns.pop("environments", None)
        columns = {name: c for name, c in columns.items() if isinstance(c, list | tuple) and len(c) == n}
        columns["completions"] = completions
        # One completion per task: a failure then costs no other its score, and each has the same time limit.
        outcomes = list(self._outcomes([{name: [c[i]] for name, c in columns.items()} for i in range(n)]))
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        self.timeouts, self.errors = outcomes.count(_TIMED_OUT), len(errors)
        if self.timeouts or errors:
            first = f", the first with {errors[0].rstrip('.')}" if errors else ""
            logger.warning(
                f"{self.__name__} could not score {self.timeouts + len(errors)} of {n} completions: {self.timeouts} "
                f"took longer than {self.timeout} seconds, {len(errors)} failed{first}."
            )
        return [outcome if isinstance(outcome, float) else None for outcome in outcomes]

    def close(self) -> None:
        """End the workers. Another call starts new ones."""
        self._end()

    def _outcomes(self, rows: list[Row]) -> Iterator[Any]:
        """Score of each row, `_TIMED_OUT`, or an error message."""
        futures = self._schedule(rows)
        for i in range(len(rows)):
            for tries in (1, 2):
                try:
                    # The pool enforces the timeout; a worker may never start. Rows start in this order.
                    outcome = futures[i].result(self.timeout + START_LIMIT)
                except ProcessExpired as error:
                    outcome = f"its worker ending with code {error.exitcode}"
                    if error.exitcode in _TOLD_TO_END and tries == 1:
                        futures[i : i + 1] = self._schedule(rows[i : i + 1])
                        continue
                except (BrokenProcessPool, CancelledError, TimeoutError) as error:
                    outcome = _TIMED_OUT
                    if not (isinstance(error, TimeoutError) and futures[i].done()):
                        # A worker that dies before the pool knows its task breaks the pool. It may have had another
                        # row, so this one is tried again; after the second failure it is skipped.
                        outcome = "its workers ending"
                        self.close()
                        futures[i + tries - 1 :] = self._schedule(rows[i + tries - 1 :])
                        continue
                except Exception as error:  # its columns cannot be sent to a worker
                    outcome = told(error)
                break
            yield outcome

    def _schedule(self, rows: list[Row]) -> list[ProcessFuture]:
        return [self._running().schedule(_score, (self.reward, row), timeout=self.timeout) for row in rows]

    def _running(self) -> ProcessPool:
        if self._pool is not None and self._pool.active:
            return self._pool
        self.close()
        # "fork" would copy CUDA's state and the locks of other threads. With "spawn", every new worker would take
        # seconds to import the reward's module, which the fork server imports once.
        context: Any = ForkServerContext()
        context.Process = _Process
        context.set_forkserver_preload([__name__, getattr(self.reward, "__module__", __name__)])
        self._pool = pool = ProcessPool(
            self.workers,
            COMPLETIONS_OF_A_WORKER,
            initializer=_limit,
            initargs=(os.getpid(), self.memory, self.reward),
            context=context,
        )
        # Not `__del__`, which need not run at exit; workers would then outlive the run. Nor `weakref.finalize`, which
        # does not run at the end of a process that multiprocessing has started; that would wait for the workers.
        self._end = Finalize(self, lambda: (pool.stop(), pool.join()), exitpriority=0)
        try:
            pool.schedule(os.getpid).result(START_LIMIT)  # a failing import raises here, not at every completion
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise RewardError(
                f"The worker processes of {self.__name__} do not start; their output above says why. Make its "
                f"module {self.reward.__module__!r} importable in a new process."
            ) from error
        return pool


def _name(reward: Callable[..., Any]) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script, which workers would import, though it may lack a `__main__` guard or take minutes."""
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


# In the workers. Each limit also holds in native code, during which a worker runs no signal handlers of Python: the
# pool, in the training process, kills a worker that is late; the kernel lets an allocation fail in the worker, before
# the out-of-memory killer chooses the trainer; the guard ends orphans.


def _limit(trainer: int, memory: int, reward: Callable[..., Any]) -> None:
    """Set the limits of a worker. Unpickling the argument `reward` imports its module before they count."""
    import resource  # POSIX only, like the fork server

    worker = os.getpid()
    os.setsid()  # what the worker starts is in its session
    if os.fork() == 0:
        _guard(worker, trainer)
    effects.make_lasting()
    # Pebble's own handler would wait for native code to return to Python.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limit, (_, hard) = memory * 2**20, resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _guard(worker: int, trainer: int) -> NoReturn:
    """Wait, in a process of its own, for the end of the worker or of the trainer, and end what the worker started."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a scheduler may signal all processes
            signal.signal(number, signal.SIG_IGN)
        # Nobody should wait for its end of a pipe. The limit may be 10⁹, and closing one by one.
        os.closerange(0, min(os.sysconf("SC_OPEN_MAX"), 2**16))
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(trainer)
            while os.getppid() == worker and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_GUARD_INTERVAL)
        for pid in psutil.pids():
            with suppress(OSError):
                if pid != os.getpid() and os.getsid(pid) == worker:
                    os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(0)


def _score(reward: Callable[..., Any], row: Row) -> float | str | None:
    try:
        return numbers(_name(reward), reward(**row), 1)[0]
    # Nothing may end the worker. Exceptions are sent as text, because not every one can be unpickled.
    except BaseException as error:
        return told(error)
