"""The benchmarks of an update phase: rollouts, counts, checks and tables, but not times."""

import functools
import json

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import update_phase as gpu_update_phase
from benchmarks.record import Limit, measure_missing
from benchmarks.updates import passes, replay, update_phase
from benchmarks.updates.shapes import QWEN3_0_6B, QWEN3_1_7B, small_qwen3
from opo_trl.checks.files import read_json


SHAPE = small_qwen3(64, 512)
EOS = 1
draw = functools.partial(replay.draw_rollout, vocab_size=512)


def test_rollout_has_the_lengths_of_math():
    rollout = draw("math", groups=10, generations=20)
    lengths = sorted(map(len, rollout.completions))
    median = lengths[len(lengths) // 2]
    percentiles = read_json(replay.MATH_LENGTHS)["percentiles"]["solution"]
    assert percentiles[48] <= median <= percentiles[52]
    assert lengths[0] == percentiles[0]
    assert lengths[-1] == percentiles[99]
    for ids in rollout.completions:
        assert ids.index(EOS) == len(ids) - 1
    for start in range(0, 200, 20):
        prompts = rollout.prompts[start : start + 20]
        assert prompts == [prompts[0]] * 20


@pytest.mark.parametrize("dead", [0.0, 0.2, 0.4, 0.6])
def test_rewards_are_equal_in_zero_variance_groups_and_have_two_values_in_the_others(dead):
    rollout = draw("math", groups=10, generations=4, dead=dead, shorter=32)
    rewards = replay.parity(rollout.completions)
    distinct_counts = []
    for start in range(0, 40, 4):
        distinct_rewards = set(rewards[start : start + 4])
        distinct_counts.append(len(distinct_rewards))
    dead_groups = round(10 * dead)
    assert distinct_counts == [1] * dead_groups + [2] * (10 - dead_groups)


@pytest.mark.parametrize("method", replay.TRAINERS)
def test_a_phase_trains_on_the_fixed_rollout_and_is_timed_completely(method, monkeypatch):
    rollout = draw("math", groups=2, generations=6, shorter=32)
    trainer = replay.make_trainer(method, SHAPE, rollout, rows=3, steps=2)
    generate = trainer._generate_and_score_completions
    batches = []

    def record_batch(inputs):
        batch = generate(inputs)
        batches.append(batch)
        return batch

    monkeypatch.setattr(trainer, "_generate_and_score_completions", record_batch)
    before = parameters_to_vector(trainer.model.parameters()).detach()
    clock = map(float, range(100))
    monkeypatch.setattr(replay, "now", lambda: next(clock))
    assert replay.phase(trainer) == 2.0  # begins once, ends twice
    assert replay.phase(trainer) == 2.0
    assert len(batches) == 2
    for batch in batches:
        masks = batch["completion_mask"].bool()
        tokens = [ids[mask].tolist() for ids, mask in zip(batch["completion_ids"], masks, strict=True)]
        assert tokens == rollout.completions
        # OPOTrainer computes them later, and only for half of the completions.
        assert ("old_per_token_logps" in batch) == (method == "GRPO")
        assert batch["advantages"].abs().sum() > 0
    after = parameters_to_vector(trainer.model.parameters())
    assert (after != before).any()
    assert trainer.state.global_step == 2


def passed_tokens(rollout):
    """The tokens of a pass over a rollout that is padded to its longest prompt and its longest completion."""
    longest_prompt = max(map(len, rollout.prompts))
    longest_completion = max(map(len, rollout.completions))
    return len(rollout.prompts) * (longest_prompt + longest_completion)


def test_committed_tokens_are_those_counted_now(monkeypatch):
    """GRPOTrainer passes its rollout, padded to the longest, twice, which takes long to count; OPOTrainer less."""
    variant = update_phase.DEFAULT
    monkeypatch.setattr(update_phase, "VARIANTS", {variant: update_phase.VARIANTS[variant]})
    committed = read_json(update_phase.RESULTS)["cases"][str(update_phase.QUICK)]
    theirs = committed["GRPOTrainer"]["tokens"]
    ours = committed[variant]["tokens"]
    trainers = update_phase.make_trainers(update_phase.QUICK)
    assert update_phase.tokens_of(trainers[variant]) == ours
    padded = passed_tokens(trainers["GRPOTrainer"].rollout)
    assert theirs["forward padded"] == theirs["gradient padded"] == padded
    assert ours["forward padded"] < ours["gradient padded"] < 0.3 * padded


def test_check_fails_on_a_ratio_above_the_committed_one_and_names_it():
    committed = read_json(update_phase.RESULTS)
    measured = read_json(update_phase.RESULTS)["cases"]
    assert update_phase.failures(committed, measured) == []
    quick = measured[str(update_phase.QUICK)]
    quick["planned"]["work"] *= 1.001
    quick["as TRL"]["time"]["median"] *= 1.16
    of_time, of_work = update_phase.failures(committed, measured)
    assert ": as TRL: time " in of_time
    assert ": planned: work " in of_work


@pytest.mark.parametrize(("shape", "parameters"), [(QWEN3_0_6B, 596_049_920), (QWEN3_1_7B, 1_720_574_976)])
def test_built_in_shapes_have_the_parameters_of_the_models(shape, parameters):
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == parameters


def test_operations_are_those_that_pytorch_counts():
    """Operations of the matrix products; PyTorch counts attention as not causal."""
    config = AutoConfig.for_model(**SHAPE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids).logits
        logits.sum().backward()
    single_pass = passes.Pass(True, 2, 24, 48, 48)
    causal_flops = gpu_update_phase.model_flops([single_pass], SHAPE, model.num_parameters())
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    attention_flops = 2 * width * 48 * 24
    assert counter.get_total_flops() == pytest.approx(causal_flops + 3 * attention_flops, rel=0.01)


def test_what_is_measured_stays_and_what_is_missing_is_measured(tmp_path, capsys):
    measured = []
    broken = ["b"]

    def case(name):
        if name == "large":
            raise torch.OutOfMemoryError
        if name in broken:
            raise ValueError(f"no {name}")
        measured.append(name)

    file = tmp_path / "new" / "results.json"
    cases = {name: functools.partial(case, name) for name in ("large", "a", "b", "c")}
    first_cases = {name: cases[name] for name in ("large", "a")}
    measure_missing(file, {"rows": 8}, first_cases, Limit(60))
    measure_missing(file, {"rows": 8}, cases, Limit(0))
    assert measured == ["a"]
    assert "the same command resumes" in capsys.readouterr().out
    results = measure_missing(file, {"rows": 8}, cases, Limit(60))
    assert results["failed"] == {"b": "ValueError: no b"}
    assert measured == ["a", "c"]  # what fails does not stop the others
    broken.clear()
    results = measure_missing(file, {"rows": 8}, cases, Limit(60))
    assert results["failed"] == {}
    assert measured == ["a", "c", "b"]
    results = json.loads(file.read_text())
    assert results["cases"] == {"large": "out of memory", "a": None, "b": None, "c": None}
    assert {"command", "date", "device", "versions"} <= results.keys()
    with pytest.raises(ValueError, match=r"settings=\{'rows': 8\}.*Choose another output"):
        measure_missing(file, {"rows": 4}, cases, Limit(60))
