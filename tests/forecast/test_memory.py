"""The memory formula against measurements, recorded and made here, and published figures; the plan's line."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.kernels.chunked_logprob
import trl.trainer.utils
from recording_trainers import make_trainer
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.updates.shapes import QWEN3_1_7B
from opo_trl.checks.files import read_json
from opo_trl.forecast import memory, plan
from opo_trl.forecast.memory import Run, memory_plan
from opo_trl.updates import shared_prompts


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDED = read_json(BENCHMARKS / "updates" / "memory.json")
ON_GPU = read_json(BENCHMARKS / "gpu" / "memory.json")["cases"]

PARAMETERS = 1720574976  # of Qwen3-1.7B
# Inputs and outputs of a layer's matrices: of q, k, v, o, gate, up and down.
MATRICES = [(2048, 2048), (2048, 1024), (2048, 1024), (2048, 2048), (2048, 6144), (2048, 6144), (6144, 2048)]
LAYERS = 28
RANK = 32
LORA = LAYERS * RANK * sum(inputs + outputs for inputs, outputs in MATRICES)
FLOAT32 = {"weights": 4, "compute": 4, "trained_width": 4}


def shape_of(**changes: Any) -> memory.Decoder:
    fields = {**QWEN3_1_7B, **changes}
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "sdpa"
    return memory.decoder(config)


def run_of_qwen3(*, lora: bool, **options: Any) -> Run:
    """A pass of Qwen3-1.7B in bfloat16, with float32 adapters."""
    if lora:
        return Run(
            shape_of(),
            parameters=PARAMETERS + LORA,
            trained=LORA,
            trained_width=4,
            total=PARAMETERS * 2 + LORA * 4,
            **options,
        )
    return Run(shape_of(), parameters=PARAMETERS, trained=PARAMETERS, trained_width=2, total=PARAMETERS * 2, **options)


def bytes_of_a_pass(components: dict[str, float]) -> float:
    """Besides weights and gradients, at one moment."""
    return sum(components.get(part, 0) for part in ("activations", "one layer", "LM head"))


def peak_of_a_pass(moments: dict[str, dict[str, float]]) -> float:
    in_head = bytes_of_a_pass(moments["LM head"])
    in_layers = bytes_of_a_pass(moments["layers"])
    return max(in_head, in_layers)


# Published figures


def test_tiles_are_those_of_trl():
    tile = (trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    assert tile == memory._TILE


def test_only_states_are_planned_for_an_unknown_architecture():
    unknown = AutoConfig.for_model("gpt2")
    assert memory.decoder(unknown) is None
    moments = memory_plan(Run(None, 10, 10, 20))
    assert moments.keys() == {"generation", "optimizer step"}


# Measurements


@pytest.mark.parametrize("name", ON_GPU)
def test_peaks_of_a_gpu(name: str):
    rows, *_ = name.split()
    checkpointing = "no checkpointing" not in name
    run = run_of_qwen3(lora="LoRA" in name, rows=int(rows), prompt=1024, completion=1280, checkpointing=checkpointing)
    moments = memory_plan(run)
    peaks = {moment: sum(components.values()) for moment, components in moments.items()}
    _, measured_update = ON_GPU[name]["update"]
    _, measured_step = ON_GPU[name]["optimizer step"]
    assert max(peaks["LM head"], peaks["layers"]) == pytest.approx(measured_update, rel=0.02)
    assert peaks["optimizer step"] == pytest.approx(measured_step, rel=0.02)


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
    under_ddp = RECORDED["ranks"]["DDP"]
    _, bytes_of_weights = under_ddp["update"]["weights"]
    n = bytes_of_weights // 2  # in bfloat16
    shape = shape_of(vocab_size=4096, hidden_size=512, num_hidden_layers=4, intermediate_size=1024, head_dim=64)
    run = Run(shape, n, n, n * options.get("trained_width", 2), processes=2, **options)
    moments = memory_plan(run)
    recorded = RECORDED["ranks"][name]
    for component, (_, measured) in recorded["update"].items():
        if measured:
            assert moments["layers"][component] == pytest.approx(measured, rel=0.02), component
    step = moments["optimizer step"]
    gradients = step["gradients"] + step.get("float32 gradients", 0)
    _, measured = recorded["step"]["gradients"]
    assert gradients == pytest.approx(measured, rel=0.02)


def allocated_peak(profiler: profile) -> int:
    """The most bytes that were allocated at once while the profiler recorded."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocated = itertools.accumulate(event.nbytes() for event in events)
    return max(allocated)


def parameters_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "checkpointing"), [("llama", False), ("qwen3", True)])
def test_allocator_in_a_pass(model_type: str, checkpointing: bool):
    """Peak of a forward and backward pass with TRL's head on a CPU, besides weights and gradients."""
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    fields = {**QWEN3_1_7B, **sizes, **heads, "model_type": model_type}
    config = AutoConfig.for_model(**fields)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).train()
    trl.trainer.utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.zeros(4, 512, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, :256] = 0  # attention needs no mask otherwise

    def forward_and_backward():
        output = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
        output.log_probs.sum().backward()

    forward_and_backward()  # makes the gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        forward_and_backward()
    measured = allocated_peak(profiler)
    n = parameters_of(model)
    options = {"rows": 4, "prompt": 1, "completion": 511, "checkpointing": checkpointing, "fused_kernels": False}
    run = Run(memory.decoder(config), n, n, 4 * n, **FLOAT32, **options)
    peak = peak_of_a_pass(memory_plan(run))
    assert peak == pytest.approx(measured, rel=0.05)


# The plan


def test_plan_is_that_of_the_trainer(tiny_model, tmp_path, monkeypatch):
    trainer = make_trainer(tiny_model, tmp_path, optim="adamw_torch_fused", beta=0.1)
    n = parameters_of(trainer.model)
    components = plan.memory_plan(trainer)["layers"]
    for name, bytes_per_parameter in (("weights", 4), ("gradients", 4), ("optimizer", 8), ("reference model", 4)):
        assert components[name] == bytes_per_parameter * n
    monkeypatch.setattr(plan, "_device_bytes", lambda trainer: 10**10)
    moments = {"generation": {}, "other": {}}
    monkeypatch.setattr(plan, "memory_plan", lambda trainer, place: moments)
    for of_vllm, text in ((9.1e9, "WARNING: does not leave 10% of the device's 10 GB"), (8.9e9, "fits, with 10% of")):
        moments["generation"] = {"vLLM": of_vllm}
        *_, line = plan.training_plan(trainer).splitlines()
        assert text in line


def test_architectures_of_the_formula_share_prompts():
    assert {*memory.ARCHITECTURES} <= {*shared_prompts.ARCHITECTURES}
