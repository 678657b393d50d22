"""Reward functions that fail in every way. They import almost nothing, so that workers start at once."""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("cannot be rebuilt from one argument")


def by_fate(completions: list, fate: list[str], **kwargs) -> list[float | None]:
    """A number is the score; a word is the failure."""
    return [_meet(word) for word in fate]


def _meet(word: str) -> float | None:
    match word:
        case "unscorable":
            return None
        case "hang in native code":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        case "allocate":
            bytearray(3 * 2**30)
        case "raise":
            raise Unpicklable(1, 2)
        case "raise what a terminal obeys":
            raise ValueError("\x1b[2J\0" * 10**6)
        case "exit":
            sys.exit(0)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)
    return float(word)


def start_processes(completions: list, fate: list[str], file: list[str], **kwargs) -> list[float | None]:
    """
    Start a process by its command, one in a session of its own that has lost its parent, and one that is forked and
    keeps this one's files open; write their ids to a file; and meet a fate.
    """
    orphan = subprocess.run(
        ["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"], start_new_session=True, capture_output=True, check=True
    )
    child = subprocess.Popen(["sleep", "600"])
    forked = os.fork()
    if forked == 0:
        time.sleep(600)
    with open(file[0], "a") as pids:
        print(child.pid, int(orphan.stdout), forked, file=pids)
    return by_fate(completions, fate)


def begin_and_wait(completions: list, file: list[str], until: list[str], **kwargs) -> list[float]:
    """Make a file, and score as soon as there is another one."""
    Path(file[0]).touch()
    while not Path(until[0]).exists():
        time.sleep(0.01)
    return [1.0]


def zero(completions: list, **kwargs) -> list[float]:
    return [0.0] * len(completions)


def seen(completions: list, **columns) -> list[float]:
    """Score the length of the only completion, and check the columns."""
    assert len(completions) == 1
    assert columns == {"level": ["Level 3"]}
    return [float(len(completions[0]))]


def process_id(completions: list, **kwargs) -> list[float]:
    time.sleep(0.01)
    return [float(os.getpid())] * len(completions)


_remembered: list[bytes] = []


def remember(completions: list, **kwargs) -> list[float]:
    """Keep 320 KiB per completion, like a parser with a cache."""
    kib = 2**10
    _remembered.extend(bytes(320 * kib) for _ in completions)
    return [1.0] * len(completions)


def loaded(completions: list[str], **kwargs) -> list[float]:
    """Whether the worker has imported the modules named in the completions."""
    return [float(name in sys.modules) for name in completions]


def text_of(completion) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def none_for_every_fourth_length(completions: list, **kwargs) -> list[float | None]:
    lengths = [len(text_of(completion)) for completion in completions]
    return [None if length % 4 == 0 else float(length % 5) for length in lengths]


def raise_for_every_fourth_length(completions: list, **kwargs) -> list[float | None]:
    scores = none_for_every_fourth_length(completions)
    if None in scores:
        raise ValueError("four")
    return scores
