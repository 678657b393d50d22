"""
Rewards that cannot take the run down: [`IsolatedReward`] scores each completion in a worker process.

Completions of a model in training can make a scorer hang in native code, fill the memory or crash its process. In a
worker, that costs one completion its score.
"""

import ctypes
import functools
import logging
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, NoReturn

import psutil
from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from ..fields import WORKER_MEMORY, require
from .errors import CountingReward, RewardError, error_text, numbers


logger = logging.getLogger(__name__)

# Seconds for a worker to start, including imports from a slow file system.
START_LIMIT = 120

# Seconds for a worker to end what its completion has started. pebble kills it after 3 by itself, and on a machine that
# stalls, the worker's children would go on. More than 60, and pebble's workers would give up waiting for each other.
CONSTS.term_timeout = 30

# Workers are replaced after this many completions, because math-verify's parser caches 2 to 10 kB per answer, which in
# days would reach the memory limit. A new worker scores its first 1,000 completions a fifth slower.
COMPLETIONS_OF_A_WORKER = 10_000

_hiding = threading.Lock()

# Events of Python that an answer, if it is evaluated, may not cause in a worker.
_FORBIDDEN = re.compile(
    r"os\.(?!listdir|scandir|walk|fwalk|getxattr|add_dll)|subprocess\.|shutil\.|socket\.|ctypes\.|pty\.|signal\.|tempfile\."
    r"|sqlite3\.|resource\."
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_in_worker = False  # the training process has to write
# In the first process of a worker: the second one, and the way to it.
_scorer: psutil.Process
_pipe: Connection


class IsolatedReward(CountingReward):
    """
    A reward function that scores each completion in a worker process, with limits on time and memory.

    It works in `reward_funcs` of every TRL trainer. [`OPOTrainer`] also logs how many completions were unscored, and
    stops the run if these are half of a round's completions.

    A completion scores `None` if it exceeds the time or memory limit, ends its worker or makes the function raise: it
    is unscored rather than wrong, and excluded from training. One warning per call counts these completions;
    `timeouts` and `errors` have the numbers of the last call.

    Args:
        reward (`Callable`):
            Reward function with TRL's signature, of a module other than the main script. It is called with lists of
            one completion and its columns, which must be picklable, and without what the trainer adds.
        workers (`int`, *optional*, defaults to `4`):
            Worker processes. They start at the first call, and end with this process, `close()` or this object.
        timeout (`float`, *optional*, defaults to `30.0`):
            Wall-clock limit per completion in seconds. A worker that exceeds it is killed, even in native code, and so
            are processes that the reward has started in it.
        memory (`int`, *optional*, defaults to `2048`):
            Memory that a worker may allocate in MiB, at least 512 (Linux's RLIMIT_DATA; ignored on macOS).

    Example:

    ```python
    >>> reward = IsolatedReward(accuracy_reward, workers=8)
    >>> reward([r"So \\boxed{\\frac12}.", r"So \\boxed{2}."], solution=["0.5", "0.5"])
    [1.0, 0.0]
    ```
    """

    def __init__(self, reward: Callable[..., Any], workers: int = 4, timeout: float = 30.0, memory: int = 2048):
        require(WORKER_MEMORY.holds(memory), "memory", memory, WORKER_MEMORY.text)
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        if getattr(reward, "__module__", None) == "__main__":
            raise ValueError(f"reward={self.__name__} is of the main script. Define it in a module of its own.")
        pickle.dumps(reward)  # says now what cannot be sent to a worker
        self.reward = reward
        self.workers = workers
        self.timeout = timeout
        self.memory = memory
        self._pool: ProcessPool | None = None
        self.close: Callable[[], Any] = lambda: None  # ends the workers; another call starts new ones

    def __reduce__(self):
        # For pickle: another process gets an object without workers, and starts its own.
        return functools.partial(IsolatedReward, self.reward, self.workers, self.timeout, self.memory), ()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """
        Score each completion in a worker: its reward, or `None` if that failed. `columns` are the dataset's, a list
        with an entry for each completion, and what else TRL gives rewards, which is left out.
        """
        n_completions = len(completions)
        arguments = {"completions": completions}
        for name, column in columns.items():
            # `trainer_state` and the like are not columns, and could not be pickled. Nor need an environment be.
            is_column = isinstance(column, list | tuple) and len(column) == n_completions
            if is_column and name != "environments":
                arguments[name] = column
        # One completion per call: a failure then costs no other its score, and each has the same time limit.
        calls = [{name: [column[i]] for name, column in arguments.items()} for i in range(n_completions)]
        outcomes = self._outcomes(calls)
        # A completion whose worker has ended gets a second try: a scheduler that stops a run also ends the workers,
        # while the trainer goes on to a checkpoint and needs these scores.
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ProcessExpired | BrokenProcessPool):
                [outcomes[index]] = self._outcomes([calls[index]])
        self._count_failures(outcomes)
        # A text is the message of an error in the reward, an exception one of the pool.
        return [None if isinstance(outcome, str | Exception) else outcome for outcome in outcomes]

    def _count_failures(self, outcomes: Sequence[Any]) -> None:
        """
        Count completions that took too long or failed, in `timeouts` and `errors`, and warn of them. An outcome is a
        score, the message of an error in the reward, or an exception of the pool of workers.
        """
        errors: list[str] = []
        self.timeouts = 0
        for outcome in outcomes:
            if isinstance(outcome, TimeoutError):
                self.timeouts += 1
            elif isinstance(outcome, Exception):
                errors.append(error_text(outcome))
            elif isinstance(outcome, str):
                errors.append(outcome)
        self.errors = len(errors)
        if self.timeouts or self.errors:
            first = f", the first with {errors[0]}" if errors else ""
            logger.warning(
                f"{self.__name__} could not score {self.timeouts + self.errors} of {len(outcomes)} completions: "
                f"{self.timeouts} took longer than {self.timeout} seconds, {self.errors} failed{first}."
            )

    def _outcomes(self, calls: Sequence[dict[str, list[Any]]]) -> list[Any]:
        """For each call, given by its arguments: a score, an error's message, or an exception of the pool."""
        pool = self._running_pool()
        futures = []
        with suppress(RuntimeError):  # the pool breaks meanwhile
            for call in calls:
                futures.append(pool.schedule(_pass_on, (self.reward, call), timeout=self.timeout))
        # No completion waits longer than this, unless a worker was ended just as it took one, and never said so.
        longest = START_LIMIT + self.timeout * math.ceil(len(calls) / self.workers)
        deadline = time.monotonic() + longest
        for future in futures:
            while not future.done() and pool.active:  # a pool that breaks forgets what is in its queue
                wait([future], 1)
                if time.monotonic() > deadline:
                    self.close()
        outcomes = [_outcome(future) for future in futures]
        return outcomes + [BrokenProcessPool()] * (len(calls) - len(outcomes))

    def _running_pool(self) -> ProcessPool:
        """
        The pool of workers, started if there is none, or if it has broken. A `RewardError` if the workers do not start
        or cannot import the reward's module.
        """
        if self._pool is not None and self._pool.active:
            return self._pool
        self.close()
        # "fork" would copy CUDA's state and the locks of other threads. With "spawn", every new worker would take
        # seconds to import the reward's module, which the fork server imports once. All its workers hash strings
        # alike, which determines the order of sets.
        context: Any = ForkServerContext()
        context.Process = _Process
        context.set_forkserver_preload([__name__, getattr(self.reward, "__module__", __name__)])
        self._check_import(context)
        pool = ProcessPool(self.workers, COMPLETIONS_OF_A_WORKER, _limit, (self.memory, self.reward), context=context)
        self._pool = pool
        # Not `__del__`, which need not run at exit; workers would then outlive the run. Nor `weakref.finalize`, which
        # does not run at the end of a process that multiprocessing has started; that would wait for the workers.
        self.close = Finalize(self, lambda: (pool.stop(), pool.join()), exitpriority=0)
        try:
            pool.schedule(os.getpid).result(START_LIMIT)
        except (BrokenProcessPool, TimeoutError) as error:
            self.close()
            raise self._no_start() from error
        return pool

    def _check_import(self, context: ForkServerContext) -> None:
        """
        Import the reward's module in a process like those of the pool; a `RewardError` if that fails. The pool itself
        would replace workers that fail at it without an end.
        """
        worker = context.Process(target=callable, args=(self.reward,))  # unpickling the argument imports
        try:
            worker.start()
            worker.join(START_LIMIT)
        except (OSError, EOFError) as error:
            raise self._no_start() from error
        has_failed = worker.exitcode is not None and worker.exitcode > 0  # not by a signal, as of a scheduler
        if has_failed:
            raise self._no_start()

    def _no_start(self) -> RewardError:
        return RewardError(
            f"The worker processes of {self.__name__} do not start; their output above says why. "
            f"Make {self.reward.__module__!r} importable in a new process."
        )


def _outcome(future: ProcessFuture) -> Any:
    """The score or exception of a completion; [`BrokenProcessPool`] if the pool broke before it was scored."""
    if not future.done():
        return BrokenProcessPool()
    return future.exception() or future.result()


class _Process(ForkServerProcess):
    """A worker that does not import the main script, which may lack a `__main__` guard or take minutes."""

    @staticmethod
    def _Popen(process_obj):
        """
        Start a worker while an empty module stands in for the main one, which the worker would import otherwise. One
        thread at a time does so.
        """
        with _hiding:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return ForkServerProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


# In the workers. A worker is two processes: the first, which the pool knows, waits for the second, which scores. So it
# can end all that the second one has started, however that one ends. On Linux, it becomes the parent of what has lost
# its own, also in another session.
#
# Each limit also holds in native code, during which a process runs no signal handlers of Python: the pool, in the
# training process, ends a worker that is late; the kernel lets an allocation fail in the second process, before the
# out-of-memory killer chooses the trainer, and signals workers when the fork server ends, with the trainer.

_PDEATHSIG, _CHILD_SUBREAPER = 1, 36  # of Linux's prctl


def _limit(memory: int, reward: Callable[..., Any]) -> None:
    """
    Divide a new worker into two processes, of which this one waits and its fork scores with at most `memory` MiB. The
    argument `reward` is not read: unpickling it has imported its module, before the limit counts.
    """
    global _scorer, _pipe
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined] # or the server outlives the trainer
    _prctl(_PDEATHSIG, signal.SIGTERM)  # sent to this process when its parent, the fork server, ends
    _prctl(_CHILD_SUBREAPER, 1)  # what has lost its parent becomes a child of this process, and is ended with it
    Finalize(None, _end_descendants, exitpriority=0)  # called when the pool closes its channel
    # The pool sends SIGTERM just after. pebble's handler would then end this process in the midst of its finalizers.
    signal.signal(signal.SIGTERM, _end_with_descendants)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then forgets a process that has ended
    _pipe, pipe_of_scorer = Pipe()
    pid = os.fork()
    if pid == 0:
        _pipe.close()
        _serve(pipe_of_scorer, memory)
    pipe_of_scorer.close()
    _scorer = psutil.Process(pid)


def _serve(pipe: Connection, memory: int) -> NoReturn:
    """
    Score the completions that come through the pipe, in the second process of a worker, until the first one ends. It
    can allocate `memory` MiB, and never returns.
    """
    import resource  # POSIX only, like the fork server

    global _in_worker
    _prctl(_PDEATHSIG, signal.SIGKILL)  # sent to this process when the first one ends
    _in_worker = True
    for number in (signal.SIGCHLD, signal.SIGTERM):  # pebble's handler would wait for native code to return to Python
        signal.signal(number, signal.SIG_DFL)
    n_bytes = memory * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))
    try:
        while True:
            reward, call = pipe.recv()
            pipe.send(_score(reward, call))
    finally:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    """Set an option of this process in Linux's kernel; without effect on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _pass_on(reward: Callable[..., Any], call: dict[str, list[Any]]) -> float | str | None:
    """
    Have the second process of this worker score the completion whose arguments are in `call`: its score, or the
    message of an error. If that process has ended, this one ends, too, which the pool takes as a failure.
    """
    try:
        _pipe.send((reward, call))
        while not _pipe.poll(1):
            if not _scorer.is_running():  # it has ended, and something that it has forked holds the pipe open
                raise EOFError
        return _pipe.recv()
    except (EOFError, OSError):
        _end_descendants()
        os._exit(1)


def _end_with_descendants(number: int, _frame: object) -> NoReturn:
    """Handle a signal: end what this process has started, and this process with the signal's number as status."""
    _end_descendants()
    os._exit(number)


def _end_descendants() -> None:
    """End what this process has started, what that has started, and so on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a SIGTERM would end this process before its descendants
    # Several times, as a process may be starting another; not forever, as one that changes its user cannot be ended.
    for _ in range(300):
        descendants = psutil.Process().children(recursive=True)
        if not descendants:
            return
        for descendant in descendants:
            with suppress(psutil.Error):
                descendant.kill()
        time.sleep(0.01)


def _score(reward: Callable[..., Any], call: dict[str, list[Any]]) -> float | str | None:
    """The score of the one completion in `call`, which has the reward's arguments; or the message of an error."""
    try:
        [value] = numbers(reward(**call), 1)
        return value
    # Nothing may end the worker. Exceptions are sent as text, because not every one can be unpickled.
    except BaseException as error:
        return error_text(error)


@functools.cache
def forbid() -> None:
    """
    Let this process, if it is a worker, import and read files, but neither write any, start processes nor connect:
    answers that are evaluated as Python then change nothing. No sandbox, but it stops what a model writes by chance.
    """
    if _in_worker:
        # It stays for the rest of the process: an answer may have started threads.
        sys.addaudithook(_raise_if_forbidden)


def _raise_if_forbidden(event: str, arguments: tuple) -> None:
    """
    An audit hook, which Python calls at each event: a `PermissionError` for one that starts a process, connects,
    writes a file or the like.
    """
    if _FORBIDDEN.match(event) or (event == "open" and _opens_for_writing(*arguments)):
        raise PermissionError(f"an answer asked for {event}")


def _opens_for_writing(_path: object, mode: str | None, flags: int | None) -> bool:
    """
    Whether a file is opened for writing, by the arguments of Python's audit event `open`: a mode such as `"w"`, which
    is `None` from `os.open`, or flags of the system, which may be missing, too.
    """
    writes_by_mode = not set("wax+").isdisjoint(mode or "")
    writes_by_flags = (flags or 0) & _WRITING != 0
    return writes_by_mode or writes_by_flags
