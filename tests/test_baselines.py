"""GRPO, GSPO and DAPO as the recipes set them train on TRL's own loss, gradient for gradient."""

from pathlib import Path

import pytest
import yaml
from helpers import RecordingBaseline, RecordingGRPO, Script, distance, logged, norm, trained
from trl import GRPOConfig

from opo_trl import OPOTrainer


RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "arithmetic" / "experiment1"
LOSS = ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "mask_truncated_completions", "beta")


def loss_fields(method: str) -> dict:
    recipe = yaml.safe_load((RECIPES / f"{method}.yaml").read_text())
    return {name: recipe[name] for name in LOSS if name in recipe}


# Learning rates at which some ratios leave the clip range, but not all.
@pytest.mark.parametrize(("method", "rate"), [("grpo", 0.3), ("gspo", 1e-4), ("dapo", 0.3)])
def test_gradient_of_every_step_is_that_of_trl(tiny_model, tmp_path, method, rate):
    # The second pass over a rollout is off-policy: there the clip ranges act. Steps of both trainers use all samples.
    options = {"num_iterations": 2, "max_steps": 4, "learning_rate": rate, **loss_fields(method)}
    trl = trained(tiny_model, tmp_path, script=Script(truncated=(2,)), trainer_class=RecordingGRPO, **options)
    ours = trained(tiny_model, tmp_path, script=Script(truncated=(2,)), trainer_class=RecordingBaseline, **options)
    assert len(ours.steps) == len(trl.steps) == 4
    for mine, theirs in zip(ours.steps, trl.steps, strict=True):
        assert norm(theirs.gradient) > 1e-4
        assert distance(mine.gradient, theirs.gradient) < 1e-4 * norm(theirs.gradient)
    clipped = logged(ours)[1]["clip_ratio/region_mean"]
    assert clipped > 0, "nothing was clipped, so the clip ranges were not compared"


def test_losses_of_the_three_methods_differ(tiny_model, tmp_path):
    gradients = {}
    for method in ("grpo", "gspo", "dapo"):
        run = trained(
            tiny_model,
            tmp_path,
            script=Script(truncated=(2,)),
            trainer_class=RecordingBaseline,
            num_iterations=2,
            max_steps=2,
            learning_rate=0.3,
            **loss_fields(method),
        )
        gradients[method] = run.steps[1].gradient
    for one, other in (("grpo", "gspo"), ("grpo", "dapo"), ("gspo", "dapo")):
        assert distance(gradients[one], gradients[other]) > 0.01 * norm(gradients[one])


def test_baseline_logs_what_the_comparison_reads(tiny_model, tmp_path):
    run = trained(tiny_model, tmp_path, trainer_class=RecordingBaseline, max_steps=1)
    (entry,) = logged(run)
    advantages = run.rollouts[0].advantages
    spread = (advantages.max() - advantages.min()).item()
    assert entry["opo/advantage_range"] == pytest.approx(spread, rel=1e-5)
    assert entry["opo/gradient_response_efficiency"] == pytest.approx(entry["grad_norm"] / (spread / 2), rel=1e-5)
    assert entry["completions/generated"] == 8


def test_configuration_of_another_trainer_is_rejected(tiny_model):
    with pytest.raises(TypeError, match=r"`args` is a `GRPOConfig`, but OPOTrainer needs a `OPOConfig`"):
        OPOTrainer(tiny_model, lambda **_: [], GRPOConfig(use_cpu=True, bf16=False))
