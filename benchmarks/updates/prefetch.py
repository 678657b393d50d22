"""
What `prefetch_rollouts` saves beside a vLLM server: seconds of an optimizer step, also of TRL's GRPOTrainer.

    python -m benchmarks.updates.prefetch            → prefetch.{json,md}; two cores, 10 minutes
    python -m benchmarks.updates.prefetch --write    the page from prefetch.json
    python -m benchmarks.updates.prefetch --quick    each trainer once, for two rollouts; writes nothing

One `trl vllm-serve` serves all runs: a random Qwen3 in float32, which a trainer on the same machine trains. Prompts,
seed, steps and numbers of completions and tokens are the same for all: no completion ends before its limit. The
trainers take turns. Seconds are those of `train`, from the first request to the last step. tests/with_vllm/README.md
says what to install, and what is replaced without a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import write_json
from opo_trl.metrics.log import PHASES

from ..pages import table
from ..record import origin
from .replay import tokenizer
from .shapes import small_qwen3


HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tests" / "with_vllm"))
import cpu_shim  # noqa: E402
from serving import environment_of_vllm, free_port, vllm_server  # noqa: E402


RESULTS = HERE / "prefetch.json"
REPEATS = 3
STEPS_PER_ROLLOUT = 2

SIZES = {
    "width": 256,
    "prompts": 8,
    "completions": 8,  # of a prompt
    "tokens": 64,  # of a completion
    "rollouts": 4,
    "rows": 8,  # of a micro-batch
}
QUICK = {"rollouts": 2}

# Seconds of a step in a run, and what the page calls them.
PARTS = {
    "step": "seconds",
    "generating": "of it generation, also beside training",
    "sending": "sending weights",
    "of the trainer's processor": "the trainer's processor",
    "of the server's processors": "the server's processor",
}

TEXT = """\
# What prefetching saves beside a vLLM server

Seconds of an optimizer step of TRL's GRPOTrainer, of OPOTrainer with the same objective (`grpo`), and of OPOTrainer
with `prefetch_rollouts: 1`, by `{command}` ({device}, {cpu_cores} cores, {date}, commit {git_commit}; {versions}).
A random Qwen3 of two layers and width {width}, in float32; {prompts} prompts × {completions} completions of {tokens}
tokens a rollout, {steps_per_rollout} optimizer steps a rollout, {rollouts} rollouts, micro-batches of {rows}. One
server for all, {repeats} runs of each, in turn. How it is measured: [prefetch.py](prefetch.py).

Median (range). Ratios are to GRPOTrainer's run of the same turn.

{steps}

Phases of a step, as OPOTrainer logs them (`opo/time/…`). `generate` is what the trainer waits for completions:

{phases}

- Seconds of one trainer differ by up to a factor of {spread:.1f} between its runs: other programs ran on the cores
  (load {load}). A ratio within that factor says nothing. Server and trainer share the cores, too, so that each slows
  the other, which separate GPUs do not.
- The trainer waits {waits_alone:.2f} s a step for completions without prefetching, and {waits:.2f} with it. Nobody can
  have asked for the first of the {rollouts} rollouts in advance.
- Computed, not measured: {trainer:.2f} processor seconds of the trainer and {server:.2f} of the server follow one
  another without prefetching. On devices of their own, overlapped fully, a step would take {bound:.2f} of {sum:.2f},
  {bound_ratio:.2f} times as long.
"""

TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig, {}),
    "OPOTrainer": (OPOTrainer, OPOConfig, {"objective": "grpo"}),
    "OPOTrainer, prefetching": (OPOTrainer, OPOConfig, {"objective": "grpo", "prefetch_rollouts": 1}),
}


def even_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward: the fraction of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def save_model(folder: str, width: int) -> None:
    """Save a random model and its tokenizer."""
    torch.manual_seed(0)
    shape = small_qwen3(width, vocab_size=len(tokenizer()))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


# A run


class Timed:
    """A method that adds up the seconds of its calls, in whichever thread."""

    def __init__(self, owner: type, name: str):
        self.seconds = 0.0
        method = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def processor_seconds(pid: int) -> float:
    """Processor time of a process and all that it has started, so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(of_process.user + of_process.system for of_process in times)


def make_trainer(name: str, model: str, folder: str, sizes: dict[str, int], port: int) -> Any:
    """A trainer of `TRAINERS`, which generates with the server at a port."""
    trainer_class, config_class, options = TRAINERS[name]
    micro_batches = sizes["prompts"] * sizes["completions"] // sizes["rows"]
    fields = {
        "output_dir": folder,
        "per_device_train_batch_size": sizes["rows"],
        "gradient_accumulation_steps": micro_batches // STEPS_PER_ROLLOUT,
        "steps_per_generation": micro_batches,
        "num_generations": sizes["completions"],
        "max_completion_length": sizes["tokens"],
        "max_steps": sizes["rollouts"] * STEPS_PER_ROLLOUT,
        "learning_rate": 1e-4,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{port}",
        "vllm_group_port": free_port(),
        "generation_kwargs": {"ignore_eos": True},
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = config_class(**fields, **options)
    summands = range(10, 10 + 4 * sizes["prompts"])
    dataset = Dataset.from_dict({"prompt": [f"{number} + {number + 1} = " for number in summands]})
    return trainer_class(model=model, reward_funcs=even_tokens, args=args, train_dataset=dataset)


def measure(trainer: Any, clocks: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Train; what each clock shows afterwards less what it showed before, divided by the number of steps."""
    before = {name: clock() for name, clock in clocks.items()}
    trainer.train()
    seconds = {name: clock() - before[name] for name, clock in clocks.items()}
    log = trainer.state.log_history
    for phase in PHASES:
        seconds[f"phase {phase}"] = sum(entry.get(f"opo/time/{phase}", 0.0) for entry in log)
    lengths = {entry["completions/mean_length"] for entry in log if "completions/mean_length" in entry}
    assert lengths == {trainer.args.max_completion_length}, f"Completions of {lengths} tokens are other work."
    of_step = {name: round(value / trainer.state.global_step, 4) for name, value in seconds.items()}
    return {**of_step, "load": round(os.getloadavg()[0], 1)}


# All runs


def measure_all(folder: Path, sizes: dict[str, int], repeats: int) -> dict[str, Any]:
    """The runs of each trainer; they take turns, beginning with the next one each time."""
    if not torch.cuda.is_available():
        cpu_shim.patch_client()
    generating = Timed(VLLMClient, "generate")
    sending = Timed(VLLMClient, "update_named_params")
    model = str(folder / "model")
    save_model(model, sizes["width"])
    arguments = ("--dtype", "float32", "--max_model_len", str(sizes["tokens"] + 64))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in TRAINERS}
    with vllm_server(model, dict(os.environ), folder / "server.log", *arguments) as server:
        clocks = {
            "step": time.perf_counter,
            "generating": lambda: generating.seconds,
            "sending": lambda: sending.seconds,
            "of the trainer's processor": time.process_time,
            "of the server's processors": lambda: processor_seconds(server["pid"]),
        }
        vllm = requests.get(f"http://127.0.0.1:{server['port']}/version").json()["version"]
        for repeat in range(repeats):
            names = list(TRAINERS)
            for name in names[repeat % 3 :] + names[: repeat % 3]:
                trainer = make_trainer(name, model, str(folder / "run"), sizes, server["port"])
                runs[name].append(measure(trainer, clocks))
                print(name, runs[name][-1], file=sys.stderr, flush=True)
    return {"vllm": vllm, "sizes": sizes, "runs": runs}


# The page


def middle(values: list[float], digits: int = 2) -> str:
    """Median and range."""
    low, *_, high = sorted(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def median_of(runs: list[dict[str, float]], part: str) -> float:
    """Median over runs of a part of their seconds."""
    return statistics.median(seconds[part] for seconds in runs)


def page(results: dict[str, Any]) -> str:
    """The page of results."""
    runs = results["runs"]
    sizes = results["sizes"]
    versions = {**results["versions"], "vllm": results["vllm"]}
    reference = [seconds["step"] for seconds in runs["GRPOTrainer"]]
    rows = []
    for name, of_trainer in runs.items():
        ratios = [own["step"] / other for own, other in zip(of_trainer, reference, strict=True)]
        first, *others = (middle([seconds[part] for seconds in of_trainer]) for part in PARTS)
        rows.append([name, first, middle(ratios), *others])
    phases = []
    for name in ("OPOTrainer", "OPOTrainer, prefetching"):
        columns = [middle([seconds[f"phase {phase}"] for seconds in runs[name]]) for phase in PHASES]
        phases.append([name, *columns])
    spreads, loads = [], []
    for of_trainer in runs.values():
        steps = [seconds["step"] for seconds in of_trainer]
        spreads.append(max(steps) / min(steps))
        loads += [seconds["load"] for seconds in of_trainer]
    trainer = median_of(runs["OPOTrainer"], "of the trainer's processor")
    server = median_of(runs["OPOTrainer"], "of the server's processors")
    first, *others = PARTS.values()
    bound = max(trainer, server)
    figures = {
        **results,
        **sizes,
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()),
        "repeats": len(reference),
        "steps_per_rollout": STEPS_PER_ROLLOUT,
        "steps": table(["trainer", first, "ratio", *others], rows),
        "phases": table(["trainer", *PHASES], phases),
        "spread": max(spreads),
        "waits_alone": median_of(runs["OPOTrainer"], "phase generate"),
        "waits": median_of(runs["OPOTrainer, prefetching"], "phase generate"),
        "trainer": trainer,
        "server": server,
        "sum": trainer + server,
        "bound": bound,
        "bound_ratio": bound / (trainer + server),
        "load": f"{min(loads):.0f} to {max(loads):.0f}",
    }
    return TEXT.format_map(figures)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="only the page")
    parser.add_argument("--quick", action="store_true", help="each trainer once; writes nothing")
    args = parser.parse_args()
    if "OPO_VLLM" not in os.environ and not args.write:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**environment_of_vllm(Path(folder)), "OPO_VLLM": folder}
            sys.exit(subprocess.run(sys.orig_argv, env=environment).returncode)
    if args.quick:
        measure_all(Path(os.environ["OPO_VLLM"]), {**SIZES, **QUICK}, repeats=1)
        return
    if not args.write:
        measured = measure_all(Path(os.environ["OPO_VLLM"]), SIZES, REPEATS)
        write_json(RESULTS, {**origin(), **measured})
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
