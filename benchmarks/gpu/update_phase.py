"""
What an update of Qwen3-0.6B and Qwen3-1.7B costs, with random weights: OPOTrainer and TRL's GRPOTrainer.

    python -m benchmarks.gpu.update_phase --output runs/gpu/update_phase.json     a GPU of 80 GB or more, 10 minutes
    python -m benchmarks.gpu.update_phase --output runs/gpu/tiny.json --tiny      any GPU or a CPU, a minute

Called again with the same file, it measures the missing cases, and writes their ratios beside it as a `.md`.

The comparison of `benchmarks/update_phase.py` at full length, in bfloat16: with and without gradient checkpointing,
with no zero-variance groups and with 40 %. Both trainers use TRL's fused LM head. Tokens, peak memory and the split of
the time are measured with one trainer alone on the device; then the phases of both alternate, so that a device that
slows down slows both.
"""

import argparse
import functools
import gc
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..pages import table
from ..passes import Pass, count_tokens, counted_passes
from ..record import Limit, device_name, measure_missing, peak_memory, reset_peak_memory
from ..replay import (
    TRAINERS,
    Rollout,
    Split,
    draw_rollout,
    make_trainer,
    phase,
    ratio,
    take_turns,
)
from ..shapes import QWEN3_0_6B, QWEN3_1_7B, small_qwen3


SHAPES = {"qwen3-1.7b": QWEN3_1_7B, "qwen3-0.6b": QWEN3_0_6B}  # the slowest first, for the time limit
TINY_SHAPES = {"tiny": small_qwen3(64, 512)}
GROUPS, GENERATIONS, ROWS, STEPS = 10, 8, 8, 2
DEAD = (0.0, 0.4)
REPEATS, TINY_REPEATS = 5, 1
TINY_SHORTER = 32  # divisor of lengths

# Dense bfloat16 operations per second: NVIDIA's data sheet of the H200 (SXM) gives twice as many, 1,979 TFLOPS, with
# sparsity.
PEAK = {"NVIDIA H200": 989e12}


def model_flops(passes: Iterable[Pass], shape: Mapping[str, Any], parameters: int) -> int:
    """
    Floating-point operations of the passes, without recomputed activations.

    A forward pass of B rows × S columns with K scored tokens takes `2·(P − H)·B·S + 2·H·K + 2·L·D·B·S²`, and one with
    gradient three times as much: P parameters, of which H in the LM head (tied to the embedding, a look-up), L layers,
    D columns of all heads; the last term is causal attention, half of `4·L·D·B·S²`.
    """
    head = shape["vocab_size"] * shape["hidden_size"]
    attention = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return sum(
        (3 if one.gradient else 1)
        * 2
        * ((parameters - head) * one.padded + head * one.scored + attention * one.padded * one.columns)
        for one in passes
    )


def measure_alone(method: str, shape: Mapping[str, Any], rollout: Rollout, **options: Any) -> dict[str, Any]:
    """Tokens, passes with gradient, operations, peak bytes and seconds by part of a trainer alone on the device."""
    trainer = make_trainer(method, shape, rollout, **options)
    phase(trainer)  # creates the moments, and looks once whether padding changes log-probabilities
    reset_peak_memory()
    with counted_passes(trainer.model) as passes:
        phase(trainer)
    peak = peak_memory()
    split = Split(trainer)
    whole = phase(trainer)
    parts = dict(split.seconds)
    return {
        "tokens": count_tokens(passes),
        "passes": sum(one.gradient for one in passes),
        "flops": model_flops(passes, shape, trainer.model.num_parameters()),
        "peak_memory": peak,
        "parts": parts | {"rest": whole - sum(parts.values())},
    }


def measure(shape: Mapping[str, Any], dead: float, shorter: int, *, repeats: int, **options: Any) -> dict[str, Any]:
    """Costs of each trainer, and OPO's time relative to GRPO's."""
    rollout = draw_rollout(
        "math",
        groups=GROUPS,
        generations=GENERATIONS,
        vocab_size=shape["vocab_size"],
        dead=dead,
        shorter=shorter,
    )
    result: dict[str, Any] = {}
    for method in TRAINERS:
        result[method] = measure_alone(method, shape, rollout, **options)
        gc.collect()
        torch.cuda.empty_cache()
    trainers = {method: make_trainer(method, shape, rollout, **options) for method in TRAINERS}
    take_turns(trainers, 1)
    seconds = take_turns(trainers, repeats)
    peak = PEAK.get(device_name())
    for method, own in result.items():
        middle = statistics.median(seconds[method])
        own |= {
            "seconds": seconds[method],
            "median": middle,
            "tokens_per_second": round(rollout.tokens / middle),
            "share_of_peak": own["flops"] / middle / peak if peak else None,
        }
    return result | {"ratio": ratio(seconds["OPO"], seconds["GRPO"])}


def page(results: Mapping[str, Any]) -> str:
    """The ratios of the cases that are done, as Markdown."""
    rows = []
    for case, found in results["cases"].items():
        times, peaks = found["ratio"], [found[method]["peak_memory"] for method in TRAINERS]
        low, high = times["low"], times["high"]
        reached = [found[method]["share_of_peak"] for method in TRAINERS]
        rows.append(
            [
                *case.split(", "),
                f"{times['median']:.2f} ({low:.2f}–{high:.2f})",
                f"{peaks[1] / peaks[0]:.2f}",
                *("" if share is None else f"{share:.0%}" for share in reached),
            ]
        )
    shares = [f"{method}, of peak" for method in TRAINERS]
    head = ["model", "zero-variance groups", "checkpointing", "time", "peak memory", *shares]
    made = f"{results['device']}, {results['date']}, PyTorch {results['versions']['torch']}"
    about = (
        "Fractions of TRL's GRPOTrainer on the same rollout, medians and ranges of alternating phases; the "
        "share of the device's operations per second that each trainer reaches."
    )
    title = "# What an update costs on a GPU"
    return "\n".join([title, "", f"`{results['command']}` ({made}).", about, "", table(head, rows), ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write or resume")
    parser.add_argument("--limit_seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, also on a CPU")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")  # names that TRL still uses
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("No GPU. `--tiny` tries the same code on a CPU.")
    repeats, shorter = (TINY_REPEATS, TINY_SHORTER) if args.tiny else (REPEATS, 1)
    options = {"rows": ROWS, "steps": STEPS, "repeats": repeats}
    cases = {
        f"{name}, {dead:.0%} dead, {'' if checkpointing else 'no '}checkpointing": functools.partial(
            measure, shape, dead, shorter, checkpointing=checkpointing, **options
        )
        for name, shape in (TINY_SHAPES if args.tiny else SHAPES).items()
        for dead in DEAD
        for checkpointing in (True, False)
    }
    results = measure_missing(args.output, {"tiny": args.tiny, **options}, cases, Limit(args.limit_seconds))
    args.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    return int(bool(results["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
