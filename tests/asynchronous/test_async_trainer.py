"""AsyncOPOTrainer: loss and gradient against the definition in float64, however a step is cut, and what it logs."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import scripted
import torch
from helpers import BACKEND, EXACT, distance, norm, relative_error, snapshot
from invariance.launch import launch, logs
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from opo_trl import AsyncOPOTrainer
from opo_trl.asynchronous.attention import tree_attention


@pytest.fixture(scope="module")
def groups(tiny_model):
    made = scripted.conversations(tiny_model, groups=4)
    made[0][3].reward = None
    return made


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"log_ratio_reduction": "mean", "mu": 5.0, "model_init_kwargs": {"attn_implementation": "sdpa"}},
        {"ratio_form": "exact", "positivity": "project", "log_ratio_clamp": 0.8},
        {"ratio_form": "log"},
    ],
    ids=lambda objective: " ".join(objective) or "default",
)
def test_gradient_is_that_of_the_definition(tiny_model, tmp_path, groups, objective):
    """With tokens of tools, conversations of two rows, a completion without a score, and weights at their bound."""
    args = scripted.config(tmp_path, **objective)
    rows = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(rows)
    trainer = scripted.train(tiny_model, args, rows)
    (step,) = trainer.recorder.steps
    expected = scripted.reference(tiny_model, step.policy, groups, args)
    assert norm(expected.gradient) > 1e-3
    assert relative_error(step.gradient, expected.gradient) < EXACT
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    # What the test is about is there.
    assert len(rows) == 4 * scripted.G + 2 - 1
    assert 2.0 in expected.ratios or args.log_ratio_reduction == "mean"
    assert any(not all(row.own[-3:]) for group in groups for each in group for row in each.rows)
    # The log
    fit = [(w, d, v) for w, d, v in zip(expected.weights, expected.deltas, expected.targets, strict=True) if v]
    if args.ratio_form == "truncated":
        missing = sum(w * (min(math.expm1(d), 1) - v) ** 2 for w, d, v in fit) / sum(w * v**2 for w, d, v in fit)
        assert log["opo/target_fit"] == pytest.approx(1 - missing, rel=1e-3, abs=1e-3)
    assert log["opo/log_ratio/absmax"] == pytest.approx(max(map(abs, expected.deltas)), rel=1e-4)
    assert not [name for name in log if name.startswith("clip_ratio")]


@pytest.fixture(scope="module")
def uncut(tiny_model, tmp_path_factory):
    return scripted.cut(tiny_model, tmp_path_factory.mktemp("uncut"), 24, 1)


def assert_same_run(policy: dict, log: list[dict], trainer) -> None:
    expected, start = snapshot(trainer.model), trainer.recorder.steps[0].policy
    assert distance(expected, start) > 1e-2
    assert distance(policy, expected) < 1e-6 * norm(expected)
    assert distance(policy, expected) < 1e-4 * distance(expected, start)
    for one, other in zip(log, (entry for entry in trainer.state.log_history if "loss" in entry), strict=True):
        # A mean near zero of log-ratios in float32 has the rounding errors of the largest of them.
        rounding = 1e-6 * max(1, other["opo/log_ratio/absmax"])
        for name in [name for name in other if name.startswith("opo/")] + ["loss", "grad_norm"]:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=rounding), name


def test_run_does_not_depend_on_micro_batches(tiny_model, tmp_path, uncut):
    trainer = scripted.cut(tiny_model, tmp_path, 3, 8)
    assert trainer.state.log_history[0]["batch/microbatches_per_step"] == 8
    assert_same_run(snapshot(trainer.model), [e for e in trainer.state.log_history if "loss" in e], trainer=uncut)


def test_each_pass_is_over_the_same_samples_with_the_policy_of_its_step(tiny_model, tmp_path, groups):
    args = scripted.config(tmp_path, num_iterations=2, weight_sync_steps=2, max_steps=4, learning_rate=0.1)
    rows = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(rows)
    trainer = scripted.train(tiny_model, args, rows)
    for step in trainer.recorder.steps:
        expected = scripted.reference(tiny_model, step.policy, groups, args)
        assert relative_error(step.gradient, expected.gradient) < EXACT
    # Ages count from the first version, in optimizer steps: not only those at which weights were sent.
    ages = [entry["opo/off_policy_steps"] for entry in trainer.state.log_history if "loss" in entry]
    assert ages == [0, 1, 2, 3]
    assert [entry["opo/pass"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 1, 2]
    assert [bool("reward" in entry) for entry in trainer.state.log_history if "loss" in entry][1] is False


def test_step_with_a_log_probability_that_is_not_a_number_is_skipped(tiny_model, tmp_path, groups):
    """It would train without that completion, and not say so."""
    args = scripted.config(tmp_path, learning_rate=0.1)
    rows = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(rows)
    rows[0].old_log_probs = rows[0].old_log_probs * math.nan
    trainer = scripted.train(tiny_model, args, rows)
    assert trainer.state.log_history[0]["opo/skipped_steps"] == 1
    assert distance(snapshot(trainer.model), trainer.recorder.steps[0].policy) == 0


def cut_in_two(model: str, folder: Path) -> None:
    trained = scripted.cut(model, folder, 6, 2, ddp_backend=BACKEND)
    assert trained.accelerator.num_processes == 2
    if trained.accelerator.is_main_process:
        policy = snapshot(trained.accelerator.unwrap_model(trained.model))
        log = [entry for entry in trained.state.log_history if "loss" in entry]
        torch.save({"policy": policy, "log": log}, folder / "trained.pt")


def test_run_does_not_depend_on_processes(tiny_model, tmp_path, uncut):
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(cut_in_two, tiny_model, tmp_path, **where) == [0, 0], logs(tmp_path)
    trained = torch.load(tmp_path / "trained.pt")
    assert_same_run(trained["policy"], trained["log"], trainer=uncut)


def test_router_loss_of_a_mixture_of_experts_is_added(tmp_path, tiny_model, groups):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    sizes = {"vocab_size": 259, "head_dim": 16, "intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, **sizes)).save_pretrained(tmp_path / "moe")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "moe")
    losses = {}
    for coefficient in (0.0, 0.5):
        args = scripted.config(tmp_path, per_device_train_batch_size=8, router_aux_loss_coef=coefficient)
        log = scripted.train(str(tmp_path / "moe"), args, scripted.samples(groups, args)).state.log_history[0]
        losses[coefficient] = log["loss"], log.get("aux_loss")
    assert losses[0.5][0] - losses[0.0][0] == pytest.approx(0.5 * losses[0.5][1], rel=1e-4)


# Attention


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_along_the_paths_of_the_tree(window):
    """A trunk of 4 tokens with branches of 3 and 2, against attention over each path alone."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 9, 8)
    module = SimpleNamespace(num_key_value_groups=2)
    paths = [list(range(4)), list(range(7)), [*range(4), 7, 8]]
    tree = {
        "tree_kv_index": torch.tensor([token for path in paths for token in path]),
        "tree_cu_seqlens_q": torch.tensor([0, 4, 7, 9]),
        "tree_cu_seqlens_k": torch.tensor([0, 4, 11, 17]),
    }
    made, _ = tree_attention(module, query, key[:, :2], value[:, :2], None, **tree, scaling=0.5, sliding_window=window)
    for path in paths:
        for place, token in enumerate(path):
            seen = path[max(0, place + 1 - window) if window else 0 : place + 1]
            for head in range(4):
                scores = 0.5 * key[0, head // 2, seen] @ query[0, head, token]
                assert torch.allclose(made[0, token, head], scores.softmax(0) @ value[0, head // 2, seen], atol=1e-6)


def test_model_with_an_attention_of_its_own_is_rejected(tiny_model, tmp_path):
    """Each sample would attend to all others of its row."""
    config = BloomConfig(vocab_size=259, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"BloomForCausalLM has an attention of its own.*with `trainer: opo`"):
        scripted.train(str(tmp_path / "model"), scripted.config(tmp_path), [])


def test_weights_are_sent_in_the_dtype_that_the_server_was_told(tiny_model, tmp_path):
    """DeepSpeed casts the model when training starts, after the trainer has been made."""
    worker = scripted.ScriptedWorker([])
    named = {"train_dataset": scripted.DATA, "rollout_worker": worker, "weight_transfer": worker}
    trainer = AsyncOPOTrainer(tiny_model, args=scripted.config(tmp_path), **named)
    trainer.model.bfloat16()
    sent = dict(trainer._streaming_iter())
    assert {weight.dtype for weight in sent.values()} == {torch.float32}
    assert sent.keys() == {name for name, _ in trainer.model.named_parameters()}
