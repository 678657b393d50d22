"""
What an update of Qwen3-0.6B and Qwen3-1.7B costs, with random weights: OPOTrainer and TRL's GRPOTrainer.

    python -m benchmarks.gpu.update_phase --output runs/gpu/update_phase.json     a GPU of 80 GB or more, 90 seconds
    python -m benchmarks.gpu.update_phase --output runs/gpu/tiny.json --tiny      any GPU or a CPU, a minute

Called again with the same file, it measures the missing cases, and writes their ratios beside it as a `.md`.

The comparison of `benchmarks/updates/update_phase.py` at full length, in bfloat16, without zero-variance groups. All
trainers use TRL's fused LM head. A first phase of each is not timed: its tokens are counted, and its peak of memory,
without what the other trainers hold. Then the phases alternate, so that a device that slows down slows all. The
smaller model is also trained by `OPOTrainer` with GRPO's loss (`objective: grpo`). An earlier form, of which results
are committed, had groups of equal rewards and the parts of a phase: `git show 7eb7cae:benchmarks/gpu/update_phase.py`.
"""

import argparse
import functools
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opo_trl.forecast.plan import memory_plan

from ..pages import table
from ..record import Limit, device_name, measure_missing, peak_memory, reset_peak_memory
from ..updates.passes import Pass, count_tokens, counted_passes
from ..updates.replay import TRAINERS, draw_rollout, make_trainer, phase, ratio, take_turns
from ..updates.shapes import QWEN3_0_6B, QWEN3_1_7B, small_qwen3


SHAPES = {"qwen3-1.7b": QWEN3_1_7B, "qwen3-0.6b": QWEN3_0_6B, "tiny": small_qwen3(64, 512)}
# Model, whether with checkpointing, and trainers; the slowest first, for the time limit.
CASES: list[tuple[str, bool, Sequence[str]]] = [
    ("qwen3-1.7b", True, ("GRPO", "OPO")),
    ("qwen3-1.7b", False, ("GRPO", "OPO")),
    ("qwen3-0.6b", True, [*TRAINERS]),
]
TINY_CASES: list[tuple[str, bool, Sequence[str]]] = [("tiny", True, [*TRAINERS]), ("tiny", False, ("GRPO", "OPO"))]
GROUPS, GENERATIONS, ROWS, STEPS = 10, 8, 8, 2
REPEATS, TINY_REPEATS = 2, 1
TINY_SHORTER = 32  # divisor of lengths

# Dense bfloat16 operations per second: NVIDIA's data sheets of these (SXM) give twice as many, 1,979 TFLOPS, with
# sparsity.
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def model_flops(passes: Iterable[Pass], shape: Mapping[str, Any], parameters: int) -> int:
    """
    Floating-point operations of the passes, without recomputed activations.

    A forward pass of B rows × S columns with K scored tokens takes `2·(P − H)·B·S + 2·H·K + 2·L·D·B·S²`, and one with
    gradient three times as much: P parameters, of which H in the LM head (tied to the embedding, a look-up), L layers,
    D columns of all heads; the last term is causal attention, half of `4·L·D·B·S²`.
    """
    head = shape["vocab_size"] * shape["hidden_size"]
    attention = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    total = 0
    for one in passes:
        linear = (parameters - head) * one.padded + head * one.scored
        products = linear + attention * one.padded * one.columns  # each a multiplication and an addition
        total += (6 if one.gradient else 2) * products
    return total


def measure(
    shape: Mapping[str, Any], methods: Sequence[str], shorter: int, *, repeats: int, **options: Any
) -> dict[str, Any]:
    """Costs of each trainer, and times relative to GRPO's."""
    rollout = draw_rollout(
        "math", groups=GROUPS, generations=GENERATIONS, vocab_size=shape["vocab_size"], shorter=shorter
    )
    trainers, result, on_gpu = {}, {}, torch.cuda.is_available()
    for method in methods:
        held = torch.cuda.memory_allocated() if on_gpu else 0
        trainers[method] = trainer = make_trainer(method, shape, rollout, **options)
        planned_peak = None
        if method != "GRPO":
            plan = memory_plan(trainer)
            planned_peak = max(sum(components.values()) for components in plan.values())
        reset_peak_memory()
        with counted_passes(trainer.model) as passes:
            phase(trainer)  # creates the moments at its first optimizer step, and looks whether padding matters
        result[method] = {
            "tokens": count_tokens(passes),
            "passes": sum(one.gradient for one in passes),
            "flops": model_flops(passes, shape, trainer.model.num_parameters()),
            "peak_memory": (peak_memory() or 0) - held,
            "planned_memory": planned_peak,
        }
    seconds = take_turns(trainers, repeats)
    peak = PEAK.get(device_name())
    for method, own in result.items():
        middle = statistics.median(seconds[method])
        own |= {
            "seconds": seconds[method],
            "tokens_per_second": round(rollout.tokens / middle),
            "share_of_peak": own["flops"] / middle / peak if peak else None,
            "ratio": ratio(seconds[method], seconds["GRPO"]),
        }
    return result


def page(results: Mapping[str, Any]) -> str:
    """The cases that are done, as Markdown."""
    rows = []
    for case, found in results["cases"].items():
        theirs = found["GRPO"]
        for method, own in found.items():
            times, share, plan = own["ratio"], own["share_of_peak"], own["planned_memory"]
            memory = f"{own['peak_memory'] / 2**30:.1f}" + (f" ({plan / 2**30:.1f})" if plan else "")
            time = f"{times['median']:.2f} ({times['low']:.2f}–{times['high']:.2f})"
            tokens = own["tokens"]["gradient padded"] / theirs["tokens"]["gradient padded"]
            cells = [time, f"{own['passes']}", f"{tokens:.2f}", memory, "" if share is None else f"{share:.0%}"]
            rows.append([case, method, *cells])
    head = [
        "case",
        "",
        "time",
        "passes with gradient",
        "their tokens",
        "peak memory in GiB (planned)",
        "of peak speed",
    ]
    made = f"{results['device']}, {results['date']}, PyTorch {results['versions']['torch']}"
    about = (
        "Time and tokens with padding are fractions of TRL's GRPOTrainer on the same rollout; medians and ranges of "
        "alternating phases."
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
        f"{name}, 0% dead, {'' if checkpointing else 'no '}checkpointing": functools.partial(
            measure, SHAPES[name], methods, shorter, checkpointing=checkpointing, **options
        )
        for name, checkpointing, methods in (TINY_CASES if args.tiny else CASES)
    }
    results = measure_missing(args.output, {"tiny": args.tiny, **options}, cases, Limit(args.limit_seconds))
    args.output.with_suffix(".md").write_text(page(results), encoding="utf-8")
    return int(bool(results["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
