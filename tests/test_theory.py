"""On a table: OPO's gradient is that of the functions which the pages name; and what bounds of the weight do."""

import pytest
import torch

from opo_trl.config import ObjectiveConfig
from opo_trl.objective import MAX_WEIGHT, OPO, Samples
from opo_trl.objectives import TOPR


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


def table(target, mu, policy, before, reused=True):
    """A completion of one token for each entry."""
    one = torch.ones_like(before)
    tokens = {"logps": policy.log()[:, None], "anchor_logps": before.log()[:, None], "mask": one.bool()[:, None]}
    return Samples(**tokens, target=target, mu=mu * one, weights=one, age=0 * one, reused=reused)


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
    config = ObjectiveConfig(mu=MU, log_ratio_clamp=20.0, **fields)
    loss = kind(config).loss(table(push / MU, MU, policy, before, reused))
    expected_loss = before @ (loss.work + loss.dissipation)
    (gradient,) = torch.autograd.grad(-expected_loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(objective(policy, before, push), logits)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert expected.norm() > 0.05


def topr(right, wrong):
    fields = {"positive_bounds": list(right), "negative_bounds": list(wrong), "log_ratio_clamp": 20.0}
    return TOPR(ObjectiveConfig(objective="topr", **fields))


def steps_until_right(start, right, most=1000):
    """Steps until right answers, whose logits begin at `start`, have half of the mass; their t at first."""
    behaviour = torch.full((6,), 1 / 6, dtype=torch.float64)
    is_right = torch.tensor([True, False, False, True, False, False])
    logits = torch.where(is_right, start, 0.0).double().requires_grad_()
    push, objective = is_right.double() - 1 / 3, topr(right, (0, 2))
    lost = float(logits.detach().softmax(0)[0] * 6)
    for n in range(most):
        policy = logits.softmax(0)
        if policy[is_right].sum() > 0.5:
            return n, lost
        work = objective.loss(table(push, 1.0, policy, behaviour)).work
        (gradient,) = torch.autograd.grad(behaviour @ work, logits)
        logits = (logits - gradient).detach().requires_grad_()
    return most, lost


def test_a_lost_answer_is_on_a_plateau_that_takes_one_over_t_steps_to_leave():
    for start in (-4.0, -5.0):
        steps, lost = steps_until_right(start, (0, 2))
        assert 4 < steps * lost < 4.5
    assert steps_until_right(-12.0, (0, 2))[0] == 1000  # 1/t is 100,000 there: not lost for ever, but for this run


def test_a_lower_bound_of_1_leaves_the_plateau_at_once():
    steps = [steps_until_right(start, (1, 2))[0] for start in (-4.0, -8.0, -12.0)]
    assert steps[2] < 100
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], abs=1)  # it grows like log 1/t


def net_forces(right, wrong):
    """The sums of the forces on a group of six completions of which one to five are right, for 280 groups."""
    random, objective = torch.Generator().manual_seed(0), topr(right, wrong)
    for n in range(280):
        behaviour = torch.full((6,), 1 / 6, dtype=torch.float64)
        log_ratio = torch.randn(6, generator=random, dtype=torch.float64).requires_grad_()
        push = (torch.arange(6) < 1 + n % 5).double()
        samples = table(push - push.mean(), 1.0, behaviour * log_ratio.exp(), behaviour)
        (force,) = torch.autograd.grad(-objective.loss(samples).work.sum(), log_ratio)
        yield float(force.sum())


@pytest.mark.parametrize(("wrong", "can_be_negative"), [((0, 1), False), ((0, 2), True)])
def test_only_bounds_that_meet_at_1_never_push_a_group_down_on_the_whole(wrong, can_be_negative):
    forces = [*net_forces((1, 2), wrong)]
    assert (min(forces) < -0.1) == can_be_negative
    assert min(forces) > -1e-12 or can_be_negative
    assert max(forces) > 0.1
