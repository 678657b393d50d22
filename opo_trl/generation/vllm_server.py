"""Whether a vLLM server answers during a run. One that ends or hangs also ends the run, in bounded time."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..checks.secrets import mask_text


PERIOD = 10.0  # seconds between two requests
ANSWER_LIMIT = 10.0  # seconds for an answer
PATIENCE = (
    120.0  # seconds since the first request without an answer; TRL's client gives a server that is gone about 60
)


def answers(url: str) -> bool:
    """Whether the vLLM server at this address says, within 10 seconds, that it is healthy."""
    import requests  # as TRL's clients, with the same users and passwords, certificates and proxies

    try:
        return requests.get(f"{url.rstrip('/')}/health", timeout=ANSWER_LIMIT).status_code == 200
    except (requests.RequestException, ValueError):  # a `ValueError` if it redirects to no address
        return False


@contextmanager
def watched(url: str) -> Iterator[None]:
    """
    Within this context, or a method that it decorates, poll a vLLM server's health in a thread. A `RuntimeError` if a
    request to the server fails there.

    TRL's client sets no time limit, since nobody knows how long generation takes; and a broadcast of weights to a
    server that is gone never returns, in code that no exception reaches. So this process exits when the server has not
    answered for two minutes.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(url, done), daemon=True).start()
    try:
        yield
    except Exception as error:
        # An `OSError` is one of `requests`; TRL's client raises an `Exception` for any other status than 200.
        if isinstance(error, OSError) or type(error) is Exception:
            raise RuntimeError(_message(url)) from error
        raise
    finally:
        done.set()


def _watch(url: str, done: threading.Event) -> None:
    """
    Until `done`, ask the server every 10 seconds (`PERIOD`), and end this process, with exit status 1, if it has not
    answered for 120 (`PATIENCE`): from the first request on, as this thread may have rested as long before it.
    """
    unanswered_since: float | None = None
    while not done.wait(PERIOD):
        asked = time.monotonic()
        if answers(url):
            unanswered_since = None
            continue
        unanswered_since = unanswered_since or asked
        if time.monotonic() - unanswered_since > PATIENCE and not done.is_set():
            os.write(2, f"\n{_message(url)}\n".encode())
            os._exit(1)


def _message(url: str) -> str:
    return (
        f"The vLLM server at {mask_text(url)} no longer answers as it should; its own log says why. Start it again, "
        "and resume the run with `--resume_from_checkpoint last`."
    )
