"""How the completions of an optimizer step are cut changes its cost and not its gradient."""

import doctest
from itertools import combinations

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from float64_reference import EXACT, Reference
from hypothesis import given
from hypothesis import strategies as st
from named_tensors import distance, relative_error, snapshot
from recording_trainers import RecordingOPO, logged, trained, without_times
from scripted_rollouts import Script

from opo_trl import OPOConfig
from opo_trl.updates import cutting
from opo_trl.updates.cutting import FEWEST_PASSES, Limits, best_cut, partition, spread
from opo_trl.updates.planner import Planner


@st.composite
def steps(draw):
    """Lengths of a step's completions, longest first, and limits."""
    lengths_of_completion = st.tuples(st.integers(1, 20), st.integers(1, 50))
    lengths = draw(st.lists(lengths_of_completion, min_size=1, max_size=9))
    max_rows = draw(st.integers(1, 5))
    max_tokens = draw(st.one_of(st.none(), st.integers(1, 300)))
    return np.array(sorted(lengths, key=sum, reverse=True)), max_rows, max_tokens


def padded_tokens(part: np.ndarray) -> int:
    width = part.max(axis=0).sum()
    return len(part) * int(width)


def total_tokens(parts: list[np.ndarray]) -> int:
    return sum(padded_tokens(part) for part in parts)


def allowed(part: np.ndarray, lengths: np.ndarray, max_rows: int, max_tokens: int | None, fill: bool) -> bool:
    """Whether a part of these completions may have its size."""
    if len(part) == 1:
        return True
    if max_tokens is not None and padded_tokens(part) > max_tokens:
        return False
    if len(part) <= max_rows:
        return True
    most_tokens = max_rows * lengths.sum(axis=1).max()
    most_scored = max_rows * lengths[:, 1].max()
    scored = len(part) * part[:, 1].max()
    return fill and padded_tokens(part) <= most_tokens and scored <= most_scored


def least_cost(lengths: np.ndarray, pass_tokens: float, **limits) -> float:
    """The least cost of all ways to cut the completions within the limits."""
    costs = []
    for n_bounds in range(len(lengths)):
        for bounds in combinations(range(1, len(lengths)), n_bounds):
            parts = np.split(lengths, bounds)
            if all(allowed(part, lengths, **limits) for part in parts):
                costs.append(pass_tokens * len(parts) + total_tokens(parts))
    return min(costs)


def test_the_example_of_the_module_is_right():
    failed, attempted = doctest.testmod(cutting)
    assert attempted > 0
    assert failed == 0


@given(step=steps(), pass_tokens=st.sampled_from([0, 13, 256, FEWEST_PASSES]), fill=st.booleans())
def test_cuts_respect_the_limits_and_cost_the_least(step, pass_tokens, fill):
    lengths, max_rows, max_tokens = step
    limits = {"max_rows": max_rows, "max_tokens": max_tokens, "fill": fill}
    cheapest = best_cut(lengths, Limits(pass_tokens=pass_tokens, **limits))
    parts = np.split(lengths, cheapest.bounds)
    assert all(allowed(part, lengths, **limits) for part in parts)
    cost = pass_tokens * len(parts) + total_tokens(parts)
    assert cost == least_cost(lengths, pass_tokens, **limits)


@given(n_parts=st.integers(1, 30), n_steps=st.integers(1, 12))
def test_parts_are_spread_evenly_in_order_and_the_last_step_has_one(n_parts, n_steps):
    parts = [{"number": number} for number in range(n_parts)]
    steps = spread(parts, n_steps)
    assert [part for step in steps for part in step] == parts
    assert len(steps) == n_steps
    assert steps[-1]
    sizes = [len(step) for step in steps]
    assert max(sizes) - min(sizes) <= 1


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.booleans()), min_size=1, max_size=6),
    n_processes=st.integers(1, 4),
)
def test_no_process_computes_much_more_than_the_mean(rows, n_processes):
    rows = np.array(rows * n_processes)
    lengths, left_out = rows[:, :2], rows[:, 2].astype(bool)
    members = partition(lengths, left_out, n_processes)
    assert sorted(members.flatten()) == list(range(len(rows)))
    tokens = np.where(left_out, 0, lengths.sum(axis=1))
    tokens_of_processes = tokens[members].sum(axis=1)
    assert tokens_of_processes.max() <= tokens_of_processes.mean() + tokens.max()


@pytest.mark.parametrize("optim", ["adamw_torch", "galore_adamw_layerwise", "lomo"])
def test_a_step_is_not_cut_for_an_optimizer_that_steps_in_every_backward_pass(optim):
    args = OPOConfig("unused", use_cpu=True, bf16=False, optim=optim)
    planner = Planner(args, Accelerator(cpu=True), communicates=False)
    has_fewest = planner._limits(4).pass_tokens == FEWEST_PASSES
    assert has_fewest == (optim != "adamw_torch")


# In training

REWARDS = [0, 1, 1, 0, 1, 1, 1, 1, 0.5, 0.2, 0.1, 0.7, 0, 0, 0, 0]
RUN = {
    "max_completion_length": 40,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "max_steps": 4,
}


def run(model, folder, **options):
    script = Script(REWARDS, max_length=30, truncated=(5,))
    return trained(model, folder, script=script, **{"skip_inert_rows": True, **RUN, **options})


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, {"skip_inert_rows": False}),
        ({}, {"max_tokens_per_micro_batch": 60}),
        ({"num_iterations": 2, "beta": 0.1}, {"max_tokens_per_micro_batch": 60}),
        ({"anchor_correction": "length_normalized", "mask_truncated_completions": True}, {}),
        ({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, {"max_tokens_per_micro_batch": 60}),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, {}),
        ({"off_policy_mask_threshold": 0.5}, {}),
    ],
    ids=str,
)
def test_planned_steps_equal_unplanned_ones(tiny_model, tmp_path, options, plan):
    reference = run(tiny_model, tmp_path / "unplanned", plan_micro_batches=False, **options)
    planned = run(tiny_model, tmp_path / "planned", **options, **plan)
    end = snapshot(reference.model)
    moved = distance(end, reference.initial)
    assert moved > 1e-3
    assert distance(snapshot(planned.model), end) < EXACT * moved
    for mine, theirs in zip(logged(planned), logged(reference), strict=True):
        expected = without_times(theirs)
        del expected["opo/frac_skipped"]
        if mine["opo/frac_skipped"] > 0:  # without the tokens of those that are left out
            del expected["entropy"]
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


class WithGaps(RecordingOPO):
    """Takes tokens out of prompts and completions, as for those of a template; no prompt loses its last one."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        random = torch.Generator().manual_seed(self.args.seed + len(self.rollouts))
        for name in ("prompt_mask", "completion_mask"):
            mask = rollout[name]
            stays = torch.rand(mask.shape, generator=random) < 0.6
            stays[:, -1] |= name == "prompt_mask"
            rollout[name] = mask * stays.to(mask.device)
        return rollout


def has_gap(mask: list[int]) -> bool:
    """Whether a token is masked before one that is not."""
    last = max(np.flatnonzero(mask), default=0)
    return 0 in mask[:last]


def test_gradient_with_gaps_in_the_masks_is_that_of_the_definition(tiny_model, tmp_path):
    script = Script()
    options = {"steps_per_generation": 4, "max_steps": 4, "num_iterations": 2}
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=WithGaps, **options)
    for call, rollout in zip(script.calls, trainer.rollouts, strict=True):
        for row, prompt, completion in zip(call, rollout.prompt_mask, rollout.completion_mask, strict=True):
            row.own = completion[: len(row.completion)].tolist()
            first_of_prompt = len(prompt) - len(row.prompt)
            row.attended = prompt[first_of_prompt:].tolist() + row.own
    assert any(has_gap(row.own) for row in script.calls[0])
    reference = Reference(trainer, script)
    for number, step in enumerate(trainer.steps):
        assert relative_error(step.gradient, reference.step(number).gradient) < EXACT


def test_half_of_the_completions_are_left_out_of_the_first_step_and_none_of_the_second(tiny_model, tmp_path):
    planned = run(tiny_model, tmp_path)
    assert [entry["opo/frac_skipped"] for entry in logged(planned)] == [0.5, 0.0, 0.5, 0.0]
    n_computed = [sum(len(batch["opo_target"]) for batch in step.batches) for step in planned.steps]
    assert n_computed == [4, 8, 4, 8]


@pytest.mark.parametrize("shape", ["sequence", "token"])
def test_completions_that_are_left_out_and_that_importance_sampling_drops_are_counted(tiny_model, tmp_path, shape):
    def drop(rollout, trainer):
        is_padding = 1.0 - rollout["completion_mask"]  # the ratio of padding is 1, as in TRL
        rollout["importance_sampling_ratio"] = is_padding if shape == "token" else torch.zeros(len(is_padding), 1)

    entries = logged(run(tiny_model, tmp_path, inject=drop))
    assert [entry["opo/frac_skipped"] for entry in entries] == [0.5, 0.0, 0.5, 0.0]
    assert [entry["opo/frac_masked"] for entry in entries] == [1.0] * 4


def test_the_behaviour_policy_scores_only_the_completions_that_need_it(tiny_model, tmp_path, monkeypatch):
    sizes = []
    score = RecordingOPO._policy_logps

    def counted(self, rows, **options):
        sizes.append(len(rows["completion_ids"]))
        return score(self, rows, **options)

    monkeypatch.setattr(RecordingOPO, "_policy_logps", counted)
    run(tiny_model, tmp_path / "1", max_steps=2)
    assert sum(sizes) == 8  # the second step's completions
    sizes.clear()
    run(tiny_model, tmp_path / "2", max_steps=2, steps_per_generation=2)
    assert sum(sizes) == 0  # on-policy


def test_only_the_last_backward_pass_of_an_optimizer_step_exchanges_gradients(tiny_model, tmp_path, monkeypatch):
    """DeepSpeed takes an optimizer step in each pass that does."""
    exchanges = []
    backward = Accelerator.backward

    def noted(accelerator, loss, **options):
        exchanges.append(accelerator.sync_gradients)
        return backward(accelerator, loss, **options)

    monkeypatch.setattr(Accelerator, "backward", noted)
    trainer = run(tiny_model, tmp_path, max_tokens_per_micro_batch=60)
    n_calls = trainer.state.global_step * RUN["gradient_accumulation_steps"]
    assert len(exchanges) > n_calls  # several passes in a call
    assert exchanges.count(True) == trainer.state.global_step == 4
