"""
`OPOTrainer` against the definition: gradients, invariances, what it prints and what it logs.

Every gradient is compared with an independent float64 computation from the logits of the model
(`float64_reference.Reference`), for complete optimizer steps of several micro-batches, on-policy and off-policy.
"""

import copy
import functools
import inspect
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from device_fields import USE_CPU
from float64_reference import Reference, assert_step_equals
from named_tensors import norm, relative_error
from recording_trainers import logged, make_trainer, metric, trained
from scripted_rollouts import PROMPTS, Script
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


# The gradient is that of the definition

CASES = {
    "defaults": {},
    "mean": {"log_ratio_reduction": "mean", "learning_rate": 0.2},
    "exact": {"ratio_form": "exact", "learning_rate": 0.025},
    "alpha 0.9": {"alpha": 0.9, "learning_rate": 0.25},
    "drive scaled by batch": {"drive_scaling": "batch"},
    "positivity by clipping": {"positivity": "clip", "mu": 0.2, "positivity_epsilon": 0.2},
    "positivity by projection": {"positivity": "project", "mu": 0.2},
    "radius": {"chi2_radius": 0.02},
    "radius, stiffened": {"chi2_radius": 3.0, "positivity": "stiffen", "drive_scaling": "group"},
    "sequence correction": {"anchor_correction": "sequence", "alpha": 0.9},
    "adaptive temperature": {"adaptive_temperature": True, "anchor_correction": "length_normalized"},
    "adaptive temperature, bounded": {"adaptive_temperature": True, "temperature_range": [0.2, 0.3]},
    "clamp": {"log_ratio_clamp": 0.3},
    "advantages unscaled": {"scale_rewards": "none"},
    "reward weights": {"reward_weights": [1.0, 2.0]},
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_the_definition(tiny_model, tmp_path, case):
    options = CASES[case]
    script = everything(rewards=TWO_REWARDS, functions=2) if "reward_weights" in options else everything()
    trainer = trained(tiny_model, tmp_path, script=script, mask_truncated_completions=True, **OFF_POLICY, **options)
    reference = Reference(trainer, script)
    steps = [reference.step(k) for k in range(3)]
    for record, expected in zip(trainer.steps, steps, strict=True):
        assert len(record.batches) == 2
        assert_step_equals(record, expected)
    on_policy, off_policy, next_rollout = steps
    assert not any(on_policy.deltas)
    distances = [abs(delta) for delta in off_policy.deltas]
    assert max(distances) > 0.05, "the policy never left the behaviour policy"
    assert {k for k, _ in next_rollout.rows} == {1}
    if case == "clamp":
        assert 0.3 in distances
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


def test_group_with_one_scored_completion_has_neither_signal_nor_nan(tiny_model, tmp_path):
    script = Script([None, None, 1.0, None, 0.2, 0.9, 0.4, 0.1])
    trainer = trained(tiny_model, tmp_path, script=script)
    assert trainer.rollouts[0].opo_valid.tolist() == [False, False, True, False, True, True, True, True]
    assert trainer.rollouts[0].opo_target[:4].tolist() == [0, 0, 0, 0]
    assert_step_equals(trainer.steps[0], Reference(trainer, script).step(0))


def test_several_rollouts_in_one_step(tiny_model, tmp_path):
    """The opposite of off-policy steps: a step over two rollouts, each with its own target and mu."""
    radius = Script()
    trainer = trained(
        tiny_model, tmp_path, script=radius, steps_per_generation=2, gradient_accumulation_steps=4, chi2_radius=0.1
    )
    expected = Reference(trainer, radius).step(0)
    assert {k for k, _ in expected.rows} == {0, 1}
    assert len(set(expected.mus)) == 2
    assert_step_equals(trainer.steps[0], expected)


# What is logged and printed


def test_metrics_are_the_definitions(tiny_model, tmp_path):
    script = everything()
    options = {"log_ratio_reduction": "mean", "learning_rate": 0.2, "chi2_radius": 0.3}
    trainer = trained(tiny_model, tmp_path, script=script, mask_truncated_completions=True, **OFF_POLICY, **options)
    reference = Reference(trainer, script)
    entries = logged(trainer)
    for k in range(2):
        step = reference.step(k)
        drive = reference.drive(0)
        takes_part = np.array(step.weights, dtype=bool)
        delta = np.array(step.deltas)[takes_part]
        v = np.expm1(delta)
        drives_of_valid = np.array(drive.drive)[np.array(drive.valid)]
        omega = np.array(drive.omega).reshape(4, 4)  # of four groups
        ess_of_groups = omega.sum(axis=1) ** 2 / (omega**2).sum(axis=1)
        advantage_range = max(drive.advantages) - min(drive.advantages)
        expected = {
            "escort/ess": ess_of_groups.mean(),
            "temperature": drive.temperature,
            "mu": drive.mu,
            "frac_zero_drive": (drives_of_valid == 0).mean(),
            "chi2": (v**2).mean(),
            "conservation_residual": v.mean(),
            "log_ratio/absmax": abs(delta).max(),
            "frac_masked": 1 - takes_part.mean(),
            "work": statistics.fmean(step.work),
            "dissipation": statistics.fmean(step.dissipation),
            "off_policy_steps": k,
            "gradient_response_efficiency": norm(step.gradient) / (advantage_range / 2),
        }
        values = {name: entries[k][f"opo/{name}"] for name in expected}
        # 1e-3: exp(Delta) - 1 multiplies the rounding of a sum of float32 log-probabilities by 1 / Delta.
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-5)
    # One unscored and one truncated completion among the sixteen of the rollout.
    first, second, _ = metric(trainer, "opo/frac_masked")
    assert (first + second) / 2 == pytest.approx(2 / 16)
    assert entries[0]["opo/frac_zero_drive"] == pytest.approx(4 / 14)


def test_rollout_without_signal_has_no_gradient_response_efficiency(tiny_model, tmp_path):
    trainer = trained(tiny_model, tmp_path, script=Script([1.0] * 8))
    (entry,) = logged(trainer)
    assert "opo/gradient_response_efficiency" not in entry
    assert None not in entry.values()  # as TRL would log a metric that is NaN
    assert entry["opo/frac_zero_drive"] == 1


def test_metrics_of_trl_are_logged_in_every_step(tiny_model, tmp_path):
    """Also in a step that skips half of its samples; with an entropy bonus, the loss without it as well."""
    options = {"skip_inert_rows": True, "steps_per_generation": 4, "max_steps": 3}
    data = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "trainer_arguments": data}
    script = [0, 1, 1, 0, 1, 1, 1, 1]
    plain = trained(tiny_model, tmp_path / "1", script=Script(script), **options)
    entries = logged(plain)
    assert [entry["opo/frac_skipped"] for entry in entries] == [0.5, 0, 0.5]
    assert all(entry["entropy"] > 0 for entry in entries)
    bonus = trained(tiny_model, tmp_path / "2", script=Script(script), entropy_coef=0.5, **options)
    for entry in logged(bonus):
        policy_loss = entry["policy_loss"]
        assert entry["loss"] == pytest.approx(policy_loss - 0.5 * entry["entropy"], rel=0.05)
        assert abs(policy_loss) < 0.1
        assert entry["entropy_coef"] == 0.5
    prefixed = [entry for entry in bonus.state.log_history if "eval_loss" in entry]
    assert len(prefixed) == 3
    assert all("eval_policy_loss" in entry and "eval_entropy" in entry for entry in prefixed)


# The trainer as users meet it


def test_model_card_names_the_method(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for text in ("OPO", "2601.12415", "Orthogonalized Policy Optimization", "\n- trl\n", "\n- opo\n"):
        assert text in card
    assert "- grpo" not in card
    assert "None" not in card  # TRL's name of a model that is not on the Hub
    assert f"fine-tuned version of `{Path(tiny_model).name}`" in card
    assert f'model="{tmp_path.name}"' in card


def test_editors_see_the_parameters_of_trl_in_their_order():
    ours = dict(inspect.signature(OPOTrainer.__init__).parameters)
    theirs = inspect.signature(GRPOTrainer.__init__).parameters
    assert ours.pop("options").kind is inspect.Parameter.VAR_KEYWORD  # those of a later release
    assert [*ours] == [*theirs]
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name


def test_configuration_of_another_trainer_is_rejected(tiny_model, tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=USE_CPU, bf16=False)
    with pytest.raises(TypeError, match=r"GRPOConfig.*OPOConfig"):
        OPOTrainer(tiny_model, Script().reward_functions(), args, Dataset.from_dict({"prompt": PROMPTS}))


def test_configuration_may_be_left_out(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the output folder is named after the model, in the working directory
    # TRL's default is bfloat16 on a GPU, which fails on a machine without one.
    monkeypatch.setattr(OPOTrainer, "config_class", functools.partial(OPOConfig, use_cpu=USE_CPU, bf16=False))
    trainer = OPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model),
        reward_funcs=Script().reward_functions(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    assert isinstance(trainer.args, OPOConfig)
    assert trainer.args.output_dir == f"{Path(tiny_model).name}-OPO"
    assert (trainer.args.alpha, trainer.args.mu) == (0.4, 0.3)
