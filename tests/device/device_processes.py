"""
Processes with pretend CUDA devices, one for each. They are forked from a server that has imported everything once, and
that has the devices from its start: torch asks only once what there is.
"""

import faulthandler
import functools
import os
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from launched_processes import launch, logs


HERE = Path(__file__).resolve().parent
PATHS = [HERE, HERE.parent, HERE.parents[1]]
LIMIT = 150  # seconds of a test; few take more than five on an idle machine


class Server(forkserver.ForkServer):
    def __init__(self, environment: dict[str, str]):
        super().__init__()
        self.environment = environment
        self.set_forkserver_preload(["preloaded_for_devices"])

    def ensure_running(self) -> None:
        with patch.dict(os.environ, self.environment):
            super().ensure_running()


def with_devices(devices: int, library: Path) -> dict[str, str]:
    """Environment of a process that sees pretend devices; `library` is the folder that the tool has built."""
    return {
        "FAKE_CUDA": "1",
        "FAKE_CUDA_DEVICES": str(devices),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),  # other tests hide all devices
        "PYTHONPATH": os.pathsep.join(map(str, [HERE.parent / "pretend_devices", library, *PATHS])),
    }


@functools.cache
def server(devices: int, library: Path) -> Server:
    return Server(with_devices(devices, library))


def call(
    function: Callable[..., None], *arguments: Any, processes: int, devices: int, library: Path, folder: Path
) -> None:
    """
    Call a function in processes of its own, which see pretend devices.

    Raises:
        `AssertionError`: it has raised an error in one of them, or has not returned within the limit.
    """
    where = {"processes": processes, "folder": folder, "server": server(devices, library)}
    statuses = launch(_called, function, arguments, devices, **where)
    assert statuses == [0] * processes, f"exit statuses {statuses}\n{logs(folder)}"


def _called(function: Callable[..., None], arguments: tuple, devices: int) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    assert torch.cuda.device_count() == devices
    if "RANK" in os.environ:
        import fakecuda

        fakecuda.install_collectives()  # which it does by itself only in a process that is started, not forked
    function(*arguments)
