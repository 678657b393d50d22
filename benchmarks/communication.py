"""
What processes send each other in an optimizer step, OPOTrainer beside TRL's GRPOTrainer: counted, not timed.

    python -m benchmarks.communication          # → results/communication.json and communication.md; 3 minutes

Four processes over gloo train the same model on the same fixed rollout: 24 completions per process and optimizer
step, with a quarter of the lengths that MATH's solutions have, in micro-batches of 4, two optimizer steps per rollout.
Bytes are those of the tensor that a collective call reduces, gathers or scatters, in parts of the model's weights.
NCCL makes the same calls; what they cost depends on the network.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from . import replay
from .memory_probes import ACCELERATE, ROOT, allow_cpu
from .pages import table
from .record import origin
from .shapes import small_qwen3


RESULTS = ROOT / "benchmarks" / "results"
PROCESSES, ROWS, STEPS, GENERATIONS = 4, 4, 2, 8
ROWS_OF_STEP = 24  # per process
SHARDINGS = {"multi_gpu": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
# Rows of GRPO, and of OPO with its options; the last one plans as on a single device, where a pass costs no network.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPOTrainer": ("GRPO", {}),
    "OPOTrainer, not planned": ("OPO", {"plan_micro_batches": False}),
    "OPOTrainer": ("OPO", {}),
    "OPOTrainer, planned for padding alone": ("OPO", {}),
}

# What is counted of each collective call of `torch.distributed`: its largest tensor.
CALLS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


class Counted(TrainerCallback):
    """
    Counts collective calls and their bytes while a trainer trains, and the passes with a gradient.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.counts, self._inside = trainer, Counter[str](), False
        for name in CALLS:
            setattr(torch.distributed, name, self._counted(getattr(torch.distributed, name)))
        compute_loss = trainer.compute_loss

        def counted_loss(*args: Any, **kwargs: Any) -> Any:
            self.counts["passes"] += 1
            return compute_loss(*args, **kwargs)

        trainer.compute_loss = counted_loss

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for argument in (*args, *kwargs.values()) for t in _tensors(argument)]
            self._add(max((t.nbytes for t in tensors), default=0), outermost=not self._inside)
            inside, self._inside = self._inside, True  # some of these functions call another one
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = inside

        return counted

    def _add(self, n_bytes: int, *, outermost: bool = True) -> None:
        if outermost:
            self.counts["calls"] += 1
            self.counts["bytes"] += n_bytes

    def on_train_begin(self, args, state, control, **kwargs):
        model = self.trainer.model_wrapped
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):  # whose reducer is not in Python
            model.register_comm_hook(None, self._all_reduce)
        self.counts.clear()

    def _all_reduce(self, state: None, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self._add(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def _tensors(argument: Any) -> list[torch.Tensor]:
    """The tensors of an argument; a list of them as one, which is what the call makes of it."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, list | tuple) and argument and all(isinstance(t, torch.Tensor) for t in argument):
        return [torch.empty(sum(t.nbytes for t in argument), dtype=torch.uint8, device="meta")]
    return []


def measure(sharding: str, variant: str) -> dict[str, float]:
    """Calls, bytes in parts of the weights, and passes, per optimizer step and process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = ["-m", "accelerate.commands.launch", "--config_file", str(ACCELERATE / f"{sharding}.yaml")]
        command += ["--num_processes", str(PROCESSES), "--mixed_precision", "no"]
        if sharding == "multi_gpu":
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        task = json.dumps({"sharding": sharding, "variant": variant, "result": str(result)})
        command = [sys.executable, *command, "-m", "benchmarks.communication", task]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        if done.returncode or not result.is_file():
            raise RuntimeError(f"{sharding}, {variant} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(result.read_text())


def train_rank(*, sharding: str, variant: str, result: str) -> None:
    """A process of [`measure`]."""
    from opo_trl import trainer as opo

    allow_cpu(sharding)
    method, options = VARIANTS[variant]
    if variant.endswith("alone"):
        opo.FEWEST_PASSES = opo.PASS_TOKENS
    shape = small_qwen3(64)
    groups = PROCESSES * ROWS_OF_STEP * STEPS // GENERATIONS
    rollout = replay.draw_rollout(
        "math", groups=groups, generations=GENERATIONS, vocab_size=shape["vocab_size"], shorter=4
    )
    device = {"use_cpu": True} if sharding == "multi_gpu" else {"use_cpu": False}
    trainer = replay.make_trainer(
        method, shape, rollout, rows=ROWS, steps=STEPS, processes=PROCESSES, ddp_backend="gloo", **device, **options
    )
    weights = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trainer.model.parameters())
    counted = Counted(trainer)
    trainer.add_callback(counted)
    trainer.train()
    assert trainer.accelerator.num_processes == PROCESSES
    if trainer.accelerator.is_main_process:
        counts = {
            "distributed_type": trainer.accelerator.distributed_type.value,
            "calls": counted.counts["calls"] / STEPS,
            "weights": round(counted.counts["bytes"] / weights / STEPS, 2),
            "passes": counted.counts["passes"] / STEPS,
        }
        Path(result).write_text(json.dumps(counts))
    torch.distributed.destroy_process_group()


def report(results: dict[str, Any]) -> str:
    """The page."""
    rows = [
        [name, variant, f"{found['passes']:g}", f"{found['calls']:g}", f"{found['weights']:.1f}"]
        for sharding, name in SHARDINGS.items()
        for variant, found in results["measured"][sharding].items()
    ]
    header = ("sharding", "trainer", "passes", "collective calls", "bytes ÷ weights")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        "# What processes send each other in an optimizer step\n\n"
        "`python -m benchmarks.communication` makes this page; its docstring says what is counted. Passes are those\n"
        "with a gradient, of one process.\n\n"
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
