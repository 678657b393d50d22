"""Published losses as objectives: those that TRL has train as in TRL, and the others by their formulas."""

import math

import pytest
import torch
from helpers import EXACT, Recording, RecordingOPO, Script, distance, norm, trained

from benchmarks.objectives import neighbours, published
from opo_trl import OPOTrainer
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import OPO, Samples


# Two passes over rollouts of two optimizer steps each, with steps so large that ratios are clipped.
PASSES = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4, "learning_rate": 0.05}
FIELDS = {
    "GRPO": {"loss_type": "grpo", "epsilon": 0.2},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0},
    "SAPO": {"loss_type": "sapo"},
    "VESPO": {"loss_type": "vespo"},
    "DrGRPO": {"loss_type": "dapo", "scale_rewards": "none"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_gradients_are_those_of_trl(tiny_model, tmp_path, name):
    kind = type(name, (Recording, OPOTrainer), {"objective_class": getattr(published, name)})
    reduction = "sum" if name in ("CISPO", "VESPO", "DrGRPO") else "mean"
    own = trained(
        tiny_model, tmp_path / "own", script=Script(), trainer_class=kind, log_ratio_reduction=reduction, **PASSES
    )
    trl = trained(tiny_model, tmp_path / "trl", script=Script(), trainer_class=RecordingOPO, **FIELDS[name], **PASSES)
    norms = [norm(other.gradient) for other in trl.steps]
    assert sorted(norms)[1] > 0.01  # GSPO clips all completions of a step
    for one, other, size in zip(own.steps, trl.steps, norms, strict=True):
        assert distance(one.gradient, other.gradient) <= EXACT * size
    clipped = [entry.get("clip_ratio/region_mean") for entry in trl.state.log_history if "grad_norm" in entry]
    assert max(share or 0 for share in clipped) > 0 or name in ("CISPO", "SAPO", "VESPO")
    entries = [entry for entry in own.state.log_history if "grad_norm" in entry]
    assert "χ²" not in own.plan
    assert not any("opo/target_fit" in entry or "opo/escort/ess" in entry for entry in entries)
    assert entries[0]["opo/work"] == pytest.approx(entries[0]["loss"], abs=1e-6) or reduction == "sum"


def force(objective, *, moved: float, target: float, mu: float = 0.3) -> float:
    """Minus the derivative of the loss of a completion of two tokens by its log-ratio, at a log-ratio."""
    logps = torch.full((1, 2), moved / 2, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tokens = {"logps": logps, "anchor_logps": torch.zeros_like(logps), "mask": torch.ones(1, 2).bool()}
    made = objective(ObjectiveConfig(log_ratio_clamp=20.0, mu=mu)).loss(
        Samples(**tokens, target=target * one, mu=mu * one, weights=one, age=0 * one, reused=True)
    )
    (gradient,) = torch.autograd.grad((made.work + made.dissipation).sum(), logps, allow_unused=True)
    return 0.0 if gradient is None else -gradient[0, 0].item()


@pytest.mark.parametrize("moved", [-1.0, 0.0, 0.3, 1.5])
@pytest.mark.parametrize("target", [-2.0, 0.0, 1.5])
def test_force_on_the_log_ratio_is_that_of_the_formula(moved, target):
    ratio, token = math.exp(moved), math.exp(moved / 2)
    bounded = min(ratio, 2.0)
    forces = {
        neighbours.Decoupled: bounded * 0.3 * target,
        published.TOPR: target * (1.0 if target >= 0 else min(ratio, 1.0)),
        published.AReaL: min(token, 2.0) * target,
        published.SPO: token * (target - abs(target) * (token - 1) / 0.2),
        published.DRPO: token * (target - abs(target) * (token - 1) / 0.2),  # π_behaviour is 1
    }
    for kind, expected in forces.items():
        assert force(kind, moved=moved, target=target) == pytest.approx(expected, abs=1e-12), kind


def test_right_answer_of_topr_keeps_its_gradient_however_unlikely_it_has_become():
    """e⁻⁵⁰ is beyond the bound of log-ratios, which is one of values. Weights of 0 end the other gradients."""
    assert force(published.TOPR, moved=-50.0, target=1.5) == pytest.approx(1.5)
    assert force(published.TOPR, moved=30.0, target=1.5) == pytest.approx(1.5)
    assert 0 > force(published.TOPR, moved=-50.0, target=-2.0) > -1e-6
    assert 0 < force(OPO, moved=-50.0, target=1.5) < 1e-6
