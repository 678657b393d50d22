"""OPO's gradient on a table is that of the functions of the policy which the pages name."""

import pytest
import torch

from opo_trl.config import ObjectiveConfig
from opo_trl.objective import MAX_WEIGHT, OPO, Samples


MU = 0.7


def reverse_kl(policy, before, push):
    return policy @ push - MU * policy @ (policy / before).log()


def chi2(policy, before, push):
    return policy @ push - MU / 2 * before @ (policy / before - 1).square()


def truncated(policy, before, push):
    """The two functions of t = π/π_k whose derivatives are min(t, 2)/t times those of t and (t − 1)²/2."""
    ratio = policy / before
    bounded = ratio.clamp(max=MAX_WEIGHT)
    excess = (ratio / MAX_WEIGHT).log()
    beyond = excess.clamp(min=0)
    reward = bounded + MAX_WEIGHT * beyond
    slope = MAX_WEIGHT * (MAX_WEIGHT - 1)
    penalty = (bounded - 1).square() / 2 + slope * beyond
    return before @ (reward * push - MU * penalty)


CASES = {
    "default": (OPO, {}, False, chi2),
    "default, with several passes": (OPO, {}, True, chi2),
    "default, beyond the bound": (OPO, {}, False, truncated),
    "exact form, with one": (OPO, {"ratio_form": "exact"}, False, chi2),
    "log form, with several": (OPO, {"ratio_form": "log"}, True, reverse_kl),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_objective(case):
    kind, fields, reused, objective = CASES[case]
    random = torch.Generator().manual_seed(3)

    def normal():
        return torch.randn(6, generator=random, dtype=torch.float64)

    before = normal().softmax(0)
    size_of_change = 3.0 if objective is truncated else 0.4
    logits = before.log() + size_of_change * normal()
    logits.requires_grad_()
    push = normal()
    policy = logits.softmax(0)
    largest = (policy / before).max()
    if objective is truncated:
        assert largest > 1.5 * MAX_WEIGHT
    else:
        assert 1.2 < largest < MAX_WEIGHT
    one = torch.ones_like(push)
    samples = Samples(
        logps=policy.log().unsqueeze(1),
        anchor_logps=before.log().unsqueeze(1),
        mask=one.bool().unsqueeze(1),
        target=push / MU,
        mu=MU * one,
        weights=one,
        age=0 * one,
        reused=reused,
    )
    config = ObjectiveConfig(mu=MU, log_ratio_clamp=20.0, **fields)
    loss = kind(config).loss(samples)
    expected_loss = before @ (loss.work + loss.dissipation)
    (gradient,) = torch.autograd.grad(-expected_loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(objective(policy, before, push), logits)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert expected.norm() > 0.05
