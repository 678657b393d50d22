"""
`OPOTrainer` against the definition: gradients, invariances, what it prints and what it logs.

Every gradient is compared with an independent float64 computation from the logits of the model (`helpers.Reference`),
for complete optimizer steps of several micro-batches, on-policy and off-policy.
"""

import copy
import functools
import json
import math
import os
import statistics
from pathlib import Path

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from helpers import (
    EXACT,
    PROMPTS,
    USE_CPU,
    Reference,
    Script,
    assert_step_equals,
    distance,
    logged,
    make_trainer,
    norm,
    relative_error,
    snapshot,
    trained,
    without_times,
)
from invariance.launch import launch, logs
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer


# Four groups with everything that a rollout may contain: an unscored completion, a zero-variance group, and (with
# `truncated`) a masked completion.
REWARDS = [0.3, 1.7, 2.2, 0.1, 1.0, None, 0.2, 0.7, 0.5, 0.5, 0.5, 0.5, 3.0, 0.0, 0.4, 1.1]
TWO_REWARDS = [(r, None if i in (3, 5) else math.sin(i)) for i, r in enumerate(REWARDS)]
OFF_POLICY = {"steps_per_generation": 4, "max_steps": 3}  # two optimizer steps on the first rollout, one on the second


def everything(**options) -> Script:
    return Script(**{"rewards": REWARDS, "truncated": (12,), **options})


# 1. The gradient is that of the definition

CASES = {
    "defaults": {},
    "mean": {"log_ratio_reduction": "mean", "learning_rate": 0.2},
    "exact": {"ratio_form": "exact", "learning_rate": 0.025},
    "exact, mean": {"ratio_form": "exact", "log_ratio_reduction": "mean", "learning_rate": 0.2},
    "alpha 0": {"alpha": 0.0},
    "alpha 0.9": {"alpha": 0.9, "learning_rate": 0.25},
    "mu": {"mu": 0.3},
    "drive scaled by group": {"drive_scaling": "group"},
    "drive scaled by batch": {"drive_scaling": "batch"},
    "positivity by a stiffer mu": {"positivity": "stiffen", "mu": 0.2},
    "positivity by clipping": {"positivity": "clip", "mu": 0.2, "positivity_epsilon": 0.2},
    "positivity by projection": {"positivity": "project", "mu": 0.2},
    "radius": {"chi2_radius": 0.02},
    "radius, stiffened": {"chi2_radius": 3.0, "positivity": "stiffen", "drive_scaling": "group"},
    "radius, projected": {"chi2_radius": 3.0, "positivity": "project"},
    "length-normalized correction": {"anchor_correction": "length_normalized"},
    "sequence correction": {"anchor_correction": "sequence", "alpha": 0.9},
    "temperature of the oracle": {"escort_temperature": 0.4},
    "adaptive temperature": {"adaptive_temperature": True, "escort_temperature": 0.5},
    "adaptive temperature, bounded": {"adaptive_temperature": True, "temperature_range": [0.2, 0.3]},
    "clamp": {"log_ratio_clamp": 0.3},
    "sampling temperature": {"temperature": 0.7},
    "advantages by batch": {"scale_rewards": "batch"},
    "advantages unscaled": {"scale_rewards": "none"},
}
REWARD_CASES = {
    "reward weights": {"reward_weights": [1.0, 2.0]},
    "normalize then sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "adaptive temperature of weighted rewards": {"adaptive_temperature": True, "reward_weights": [0.2, 3.0]},
}


@pytest.mark.parametrize("case", [*CASES, *REWARD_CASES])
def test_gradient_is_the_definition(tiny_model, tmp_path, case):
    options = {**CASES, **REWARD_CASES}[case]
    script = everything(rewards=TWO_REWARDS, functions=2) if case in REWARD_CASES else everything()
    trainer = trained(tiny_model, tmp_path, script=script, mask_truncated_completions=True, **OFF_POLICY, **options)
    reference = Reference(trainer, script)
    steps = [reference.step(k) for k in range(3)]
    for record, expected in zip(trainer.steps, steps, strict=True):
        assert len(record.batches) == 2
        assert_step_equals(record, expected)
    assert max(map(abs, steps[0].deltas)) == 0
    assert max(map(abs, steps[1].deltas)) > 0.05, "the policy never left the behaviour policy"
    assert {k for k, _ in steps[2].rows} == {1}
    if case == "clamp":
        assert any(abs(delta) == 0.3 for delta in steps[1].deltas)
    # Negative control: the same record is not explained by the defaults.
    plain = copy.copy(trainer.args)
    defaults = OPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False, log_ratio_clamp=trainer.args.log_ratio_clamp)
    for name in options:
        if name not in ("learning_rate", "log_ratio_clamp"):
            setattr(plain, name, getattr(defaults, name))
    plain.mu, plain.log_ratio_clamp = 1.0, 20.0
    reference.args = plain
    if case != "defaults":
        assert relative_error(trainer.steps[1].gradient, reference.step(1).gradient) > 0.01


def test_adaptive_temperature_follows_confidence_and_success(tiny_model, tmp_path):
    """With the model's own completions: scripted ones are so unlikely that success has hardly any effect."""
    rewards = []

    def first(prompts, completions, completion_ids, **kwargs):
        rewards.append([[None if i == 3 else float(sum(ids) % 7), None] for i, ids in enumerate(completion_ids)])
        return [row[0] for row in rewards[-1]]

    def second(prompts, completions, completion_ids, **kwargs):
        for i, (row, ids) in enumerate(zip(rewards[-1], completion_ids, strict=True)):
            row[1] = None if i == 3 else float(ids[0] % 5 == 0)
        return [row[1] for row in rewards[-1]]

    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        temperature=0.1,
        adaptive_temperature=True,
        reward_weights=[0.3, 4.0],
        learning_rate=0.005,
        max_steps=3,
        trainer_arguments={"reward_funcs": [first, second], "rollout_func": None},
    )
    script.calls = [script.observed(rollout, rewards[k]) for k, rollout in enumerate(trainer.rollouts)]
    reference = Reference(trainer, script)
    found = [entry["opo/temperature"] for entry in logged(trainer)]
    assert found == pytest.approx([reference.drive(k).temperature for k in range(3)], rel=1e-4)
    # Negative controls: rewards without their weights, and an unscored completion that counts as a failure.
    trainer.args.reward_weights = None
    assert any(abs(reference.drive(k).temperature - found[k]) > 0.01 for k in range(3))
    trainer.args.reward_weights = [0.3, 4.0]
    reference.valid = lambda row: True
    assert any(abs(reference.drive(k).temperature - found[k]) > 0.01 for k in range(3))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_unscored_and_truncated_completions_have_no_effect(tiny_model, tmp_path, reduction):
    """Whatever their tokens: two rollouts that differ only in these samples give the same update."""

    class Altered(Script):
        def completion(self, call, row, eos):
            # The same length, hence the same shapes in the forward pass.
            tokens = super().completion(call, row, eos)
            return [77] * len(tokens) if row == 12 else [*[88] * (len(tokens) - 1), eos] if row == 5 else tokens

    options = {"mask_truncated_completions": True, "log_ratio_reduction": reduction, **OFF_POLICY}
    script = everything()
    one = trained(tiny_model, tmp_path, script=script, **options)
    other = trained(tiny_model, tmp_path, script=Altered(REWARDS, truncated=(12,)), **options)
    assert not torch.equal(one.rollouts[0].completion_ids, other.rollouts[0].completion_ids)
    for k in range(2):
        assert relative_error(one.steps[k].gradient, other.steps[k].gradient) < EXACT


def test_group_with_one_scored_completion_has_neither_signal_nor_nan(tiny_model, tmp_path):
    script = Script([None, None, 1.0, None, 0.2, 0.9, 0.4, 0.1])
    trainer = trained(tiny_model, tmp_path, script=script)
    assert trainer.rollouts[0].opo_valid.tolist() == [False, False, True, False, True, True, True, True]
    assert trainer.rollouts[0].opo_target[:4].tolist() == [0, 0, 0, 0]
    assert_step_equals(trainer.steps[0], Reference(trainer, script).step(0))


def test_unscored_rollout_changes_nothing(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, script=Script([None] * 8), max_steps=2)
    assert all(torch.equal(tensor, trainer.initial[name]) for name, tensor in snapshot(trainer.model).items())
    assert logged(trainer)[0]["opo/frac_masked"] == 1


# 2. TRL's own loss is never trained


def test_loss_of_grpo_is_never_called(tiny_model, tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("the loss of GRPO was called")

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", forbidden)
    monkeypatch.setattr(GRPOTrainer, "compute_loss", forbidden)
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        trainer_arguments={"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})},
    )
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2
    batch = send_to_device(trainer.steps[0].batches[0], trainer.accelerator.device)
    assert torch.equal(trainer._compute_loss(trainer.model, batch), trainer.compute_loss(trainer.model, batch))


def test_outputs_of_the_loss_are_rejected(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path)
    with pytest.raises(ValueError, match="returning outputs"):
        trainer.compute_loss(trainer.model, {}, return_outputs=True)


# 3. What alpha and mu do


def test_alpha_changes_the_update(tiny_model, tmp_path):
    one, other = (trained(tiny_model, tmp_path, alpha=alpha) for alpha in (0.4, 0.7))
    # Not only its norm: alpha changes the ratios of a group's weights.
    a, b = (torch.cat([g.flatten() for g in trainer.steps[0].gradient.values()]) for trainer in (one, other))
    assert torch.cosine_similarity(a, b, dim=0) < 0.9999
    assert relative_error(one.steps[0].gradient, other.steps[0].gradient) > 0.1


def test_mu_changes_nothing_on_policy(tiny_model, tmp_path):
    one, four, three = (trained(tiny_model, tmp_path, mu=mu, max_steps=3) for mu in (1.0, 4.0, 3.0))
    # Bitwise for a power of two; otherwise mu · (g / mu) rounds.
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), four.model.parameters(), strict=True))
    assert relative_error(three.steps[2].gradient, one.steps[2].gradient) < EXACT


def test_mu_has_an_effect_off_policy(tiny_model, tmp_path):
    one, four = (trained(tiny_model, tmp_path, mu=mu, steps_per_generation=4, max_steps=2) for mu in (1.0, 4.0))
    assert all(torch.equal(one.steps[0].gradient[name], g) for name, g in four.steps[0].gradient.items())
    assert relative_error(one.steps[1].gradient, four.steps[1].gradient) > 0.5


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize(
    "options", [{}, {"drive_scaling": "group", "alpha": 0.0}, {"drive_scaling": "batch", "chi2_radius": 0.1}]
)
def test_equal_rewards_change_nothing(tiny_model, tmp_path, options, reward):
    # These rewards are not binary fractions, so their float32 mean may differ from them by a rounding error.
    script = Script([reward] * 24)
    sizes = {"per_device_train_batch_size": 6, "num_generations": 6}
    trainer = trained(tiny_model, tmp_path, script=script, **sizes, **options, **OFF_POLICY)
    assert all(torch.equal(tensor, trainer.initial[name]) for name, tensor in snapshot(trainer.model).items())
    assert all(norm(step.gradient) == 0 for step in trainer.steps)


# 4. One trajectory, any execution

SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"log_ratio_reduction": "mean", "beta": 0.1, "entropy_coef": 0.05},
        {"drive_scaling": "batch", "positivity": "project", "ratio_form": "exact", "learning_rate": 0.025},
    ],
    ids=["sum", "mean, KL and entropy", "batch scope"],
)
def test_split_into_micro_batches_changes_nothing(tiny_model, tmp_path, options):
    """Two steps on one rollout of 16: a step has the samples and the gradient of one large micro-batch."""
    runs = [
        trained(
            tiny_model,
            tmp_path,
            script=everything(),
            mask_truncated_completions=True,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=micro,
            generation_batch_size=16,
            max_steps=2,
            **options,
        )
        for rows, micro in SPLITS
    ]
    whole = runs[0]
    for (rows, micro), run in zip(SPLITS, runs, strict=True):
        for step, other in zip(run.steps, whole.steps, strict=True):
            assert [len(batch["row"]) for batch in step.batches] == [rows] * micro
            # In another order where completions of a prompt are together.
            assert torch.cat([b["row"] for b in step.batches]).sort()[0].equal(other.batches[0]["row"].sort()[0])
            assert relative_error(step.gradient, other.gradient) < EXACT
            assert sum(step.losses) == pytest.approx(other.losses[0], rel=1e-4, abs=1e-5)


def test_several_rollouts_in_one_step(tiny_model, tmp_path):
    """The opposite of off-policy steps: a step over two rollouts, each with its own target and mu."""
    script = Script()
    trainer = trained(tiny_model, tmp_path, script=script, steps_per_generation=2, gradient_accumulation_steps=4)
    expected = Reference(trainer, script).step(0)
    assert {k for k, _ in expected.rows} == {0, 1}
    assert_step_equals(trainer.steps[0], expected)
    radius = Script()
    trainer = trained(
        tiny_model, tmp_path, script=radius, steps_per_generation=2, gradient_accumulation_steps=4, chi2_radius=0.1
    )
    expected = Reference(trainer, radius).step(0)
    assert len(set(expected.mus)) == 2
    assert_step_equals(trainer.steps[0], expected)


def test_short_last_step_of_an_epoch(tiny_model, tmp_path):
    """Six micro-batches in an epoch and four in a step: the second step is the mean of two."""
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        steps_per_generation=2,
        gradient_accumulation_steps=4,
        max_steps=2,
        trainer_arguments={"train_dataset": Dataset.from_dict({"prompt": PROMPTS[:6]})},
    )
    assert [len(step.batches) for step in trainer.steps] == [4, 2]
    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, Reference(trainer, script).step(k))


def test_rollouts_that_end_within_a_step(tiny_model, tmp_path):
    """Rollouts of 2 micro-batches, steps of 3: the second step begins with the rest of the first one's rollout."""
    script = Script()
    trainer = trained(
        tiny_model, tmp_path, script=script, steps_per_generation=2, gradient_accumulation_steps=3, max_steps=2
    )
    steps = [Reference(trainer, script).step(k) for k in range(2)]
    assert [[k for k, _ in step.rows] for step in steps] == [[0] * 8 + [1] * 4, [1] * 4 + [2] * 8]
    for record, expected in zip(trainer.steps, steps, strict=True):
        assert_step_equals(record, expected)
    assert [abs(delta) > 1e-3 for delta in steps[1].deltas] == [True] * 4 + [False] * 8


def test_age_of_rollouts_that_end_within_a_step(tiny_model, tmp_path):
    """A step is on-policy only if all of its samples are."""
    trainer = trained(
        tiny_model, tmp_path, steps_per_generation=2, gradient_accumulation_steps=3, max_steps=2, learning_rate=0.05
    )
    first, second = logged(trainer)
    assert (first["opo/chi2"], first["opo/off_policy_steps"]) == (pytest.approx(0, abs=1e-9), 0)
    assert second["opo/chi2"] > 1e-3
    assert second["opo/off_policy_steps"] > 0


def test_groups_across_two_processes(tiny_model, tmp_path):
    """Three groups of 4 on two processes of 6: the second group has two completions on each."""
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path}
    assert launch(train_scripted_groups, tiny_model, str(tmp_path), **where) == [0, 0], logs(tmp_path)
    two, one = json.loads((tmp_path / "result.json").read_text()), scripted_groups(tiny_model, tmp_path)
    assert (two["processes"], one["processes"]) == (2, 1)
    for name in ("target", "mu"):
        assert two[name] == pytest.approx(one[name], abs=1e-6)
    assert two["valid"] == one["valid"] == [row not in (3, 5) for row in range(12)]
    assert max(map(abs, one["target"])) > 0.1
    longest = 9
    assert sum(two["tokens"]) == sum(two["held"])
    assert abs(two["tokens"][0] - two["tokens"][1]) <= longest < abs(two["held"][0] - two["held"][1])
    for logged_by_two, logged_by_one in zip(two["logged"], one["logged"], strict=True):
        assert logged_by_two == pytest.approx(logged_by_one, rel=1e-3, abs=1e-5)
    # After three SGD steps, one of them off-policy, the parameters agree to float32 rounding.
    assert two["moved"] == pytest.approx(one["moved"], rel=1e-4)
    assert math.dist(two["parameters"], one["parameters"]) < EXACT * one["moved"]


def train_scripted_groups(model: str, folder: str) -> None:
    """In each process."""
    result = scripted_groups(model, Path(folder))
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))


def scripted_groups(model: str, folder: Path) -> dict:
    """Train three optimizer steps, two of them on one rollout; the result in the order of the rollout's samples."""
    rewards = [0.3, 1.7, 2.2, 0.1, 1.0, None, 0.2, 0.7, 0.5, 0.9, 0.4, 1.3]
    trainer = trained(
        model,
        folder,
        script=Script(rewards, truncated=(3,)),
        # So that samples are exchanged: with prompts computed once, the completions of a prompt may stay together.
        model_init_kwargs={"attn_implementation": "eager"},
        mask_truncated_completions=True,
        drive_scaling="batch",
        chi2_radius=0.5,
        per_device_train_batch_size=len(rewards) // int(os.environ.get("WORLD_SIZE", "1")),
        gradient_accumulation_steps=1,
        num_iterations=2,
        max_steps=3,
        learning_rate=0.01,
    )
    rollout = trainer.rollouts[0]
    columns = {"target": rollout.opo_target, "valid": rollout.opo_valid, "mu": rollout.opo_mu}
    columns["tokens"] = torch.stack([batch["completion_mask"].sum() for batch in trainer.steps[0].batches]).sum()[None]
    columns["held"] = rollout.completion_mask.sum()[None]
    policy = snapshot(trainer.accelerator.unwrap_model(trainer.model))
    parameters = torch.cat([policy[name].flatten() for name in trainer.initial])
    initial = torch.cat([trainer.initial[name].flatten() for name, _ in trainer.model.named_parameters()])
    return {
        "processes": trainer.accelerator.num_processes,
        "parameters": parameters.tolist(),
        "moved": (parameters - initial).norm().item(),
        "logged": [
            {name: value for name, value in without_times(entry).items() if name.startswith("opo/")}
            for entry in logged(trainer)
        ],
        **{
            name: trainer.accelerator.gather(column.to(trainer.accelerator.device)).tolist()
            for name, column in columns.items()
        },
    }


# 5. What is logged and printed

METRICS = {
    *("escort/ess", "temperature", "mu", "chi2", "conservation_residual", "log_ratio/absmax", "frac_zero_drive"),
    *("frac_masked", "off_policy_steps", "work", "dissipation", "gradient_response_efficiency"),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_every_metric_is_logged_on_every_step(tiny_model, tmp_path, reduction):
    trainer = trained(tiny_model, tmp_path, log_ratio_reduction=reduction, **OFF_POLICY)
    entries = logged(trainer)
    assert len(entries) == 3
    for entry in entries:
        missing = {name for name in METRICS if not isinstance(entry.get(f"opo/{name}"), float)}
        assert not missing
    assert [entry["opo/off_policy_steps"] for entry in entries] == [0, 1, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"log_ratio_reduction": "mean", "learning_rate": 0.2, "chi2_radius": 0.3},
        {"positivity": "clip", "mu": 0.2, "escort_temperature": 0.6},
    ],
    ids=["sum", "mean", "clipped"],
)
def test_metrics_are_the_definitions(tiny_model, tmp_path, options):
    script = everything()
    trainer = trained(tiny_model, tmp_path, script=script, mask_truncated_completions=True, **OFF_POLICY, **options)
    reference = Reference(trainer, script)
    entries = logged(trainer)
    for k in range(2):
        step, drive = reference.step(k), reference.drive(0)
        rows = [i for i, weight in enumerate(step.weights) if weight]
        delta = [step.deltas[i] for i in rows]
        v = [math.expm1(d) for d in delta]
        valid = [i for i in range(16) if drive.valid[i]]
        groups = [[drive.omega[i] for i in range(g, g + 4)] for g in range(0, 16, 4)]
        expected = {
            "escort/ess": statistics.fmean(sum(g) ** 2 / sum(w * w for w in g) for g in groups),
            "temperature": drive.temperature,
            "mu": drive.mu,
            "frac_zero_drive": statistics.fmean(drive.drive[i] == 0 for i in valid),
            "chi2": statistics.fmean(x * x for x in v),
            "conservation_residual": statistics.fmean(v),
            "log_ratio/absmax": max(map(abs, delta)),
            "frac_masked": 1 - len(rows) / 8,
            "work": statistics.fmean(step.work),
            "dissipation": statistics.fmean(step.dissipation),
            "off_policy_steps": k,
            "gradient_response_efficiency": norm(step.gradient)
            / ((max(drive.advantages) - min(drive.advantages)) / 2),
        }
        assert expected.keys() == METRICS
        values = {name: entries[k][f"opo/{name}"] for name in expected}
        # 1e-3: exp(Delta) - 1 multiplies the rounding of a sum of float32 log-probabilities by 1 / Delta.
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-5)
    # One unscored and one truncated completion among the sixteen of the rollout.
    assert sum(entry["opo/frac_masked"] for entry in entries[:2]) / 2 == pytest.approx(2 / 16)
    assert entries[0]["opo/frac_zero_drive"] == pytest.approx(4 / 14)


def test_rollout_without_signal_has_no_gradient_response_efficiency(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, script=Script([1.0] * 8))
    (entry,) = logged(trainer)
    assert "opo/gradient_response_efficiency" not in entry
    assert None not in entry.values()  # as TRL would log a metric that is NaN
    assert entry["opo/frac_zero_drive"] == 1


def test_gradient_norm_does_not_grow_with_the_length(tiny_model, tmp_path):
    """That of a log-ratio does: without scaling, the gradient would be clipped in nearly every step."""
    norms = {}
    for reduction in ("sum", "mean"):
        norms[reduction] = [
            logged(
                trained(
                    tiny_model,
                    tmp_path / f"{reduction} {length}",
                    script=Script(min_length=length, max_length=length),
                    max_completion_length=160,
                    log_ratio_reduction=reduction,
                )
            )[0]["grad_norm"]
            for length in (8, 32, 128)
        ]
    assert norms["sum"] == pytest.approx(norms["mean"], rel=1e-3)  # for equal lengths the losses are the same
    assert norms["sum"][2] < norms["sum"][0]


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, True),
        ({"steps_per_generation": 1}, True),
        ({"num_iterations": 2}, False),
        ({"steps_per_generation": 4}, False),
    ],
)
def test_warning_of_an_on_policy_run_comes_once(tiny_model, tmp_path, caplog, options, warned):
    trained(tiny_model, tmp_path, max_steps=3, **options)
    found = [message for message in caplog.messages if "serves a single optimizer step" in message]
    assert len(found) == warned
    for name in ("steps_per_generation", "gradient_accumulation_steps=2") if warned else ():
        assert name in found[0]


@pytest.mark.parametrize("evaluated", [False, True])
def test_metrics_of_trl_are_logged_in_every_step(tiny_model, tmp_path, evaluated):
    """Also in a step that skips half of its samples; with an entropy bonus, the loss without it as well."""
    options = {"skip_inert_rows": True, "steps_per_generation": 4, "max_steps": 3}
    if evaluated:
        data = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})}
        options |= {"eval_strategy": "steps", "eval_steps": 1, "trainer_arguments": data}
    script = [0, 1, 1, 0, 1, 1, 1, 1]
    plain = trained(tiny_model, tmp_path / "1", script=Script(script), **options)
    entries = logged(plain)
    assert [entry["opo/frac_skipped"] for entry in entries] == [0.5, 0, 0.5]
    assert all(entry["entropy"] > 0 for entry in entries)
    bonus = trained(tiny_model, tmp_path / "2", script=Script(script), entropy_coef=0.5, **options)
    for entry in logged(bonus):
        assert entry["loss"] == pytest.approx(entry["policy_loss"] - 0.5 * entry["entropy"], rel=0.05)
        assert abs(entry["policy_loss"]) < 0.1
    prefixed = [entry for entry in bonus.state.log_history if "eval_loss" in entry]
    assert len(prefixed) == 3 * evaluated
    assert all("eval_policy_loss" in entry and "eval_entropy" in entry for entry in prefixed)


# 6. The trainer as users meet it


def test_model_card_names_the_method(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for text in ("OPO", "2601.12415", "Orthogonalized Policy Optimization", "\n- trl\n", "\n- opo\n"):
        assert text in card
    assert "- grpo" not in card


def test_configuration_of_another_trainer_is_rejected(tiny_model, tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False)
    with pytest.raises(TypeError, match=r"GRPOConfig.*OPOConfig"):
        OPOTrainer(tiny_model, Script().reward_functions(), args, Dataset.from_dict({"prompt": PROMPTS}))


@pytest.mark.parametrize("as_module", [False, True], ids=["path", "module"])
def test_configuration_may_be_left_out(tiny_model, tmp_path, monkeypatch, as_module):
    monkeypatch.chdir(tmp_path)  # the output folder is named after the model, in the working directory
    # TRL's default is bfloat16 on a GPU, which fails on a machine without one.
    monkeypatch.setattr(OPOTrainer, "config_class", functools.partial(OPOConfig, use_cpu=USE_CPU, bf16=False))
    model = AutoModelForCausalLM.from_pretrained(tiny_model) if as_module else tiny_model
    trainer = OPOTrainer(
        model=model,
        reward_funcs=Script().reward_functions(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    assert isinstance(trainer.args, OPOConfig)
    assert trainer.args.output_dir == f"{Path(tiny_model).name}-OPO"
    assert (trainer.args.alpha, trainer.args.mu) == (0.4, 0.3)


def test_recorded_distance_can_fail(tiny_model, tmp_path):
    """The comparisons above rely on this number: it is not zero for different gradients."""
    trainer = trained(tiny_model, tmp_path, max_steps=2)
    assert distance(trainer.steps[0].gradient, trainer.steps[1].gradient) > 0.1
