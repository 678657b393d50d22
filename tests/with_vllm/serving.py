"""TRL's vLLM server, and an environment in which vLLM's CPU build receives weights."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch


HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# No compilation, a small cache, no network: the models are tiny.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def environment_of_vllm(folder: Path) -> dict[str, str]:
    """Environment of processes that use vLLM; without a GPU, `folder` gets what announces the replacements to it."""
    paths = [str(ROOT), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    if not torch.cuda.is_available():
        import cpu_shim

        paths.insert(0, cpu_shim.install(folder))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": programs}


@contextmanager
def vllm_server(model: str, environment: dict[str, str], log: Path, *arguments: str, port: int = 0) -> Iterator[dict]:
    """
    TRL's vLLM server, with more arguments, on a free port if none is given. Yields its `port`, the `group_port` for
    weights, and `pid`, which is also the number of its process group.
    """
    port = port or free_port()
    command = ["trl", "vllm-serve", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--gpu_memory_utilization", "0.1", "--enforce_eager", "true", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for_server(process, port, log)
        yield {"port": port, "group_port": free_port(), "pid": process.pid}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_server(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise RuntimeError(f"The server did not start:\n{log.read_text()[-5000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def result_of(process: subprocess.CompletedProcess, folder: Path) -> dict:
    """What a process that should have succeeded has written."""
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed[-5000:]
    return json.loads((folder / "result.json").read_text())
