"""The memory formula against measurements, recorded and made here, and published figures; the plan's line."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.kernels.chunked_logprob
import trl.trainer.utils
from helpers import make_trainer
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import QWEN3_1_7B
from opo_trl.forecast import memory, plan
from opo_trl.forecast.memory import Run, memory_plan
from opo_trl.updates import shared_prompts


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDED = json.loads((RESULTS / "memory.json").read_text())
ON_GPU = json.loads((RESULTS / "gpu" / "memory.json").read_text())["cases"]

PARAMETERS = 1720574976  # of Qwen3-1.7B
# 28 layers of rank 32: q, k, v, o, gate, up, down.
LORA = 28 * 32 * (2048 * 2 + 2 * (2048 + 1024) + 2048 * 2 + 2 * (2048 + 6144) + 6144 + 2048)
FLOAT32 = {"weights": 4, "compute": 4, "trained_width": 4}
TO_SCORE = {"prompt": 1, "completion": 2303}


def shape_of(**changes: Any) -> memory.Decoder:
    config = AutoConfig.for_model(**QWEN3_1_7B | changes)
    config._attn_implementation = "sdpa"
    return memory.decoder(config)


def planned(*, lora: bool = False, **options: Any) -> dict[str, dict[str, float]]:
    """A pass of Qwen3-1.7B in bfloat16, with float32 adapters."""
    counts = {"parameters": PARAMETERS + LORA * lora, "trained": LORA if lora else PARAMETERS}
    options = {"trained_width": 4 if lora else 2, **options}
    width = options.get("weights", 2)
    total = PARAMETERS * width + LORA * lora * options["trained_width"]
    return memory_plan(Run(shape_of(), **counts, **{"total": total, **options}))


def peak_of_a_pass(moments: dict[str, dict[str, float]]) -> float:
    parts = ("activations", "one layer", "LM head")
    return max(sum(moments[moment].get(part, 0) for part in parts) for moment in ("LM head", "layers"))


# Published figures


def test_tiles_are_those_of_trl():
    rows, words = trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
    assert (rows, words) == memory._TILE


def test_only_states_are_planned_for_an_unknown_architecture():
    assert memory.decoder(AutoConfig.for_model("gpt2")) is None
    assert memory_plan(Run(None, 10, 10, 20)).keys() == {"generation", "optimizer step"}


# Measurements


@pytest.mark.parametrize("name", ON_GPU)
def test_peaks_of_a_gpu(name: str):
    rows, lora = int(name.split()[0]), "LoRA" in name
    sizes = {"prompt": 1024, "completion": 1280, "checkpointing": "no checkpointing" not in name}
    peaks = {moment: sum(parts.values()) for moment, parts in planned(lora=lora, rows=rows, **sizes).items()}
    assert max(peaks["LM head"], peaks["layers"]) == pytest.approx(ON_GPU[name]["update"][1], rel=0.02)
    assert peaks["optimizer step"] == pytest.approx(ON_GPU[name]["optimizer step"][1], rel=0.02)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDP", {"sharding": "ddp"}),
        ("ZeRO-1", {"sharding": "zero1"}),
        ("ZeRO-2", {"sharding": "zero2"}),
        ("ZeRO-2, float32", {"sharding": "zero2", **FLOAT32}),
        ("ZeRO-3", {"sharding": "zero3"}),
        ("FSDP2", {"sharding": "fsdp2", "trained_width": 4}),
    ],
)
def test_what_each_of_two_processes_holds(name: str, options: dict[str, Any]):
    n = RECORDED["ranks"]["DDP"]["update"]["weights"][1] // 2  # in bfloat16
    shape = shape_of(vocab_size=4096, hidden_size=512, num_hidden_layers=4, intermediate_size=1024, head_dim=64)
    run = Run(shape, n, n, n * options.get("trained_width", 2), processes=2, **options)
    moments, recorded = memory_plan(run), RECORDED["ranks"][name]
    for component, (_, held) in recorded["update"].items():
        assert not held or moments["layers"][component] == pytest.approx(held, rel=0.02), component
    step = moments["optimizer step"]
    gradients = step["gradients"] + step.get("float32 gradients", 0)
    assert gradients == pytest.approx(recorded["step"]["gradients"][1], rel=0.02)


@pytest.mark.parametrize(("model_type", "checkpointing"), [("llama", False), ("qwen3", True)])
def test_allocator_in_a_pass(model_type: str, checkpointing: bool):
    """Peak of a forward and backward pass with TRL's head on a CPU, besides weights and gradients."""
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**QWEN3_1_7B | sizes | heads | {"model_type": model_type})
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).train()
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, mask = torch.zeros(4, 512, dtype=torch.long), torch.ones(4, 512, dtype=torch.long)
    mask[0, :256] = 0  # attention needs no mask otherwise

    def passed():
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).log_probs.sum().backward()

    passed()  # makes the gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        passed()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    measured = max(itertools.accumulate(event.nbytes() for event in events))
    n = sum(p.numel() for p in model.parameters())
    options = {"rows": 4, "prompt": 1, "completion": 511, "checkpointing": checkpointing, "fused_kernels": False}
    run = Run(memory.decoder(config), n, n, 4 * n, **FLOAT32, **options)
    assert peak_of_a_pass(memory_plan(run)) == pytest.approx(measured, rel=0.05)


# The plan


def test_plan_is_that_of_the_trainer(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path, optim="adamw_torch_fused", beta=0.1)
    n = sum(p.numel() for p in trainer.model.parameters())
    components = plan.memory_plan(trainer)["layers"]
    parts = [components[name] for name in ("weights", "gradients", "optimizer", "reference model")]
    assert parts == [4 * n, 4 * n, 8 * n, 4 * n]
    monkeypatch.setattr(plan, "_device_bytes", lambda _: int(10e9))
    for held, says in ((9.1e9, "WARNING: does not leave 10% of the device's 10 GB"), (8.9e9, "fits, with 10% of")):
        monkeypatch.setattr(plan, "memory_plan", lambda _, held=held: {"generation": {"vLLM": held}, "other": {}})
        assert says in plan.training_plan(trainer).splitlines()[-1]


def test_architectures_that_share_prompts_are_those_of_the_formula():
    assert shared_prompts.ARCHITECTURES == memory.ARCHITECTURES
