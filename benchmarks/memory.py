"""
`opo_trl.forecast.memory` against measurements, and the tables of docs/performance.md and benchmarks/results/memory.md.

    python -m benchmarks.memory --measure               measure (CPU, about 10 minutes) and write the tables
    python -m benchmarks.memory --measure ops losses    measure only these again
    python -m benchmarks.memory --measure runs --model runs/smollm2    runs of a pretrained model (10 minutes)
    python -m benchmarks.memory --write                 write the tables from the formula and the committed results
    python -m benchmarks.memory                         print predictions and measurements

`ops` are the operations of a pass at the shape of Qwen3-1.7B and `losses` the CPU allocator on small models
(`benchmarks/memory_probes.py`), `ranks` the tensors that the processes of a run hold and `runs` the resident memory of
runs with SmolLM2-135M-Instruct, made by `benchmarks/smollm2.py` (`benchmarks/memory_ranks.py`).
"""

import argparse
import functools
import json
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from opo_trl.forecast.memory import HEADROOM, Precision, decoder, memory_plan

from .memory_probes import Pass, build, make_config, measure_loss, measure_ops
from .memory_ranks import COMPONENTS, measure_ranks, measure_resident
from .pages import fill, table
from .record import origin
from .shapes import QWEN3_1_7B


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "memory.json"
PAGE = ROOT / "docs" / "performance.md"
MEASURED = ROOT / "benchmarks" / "results" / "memory.md"

SMALL = QWEN3_1_7B | {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# DeepSpeed does not shard parameters below 100,000 elements: here, as in a large model, only the norms.
MEDIUM = SMALL | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
# Qwen3-1.7B with 1/64 of its parameters, and of DeepSpeed's thresholds.
SCALED = SMALL | {"vocab_size": 18992, "num_hidden_layers": 28}
SCALED_ZERO = {
    "stage3_param_persistence_threshold": 1562,
    "stage3_prefetch_bucket_size": 781250,
    "stage3_max_live_parameters": 15625000,
    "stage3_max_reuse_distance": 15625000,
    "reduce_bucket_size": 7812500,
}

PARTS = ("ops", "losses", "ranks", "runs")
PROMPT, COMPLETION, LORA_RANK = 1024, 1280, 32
LENGTH = PROMPT + COMPLETION
CARD, PROCESSES, SHARE = 24e9, 4, 0.4

OPS: dict[str, dict[str, Any]] = {
    "4 rows": {"rows": 4, "length": LENGTH},
    "1 row": {"rows": 1, "length": LENGTH},
    "16 rows of 512 tokens": {"rows": 16, "length": 512},
    "1 row, no checkpointing": {"rows": 1, "length": LENGTH, "checkpointing": False},
    "4 rows, LoRA, float32 adapters": {"rows": 4, "length": LENGTH, "lora": LORA_RANK},
    "4 rows, LoRA, bfloat16 adapters (ZeRO)": {"rows": 4, "length": LENGTH, "lora": LORA_RANK, "adapters": "bfloat16"},
    "1 row, LoRA, no checkpointing": {"rows": 1, "length": LENGTH, "lora": LORA_RANK, "checkpointing": False},
    "4 rows, float32 weights under autocast": {"rows": 4, "length": LENGTH, "weights": "float32"},
    "4 rows, float32": {"rows": 4, "length": LENGTH, "weights": "float32", "autocast": False},
    "1 row, eager attention": {"rows": 1, "length": LENGTH, "attention": "eager"},
}
_BF16 = {"weights": "bfloat16", "autocast": True}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "256 tokens": (SMALL, {"rows": 4, "length": 256}),
    "512 tokens": (SMALL, {"rows": 4, "length": 512}),
    "512 tokens, no checkpointing": (SMALL, {"rows": 4, "length": 512, "checkpointing": False}),
    "512 tokens, hidden size 512": (MEDIUM, {"rows": 4, "length": 512}),
    "64 tokens, 32,768 words": (SMALL | {"vocab_size": 32768}, {"rows": 4, "length": 64}),
    "512 tokens, bfloat16": (SMALL, {"rows": 4, "length": 512, **_BF16}),
    "512 tokens, bfloat16, no checkpointing": (SMALL, {"rows": 4, "length": 512, "checkpointing": False, **_BF16}),
}
RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 process": (MEDIUM, {"sharding": "none"}),
    "1 process, float32": (MEDIUM, {"sharding": "none", "weights": "float32"}),
    "1 process, LoRA": (MEDIUM, {"sharding": "none", "lora": 8}),
    "DDP": (MEDIUM, {"sharding": "ddp"}),
    "ZeRO-1": (MEDIUM, {"sharding": "zero1"}),
    "ZeRO-2": (MEDIUM, {"sharding": "zero2"}),
    "ZeRO-2, float32": (MEDIUM, {"sharding": "zero2", "weights": "float32"}),
    "ZeRO-2, LoRA": (MEDIUM, {"sharding": "zero2", "lora": 8}),
    "ZeRO-3": (MEDIUM, {"sharding": "zero3"}),
    "ZeRO-3, float32": (MEDIUM, {"sharding": "zero3", "weights": "float32"}),
    "ZeRO-3, Qwen3-1.7B at 1/64": (SCALED, {"sharding": "zero3", "zero": SCALED_ZERO}),
    "FSDP2": (MEDIUM, {"sharding": "fsdp2"}),
}

RECIPE = ROOT / "recipes" / "smollm2-135m" / "opo.yaml"
_LORA = ["--use_peft", "true", "--lora_r", "32", "--lora_dropout", "0", "--lora_target_modules", "all-linear"]
_RECOMPUTED = ["--gradient_checkpointing", "true"]
RUNS = {
    "all weights": [],
    "all weights, checkpointing": _RECOMPUTED,
    "LoRA": _LORA,
    "LoRA, checkpointing": [*_LORA, *_RECOMPUTED],
}


def measure(only: Iterable[str], model: Path | None = None):
    """Measure these parts again, and keep the others; `model` is the folder of the model for `runs`."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if "ops" in only:
        results["ops"] = {name: measure_ops(QWEN3_1_7B, **case) for name, case in OPS.items()}
    if "losses" in only:
        results["losses"] = {name: measure_loss(shape, **case) for name, (shape, case) in LOSSES.items()}
    if "ranks" in only:
        results["ranks"] = {name: measure_ranks(shape, **case) for name, (shape, case) in RANKS.items()}
    if "runs" in only:
        start = ["--config", str(RECIPE), "--model_name_or_path", str(model)]
        results["runs"] = {name: measure_resident([*start, *words]) for name, words in RUNS.items()}
    results |= origin()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


# Predictions


def count(shape: dict[str, Any], lora: int = 0) -> dict[str, int]:
    """Number of parameters, and of trained ones."""
    return dict(zip(("parameters", "trained"), _count(tuple(shape.items()), lora), strict=True))


@functools.cache
def _count(shape: tuple, lora: int) -> tuple[int, int]:
    sizes = [(p.numel(), p.requires_grad) for p in build(dict(shape), lora=lora).parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def plan_pass(shape: dict[str, Any], *, fused_kernels: bool = True, **case: Any) -> dict[str, float]:
    """Bytes of a [`Pass`] besides weights and gradients, by moment; all tokens but one are scored."""
    one = Pass(**case)
    width = getattr(torch, one.weights).itemsize
    trained = getattr(torch, one.adapters).itemsize if one.lora else width
    plan = memory_plan(
        decoder(make_config(shape, one.attention)),
        **count(shape, one.lora),
        precision=Precision(width, 2 if one.autocast else width, trained),
        rows=one.rows,
        prompt=1,
        completion=one.length - 1,
        checkpointing=one.checkpointing,
        fused_kernels=fused_kernels,
    )
    parts = ("activations", "one layer", "LM head")
    return {moment: sum(plan[moment].get(part, 0) for part in parts) for moment in ("LM head", "layers")}


def plan_loss(shape: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    return plan_pass(shape, **{"weights": "float32", "autocast": False, **case}, fused_kernels=False)


def plan_run(
    sharding: str,
    shape: dict[str, Any] = QWEN3_1_7B,
    *,
    lora: bool = False,
    rows: int = 4,
    prompt: int = PROMPT,
    completion: int = COMPLETION,
    share: float = SHARE,
    **options,
) -> dict:
    """A run, of the recipes' model and lengths by default, by moment and component."""
    trained = 4 if sharding == "fsdp2" or (lora and not sharding.startswith("zero")) else 2
    defaults = {"vllm_sleeps": True, "processes": 1 if sharding == "none" else PROCESSES}
    return memory_plan(
        decoder(make_config(shape)),
        **count(shape, LORA_RANK if lora else 0),
        precision=Precision(trained=trained),
        sharding=sharding,
        rows=rows,
        prompt=prompt,
        completion=completion,
        vllm=share * CARD,
        **defaults | options,
    )


def peak(plan: dict[str, dict[str, float]]) -> float:
    return max(sum(components.values()) for components in plan.values())


# Tables


def gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.2f}"


def verdict(size: float) -> str:
    """A size, and whether it fits on a card: yes, with too little headroom, or no."""
    return f"{gb(size)} {'✓' if size <= (1 - HEADROOM) * CARD else '?' if size <= CARD else '✗'}"


ROWS = (1, 2, 4, 8, 16)


def by_rows(runs: dict[str, dict[str, Any]]) -> str:
    return table(
        ["rows of a micro-batch", *map(str, ROWS)],
        [[name, *(verdict(peak(plan_run(**run, rows=rows))) for rows in ROWS)] for name, run in runs.items()],
    )


def by_component(run: dict[str, Any]) -> str:
    plan = plan_run(**run)
    names = list(dict.fromkeys(name for components in plan.values() for name in components))
    rows = [[name, *(gb(parts[name]) if name in parts else "" for parts in plan.values())] for name in names]
    return table(["GB", *plan], [*rows, ["**sum**", *(f"**{gb(sum(parts.values()))}**" for parts in plan.values())]])


FOUR = {
    "DDP": {"sharding": "ddp"},
    "ZeRO-1": {"sharding": "zero1"},
    "ZeRO-2": {"sharding": "zero2"},
    "ZeRO-2, no checkpointing": {"sharding": "zero2", "checkpointing": False},
    "ZeRO-3": {"sharding": "zero3"},
    "FSDP2": {"sharding": "fsdp2"},
    "LoRA, DDP": {"sharding": "ddp", "lora": True},
    "LoRA, ZeRO-2": {"sharding": "zero2", "lora": True},
}
ONE = {
    "LoRA": {"sharding": "none", "lora": True, "share": 0.45},
    "LoRA, vLLM awake": {"sharding": "none", "lora": True, "share": 0.45, "vllm_sleeps": False},
    "LoRA, no checkpointing": {"sharding": "none", "lora": True, "share": 0.45, "checkpointing": False},
    "all weights": {"sharding": "none"},
    "all weights, vLLM awake": {"sharding": "none", "vllm_sleeps": False},
}


def compared(pairs: Iterable[tuple[str, float, float]], unit: float) -> Iterable[list[str]]:
    for name, said, measured in pairs:
        yield [name, f"{said / unit:.3f}", f"{measured / unit:.3f}", f"{said / measured:.3f}"]


def rank_cells(result: dict[str, Any]) -> list[str]:
    cells = [result["update"].get(name, [0, 0]) for name in COMPONENTS] + [result["step"]["gradients"]]
    return [f"{said / 1e6:.1f} / {held / 1e6:.1f}" if held else "" for said, held in cells]


def run_cells(result: dict[str, float]) -> list[str]:
    sizes = [result[name] for name in ("planned", "returned", "kept")]
    ratios = [f"{result['planned'] / result[name]:.2f}" for name in ("returned", "kept")]
    return [f"{size / 1e9:.2f}" for size in sizes] + ratios


def blocks() -> dict[str, str]:
    """Tables of both pages, by name."""
    results = json.loads(RESULTS.read_text())
    head = ["", "formula", "measured", "ratio"]
    ops = [(name, max(plan_pass(QWEN3_1_7B, **case).values()), results["ops"][name]) for name, case in OPS.items()]
    losses = [
        (f"{name}, {moment}", plan_loss(shape, case)[moment], size)
        for name, (shape, case) in LOSSES.items()
        for moment, size in results["losses"][name].items()
    ]
    return {
        "four": by_rows(FOUR),
        "four awake": by_rows({name: {**run, "vllm_sleeps": False} for name, run in FOUR.items()}),
        "one": by_rows(ONE),
        "zero2": by_component(FOUR["ZeRO-2"]),
        "zero3": by_component(FOUR["ZeRO-3"]),
        "lora": by_component(FOUR["LoRA, DDP"]),
        "lora on one": by_component(ONE["LoRA"]),
        "ops": table(head, compared(ops, 1e9)),
        "losses": table(head, compared(losses, 1e6)),
        "ranks": table(
            ["", *COMPONENTS, "gradients in the step"],
            [[name, *rank_cells(result)] for name, result in results["ranks"].items()],
        ),
        "runs": table(
            ["GB", "plan", "measured", "by glibc's defaults", "ratio", "ratio by glibc's defaults"],
            [[name, *run_cells(result)] for name, result in results["runs"].items()],
        ),
        "versions": ", ".join(f"{name} {version}" for name, version in results["versions"].items()),
    }


def filled(page: str) -> str:
    """A page with its tables updated."""
    return fill(page, {name: text for name, text in blocks().items() if f"<!-- {name} -->" in page})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=PARTS, help="measure all but runs, or only these")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, for runs")
    parser.add_argument("--write", action="store_true", help="write the tables of both pages")
    args = parser.parse_args()
    if "runs" in (args.measure or ()) and args.model is None:
        parser.error("--measure runs needs --model")
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.measure is not None:
        measure(args.measure or PARTS[:3], args.model)
    if args.write or args.measure is not None:
        for page in (PAGE, MEASURED):
            page.write_text(filled(page.read_text()))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in blocks().items()))


if __name__ == "__main__":
    main()
