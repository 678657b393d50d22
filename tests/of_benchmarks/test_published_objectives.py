"""Published losses as objectives: those that the package has as there, and the others by their formulas."""

import math

import pytest
import torch

from benchmarks.objectives import published
from benchmarks.objectives.neighbours import small_second_moment
from opo_trl import OPOConfig
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Groups, Samples
from opo_trl.objectives import OBJECTIVES


WORDS = {"GRPO": "grpo", "GSPO": "gspo", "CISPO": "cispo", "SAPO": "sapo", "VESPO": "vespo", "DrGRPO": "dapo"}
FIELDS = {"GSPO": {"epsilon": 3e-4, "epsilon_high": 4e-4}, "CISPO": {"epsilon_high": 5.0}}


@pytest.mark.parametrize("name", WORDS)
def test_gradients_are_those_of_the_package(name):
    """Which other tests hold against TRL's."""
    reduction = "sum" if name in ("CISPO", "VESPO", "DrGRPO") else "mean"
    fields = {"use_cpu": True, "bf16": False, "objective": WORDS[name], **FIELDS.get(name, {})}
    kinds = {
        getattr(published, name): ObjectiveConfig(log_ratio_clamp=20.0, log_ratio_reduction=reduction),
        OBJECTIVES[WORDS[name]]: OPOConfig("unused", **fields),
    }
    random = torch.Generator().manual_seed(0)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [3]])
    moved = 0.3 * torch.randn(4, 6, generator=random, dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    more = {"target": torch.tensor([1.2, -0.4, 0.5, -1.3], dtype=torch.float64), "mu": one, "weights": one}
    gradients = []
    for kind, args in kinds.items():
        logps = (moved - 1).requires_grad_()
        tokens = {"logps": logps, "anchor_logps": torch.full_like(moved, -1), "mask": mask}
        loss = kind(args).loss(Samples(**tokens, **more, age=0 * one, reused=True))
        gradients += torch.autograd.grad((loss.work + loss.dissipation).sum(), logps)
    assert gradients[1].norm() > 0.1
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_advantages_of_dr_grpo_are_not_divided():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    groups = Groups(advantages=2 * rewards, rewards=rewards, valid=torch.ones(8).bool(), num_generations=4)
    target = published.DrGRPO(ObjectiveConfig()).targets(groups).target
    assert target.tolist() == [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]


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
    forces = {
        published.TOPR: target * (1.0 if target >= 0 else min(ratio, 1.0)),
        published.AReaL: min(token, 2.0) * target,
        published.SPO: token * (target - abs(target) * (token - 1) / 0.2),
        published.DRPO: token * (target - abs(target) * (token - 1) / 0.2),  # π_behaviour is 1
    }
    for kind, expected in forces.items():
        assert force(kind, moved=moved, target=target) == pytest.approx(expected, abs=1e-12), kind


def test_m2po_keeps_most_tokens_whose_mean_square_is_small():
    moved, mask = torch.tensor([[0.1, -0.3, 0.2], [9.0, 0.25, -0.5]]), torch.ones(2, 3).bool()
    mask[1, 0] = False
    # Mean squares, the smallest first: 0.01, 0.025, 0.0375, 0.0506 and 0.0905.
    assert small_second_moment(moved, mask, 0.04).tolist() == [[True, False, True], [False, True, False]]
