"""A limit on the processor time that reading a model's text may take."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OutOfTime(BaseException):
    """Not an `Exception`, which a parser would catch, to continue with its next attempt without a limit."""


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """
    Raise [`OutOfTime`] after these seconds of this thread's processor time, in the main thread only, and not in native
    code, but regular expressions. Limits by the wall clock fail right answers when many workers share a processor.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.thread_time()

    def stop(*_: Any) -> None:
        # The timer counts all threads. It and the clock differ by some milliseconds.
        if time.thread_time() - began > 0.9 * seconds:
            raise OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    try:
        try:
            # Repeatedly, as other threads count, too, and as some code, such as a destructor, swallows exceptions.
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # a last signal may arrive while the timer is being stopped
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
