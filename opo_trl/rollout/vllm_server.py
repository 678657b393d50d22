"""
Whether a vLLM server answers during a run. A server that ends or hangs also ends
the run, in bounded time and with a message that names it.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from ..checks.secrets import mask_text
from ..checks.text import one_line
from ..rewards.errors import told


PERIOD = 10.0  # seconds between two requests, and to wait for an answer
PATIENCE = 120.0  # seconds without an answer; TRL's client gives a server that is gone about 60


def status(url: str, route: str = "/health") -> int | str | None:
    """Status that a server answers with, or the error if its answer cannot be read; `None` if nothing answers."""
    import requests  # as TRL's clients, with the same users and passwords, certificates and proxies

    try:
        return requests.get(f"{url.rstrip('/')}{route}", timeout=PERIOD).status_code
    except (requests.RequestException, ValueError) as error:  # a `ValueError` if it redirects to no address
        silent = type(error) in (requests.ConnectionError, requests.ConnectTimeout, requests.ReadTimeout)
        return None if silent else f"{type(error).__name__}: {one_line(str(error))}"


def wait(url: str, seconds: float) -> int | str | None:
    """Wait until a server is healthy or time is up; returns what it said last."""
    deadline = time.monotonic() + seconds
    while (said := status(url)) != 200 and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
    return said


def wait_until_it_answers(url: str) -> None:
    """Wait until a server is healthy; a `RuntimeError` if it has not been for two minutes."""
    if (said := wait(url, PATIENCE)) != 200:
        raise RuntimeError(_message(url, said))


@contextmanager
def watched(url: str) -> Iterator[None]:
    """
    Poll a server's health while this process waits for it; a `RuntimeError` if a request to it fails.

    TRL's client sets no time limit, since nobody knows how long generation takes; and a broadcast of weights to a
    server that is gone never returns, in code that no exception reaches. So this process exits when the server has not
    answered for two minutes.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(url, done), daemon=True).start()
    try:
        yield
    except Exception as error:
        # An `OSError` is one of `requests`; TRL's client raises an `Exception` for any other status than 200, and a
        # `LookupError` or `TypeError` for an answer without what it reads.
        if isinstance(error, OSError | LookupError | TypeError) or type(error) is Exception:
            raise RuntimeError(_message(url, told(error))) from error
        raise
    finally:
        done.set()


@contextmanager
def without_password(url: str | None) -> Iterator[None]:
    """Leave user and password of a server's address out of what TRL raises, whose messages name the address."""
    user = urlsplit(url or "").netloc.rpartition("@")[0]
    try:
        yield
    except Exception as error:
        if user and f"{user}@" in str(error):
            raise RuntimeError(str(error).replace(f"{user}@", "***@")) from None
        raise


def _watch(url: str, done: threading.Event) -> None:
    answered = time.monotonic()
    while not done.wait(PERIOD):
        if (said := status(url)) == 200:
            answered = time.monotonic()
        elif time.monotonic() - answered > PATIENCE and not done.is_set():
            os.write(2, f"\n{_message(url, said)}\n".encode())
            os._exit(1)


def _message(url: str, said: int | str | None) -> str:
    return (
        f"The vLLM server at {mask_text(url)} no longer answers as it should (last: {said or 'no answer'}). Its "
        "own log says why; start it again, and resume the run with `--resume_from_checkpoint last`."
    )
