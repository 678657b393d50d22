"""
Stand-ins on one machine for what the Slurm scripts call: `srun`, `scancel`, `scontrol`, and `trl`, `vllm` and
`opo-trl` that pretend.

    python tests/scripts/slurm.py srun|scancel|scontrol|trl|vllm|opo-trl ARGUMENT …

A node is an address of the loopback network, and is listed in $HOSTS. Each call is a line of the file $CALLS. $SERVER
and $TRAINING set how the server and training behave.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen


def value(argv: list[str], option: str) -> str:
    """Value of an option; the last one counts, as in every parser concerned."""
    return argv[len(argv) - argv[::-1].index(option)]


def srun(argv: list[str]) -> int:
    """Start a command once per node, each with its log."""
    first = next(i for i, argument in enumerate(argv) if not argument.startswith("--"))
    options = dict(argument[2:].split("=", 1) for argument in argv[:first])
    hosts = options["nodelist"].split(",")
    if not len(hosts) == int(options["nodes"]) == int(options["ntasks"]):
        raise ValueError(f"nodes, ntasks and nodelist disagree: {options}")
    tasks = []
    for node, host in enumerate(hosts):
        environment = {**os.environ, "SLURM_NODEID": str(node), "SLURMD_NODENAME": host}
        with open(
            options["output"].replace("%t", str(node)), "ab" if options["open-mode"] == "append" else "wb"
        ) as log:
            tasks.append(
                subprocess.Popen(
                    argv[first:], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            )

    steps = Path(os.environ["CALLS"]).parent
    step = steps / f"step-{len(list(steps.glob('step-*')))}"
    step.write_text(" ".join(str(task.pid) for task in tasks))

    signal.signal(signal.SIGTERM, lambda *_: signal_step(step, signal.SIGTERM))
    while None in (statuses := [task.poll() for task in tasks]):
        time.sleep(0.1)
    signal_step(step, signal.SIGKILL)  # a step leaves nothing behind
    return max(status if status >= 0 else 128 - status for status in statuses)


def signal_step(step: Path, number: int):
    for pid in step.read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), number)


def scancel(argv: list[str]) -> int:
    """Send a signal to a step of the job: to all of its processes, as Slurm does."""
    number = signal.Signals[f"SIG{argv[0].removeprefix('--signal=')}"]
    job, step = argv[1].split(".")
    if job != os.environ["SLURM_JOB_ID"]:
        raise ValueError(f"There is no job {job}.")
    signal_step(Path(os.environ["CALLS"]).parent / f"step-{step}", number)
    return 0


def scontrol(argv: list[str]) -> int:
    if argv[:2] == ["show", "hostnames"]:
        print(*os.environ["HOSTS"].split(), sep="\n")
    return 0


def trl(argv: list[str]) -> int:
    """A server that is busy for the first requests, and then healthy."""
    answers = iter([503] * 2)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(next(answers, 200) if self.path == "/health" else 404)
            self.end_headers()

    def end_with_training():
        while '"opo-trl"' not in Path(os.environ["CALLS"]).read_text():
            time.sleep(0.1)
        os._exit(3)

    if os.environ["SERVER"] == "fails in training":
        threading.Thread(target=end_with_training, daemon=True).start()
    ThreadingHTTPServer((os.environ["SLURMD_NODENAME"], int(value(argv, "--port"))), Handler).serve_forever()
    return 0


def opo_trl(argv: list[str]) -> int:
    """Training: `ends`, `continues`, or `saves` and continues."""
    url = value(argv, "--vllm_server_base_url") if "--vllm_server_base_url" in argv else None
    if "--vllm_server_host" in argv:
        url = f"http://{value(argv, '--vllm_server_host')}:{value(argv, '--vllm_server_port')}"
    if url:
        urlopen(f"{url}/health").close()  # raises if the server is not ready, and asks $http_proxy unless told not to
    if os.environ["TRAINING"] == "saves":
        checkpoint = Path(value(argv, "--output_dir")) / "checkpoint-100"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "trainer_state.json").touch()
    if os.environ["TRAINING"] != "ends":
        (Path(os.environ["CALLS"]).parent / "trains").touch()
        time.sleep(600)
    return 0


if __name__ == "__main__":
    name, *argv = sys.argv[1:]
    with open(os.environ["CALLS"], "a") as calls:
        own = {"node": os.environ.get("SLURM_NODEID"), "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
        own |= {"overlaps": os.environ.get("SLURM_OVERLAP"), "develops": os.environ.get("VLLM_SERVER_DEV_MODE")}
        calls.write(json.dumps({"name": name, "argv": argv, **own}) + "\n")
    sys.exit(
        {"srun": srun, "scancel": scancel, "scontrol": scontrol, "trl": trl, "vllm": trl, "opo-trl": opo_trl}[name](
            argv
        )
    )
