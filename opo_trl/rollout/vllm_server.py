"""A vLLM server that ends or hangs also ends the run, in bounded time and with a message that names it."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from urllib.request import urlopen


PERIOD = 10.0  # seconds between two requests, and to wait for an answer
PATIENCE = 120.0  # seconds without an answer; TRL's client gives a server that is gone about 60


@contextmanager
def watched(base_url: str) -> Iterator[None]:
    """
    Poll a server's health while this process waits for it.

    TRL's client sets no time limit, since nobody knows how long generation takes; and a broadcast of weights to a
    server that is gone never returns, in code that no exception reaches. So this process exits when the server has not
    answered for two minutes.

    Raises:
        `RuntimeError`: the code inside failed to reach the server; TRL's client tries for a minute.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(base_url, done), daemon=True).start()
    try:
        yield
    except OSError as error:  # includes all errors of `requests`
        raise RuntimeError(_message(base_url)) from error
    finally:
        done.set()


def wait_until_it_answers(base_url: str) -> None:
    """
    Wait until a server is healthy.

    Raises:
        `RuntimeError`: it has not been for two minutes.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urlopen(f"{base_url}/health", timeout=PERIOD).close()
            return
        except (OSError, HTTPException) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(_message(base_url)) from error
        time.sleep(1)


def _watch(base_url: str, done: threading.Event) -> None:
    answered = time.monotonic()
    while not done.wait(PERIOD):
        try:
            urlopen(f"{base_url}/health", timeout=PERIOD).close()
            answered = time.monotonic()
        except (OSError, HTTPException) as error:
            if time.monotonic() - answered > PATIENCE and not done.is_set():
                os.write(2, f"\n{_message(base_url)}\n{error}\n".encode())
                os._exit(1)


def _message(base_url: str) -> str:
    return (
        f"The vLLM server at {base_url} no longer answers. Its own log says why; start it again, and resume "
        "the run with `--resume_from_checkpoint last`."
    )
