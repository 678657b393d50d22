"""
What processes send each other in an optimizer step, with OPOTrainer and TRL's GRPOTrainer: counted, not timed.

    python -m benchmarks.communication          # → results/communication.json and communication.md; 15 minutes

Four processes over gloo train the same model on the same fixed rollout: 24 completions per process and optimizer
step, with a quarter of the lengths of MATH's solutions, in micro-batches of 4, two optimizer steps per rollout.
The script counts the numbers in the tensors that collective calls reduce, gather or scatter, relative to the model's
parameters. Those of exchanged samples (`rows`), which do not grow with the model, are counted separately; they pass as
bytes, counted as numbers of four. NCCL makes the same calls; their cost depends on the network.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from opo_trl.rollout import planner

from . import replay
from .launched import ROOT, allow_cpu, launch
from .pages import table
from .record import origin
from .shapes import small_qwen3


RESULTS = ROOT / "benchmarks" / "results"
PROCESSES, ROWS, STEPS, GENERATIONS = 4, 4, 2, 8
ROWS_OF_STEP = 24  # per process
BYTES = 4  # of a number of exchanged samples
SHARDINGS = {"multi_gpu": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
# Row of the table → method and options. The last one plans as on a single device, where a pass needs no communication.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPOTrainer": ("GRPO", {}),
    "OPOTrainer, not planned": ("OPO", {"plan_micro_batches": False}),
    "OPOTrainer": ("OPO", {}),
    "OPOTrainer, planned for padding alone": ("OPO", {}),
}

COLUMNS = {"passes": "g", "calls": "g", "weights": ".1f", "rows": ",.0f"}

# With DeepSpeed's own thresholds, every process would hold all of so small a model.
NO_THRESHOLDS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def count(trainer: Any) -> dict[str, int]:
    """Train, and count passes, collective calls, the numbers moved, and those moved to exchange samples."""
    passes, compute_loss, exchange = [0], trainer.compute_loss, planner.exchange_rows

    def counted_loss(*args: Any, **kwargs: Any) -> Any:
        passes[0] += 1
        return compute_loss(*args, **kwargs)

    def recorded_exchange(*args: Any, **kwargs: Any) -> Any:
        with record_function("rows"):
            return exchange(*args, **kwargs)

    trainer.compute_loss, planner.exchange_rows = counted_loss, recorded_exchange
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.train()
    counts = {"calls": 0, "numbers": 0, "rows": 0, "passes": passes[0]}
    exchanges = [event.time_range for event in profiler.events() if event.name == "rows"]
    for event in profiler.events():
        if event.name.startswith("gloo:"):  # every call, including those of DDP and FSDP in C++
            numbers = sum(math.prod(shape) for shape in event.input_shapes)
            numbers *= PROCESSES if "gather" in event.name else 1  # what every process receives
            inside = any(span.start <= event.time_range.start <= span.end for span in exchanges)
            numbers /= BYTES if inside else 1
            counts["calls"] += 1
            counts["numbers"] += numbers
            counts["rows"] += numbers if inside else 0
    return counts


def measure(sharding: str, variant: str) -> dict[str, float]:
    """Per optimizer step: calls, passes, numbers of exchanged samples, and other numbers per parameter (`weights`)."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"sharding": sharding, "variant": variant, "folder": folder}
        return launch("benchmarks.communication", task, folder, sharding=sharding, processes=PROCESSES)


def train_rank(*, sharding: str, variant: str, folder: str) -> None:
    """A process of [`measure`]."""
    allow_cpu(sharding)
    method, options = VARIANTS[variant]
    if variant.endswith("alone"):
        planner.FEWEST_PASSES = planner.PASS_TOKENS["cpu"]
    shape = small_qwen3(64)
    groups = PROCESSES * ROWS_OF_STEP * STEPS // GENERATIONS
    rollout = replay.draw_rollout(
        "math", groups=groups, generations=GENERATIONS, vocab_size=shape["vocab_size"], shorter=4
    )
    device = {"use_cpu": True} if sharding == "multi_gpu" else {"use_cpu": False}
    trainer = replay.make_trainer(
        method, shape, rollout, rows=ROWS, steps=STEPS, processes=PROCESSES, ddp_backend="gloo", **device, **options
    )
    if sharding == "zero3":
        trainer.args.deepspeed_plugin.hf_ds_config.config["zero_optimization"].update(NO_THRESHOLDS)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in trainer.model.parameters())
    counts = {name: n / STEPS for name, n in count(trainer).items()}
    assert trainer.accelerator.num_processes == PROCESSES
    counts["weights"] = round((counts.pop("numbers") - counts["rows"]) / parameters, 2)
    if trainer.accelerator.is_main_process:
        found = {"distributed_type": trainer.accelerator.distributed_type.value, **counts}
        (Path(folder) / "result.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def report(results: dict[str, Any]) -> str:
    """The page."""
    rows = [
        [name, variant, *(f"{found[column]:{form}}" for column, form in COLUMNS.items())]
        for sharding, name in SHARDINGS.items()
        for variant, found in results["measured"][sharding].items()
    ]
    header = ("sharding", "trainer", "passes", "collective calls", "numbers ÷ parameters", "of samples")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        "# What processes send each other in an optimizer step\n\n"
        "`python -m benchmarks.communication` makes this page; its docstring says what is counted. Passes are those\n"
        "of one process with a gradient.\n\n"
        f"{table(header, rows)}\n\nMeasured {results['date'][:10]} with {versions}.\n"
    )


def main() -> None:
    measured = {s: {variant: measure(s, variant) for variant in VARIANTS} for s in SHARDINGS}
    results = {**origin(), "measured": measured}
    (RESULTS / "communication.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "communication.md").write_text(report(results))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_rank(**json.loads(sys.argv[1]))
    else:
        main()
