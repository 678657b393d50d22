"""
The memory plan against measured peaks of one GPU: Qwen3-1.7B with random weights, `OPOTrainer.compute_loss`, AdamW.

    python -m benchmarks.gpu.memory --output runs/gpu/memory.json     a few minutes on a GPU of 24 GB or more

Compares `torch.cuda.max_memory_allocated` of the second micro-batch, and of the optimizer step, with the formula. A
case that runs out of memory is recorded as such. Called again with the same file, it measures the missing cases.
`--tiny` measures a tiny model, for which the formula is far too low.
"""

import argparse
import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..memory import COMPLETION, LORA_RANK, PROMPT, plan_run
from ..memory_probes import make_config, make_trainer, micro_batch
from ..record import Limit, measure_missing
from ..shapes import QWEN3_1_7B, small_qwen3


CASES: dict[str, dict[str, Any]] = {
    "8 rows": {"rows": 8},
    "4 rows": {"rows": 4},
    "1 row": {"rows": 1},
    "1 row, no checkpointing": {"rows": 1, "checkpointing": False},
    "8 rows, LoRA": {"rows": 8, "lora": True},
    "4 rows, LoRA": {"rows": 4, "lora": True},
}
FULL: dict[str, Any] = {"shape": QWEN3_1_7B, "prompt": PROMPT, "completion": COMPLETION}
TINY: dict[str, Any] = {"shape": small_qwen3(64, 512), "prompt": 32, "completion": 40}


def measure(
    shape: dict[str, Any],
    *,
    rows: int,
    prompt: int,
    completion: int,
    lora: bool = False,
    checkpointing: bool = True,
) -> dict[str, int]:
    """Peaks of allocated bytes in an update and in the optimizer step, and bytes reserved by the allocator."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(make_config(shape), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "bf16": True, "gradient_checkpointing": checkpointing}
        options["gradient_accumulation_steps"] = 2
        trainer = make_trainer(model, rows=rows, lora=LORA_RANK if lora else 0, **options)
    if checkpointing:
        model.gradient_checkpointing_enable()
    trainer.model.train()
    policy = trainer.accelerator.prepare(trainer.model)  # under autocast, as in training
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW((p for p in trainer.model.parameters() if p.requires_grad), lr=1e-6, fused=True)
    batch = micro_batch(shape, rows=rows, prompt=prompt, completion=completion)
    batch, peaks = {name: tensor.to(trainer.accelerator.device) for name, tensor in batch.items()}, {}
    for _ in range(2):  # the first round creates the moments
        for _ in range(2):  # the first micro-batch creates the gradients
            torch.cuda.reset_peak_memory_stats()
            trainer.accelerator.backward(trainer.compute_loss(policy, batch))
        peaks["update"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peaks["optimizer step"] = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
    peaks["reserved"] = torch.cuda.memory_reserved()
    return peaks


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """`[formula, measured]` in bytes by moment, and reserved bytes."""
    plan = {moment: sum(parts.values()) for moment, parts in plan_run("none", share=0, **case).items()}
    said = {"update": max(plan["LM head"], plan["layers"]), "optimizer step": plan["optimizer step"]}
    measured = measure(**case)
    return {moment: [said[moment], measured[moment]] for moment in said} | {"reserved": measured["reserved"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write or resume")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not torch.cuda.is_available():
        print("No GPU. `python -m benchmarks.memory` measures on a CPU.")
        return int(not args.tiny)
    size = TINY if args.tiny else FULL
    cases = {name: functools.partial(compare, size | case) for name, case in CASES.items()}
    results = measure_missing(args.output, size, cases, Limit(args.limit_seconds))
    return int(bool(results["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
