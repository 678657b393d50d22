"""On a table: OPO's gradient is that of the functions which the pages name; and what bounds of the weight do."""

import pytest
import torch
from objective_by_hand import gradient_of_sum, table

from opo_trl.config import ObjectiveConfig
from opo_trl.objective import MAX_WEIGHT, OPO
from opo_trl.objectives import TOPR


MU = 0.7


def reverse_kl(policy, before, push):
    log_ratio = (policy / before).log()
    divergence = policy @ log_ratio
    return policy @ push - MU * divergence


def chi2(policy, before, push):
    excess = policy / before - 1
    divergence = before @ excess.square()
    return policy @ push - MU / 2 * divergence


def truncated(policy, before, push):
    """The two functions of t = π/π_k whose derivatives are min(t, 2)/t times those of t and (t − 1)²/2."""
    ratio = policy / before
    bounded = ratio.clamp(max=MAX_WEIGHT)
    excess = (ratio / MAX_WEIGHT).log()
    beyond = excess.clamp(min=0)
    reward = bounded + MAX_WEIGHT * beyond
    slope = MAX_WEIGHT * (MAX_WEIGHT - 1)
    within = (bounded - 1).square() / 2
    penalty = within + slope * beyond
    values = reward * push - MU * penalty
    return before @ values


CASES = {
    "default": (OPO, {}, False, chi2),
    "default, with several passes": (OPO, {}, True, chi2),
    "default, beyond the bound": (OPO, {}, False, truncated),
    "exact form, with one": (OPO, {"ratio_form": "exact"}, False, chi2),
    "log form, with several": (OPO, {"ratio_form": "log"}, True, reverse_kl),
}


def uniform_policy():
    return torch.full((6,), 1 / 6, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_objective(case):
    kind, fields, reused, objective = CASES[case]
    random = torch.Generator().manual_seed(3)

    def normal():
        return torch.randn(6, generator=random, dtype=torch.float64)

    before = normal().softmax(0)
    size_of_change = 3.0 if objective is truncated else 0.4
    change = size_of_change * normal()
    logits = before.log() + change
    logits.requires_grad_()
    push = normal()
    policy = logits.softmax(0)
    ratio = policy / before
    largest = ratio.max()
    if objective is truncated:
        assert largest > 1.5 * MAX_WEIGHT
    else:
        assert 1.2 < largest < MAX_WEIGHT
    config = ObjectiveConfig(mu=MU, log_ratio_clamp=20.0, **fields)
    samples = table(push / MU, policy, before, mu=MU, reused=reused)
    loss = kind(config).loss(samples)
    losses = loss.work + loss.dissipation
    expected_loss = before @ losses
    (gradient,) = torch.autograd.grad(-expected_loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(objective(policy, before, push), logits)
    assert torch.allclose(gradient, expected, atol=1e-12)
    assert expected.norm() > 0.05


def topr(right, wrong):
    """With these bounds of the weights of right and of wrong completions."""
    config = ObjectiveConfig(
        objective="topr", positive_bounds=list(right), negative_bounds=list(wrong), log_ratio_clamp=20.0
    )
    return TOPR(config)


def steps_until_right(start, right, most=1000):
    """Steps until right answers, whose logits begin at `start`, have half of the mass; their t at first."""
    behaviour = uniform_policy()
    is_right = torch.tensor([True, False, False, True, False, False])
    push = is_right.double() - 1 / 3
    objective = topr(right, (0, 2))
    logits = torch.where(is_right, start, 0.0).double()
    first_ratios = logits.softmax(0) * 6
    ratio_at_first = first_ratios[0].item()
    for n in range(most):
        logits.requires_grad_()
        policy = logits.softmax(0)
        mass_of_right = policy[is_right].sum()
        if mass_of_right > 0.5:
            return n, ratio_at_first
        samples = table(push, policy, behaviour)
        expected_work = behaviour @ objective.loss(samples).work
        logits = logits.detach() - gradient_of_sum(expected_work, logits)
    return most, ratio_at_first


def test_a_lost_answer_is_on_a_plateau_that_takes_one_over_t_steps_to_leave():
    for start in (-4.0, -5.0):
        steps, ratio_at_first = steps_until_right(start, (0, 2))
        assert 4 < steps * ratio_at_first < 4.5
    steps, _ = steps_until_right(-12.0, (0, 2))
    assert steps == 1000  # 1/t is 100,000 there: not lost for ever, but for this run


def test_a_lower_bound_of_1_leaves_the_plateau_at_once():
    from_near, _ = steps_until_right(-4.0, (1, 2))
    from_far, _ = steps_until_right(-8.0, (1, 2))
    from_farthest, _ = steps_until_right(-12.0, (1, 2))
    assert from_farthest < 100
    assert from_farthest - from_far == pytest.approx(from_far - from_near, abs=1)  # it grows like log 1/t


def net_forces(right, wrong):
    """The sums of the forces on a group of six completions of which one to five are right, for 280 groups."""
    random = torch.Generator().manual_seed(0)
    objective = topr(right, wrong)
    behaviour = uniform_policy()
    for n in range(280):
        log_ratio = torch.randn(6, generator=random, dtype=torch.float64)
        log_ratio.requires_grad_()
        policy = behaviour * log_ratio.exp()
        count_of_right = 1 + n % 5
        rewards = (torch.arange(6) < count_of_right).double()
        samples = table(rewards - rewards.mean(), policy, behaviour)
        loss = objective.loss(samples)
        forces = gradient_of_sum(-loss.work, log_ratio)
        yield float(forces.sum())


@pytest.mark.parametrize(("wrong", "can_be_negative"), [((0, 1), False), ((0, 2), True)])
def test_only_bounds_that_meet_at_1_never_push_a_group_down_on_the_whole(wrong, can_be_negative):
    forces = [*net_forces((1, 2), wrong)]
    assert (min(forces) < -0.1) == can_be_negative
    assert min(forces) > -1e-12 or can_be_negative
    assert max(forces) > 0.1
