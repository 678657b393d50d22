"""
Several nodes, on one machine: what the Slurm scripts start, with which arguments.

The scripts run as under `sbatch`, with stand-ins for Slurm (`slurm.sh`) that start a command once per node. No test
runs on a cluster.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from started_programs import environment, free_port, wait_until
from trl.scripts.vllm_serve import make_parser as vllm_serve_parser


ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "recipes" / "slurm"
STAND_INS = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """The arithmetic recipe, with the length that a server needs."""
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    text = (ROOT / "recipes" / "arithmetic" / "opo.yaml").read_text()
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("accelerate_config")]
    path.write_text("".join(lines) + "vllm_max_model_length: 64\n")
    return path


@pytest.fixture(scope="module")
def fields() -> list[str]:
    """Fields of a run; their quotation marks, spaces and patterns must arrive unchanged."""
    awkward = ["--instruction", 'Don\'t  "guess": $HOME/*', "--output_dir", "runs/a b"]
    return [*awkward, "--vllm_server_port", str(free_port())]


@dataclass
class Job:
    """A job of two nodes, on 127.0.0.1 and 127.0.0.2."""

    folder: Path  # checkout from which it is submitted
    programs: Path  # folder of the stand-ins
    known: Path  # folder of Python's outputs

    def start(self, script: str, *argv: str, **more: str) -> subprocess.Popen:
        """Start a script as Slurm does: a copy of it, in the folder from which it was submitted."""
        spooled = self.programs / "slurm_script"
        shutil.copy(SLURM / script, spooled)
        job = {"SLURM_JOB_ID": "71234", "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_GPUS_ON_NODE": "1"}
        job |= {"HOSTS": "127.0.0.1 127.0.0.2", "CALLS": str(self.folder / "calls"), "PYTHON": sys.executable}
        job |= {"KNOWN": str(self.known), "TRAINING": "ends", "SERVER": "runs"}
        job |= {"http_proxy": "http://127.0.0.1:9"}  # as on clusters
        settings = environment(**job | more)
        settings["PATH"] = os.pathsep.join([str(self.programs), settings["PATH"]])
        return subprocess.Popen(
            ["bash", str(spooled), *argv], cwd=self.folder, env=settings, stderr=subprocess.PIPE, text=True
        )

    def finish(self, process: subprocess.Popen) -> tuple[int, str]:
        """Status and errors of a script, when it has ended and no process of the job is left."""
        _, errors = process.communicate(timeout=600)
        wait_until(lambda: not self.running())
        return process.returncode, errors

    def run(self, script: str, *argv: str, **more: str) -> tuple[int, str]:
        """Run a script to its end."""
        return self.finish(self.start(script, *argv, **more))

    def running(self) -> list[Path]:
        """Processes of the job: `CALLS` in their environment identifies them."""
        mark = f"CALLS={self.folder / 'calls'}".encode()
        processes = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if mark in variables:
                    processes.append(process)
        return processes

    def calls(self, name: str) -> list[list[str]]:
        """Arguments of each call of a stand-in so far; within a step, in the order of its nodes."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [line.split("\t")[:-1] for line in lines]
        calls.sort(key=lambda call: call[1])
        return [argv for called, _, *argv in calls if called == name]


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("known")


@pytest.fixture
def stand_ins(tmp_path, known) -> Iterator[Job]:
    """A job with stand-ins for Slurm, training and serving, and short sleeps."""
    job = Job(tmp_path / "check out", tmp_path / "programs", known)
    job.folder.mkdir()
    job.programs.mkdir()
    (job.folder / "recipes").symlink_to(ROOT / "recipes")
    for name in ("srun", "scancel", "scontrol", "trl", "opo-trl", "sleep", "python"):
        (job.programs / name).symlink_to(STAND_INS)
    yield job
    for process in job.running():  # left by a failed test
        os.kill(int(process.name), signal.SIGKILL)


def words_after(word: str, argv: list[str]) -> list[str]:
    start = argv.index(word) + 1
    return argv[start:]


def test_training_on_all_nodes(stand_ins, recipe, fields):
    status, errors = stand_ins.run("colocate.sbatch", str(recipe), *fields, SLURM_GPUS_ON_NODE="4")
    assert status == 0, errors
    (step,) = stand_ins.calls("srun")
    assert {"--nodes=2", "--ntasks=2", "--nodelist=127.0.0.1,127.0.0.2", "--kill-on-bad-exit=1"} < set(step)
    launchers = stand_ins.calls("opo-trl")
    assert len(launchers) == 2
    for node, argv in enumerate(launchers):
        machines = f"train --machine_rank {node} --num_machines 2 --num_processes 8"
        address = "--main_process_ip 127.0.0.1 --main_process_port 21234"
        launch = [*machines.split(), *address.split()]
        assert argv == [*launch, "--config", str(recipe), *fields, "--vllm_mode", "colocate"]


def test_server_is_ready_before_training_and_ends_with_it(stand_ins, recipe, fields):
    for_server = ["--tensor_parallel_size", "2", "--chat-template", "a b.jinja"]
    argv = [str(recipe), *fields, "--", *for_server]
    status, errors = stand_ins.run("vllm_server.sbatch", *argv, SLURM_GPUS_ON_NODE="4")
    assert status == 0, errors
    serve, train = stand_ins.calls("srun")
    assert {"--nodes=1", "--ntasks=1", "--nodelist=127.0.0.2"} < set(serve)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=127.0.0.1"} < set(train)
    port = fields[-1]
    ((command, *server),) = stand_ins.calls("trl")
    assert command == "vllm-serve"
    parsed, rest = vllm_serve_parser().parse_args_and_config(server, return_remaining_strings=True)
    assert (parsed.model, parsed.port, parsed.max_model_len) == ("arithmetic", int(port), 64)
    assert (parsed.revision, parsed.trust_remote_code) == ("main", False)
    assert parsed.host == "127.0.0.2"  # not all interfaces
    assert parsed.tensor_parallel_size == 2  # set on the command line; all four GPUs by default
    assert server[:2] == ["--tensor_parallel_size", "4"]
    assert rest == ["--chat-template", "a b.jinja"]
    (training,) = stand_ins.calls("opo-trl")
    assert training[3:7] == ["--num_machines", "1", "--num_processes", "4"]
    of_server = f"--use_vllm true --vllm_mode server --vllm_server_host 127.0.0.2 --vllm_server_port {port}"
    assert words_after(str(recipe), training) == [*fields, *of_server.split()]


def test_server_that_dies_fails_the_job(stand_ins, recipe, fields):
    more = {"SERVER": "fails in training", "TRAINING": "continues"}
    status, errors = stand_ins.run("vllm_server.sbatch", str(recipe), *fields, **more)
    assert status == 1
    assert "error: the vLLM server ended during training: see runs/slurm/71234/server.log" in errors


@pytest.mark.parametrize(
    ("checkpoint", "restarts", "added"),
    [
        ("checkpoint-50/trainer_state.json", 0, ["--resume_from_checkpoint", "last"]),
        # An incomplete checkpoint: of this job, or of another one, which `opo-trl train` rejects
        ("checkpoint-50/model.safetensors", 1, ["--resume_from_checkpoint", "auto"]),
    ],
)
def test_restarted_job_continues_the_run(stand_ins, recipe, fields, checkpoint, restarts, added):
    path = stand_ins.folder / "runs" / "a b" / checkpoint
    path.parent.mkdir(parents=True)
    path.touch()
    status, errors = stand_ins.run("colocate.sbatch", str(recipe), *fields, SLURM_RESTART_COUNT=str(restarts))
    assert status == 0, errors
    for argv in stand_ins.calls("opo-trl"):
        assert words_after(str(recipe), argv) == [*added, *fields, "--vllm_mode", "colocate"]


@pytest.mark.parametrize(("training", "requeued"), [("saves", True), ("continues", False)])
def test_job_out_of_time_is_requeued_if_it_made_progress(stand_ins, recipe, fields, training, requeued):
    process = stand_ins.start("colocate.sbatch", str(recipe), *fields, TRAINING=training)
    wait_until(lambda: len(stand_ins.calls("opo-trl")) == 2)
    wait_until((stand_ins.folder / "trains").exists)
    process.send_signal(signal.SIGUSR1)
    status, errors = stand_ins.finish(process)
    assert (["requeue", "71234"] in stand_ins.calls("scontrol")) == requeued
    assert status == (0 if requeued else 1)
    assert ("out of time without a new checkpoint" in errors) != requeued
