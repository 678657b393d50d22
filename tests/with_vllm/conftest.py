"""Environment of processes that use vLLM, and a server."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from serving import HERE, environment_of_vllm, result_of, vllm_server


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of processes that use vLLM; skips the test where it is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("needs vLLM: tests/with_vllm/README.md says how to install it")
    return environment_of_vllm(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def start(environment: dict[str, str], tiny_model: str) -> Callable[..., subprocess.CompletedProcess]:
    """`start(program, command, folder, **options)`: a program of this folder, once it has ended."""

    def ended(
        program: str, command: str, folder: Path, launcher: tuple[str, ...] = (sys.executable,), **options
    ) -> subprocess.CompletedProcess:
        arguments = [str(HERE / program), command, str(folder), json.dumps({"model": tiny_model, **options})]
        return subprocess.run(
            [*launcher, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=900
        )

    return ended


@pytest.fixture(scope="session")
def run(start: Callable[..., subprocess.CompletedProcess], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`run(command, **options)`: the result of `run.py` in a separate process, or in those of `launcher`."""

    def result(command: str, *launcher: tuple[str, ...], **options) -> dict:
        folder = tmp_path_factory.mktemp(command)
        return result_of(start("run.py", command, folder, *launcher, **options), folder)

    return result


@pytest.fixture(params=["colocate", "server"])
def place(
    request: pytest.FixtureRequest, environment: dict[str, str], tiny_model: str, tmp_path: Path
) -> Iterator[dict]:
    """Options that tell `run.py` where vLLM is; a server runs as long as the test."""
    if request.param == "colocate":
        yield {"mode": "colocate"}
        return
    with vllm_server(tiny_model, environment, tmp_path / "server.log", "--max_model_len", "128") as options:
        yield {"mode": "server", **options}
