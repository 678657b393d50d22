"""The memory formula against measurements and published figures; the plan's line; tables of docs/performance.md."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl.kernels.chunked_logprob
import trl.trainer.utils
import yaml
from helpers import USE_CPU, make_trainer
from invariance.launch import launch, logs
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import memory as benchmark
from benchmarks import memory_probes as probes
from benchmarks import memory_ranks
from opo_trl.forecast import memory, plan
from opo_trl.forecast.memory import memory_plan


ROOT = Path(__file__).resolve().parents[2]
QWEN = benchmark.QWEN3_1_7B


def total(components: dict[str, float]) -> float:
    return sum(components.values())


# Published figures


@pytest.mark.parametrize(
    ("sharding", "moment", "gigabytes"), [("zero1", 1, 31.4), ("zero2", 2, 16.6), ("zero3", 2, 1.9)]
)
def test_states_are_those_of_the_zero_paper(sharding: str, moment: int, gigabytes: float):
    """Figure 1 of Rajbhandari et al.: 7.5 billion parameters, 64 processes; 120 GB without sharding."""
    states = memory._states(sharding, 64, 7.5e9, b=2, c=2, moments=None, bucket=0)
    weights = 15e9 / (64 if sharding == "zero3" else 1)
    parts = states[0] | states[moment]
    assert (weights + parts["gradients"] + parts["optimizer"]) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_parameters_of_qwen3():
    assert benchmark.count(QWEN) == {"parameters": 1720574976, "trained": 1720574976}
    # 28 layers of rank 32: q, k, v, o, gate, up, down.
    lora = 28 * 32 * (2048 * 2 + 2 * (2048 + 1024) + 2048 * 2 + 2 * (2048 + 6144) + 6144 + 2048)
    assert benchmark.count(QWEN, 32)["trained"] == lora


def test_shape_is_that_of_the_real_configuration(shared_data):
    real = json.loads((shared_data / "Qwen3-1.7B" / "config.json").read_text())
    assert {name: real[name] for name in QWEN} == QWEN


def test_tiles_are_those_of_trl():
    rows, words = trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
    assert (rows, words) == memory._TILE


def test_runs_of_the_tables_are_the_recipes():
    for recipe, share in {"experiment1": 0.4, "experiment2": 0.4, "experiment1_lora": 0.45}.items():
        fields = yaml.safe_load((ROOT / "recipes" / "qwen3-1.7b" / recipe / "opo.yaml").read_text())
        assert fields["vllm_gpu_memory_utilization"] == share
        assert fields["per_device_train_batch_size"] == 4
        assert all(fields[name] for name in ("vllm_enable_sleep_mode", "gradient_checkpointing", "bf16"))
        assert (fields["max_prompt_length"], fields["max_completion_length"]) == (
            benchmark.PROMPT,
            benchmark.COMPLETION,
        )
        assert fields["accelerate_config"] == f"../../accelerate/{'single_gpu' if 'lora' in recipe else 'zero2'}.yaml"
    assert fields["lora_r"] == benchmark.LORA_RANK
    assert (benchmark.SHARE, benchmark.ONE["LoRA"]["share"]) == (0.4, 0.45)


# Relations


@pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("lora", [False, True])
def test_nothing_more_needs_less_memory(sharding: str, lora: bool):
    def peaks(**options):
        run = benchmark.plan_run(sharding, lora=lora, **options)
        return [total(run[moment]) for moment in ("generation", "optimizer step", "LM head", "layers")]

    for options in (
        {"rows": 8},
        {"checkpointing": False},
        {"share": 0.5},
        {"vllm_sleeps": False},
        {"reference": True},
    ):
        more, less = peaks(**options), peaks()
        assert more != less, options
        assert all(m >= n for m, n in zip(more, less, strict=True)), options
    if sharding != "none":
        more, less = peaks(processes=4), peaks(processes=8)
        assert all(m >= n for m, n in zip(more, less, strict=True))


def test_sharding_orders_what_is_held():
    states = {
        sharding: sum(
            benchmark.plan_run(sharding)["layers"].get(name, 0) for name in ("weights", "gradients", "optimizer")
        )
        for sharding in ("zero1", "zero2", "zero3")
    }
    assert states["zero1"] > states["zero2"] > states["zero3"]
    whole = memory_plan(None, parameters=1e9, trained=1e9, sharding="zero3", processes=1, bucket=0)
    assert whole["optimizer step"] == pytest.approx(
        {"weights": 2e9, "gradients": 2e9, "optimizer": 12e9, "float32 gradients": 6e9}
    )


def test_only_states_are_planned_for_an_unknown_architecture():
    assert memory.decoder(AutoConfig.for_model("gpt2")) is None
    assert memory_plan(None, parameters=10, trained=10).keys() == {"generation", "optimizer step"}


# Measurements


@pytest.mark.parametrize("name", ["4 rows", "1 row, no checkpointing"])
def test_operations_of_a_pass_at_full_size(name: str):
    case = benchmark.OPS[name]
    assert max(benchmark.plan_pass(QWEN, **case).values()) == pytest.approx(probes.measure_ops(QWEN, **case), rel=0.02)


@pytest.mark.parametrize("model_type", memory._ARCHITECTURES)
@pytest.mark.parametrize("options", [{}, {"checkpointing": False, "lora": 4}])
def test_operations_of_a_pass_by_architecture(model_type: str, options: dict):
    shape = benchmark.SMALL | {"model_type": model_type, "tie_word_embeddings": False, "vocab_size": 1024}
    case = {"rows": 4, "length": 512, **options}
    said = max(benchmark.plan_pass(shape, **case).values())
    assert said == pytest.approx(probes.measure_ops(shape, **case), rel=0.03)


def test_scoring_the_rollout_stays_below_the_update():
    lora = benchmark.plan_pass(QWEN, **benchmark.OPS["4 rows, LoRA, bfloat16 adapters (ZeRO)"])  # the least of all
    assert probes.measure_ops(QWEN, **benchmark.OPS["4 rows"], grad=False) < 0.5 * max(lora.values())


@pytest.mark.parametrize("name", ["256 tokens", "512 tokens, bfloat16, no checkpointing"])
def test_allocator_in_compute_loss(name: str):
    shape, case = benchmark.LOSSES[name]
    assert benchmark.plan_loss(shape, case) == pytest.approx(probes.measure_loss(shape, **case), rel=0.05)


def train_rank(sharding: str, folder: str):
    """A process of a launch; the model is made by the test."""
    memory_ranks.train_rank(sharding=sharding, weights="float32", folder=folder)


@pytest.mark.parametrize("sharding", ["ddp", "zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_what_a_process_holds(sharding: str, tmp_path: Path):
    if sharding.startswith("zero"):
        pytest.importorskip("deepspeed")
    model = AutoModelForCausalLM.from_config(probes.make_config(benchmark.MEDIUM))
    model.save_pretrained(tmp_path / "model")
    config = "multi_gpu" if sharding == "ddp" else sharding
    status = launch(train_rank, sharding, str(tmp_path), config=config, processes=2, folder=tmp_path)
    assert not any(status), logs(tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["processes"] == 2
    assert result["distributed_type"] == ("MULTI_CPU" if sharding == "ddp" else "DEEPSPEED")
    for moment in ("update", "step"):
        for component, (planned, held) in result[moment].items():
            assert planned == pytest.approx(held, rel=0.02), (moment, component)


# The plan


def test_plan_is_that_of_the_trainer(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, optim="adamw_torch_fused", beta=0.1)
    n = sum(p.numel() for p in trainer.model.parameters())
    components = plan.memory_plan(trainer)["layers"]
    assert [components[name] for name in ("weights", "gradients", "optimizer", "reference model")] == [
        4 * n,
        4 * n,
        8 * n,
        4 * n,
    ]
    prompt, completion = plan._row_tokens(trainer)
    text = plan.training_plan(trainer)
    rows = f"1 × ({prompt} + 4 × {completion}" if USE_CPU else f"4 × ({prompt} + {completion}"
    assert f"not sharded, 1 process; {rows}) tokens" in text
    assert "peak at LM head: " in text
    assert ("of the device's" in text) is not USE_CPU


@pytest.mark.parametrize(
    ("moment", "component", "options", "field"),
    [
        ("generation", "vLLM", {}, "vllm_gpu_memory_utilization"),
        ("layers", "vLLM", {"vllm_enable_sleep_mode": False}, "vllm_enable_sleep_mode"),
        ("layers", "one layer", {}, "per_device_train_batch_size"),
        ("layers", "activations", {"gradient_checkpointing": False}, "gradient_checkpointing"),
        ("generation", "KV cache", {}, "steps_per_generation"),
        ("layers", "buckets", {}, "reduce_bucket_size"),
        ("optimizer step", "optimizer", {}, "accelerate_config"),
    ],
)
def test_warning_of_what_does_not_fit_names_the_field_to_change(
    tiny_model, tmp_path, monkeypatch, moment, component, options, field
):
    trainer = make_trainer(tiny_model, tmp_path)
    for name, value in {"gradient_checkpointing": True, "vllm_enable_sleep_mode": True, **options}.items():
        setattr(trainer.args, name, value)
    monkeypatch.setattr(plan, "memory_plan", lambda _: {moment: {component: 9.1e9}, "other": {}})
    monkeypatch.setattr(plan, "_device_bytes", lambda _: int(10e9))
    warning = plan.training_plan(trainer).splitlines()[-1]
    assert "WARNING: does not leave 10% of the device's 10 GB" in warning
    assert f"`{field}`" in warning
    monkeypatch.setattr(plan, "_device_bytes", lambda _: int(10.2e9))
    assert "fits, with 10%" in plan.training_plan(trainer)


# The page


def test_tables_of_the_pages_are_those_of_the_formula():
    pages = [page.read_text() for page in (benchmark.PAGE, benchmark.MEASURED)]
    assert [benchmark.filled(page) for page in pages] == pages, "run `python -m benchmarks.memory --write`"
    assert {"".join(pages).count(f"<!-- {name} -->") for name in benchmark.blocks()} == {1}


def test_plan_on_the_page_is_the_one_of_the_recipe(monkeypatch):
    run = benchmark.plan_run("zero2")
    monkeypatch.setattr(plan, "memory_plan", lambda _: run)
    monkeypatch.setattr(plan, "_sharding", lambda _: "zero2")
    monkeypatch.setattr(plan, "_row_tokens", lambda _: (benchmark.PROMPT, benchmark.COMPLETION))
    monkeypatch.setattr(plan, "_device_bytes", lambda _: int(benchmark.CARD))
    trainer = SimpleNamespace(
        args=SimpleNamespace(per_device_train_batch_size=4, world_size=4),
        model=SimpleNamespace(config=probes.make_config(QWEN)),
        _largest_micro_batch=lambda *_: (4, 1),
    )
    # Remedies are looked up before it is known whether the run fits.
    monkeypatch.setattr(plan, "_remedy", lambda *_: "")
    assert f"  memory     {plan._memory(trainer)}\n" in benchmark.PAGE.read_text()


def test_measurements_agree_with_the_formula():
    """The committed results; a component that is not measured (what FSDP2 gathers) is 0 there."""
    results = json.loads(benchmark.RESULTS.read_text())
    for name, case in benchmark.OPS.items():
        assert max(benchmark.plan_pass(QWEN, **case).values()) == pytest.approx(results["ops"][name], rel=0.05), name
    for name, (shape, case) in benchmark.LOSSES.items():
        assert benchmark.plan_loss(shape, case) == pytest.approx(results["losses"][name], rel=0.05), name
    for name, result in results["ranks"].items():
        for planned, held in [*result["update"].values(), *result["step"].values()]:
            assert not held or planned == pytest.approx(held, rel=0.05), name
    for name, result in results["runs"].items():
        assert result["planned"] == pytest.approx(result["returned"], rel=0.05), name
