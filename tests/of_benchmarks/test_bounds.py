"""The confirmation of bounds: the hinge, and the rule."""

import numpy as np
import pytest
import torch

from benchmarks import bounds
from benchmarks.bounds import ARMS, CANDIDATES, REFERENCES, REGIMES
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Groups, Samples


def force(name: str, moved: float, target: float) -> float:
    """Minus the derivative of the loss of a completion of one token by its log-ratio."""
    arm = ARMS[name]
    logps = torch.tensor([[moved]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    tokens = {"logps": logps, "anchor_logps": torch.zeros_like(logps), "mask": torch.ones(1, 1).bool()}
    made = Samples(**tokens, target=target * one, mu=one, weights=one, age=0 * one, reused=True)
    loss = arm.kind(ObjectiveConfig(log_ratio_clamp=20.0, **arm.options)).loss(made)
    (gradient,) = torch.autograd.grad((loss.work + loss.dissipation).sum(), logps)
    return -gradient.item()


def test_completions_of_solved_groups_are_held_but_not_pushed():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    known = Groups(advantages=rewards - 0.5, rewards=rewards, valid=torch.arange(9) != 8, num_generations=3)
    for name in CANDIDATES:
        arm = ARMS[name]
        target = arm.kind(ObjectiveConfig(log_ratio_clamp=20.0, **arm.options)).targets(known).target
        held = target == torch.tensor(bounds._SOLVED)
        # The last group has a wrong answer, which does not take part.
        assert held.tolist() == ([True] * 3 + [False] * 3 + [True] * 2 + [False] if "hinge" in name else [False] * 9)
    name = "(1, 2, 0, 2), hinge"
    assert force(name, -1.0, bounds._SOLVED) == pytest.approx(1 - np.exp(-1))
    assert force(name, 0.0, bounds._SOLVED) == force(name, 0.5, bounds._SOLVED) == 0


def reached(**behind: float) -> dict:
    """Accuracies of a form at 80 everywhere, and of references so many points behind in one regime each."""
    random = np.random.default_rng(1)
    regimes = dict(zip(REFERENCES, ("few", "lag", "many"), strict=True))
    found = {(arm, regime): 80 + random.normal(0, 1, 24) for arm in ("form", *REFERENCES) for regime in REGIMES}
    for arm, points in behind.items():
        name = arm.replace("_", " ")
        found[name, regimes[name]] -= points
    return found


def test_a_form_passes_that_is_nowhere_behind_and_somewhere_ahead_of_each():
    ahead = {"TOPR": 4.0, "truncated_REINFORCE": 4.0, "OPO": 4.0}
    assert bounds.passes(reached(**ahead), "form") == (True, True)
    assert bounds.passes(reached(**ahead | {"OPO": 0.0}), "form") == (True, False)
    fallen = reached(**ahead)
    fallen["form", "fresh"] -= 6
    assert bounds.passes(fallen, "form") == (False, True)
