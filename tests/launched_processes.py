"""
Start the processes of a run, in the environment that `accelerate launch` would give them.

On the CPU, processes are forked from a server that has imported everything once: the imports take longer than the
tests' runs. With `pytest --on-device`, each starts anew, with a device of its own.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from device_fields import USE_CPU, devices_for
from started_programs import free_port


TESTS = Path(__file__).resolve().parent
CONFIGS = TESTS.parent / "recipes" / "accelerate"

# Not Python's own server: the workers of rewards are forked from that, with the imports of its first user.
SERVER = forkserver.ForkServer()

# Settings of a GPU configuration that change for CPU processes.
DEVICE_SETTINGS = {"mixed_precision": "no"}


def cpu_version(config: Path, processes: int) -> dict[str, Any]:
    """A configuration of `recipes/accelerate` for CPU processes: the users' file except for [`DEVICE_SETTINGS`]."""
    return yaml.safe_load(config.read_text()) | DEVICE_SETTINGS | {"num_processes": processes}


def environment(config: str | None, processes: int, folder: Path) -> dict[str, str]:
    """Environment variables of a launch, as accelerate computes them from a configuration file."""
    if config is None:
        return {}
    path = folder / f"{config}.yaml"
    path.write_text(yaml.safe_dump(cpu_version(CONFIGS / f"{config}.yaml", processes)))
    command = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
    arguments, file, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(file.deepspeed_config)
        env = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


def launch(
    target: Callable[..., None],
    *arguments: Any,
    config: str | None = None,
    processes: int = 1,
    folder: Path,
    meanwhile: Callable[[list[BaseProcess]], None] = lambda started: None,
    limit: float = 600.0,
    server: forkserver.ForkServer = SERVER,
) -> list[int]:
    """
    Run `target(*arguments)` in every process of a launch.

    Args:
        target: function of a module below `tests`.
        config: name of a configuration in `recipes/accelerate`; `None` for a single process.
        processes: number of processes.
        folder: where `process_*.log` go.
        meanwhile: called with the processes while they run.
        limit: seconds after which they are killed.
        server: what they are forked from.

    Returns:
        Exit status of each process; −9 for one that was killed.

    Raises:
        TimeoutError: they did not end within the limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = environment(config, processes, folder) | devices_for(processes)
    prepare()
    context = multiprocessing.get_context("forkserver" if USE_CPU else "spawn")
    port = free_port()
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env_of_rank = dict(env)
        if processes > 1:
            env_of_rank |= {name: str(value) for name, value in place.items()}
        process = context.Process(target=_run, args=(target, arguments, env_of_rank, folder / f"process_{rank}.log"))
        connect = patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)
        # A device is chosen before torch is imported.
        with connect, patch.dict(os.environ, {} if USE_CPU else env_of_rank):
            process.start()
        started.append(process)
    deadline = time.monotonic() + limit
    meanwhile(started)
    while any(process.is_alive() for process in started):
        for process in started:
            process.join(0.05)
        late = time.monotonic() > deadline
        if late or any(process.exitcode for process in started):  # the others would wait for it
            for process in started:
                process.kill()
        if late:
            raise TimeoutError(f"The processes still ran after {limit} seconds.\n{logs(folder)}")
    return [process.exitcode for process in started]


def logs(folder: Path) -> str:
    """The end of each process's output, for the message of a failure."""
    ends = []
    for path in sorted(folder.glob("process_*.log")):
        end = path.read_text()[-3000:]
        ends.append(f"{path.name}:\n{end}")
    return "\n".join(ends)


def prepare() -> None:
    """Set the environment and the imports of the server."""
    # Many processes with small models, on the CPU even where there is a GPU.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if USE_CPU else "cuda")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    paths = os.environ.get("PYTHONPATH")
    if not paths:
        os.environ["PYTHONPATH"] = str(TESTS)
    elif str(TESTS) not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{TESTS}{os.pathsep}{paths}"
    SERVER.set_forkserver_preload(["preloaded_for_launches"])


def _run(target: Callable[..., None], arguments: tuple, env: dict[str, str], log: Path):
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    target(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
