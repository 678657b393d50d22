"""Environment of processes that use vLLM, and a server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import free_port


HERE = Path(__file__).parent
ON_CPU = not torch.cuda.is_available()

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


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes that use vLLM; skips the test where it is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM: tests/with_vllm/README.md says how to install it")
    paths = [str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    if ON_CPU:
        import cpu_shim

        paths.insert(0, cpu_shim.install(tmp_path_factory.mktemp("shim")))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PATH": programs}


@pytest.fixture(scope="session")
def run(environment: dict[str, str], tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict]:
    """`run(command, **options)`: the result of `run.py` in a separate process, or in those of `launcher`."""

    def result(command: str, launcher: tuple[str, ...] = (sys.executable,), **options) -> dict:
        folder = tmp_path_factory.mktemp(command)
        arguments = [str(HERE / "run.py"), command, str(folder), json.dumps({"model": tiny_model, **options})]
        process = subprocess.run(
            [*launcher, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=900
        )
        printed = process.stdout + process.stderr
        assert process.returncode == 0, printed[-5000:]
        return json.loads((folder / "result.json").read_text())

    return result


@pytest.fixture(params=["colocate", "server"])
def place(
    request: pytest.FixtureRequest, environment: dict[str, str], tiny_model: str, tmp_path: Path
) -> Iterator[dict]:
    """Options that tell `run.py` where vLLM is; a server runs as long as the test."""
    if request.param == "colocate":
        yield {"mode": "colocate"}
        return
    group_port = free_port()
    command = ["trl", "vllm-serve", "--model", tiny_model, "--max_model_len", "128"]
    command += ["--gpu_memory_utilization", "0.1", "--enforce_eager", "true"]
    with server(command, environment, tmp_path / "server.log") as port_and_process:
        yield {"mode": "server", "group_port": group_port, **port_and_process}


@contextmanager
def server(command: list[str], environment: dict[str, str], log: Path) -> Iterator[dict]:
    """A server that runs meanwhile: its port and process."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for_server(process, port, log)
        yield {"port": port, "pid": process.pid}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_server(process: subprocess.Popen, port: int, log: Path):
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    pytest.fail(f"The server did not start:\n{log.read_text()[-5000:]}")
