"""The benchmarks of an update phase: rollouts, counts, checks and tables, but not times."""

import copy
import functools
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import passes, replay, update_phase
from benchmarks.gpu import update_phase as gpu_update_phase
from benchmarks.shapes import QWEN3_0_6B, QWEN3_1_7B, small_qwen3
from opo_trl.rollout.rows import optimizer_step_of_rows


QUICK = update_phase.QUICK
SHAPE = small_qwen3(64, 512)
draw = functools.partial(replay.draw_rollout, vocab_size=512)


# The rollout


def test_rollout_has_the_lengths_of_math():
    rollout = draw("math", groups=10, generations=20)
    lengths = sorted(map(len, rollout.completions))
    percentiles = json.loads(replay.MATH_LENGTHS.read_text())["percentiles"]["solution"]
    assert percentiles[48] <= lengths[len(lengths) // 2] <= percentiles[52]
    assert (lengths[0], lengths[-1]) == (percentiles[0], percentiles[99])
    assert all(ids.count(1) == (ids[-1] == 1) == 1 for ids in rollout.completions)  # one EOS, at the end
    groups = [rollout.prompts[i : i + 20] for i in range(0, 200, 20)]
    assert all(ids == group[0] for group in groups for ids in group)


def test_other_lengths_have_the_same_longest_completion_and_shorter_ones_a_part_of_it():
    longest = {name: max(map(len, draw(name, groups=5, generations=20).completions)) for name in update_phase.LENGTHS}
    assert longest["math"] == longest["equal"]
    assert 0.98 * longest["math"] <= longest["uniform"] <= longest["math"]
    shorter = draw("math", groups=5, generations=20, shorter=8)
    assert max(map(len, shorter.completions)) == longest["math"] // 8


@pytest.mark.parametrize("dead", [0.0, 0.2, 0.4, 0.6])
def test_rewards_are_equal_in_zero_variance_groups_and_have_two_values_in_the_others(dead):
    rewards = replay.parity(draw("math", groups=10, generations=4, dead=dead, shorter=32).completions)
    spreads = [len(set(rewards[i : i + 4])) for i in range(0, 40, 4)]
    assert spreads == [1] * round(10 * dead) + [2] * (10 - round(10 * dead))


def test_rollout_that_cannot_be_cut_is_rejected():
    rollout = draw("equal", groups=2, generations=3, shorter=64)
    with pytest.raises(ValueError, match=r"rows=4 does not cut 6 completions.*divisor of 3"):
        replay.make_trainer("GRPO", SHAPE, rollout, rows=4, steps=2)


# A phase


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


def test_parts_of_a_phase_are_disjoint(monkeypatch):
    rollout = draw("math", groups=2, generations=6, shorter=32)
    trainer = replay.make_trainer("OPO", SHAPE, rollout, rows=3, steps=2)
    clock = iter(range(10_000))
    monkeypatch.setattr(replay, "now", lambda: float(next(clock)))
    split = replay.Split(trainer)
    whole = replay.phase(trainer)
    assert split.seconds.keys() == {"scoring", "anchor", "forward", "backward", *replay.OWN_PARTS}
    assert all(seconds > 0 for seconds in split.seconds.values())
    assert sum(split.seconds.values()) < whole


# The comparison


@pytest.fixture(scope="module")
def quick() -> dict:
    """Of the committed width, on which it depends where prompts are computed once."""
    return update_phase.measure(QUICK, repeats=1)


@pytest.fixture(scope="module")
def rollout() -> replay.Rollout:
    return draw(
        QUICK.lengths,
        groups=update_phase.GROUPS,
        generations=update_phase.GENERATIONS,
        dead=QUICK.dead,
        shorter=update_phase.SHORTER,
    )


def test_grpo_passes_the_rollout_padded_to_its_longest_twice(quick, rollout):
    real = sum(map(len, rollout.prompts)) + sum(map(len, rollout.completions))
    padded = len(rollout.prompts) * (max(map(len, rollout.prompts)) + max(map(len, rollout.completions)))
    tokens = quick["GRPOTrainer"]["tokens"]
    assert (tokens["forward tokens"], tokens["gradient tokens"]) == (real, real)
    assert (tokens["forward padded"], tokens["gradient padded"]) == (padded, padded)


def test_opo_passes_every_token_with_less_padding_and_skips_zero_gradient_samples_of_the_first_step(quick, rollout):
    theirs, unplanned, planned, skipping, budget = (own["tokens"] for own in quick.values())
    assert unplanned["gradient padded"] == theirs["gradient padded"]
    assert 2 * unplanned["forward padded"] == theirs["forward padded"]  # only for the second step
    for tokens in (unplanned, planned):
        assert tokens["gradient scored"] == theirs["gradient scored"]
    assert planned["gradient tokens"] < theirs["gradient tokens"]  # prompts are computed once for some completions
    lengths = [len(completion) for completion in rollout.completions]
    step = optimizer_step_of_rows(len(lengths), QUICK.steps, seed=42, rollout=0)
    n_dead = round(QUICK.dead * update_phase.GROUPS) * update_phase.GENERATIONS
    skipped = sum(length for length, when in zip(lengths[:n_dead], step[:n_dead], strict=True) if when == 0)
    assert theirs["gradient scored"] - skipping["gradient scored"] == skipped > 0
    assert budget["gradient scored"] == skipping["gradient scored"]
    later = sum(length for length, when in zip(lengths, step, strict=True) if when == 1)
    assert all(tokens["forward scored"] == later for tokens in (unplanned, planned, skipping, budget))
    padded = [tokens["gradient padded"] for tokens in (theirs, planned, skipping, budget)]
    assert padded[:3] == sorted(padded[:3], reverse=True)
    assert max(padded[1:]) < 0.3 * padded[0]  # a small budget leaves fewer completions together


def test_opo_holds_no_more_memory_than_grpo_and_less_with_a_budget(quick):
    memory = [quick[name]["memory"] for name in update_phase.VARIANTS]
    assert max(memory) < 1.01
    assert memory[-1] < 0.8 * memory[-2]


def test_check_fails_on_a_committed_ratio_that_is_too_small_and_names_it(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(update_phase, "RESULTS", tmp_path / "update_phase.json")
    monkeypatch.setattr(update_phase, "measure", lambda case, repeats: quick)
    committed = {"tolerances": update_phase.TOLERANCES, "cases": {str(QUICK): copy.deepcopy(quick)}}
    update_phase.RESULTS.write_text(json.dumps(committed))
    assert update_phase.main(["--check", "--quick"]) == 0
    committed["cases"][str(QUICK)]["planned"]["work"] *= 0.999
    committed["cases"][str(QUICK)]["as TRL"]["time"]["median"] /= 1.16
    update_phase.RESULTS.write_text(json.dumps(committed))
    capsys.readouterr()
    assert update_phase.main(["--check", "--quick"]) == 1
    named = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(": ")[1:2] + line.split(": ")[2].split()[:1] for line in named] == [
        ["as TRL", "time"],
        ["planned", "work"],
    ]
    assert not update_phase.RESULTS.with_suffix(".md").exists()


# The committed results


def test_committed_page_is_that_of_the_committed_results():
    results = json.loads(update_phase.RESULTS.read_text())
    assert update_phase.RESULTS.with_suffix(".md").read_text() == update_phase.page(results)


def test_committed_tokens_are_those_counted_now(quick):
    committed = json.loads(update_phase.RESULTS.read_text())["cases"][str(QUICK)]
    assert {name: own["tokens"] for name, own in committed.items()} == {
        name: own["tokens"] for name, own in quick.items()
    }


def test_figure_can_be_drawn(tmp_path):
    update_phase.draw(json.loads(update_phase.RESULTS.read_text())["cases"], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


# On a GPU


@pytest.mark.parametrize(("shape", "parameters"), [(QWEN3_0_6B, 596_049_920), (QWEN3_1_7B, 1_720_574_976)])
def test_built_in_shapes_have_the_parameters_of_the_models(shape, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    assert model.num_parameters() == parameters


def test_built_in_shape_is_that_of_qwen3_1_7b(shared_data):
    ours = AutoConfig.for_model(**QWEN3_1_7B).to_dict()
    theirs = AutoConfig.from_pretrained(shared_data / "Qwen3-1.7B").to_dict()
    identity = {"_name_or_path", "architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {k: v for k, v in ours.items() if k not in identity} == {
        k: v for k, v in theirs.items() if k not in identity
    }


def test_operations_are_those_that_pytorch_counts():
    """Operations of the matrix products; PyTorch counts attention as not causal."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), attn_implementation="eager")
    ids = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    said = gpu_update_phase.model_flops([passes.Pass(True, 2, 24, 48, 48)], SHAPE, model.num_parameters())
    attention = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_attention_heads"] * SHAPE["head_dim"] * 48 * 24
    assert counter.get_total_flops() == pytest.approx(said + 3 * attention, rel=0.01)


@pytest.mark.slow
def test_comparison_on_a_gpu_runs_to_its_end(tmp_path):
    assert gpu_update_phase.main(["--output", str(tmp_path / "result.json"), "--tiny"]) == 0
    cases = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert len(cases) == 2
    for case in cases.values():
        assert case["OPO"]["flops"] < case["GRPO"]["flops"]
        assert case["OPO"]["ratio"]["low"] <= case["OPO"]["ratio"]["high"]
    assert "our GRPO" in cases["tiny, 0% dead, checkpointing"]
