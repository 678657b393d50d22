"""
Rewards that cannot take the run down: [`IsolatedReward`] scores each completion in a worker process.

Completions of a model in training can make a scorer hang in native code, fill the memory or crash its process. In a
worker, that costs one completion its score.
"""

import ctypes
import functools
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from . import LEAST_MEMORY, effects
from .errors import CountingReward, RewardError, numbers, told


logger = logging.getLogger(__name__)

START_LIMIT = 120  # seconds for a worker to start, including imports from a slow file system

# Workers are replaced after this many completions, because math-verify's parser caches 2 to 10 kB per answer, which in
# days would reach the memory limit. A new worker scores its first 1,000 completions a fifth slower.
COMPLETIONS_OF_A_WORKER = 10_000

_LOST = (ProcessExpired, BrokenProcessPool, CancelledError)
_hiding = threading.Lock()


class IsolatedReward(CountingReward):
    """
    A reward function that scores each completion in a worker process, with limits on time and memory.

    It works in `reward_funcs` of every TRL trainer. [`OPOTrainer`] and [`OPOTrainer`] also log how many
    completions were unscored, and stop the run if there are too many (`max_reward_failure_rate`).

    A completion scores `None` if it exceeds the time or memory limit, ends its worker or makes the function raise. It
    is then unscored rather than wrong, and excluded from training (if other reward functions score it, TRL counts the
    missing score as 0). One warning per call counts these completions and shows the first error.

    Args:
        reward (`Callable`):
            Reward function with TRL's signature that scores each completion independently: it is called with lists of
            one completion and its columns, without `trainer_state`, `log_extra`, `log_metric` and `environments`. It
            must be importable from a module other than the main script, which workers never import; columns must be
            picklable. Processes that it starts are its own to end.
        workers (`int`, *optional*, defaults to `4`):
            Number of worker processes. They start at the first call, and end with this process, with [`close`], or
            when this object is garbage-collected.
        timeout (`float`, *optional*, defaults to `30.0`):
            Wall-clock limit per completion in seconds. A worker that exceeds it is killed, even in native code.
        memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate in MiB, at least 512: Linux's RLIMIT_DATA, which unlike the address space
            does not count the code of libraries. Ignored on macOS.

    Attributes:
        timeouts (`int`), errors (`int`):
            Completions of the last call that were not scored in time; and that raised, ran out of memory or ended
            their worker.

    Raises:
        `ValueError`: `memory` is too small, or the function is the main script's.
        [`RewardError`]: if the workers cannot start, at the first call.

    Example:

    ```python
    >>> reward = IsolatedReward(accuracy_reward, workers=8)
    >>> reward([r"So \\boxed{\\frac12}.", r"So \\boxed{2}."], solution=["0.5", "0.5"])
    [1.0, 0.0]
    ```
    """

    def __init__(self, reward: Callable[..., Any], *, workers: int = 4, timeout: float = 30.0, memory: int = 2048):
        if memory < LEAST_MEMORY:  # right answers would silently be wrong
            raise ValueError(f"memory={memory} is too small for a worker. Set `memory` to {LEAST_MEMORY} or more.")
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        if getattr(reward, "__module__", None) == "__main__":
            raise ValueError(f"reward={self.__name__} is of the main script. Define it in a module of its own.")
        pickle.dumps(reward)  # says now what cannot be sent to a worker
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
        rows = [{name: [c[i]] for name, c in columns.items()} for i in range(n)]
        outcomes = self._outcomes(rows)
        for i in [i for i, outcome in enumerate(outcomes) if isinstance(outcome, _LOST)]:
            # It may have ended for another's fault, or because a scheduler told all processes to end; so once more.
            outcomes[i] = self._outcomes([rows[i]])[0]
        failed = [outcome for outcome in outcomes if isinstance(outcome, str | Exception)]
        said = [o if isinstance(o, str) else told(o) for o in failed if not isinstance(o, TimeoutError)]
        self.timeouts, self.errors = len(failed) - len(said), len(said)
        if failed:
            logger.warning(
                f"{self.__name__} could not score {len(failed)} of {n} completions: {self.timeouts} took longer than "
                f"{self.timeout} seconds, {self.errors} failed{', the first with ' * bool(said)}{''.join(said[:1])}."
            )
        return [None if isinstance(outcome, str | Exception) else outcome for outcome in outcomes]

    def close(self) -> None:
        """End the workers. Another call starts new ones."""
        self._end()

    def _outcomes(self, rows: Sequence[dict[str, list[Any]]]) -> list[Any]:
        """Score of each row, the message of an error in the worker, or an exception of the pool."""
        pool, limit = self._running(), self.timeout + START_LIMIT  # a worker may never start
        outcomes: list[Any] = []
        try:
            futures = [pool.schedule(_score, (self.reward, row), timeout=self.timeout) for row in rows]
        except RuntimeError:  # it has ended meanwhile
            return [CancelledError()] * len(rows)
        for future in futures:
            try:
                outcomes.append(future.result(limit))
            except Exception as error:
                outcomes.append(error if future.done() else CancelledError())
                if isinstance(error, BrokenProcessPool) or not future.done():
                    limit = 0  # a pool without workers finishes nothing
        if limit == 0:
            self.close()
        return outcomes

    def _running(self) -> ProcessPool:
        if self._pool is not None and self._pool.active:
            return self._pool
        self.close()
        # "fork" would copy CUDA's state and the locks of other threads. With "spawn", every new worker would take
        # seconds to import the reward's module, which the fork server imports once. All its workers hash strings
        # alike, which determines the order of sets.
        context: Any = ForkServerContext()
        context.Process = _Process
        context.set_forkserver_preload([__name__, getattr(self.reward, "__module__", __name__)])
        self._pool = pool = ProcessPool(
            self.workers, COMPLETIONS_OF_A_WORKER, _limit, (self.memory, self.reward), context=context
        )
        # Not `__del__`, which need not run at exit; workers would then outlive the run. Nor `weakref.finalize`, which
        # does not run at the end of a process that multiprocessing has started; that would wait for the workers.
        self._end = Finalize(self, lambda: (pool.stop(), pool.join()), exitpriority=0)
        try:
            pool.schedule(os.getpid).result(START_LIMIT)  # a failing import raises here, not at every completion
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise RewardError(
                f"The worker processes of {self.__name__} do not start; their output above says why. Make its module "
                f"{self.reward.__module__!r} importable in a new process."
            ) from error
        return pool


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj):
        with _without_main():
            return ForkServerProcess._Popen(process_obj)


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main script, which workers would import, though it may lack a `__main__` guard or take minutes."""
    with _hiding:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


# In the workers. Each limit also holds in native code, during which a worker runs no signal handlers of Python: the
# pool, in the training process, kills a worker that is late; the kernel lets an allocation fail in the worker, before
# the out-of-memory killer chooses the trainer, and kills workers when the fork server ends, with the trainer.


def _limit(memory: int, reward: Callable[..., Any]) -> None:
    """Set the limits of a worker. Unpickling the argument `reward` imports its module before they count."""
    import resource  # POSIX only, like the fork server

    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined] # or the server outlives the trainer
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    effects.lasting = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler would wait for native code to return to Python
    resource.setrlimit(resource.RLIMIT_DATA, (memory * 2**20, memory * 2**20))


def _score(reward: Callable[..., Any], row: dict[str, list[Any]]) -> float | str | None:
    try:
        return numbers(reward(**row), 1)[0]
    # Nothing may end the worker. Exceptions are sent as text, because not every one can be unpickled.
    except BaseException as error:
        return told(error)
