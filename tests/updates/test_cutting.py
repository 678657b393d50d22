"""How the samples of an optimizer step are cut changes its cost and not its gradient."""

from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import (
    EXACT,
    RecordingOPO,
    Reference,
    Script,
    distance,
    logged,
    norm,
    relative_error,
    snapshot,
    trained,
    without_times,
)
from hypothesis import given
from hypothesis import strategies as st

from opo_trl.updates.cutting import FEWEST_PASSES, Limits, best_cut, partition, spread


@st.composite
def steps(draw):
    """Lengths of a step's samples, longest first, and limits."""
    rows = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=1, max_size=9))
    lengths = np.array(sorted(rows, key=sum, reverse=True))
    return lengths, draw(st.integers(1, 5)), draw(st.one_of(st.none(), st.integers(1, 300)))


def cut(lengths: np.ndarray, **limits) -> list[int]:
    """Where each part but the first begins."""
    return best_cut(lengths, Limits(**limits))[1]


def padded_tokens(part: np.ndarray) -> int:
    return len(part) * int(part.max(axis=0).sum())


def allowed(part: np.ndarray, lengths: np.ndarray, max_rows: int, max_tokens: int | None, fill: bool) -> bool:
    """Whether a part of these samples may have its size."""
    no_larger = padded_tokens(part) <= max_rows * lengths.sum(axis=1).max()
    no_larger &= len(part) * part[:, 1].max() <= max_rows * lengths[:, 1].max()
    rows = len(part) <= max_rows or (fill and no_larger)
    return len(part) == 1 or (rows and (max_tokens is None or padded_tokens(part) <= max_tokens))


def all_cuts(lengths: np.ndarray, n_parts: int, **limits) -> list[int]:
    """Padded tokens of every way to cut the samples within the limits."""
    ways = (np.split(lengths, bounds) for bounds in combinations(range(1, len(lengths)), n_parts - 1))
    return [
        sum(map(padded_tokens, parts)) for parts in ways if all(allowed(part, lengths, **limits) for part in parts)
    ]


@given(step=steps(), pass_tokens=st.sampled_from([0, 13, 256, FEWEST_PASSES]), fill=st.booleans())
def test_cuts_respect_the_limits_and_cost_the_least(step, pass_tokens, fill):
    lengths, max_rows, max_tokens = step
    limits = {"max_rows": max_rows, "max_tokens": max_tokens, "fill": fill}
    parts = np.split(lengths, cut(lengths, pass_tokens=pass_tokens, **limits))
    assert all(allowed(part, lengths, **limits) for part in parts)
    costs = [
        pass_tokens * n_parts + min(all_cuts(lengths, n_parts, **limits), default=np.inf)
        for n_parts in range(1, len(lengths) + 1)
    ]
    assert pass_tokens * len(parts) + sum(map(padded_tokens, parts)) == min(costs)


@given(n_parts=st.integers(1, 30), n_steps=st.integers(1, 12))
def test_parts_are_spread_evenly_in_order_and_the_last_step_has_one(n_parts, n_steps):
    steps = spread([{"i": i} for i in range(n_parts)], n_steps)
    assert [part["i"] for step in steps for part in step] == list(range(n_parts))
    assert len(steps) == n_steps
    assert steps[-1]
    assert max(map(len, steps)) - min(map(len, steps)) <= 1


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.booleans()), min_size=1, max_size=6),
    n_processes=st.integers(1, 4),
)
def test_no_process_computes_much_more_than_the_mean(rows, n_processes):
    rows = np.array(rows * n_processes)
    lengths, zero_gradient = rows[:, :2], rows[:, 2].astype(bool)
    members = partition(lengths, zero_gradient, n_processes)
    assert sorted(members.flatten()) == list(range(len(rows)))
    tokens = np.where(zero_gradient, 0, lengths.sum(axis=1))
    assert tokens[members].sum(axis=1).max() <= tokens.mean() * members.shape[1] + tokens.max()


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
    end, start = snapshot(reference.model), reference.initial
    moved = norm({name: end[name] - start[name] for name in end})
    assert moved > 1e-3
    assert distance(snapshot(planned.model), end) < EXACT * moved
    for mine, theirs in zip(logged(planned), logged(reference), strict=True):
        for name, value in without_times(theirs).items():
            skipped = name == "opo/frac_skipped" or (name == "entropy" and mine["opo/frac_skipped"] > 0)
            if not skipped:
                assert mine[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


class WithGaps(RecordingOPO):
    """Takes tokens out of prompts and completions, as for those of a template; no prompt loses its last one."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        random = torch.Generator().manual_seed(self.args.seed + len(self.rollouts))
        for name in ("prompt_mask", "completion_mask"):
            kept = torch.rand(rollout[name].shape, generator=random) < 0.6
            kept[:, -1] |= name == "prompt_mask"
            rollout[name] = rollout[name] * kept.to(rollout[name].device)
        return rollout


def test_gradient_with_gaps_in_the_masks_is_that_of_the_definition(tiny_model, tmp_path):
    script = Script()
    options = {"steps_per_generation": 4, "max_steps": 4, "num_iterations": 2}
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=WithGaps, **options)
    for call, rollout in zip(script.calls, trainer.rollouts, strict=True):
        for row, prompt, completion in zip(call, rollout.prompt_mask, rollout.completion_mask, strict=True):
            row.own = completion[: len(row.completion)].tolist()
            row.attended = prompt[len(prompt) - len(row.prompt) :].tolist() + row.own
    assert any(0 in row.own[: max(np.flatnonzero(row.own), default=0)] for row in script.calls[0])
    reference = Reference(trainer, script)
    for number, step in enumerate(trainer.steps):
        assert relative_error(step.gradient, reference.step(number).gradient) < EXACT


def test_half_of_the_samples_are_skipped_in_the_first_step_and_none_in_the_second(tiny_model, tmp_path):
    planned = run(tiny_model, tmp_path)
    assert [entry["opo/frac_skipped"] for entry in logged(planned)] == [0.5, 0.0, 0.5, 0.0]
    assert [sum(len(b["opo_target"]) for b in step.batches) for step in planned.steps] == [4, 8, 4, 8]


def test_skipped_samples_that_importance_sampling_drops_are_counted(tiny_model, tmp_path):
    def drop(rollout, trainer):
        rollout["importance_sampling_ratio"] = torch.zeros(len(rollout["completion_ids"]), 1)

    entries = logged(run(tiny_model, tmp_path, inject=drop))
    assert [entry["opo/frac_skipped"] for entry in entries] == [0.5, 0.0, 0.5, 0.0]
    assert [entry["opo/frac_masked"] for entry in entries] == [1.0] * 4


def test_anchor_pass_covers_only_the_samples_that_need_it(tiny_model, tmp_path, monkeypatch):
    seen = []
    anchor_pass = RecordingOPO._policy_logps

    def counted(self, rows, **options):
        seen.append(len(rows["completion_ids"]))
        return anchor_pass(self, rows, **options)

    monkeypatch.setattr(RecordingOPO, "_policy_logps", counted)
    run(tiny_model, tmp_path / "1", max_steps=2)
    assert sum(seen) == 8  # the second step's samples
    seen.clear()
    run(tiny_model, tmp_path / "2", max_steps=2, steps_per_generation=2)
    assert sum(seen) == 0  # on-policy
