"""The benchmarks of an update phase: rollouts, counts, checks and tables, but not times."""

import functools
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import passes, replay, update_phase
from benchmarks.gpu import update_phase as gpu_update_phase
from benchmarks.shapes import QWEN3_0_6B, QWEN3_1_7B, small_qwen3


SHAPE = small_qwen3(64, 512)
draw = functools.partial(replay.draw_rollout, vocab_size=512)


def test_rollout_has_the_lengths_of_math():
    rollout = draw("math", groups=10, generations=20)
    lengths = sorted(map(len, rollout.completions))
    percentiles = json.loads(replay.MATH_LENGTHS.read_text())["percentiles"]["solution"]
    assert percentiles[48] <= lengths[len(lengths) // 2] <= percentiles[52]
    assert (lengths[0], lengths[-1]) == (percentiles[0], percentiles[99])
    assert all(ids.count(1) == (ids[-1] == 1) == 1 for ids in rollout.completions)  # one EOS, at the end
    groups = [rollout.prompts[i : i + 20] for i in range(0, 200, 20)]
    assert all(ids == group[0] for group in groups for ids in group)


@pytest.mark.parametrize("dead", [0.0, 0.2, 0.4, 0.6])
def test_rewards_are_equal_in_zero_variance_groups_and_have_two_values_in_the_others(dead):
    rewards = replay.parity(draw("math", groups=10, generations=4, dead=dead, shorter=32).completions)
    spreads = [len(set(rewards[i : i + 4])) for i in range(0, 40, 4)]
    assert spreads == [1] * round(10 * dead) + [2] * (10 - round(10 * dead))


@pytest.mark.parametrize("method", replay.TRAINERS)
def test_a_phase_trains_on_the_fixed_rollout_and_is_timed_completely(method, monkeypatch):
    rollout = draw("math", groups=2, generations=6, shorter=32)
    trainer = replay.make_trainer(method, SHAPE, rollout, rows=3, steps=2)
    seen, generate = [], trainer._generate_and_score_completions
    monkeypatch.setattr(
        trainer, "_generate_and_score_completions", lambda inputs: seen.append(generate(inputs)) or seen[-1]
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    clock = iter(range(100))
    monkeypatch.setattr(replay, "now", lambda: float(next(clock)))
    assert replay.phase(trainer) == 2.0  # begins once, ends twice
    assert replay.phase(trainer) == 2.0
    assert len(seen) == 2
    for batch in seen:
        mask = batch["completion_mask"].bool()
        tokens = [ids[kept].tolist() for ids, kept in zip(batch["completion_ids"], mask, strict=True)]
        assert tokens == rollout.completions
        assert ("old_per_token_logps" in batch) == (method == "GRPO")  # ours does that later, for half of them
        assert batch["advantages"].abs().sum() > 0
    assert any((p != old).any() for p, old in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.state.global_step == 2


def test_committed_tokens_are_those_counted_now(monkeypatch):
    """GRPOTrainer passes its rollout, padded to the longest, twice, which takes long to count; OPOTrainer less."""
    monkeypatch.setattr(update_phase, "VARIANTS", {update_phase.DEFAULT: update_phase.VARIANTS[update_phase.DEFAULT]})
    committed = json.loads(update_phase.RESULTS.read_text())["cases"][str(update_phase.QUICK)]
    trainers = update_phase.make_trainers(update_phase.QUICK)
    assert update_phase.tokens_of(trainers[update_phase.DEFAULT]) == committed[update_phase.DEFAULT]["tokens"]
    rollout = trainers["GRPOTrainer"].rollout
    padded = len(rollout.prompts) * (max(map(len, rollout.prompts)) + max(map(len, rollout.completions)))
    theirs, ours = committed["GRPOTrainer"]["tokens"], committed[update_phase.DEFAULT]["tokens"]
    assert theirs["forward padded"] == theirs["gradient padded"] == padded
    assert ours["forward padded"] < ours["gradient padded"] < 0.3 * padded


def test_check_fails_on_a_ratio_above_the_committed_one_and_names_it():
    committed = json.loads(update_phase.RESULTS.read_text())
    measured = json.loads(update_phase.RESULTS.read_text())["cases"]
    assert update_phase.failures(committed, measured) == []
    measured[str(update_phase.QUICK)]["planned"]["work"] *= 1.001
    measured[str(update_phase.QUICK)]["as TRL"]["time"]["median"] *= 1.16
    found = [said.split(": ")[1:] for said in update_phase.failures(committed, measured)]
    assert [(variant, said.split()[0]) for variant, said in found] == [("as TRL", "time"), ("planned", "work")]


@pytest.mark.parametrize(("shape", "parameters"), [(QWEN3_0_6B, 596_049_920), (QWEN3_1_7B, 1_720_574_976)])
def test_built_in_shapes_have_the_parameters_of_the_models(shape, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert model.num_parameters() == parameters


def test_operations_are_those_that_pytorch_counts():
    """Operations of the matrix products; PyTorch counts attention as not causal."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), attn_implementation="eager")
    ids = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    said = gpu_update_phase.model_flops([passes.Pass(True, 2, 24, 48, 48)], SHAPE, model.num_parameters())
    attention = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_attention_heads"] * SHAPE["head_dim"] * 48 * 24
    assert counter.get_total_flops() == pytest.approx(said + 3 * attention, rel=0.01)
