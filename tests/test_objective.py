"""
The objective against the paper's definitions, in float64; docs/paper.md has what follows from them.

The references are plain loops and closed forms over Python floats, written from the definitions and not from the
code. What holds for whole ranges of inputs is in `test_objective_properties.py`.
"""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from by_hand import (
    ADVANTAGES,
    CORRECTIONS,
    LOGPS,
    TRASH,
    VALID,
    G,
    assert_exact,
    assert_tight,
    drive_by_hand,
    escort_by_hand,
    f64,
    groups_of,
    log_ratio_of,
)
from scipy.optimize import minimize
from torch.testing import assert_close

from opo_trl import OPOConfig
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import (
    OPO,
    Groups,
    Objective,
    Samples,
    admissible_target,
    escort_weights,
    opo_loss,
    project,
    stiffness_for_radius,
)
from opo_trl.objectives import OBJECTIVES, TOPR, objective_named


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run():
    torch.manual_seed(0)


with_invalid_rows = pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])


def bools(valid):
    return None if valid is None else torch.tensor(valid)


# Escort weights: Definition 3.1 and Proposition 3.2


@with_invalid_rows
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 0.2), (0.4, 1.0), (0.9, f64(1.5)), (1.0, 1.0)])
def test_escort_weights_are_the_definition(alpha, temperature, correction, valid):
    anchor = CORRECTIONS[correction]
    omega = escort_weights(
        f64(ADVANTAGES),
        alpha=alpha,
        num_generations=G,
        temperature=temperature,
        anchor_logps=None if anchor is None else f64(anchor),
        valid=bools(valid),
    )
    assert_tight(omega, escort_by_hand(ADVANTAGES, alpha, float(temperature), anchor, valid))


# Projection: Theorem 3.4 and Remarks 3.5 and 3.6


@with_invalid_rows
def test_projection_subtracts_the_chemical_potential_of_each_group(valid):
    field = [abs(logp) for logp in LOGPS]  # of which the mean is not 1
    drive, chemical_potential = project(f64(field), num_generations=G, valid=bools(valid))
    assert_tight(drive, drive_by_hand(field, valid))
    groups = groups_of(len(field), valid=valid)
    assert_tight(chemical_potential, [statistics.fmean(field[i] for i in rows) for rows in groups])


@with_invalid_rows
@pytest.mark.parametrize("scaling", ["group", "batch"])
def test_scaling_divides_by_the_unbiased_standard_deviation(scaling, valid):
    omega = escort_by_hand(ADVANTAGES, 0.4, valid=valid)
    expected = drive_by_hand(omega, valid)
    first, second, third = groups_of(len(omega), valid=valid)
    scaled_together = [first, second] if scaling == "group" else [first + second + third]  # the third has no variance
    for rows in scaled_together:
        std = statistics.stdev([expected[i] for i in rows])
        for i in rows:
            expected[i] /= std
    expected[8:] = [0.0] * 4
    drive, _ = project(f64(omega), num_generations=G, scaling=scaling, valid=bools(valid))
    assert_tight(drive, expected)
    assert_exact(drive[8:], f64([0.0] * 4))


@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e4])
def test_zero_variance_group_has_exactly_zero_drive(value, scaling):
    """Sums of 0.1 are rounded, and a rounding error divided by its own standard deviation would be of order 1."""
    for group in range(2, 65):
        equal = torch.full((2 * group,), value)
        omega = escort_weights(equal, alpha=0.4, num_generations=group, temperature=0.3)
        assert_exact(omega, torch.ones_like(omega))
        for weights in (omega, equal):  # also equal weights that are not 1
            drive, _ = project(weights, num_generations=group, scaling=scaling)
            assert_exact(drive, torch.zeros_like(drive))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_drive_over_one_minus_alpha_tends_to_the_centered_advantage_as_alpha_tends_to_one(temperature):
    """Remark 3.6, corrected: omega itself tends to 1, not to A. With scaling, the limit is the z-score."""
    centered = f64(drive_by_hand(ADVANTAGES)) / temperature
    z_scores, _ = project(f64(ADVANTAGES), num_generations=G, scaling="group")
    errors = []
    for k in (2, 3, 4):
        alpha = 1 - 10.0**-k
        omega = escort_weights(f64(ADVANTAGES), alpha=alpha, num_generations=G, temperature=temperature)
        drive, _ = project(omega, num_generations=G)
        error = drive / (1 - alpha) - centered
        errors.append(error.abs().max().item())
        scaled, _ = project(omega, num_generations=G, scaling="group")
        assert_close(scaled, z_scores, rtol=0, atol=4 * 10.0**-k)
        assert_close(omega, torch.ones_like(omega), rtol=0, atol=4 * 10.0**-k)
    assert errors[0] < 0.1
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)  # O(1 - alpha): exactly first order
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("scaling", ["group", "batch"])
def test_scaled_drive_conserves_probability_near_alpha_one(scaling):
    """There, scaling divides the rounding error of the mean by a small number."""
    omega = escort_weights(torch.randn(64, dtype=torch.float64), alpha=1 - 1e-6, num_generations=8)
    drive, _ = project(omega, num_generations=8, scaling=scaling)
    assert drive.view(-1, 8).mean(dim=1).abs().max() < 1e-9


# The loss


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 0.5, 0.0, 2.0, 1.7]], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("mu", [0.3, f64(2.0)])
@pytest.mark.parametrize("ratio_form", ["log", "exact"])
def test_loss_is_work_plus_dissipation(ratio_form, mu, weights):
    """Its gradient is −g + mu · u, so that the Hessian is mu everywhere, and mu has no effect at u = 0."""
    deltas, target = [0.3, -0.8, 0.1, 1.1, 0.0], [0.2, -1.0, 0.4, -0.3, 0.9]
    is_exact = ratio_form == "exact"
    values, gradients = [], []
    m = float(mu)
    for delta, goal, w in zip(deltas, target, weights, strict=True):
        u = math.exp(delta) - 1 if is_exact else delta
        push, pull_back = -m * goal * u, m / 2 * u**2
        values.append(w * (push + pull_back))
        gradients.append(w * (-m * goal + m * u))
    u = f64(deltas).expm1() if is_exact else f64(deltas)
    u.requires_grad_()
    log_ratio = u.log1p() if is_exact else u
    loss = opo_loss(log_ratio, f64(target), mu=mu, ratio_form=ratio_form, weights=f64(weights))
    assert_tight(loss.detach(), values)
    assert_tight(torch.autograd.grad(loss.sum(), u)[0], gradients)


def test_exact_form_is_precise_near_the_behaviour_policy():
    """exp(Delta) - 1 in two steps would lose all digits of a log-ratio of 1e-12."""
    loss = opo_loss(f64([1e-12]), f64([1.0]), mu=1.0, ratio_form="exact")
    assert_close(loss, f64([-1e-12]), rtol=1e-11, atol=0)


def test_escort_weights_drive_and_target_carry_no_gradient():

    def leaf(values):
        return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()

    omega = escort_weights(
        leaf(ADVANTAGES), alpha=leaf(0.4), num_generations=G, temperature=leaf(0.7), anchor_logps=leaf(LOGPS)
    )
    drive, chemical_potential = project(leaf(omega), num_generations=G, scaling="group")
    stiffness = stiffness_for_radius(leaf(drive), 0.1)
    target, mu = admissible_target(leaf(drive), mu=leaf(1.1), num_generations=G, positivity="stiffen")
    assert not any(result.requires_grad for result in (omega, drive, chemical_potential, stiffness, target, mu))


# χ² trust region: Proposition 6.3, corrected


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_stiffness_for_radius_neither_underflows_nor_overflows(scale):
    """The squares of these are out of float32's range."""
    mu = stiffness_for_radius(torch.tensor([1.0, -1.0, 2.0, -2.0]) * scale, 0.1)
    assert_close(mu / scale, torch.tensor(5.0))


@pytest.mark.parametrize("omega", [(0.5, 1.5), (0.2, 0.6, 0.9, 1.2, 2.1)])
def test_target_solves_the_chi2_constrained_problem(omega):
    """max <omega, v> over v in H0 with E[v²] ≤ radius, by a generic solver."""
    size = len(omega)
    drive, _ = project(f64(omega), num_generations=size)
    target, _ = admissible_target(drive, mu=stiffness_for_radius(drive, 0.3), num_generations=size)

    def negative_mean(v):
        return -statistics.fmean(w * x for w, x in zip(omega, v, strict=True))

    def room_in_radius(v):
        return 0.3 - statistics.fmean(x**2 for x in v)

    start = [0.01 * (-1) ** i for i in range(size)]
    constraints = [{"type": "eq", "fun": sum}, {"type": "ineq", "fun": room_in_radius}]
    solution = minimize(negative_mean, x0=start, constraints=constraints, method="SLSQP", options={"ftol": 1e-14})
    assert_close(target, f64(solution.x), rtol=0, atol=1e-5)


# Positivity: Proposition 6.4, corrected


def test_stiffen_raises_mu_to_the_smallest_admissible_value_of_the_batch():
    drive = f64([0.5, -0.4, -0.1, 1.2, -0.9, -0.3])
    for given, used in ((0.2, 0.9), (0.95, 0.95)):  # 0.9 is −min g over both groups
        target, mu = admissible_target(drive, mu=given, num_generations=3, positivity="stiffen")
        assert mu.item() == used
        assert_tight(target, drive / used)


def test_clip_bounds_the_target_from_below_and_gives_up_conservation():
    drive = f64([0.9, -0.8, -0.1])
    for options, least in (({}, -0.999), ({"epsilon": 0.2}, -0.8)):
        target, mu = admissible_target(drive, mu=0.5, num_generations=3, positivity="clip", **options)
        assert mu.item() == 0.5
        assert_tight(target, [1.8, least, -0.2])


def project_by_brute_force(y, total):
    """The closest point of {t ≥ 0, Σt = total}: the best over all supports of the equality-constrained optimum."""
    best, best_distance = None, math.inf
    for size in range(1, len(y) + 1):
        for support in itertools.combinations(range(len(y)), size):
            shift = (sum(y[i] for i in support) - total) / size
            t = [0.0] * len(y)
            for i in support:
                t[i] = y[i] - shift
            distance = sum((a - b) ** 2 for a, b in zip(t, y, strict=True))
            if min(t) >= 0 and distance < best_distance:
                best, best_distance = t, distance
    return best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mu", [1e-3, 0.05, 0.3, 1.0])
def test_project_is_the_euclidean_projection_on_the_simplex(mu, dtype):
    """Of the valid rows of a group; exact up to the rounding of the largest entry, also with near ties."""
    near_ties = torch.randn(10, 6, dtype=dtype).round() + 1e-3 * torch.randn(10, 6, dtype=dtype)
    drive = (near_ties - near_ties.mean(dim=1, keepdim=True)).flatten()
    valid = torch.rand(60) > 0.2
    drive[~valid] = math.nan
    target, used = admissible_target(drive, mu=mu, num_generations=6, positivity="project", valid=valid)
    assert used.item() == pytest.approx(mu)
    largest = drive[valid].abs().max().item() / mu
    tolerance = 4 * torch.finfo(dtype).eps * (1 + largest)
    for rows in groups_of(60, 6, valid.tolist()):
        expected = project_by_brute_force([1 + x for x in (drive[rows] / used).tolist()], len(rows))
        assert_close(target[rows] + 1, torch.tensor(expected, dtype=dtype), rtol=0, atol=tolerance)
    assert_exact(target[~valid], torch.zeros_like(target[~valid]))


# Adaptive temperature


def temperature(base=0.5, *, mean_logps, rewards, vocab_size=50, low=1e-3, high=9.0, valid=None) -> float:
    fields = {"escort_temperature": base, "adaptive_temperature": True, "temperature_range": [low, high]}
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    rewards, mean_logps = f64(rewards), f64(mean_logps)
    groups = Groups(rewards, rewards, valid, 1, mean_logps=mean_logps, vocab_size=vocab_size)
    return OPO(SimpleNamespace(**fields)).temperature(groups).item()


@pytest.mark.parametrize("entropy", [-7.0, 0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("success", [-0.5, 0.0, 0.3, 0.5])
@pytest.mark.parametrize(("base", "low", "high"), [(0.5, 1e-3, 9.0), (1.4, 1.1, 1.5)])
def test_adaptive_temperature_is_the_schedule_of_the_authors_code(entropy, success, base, low, high):
    """For four rewards, of which two are the extremes."""
    rollout = {"mean_logps": [-entropy * math.log(50)] * 4, "rewards": [-1.0, 1.0, 2 * success, 2 * success]}
    entropy = min(max(entropy, 0), 1)
    expected = base * (1 + 0.2 * entropy - 0.5 * (1 - entropy) * success)
    within = min(max(expected, low), high)
    assert temperature(base, low=low, high=high, **rollout) == pytest.approx(within, rel=1e-12)


@pytest.mark.parametrize("trash", [0.0, *TRASH])
@with_invalid_rows
def test_entropy_and_success_are_those_of_the_valid_completions(valid, trash):
    """Mean surprise per token over that of the uniform policy; mean reward scaled to the range of rewards."""
    logps = list(CORRECTIONS["length_normalized"])
    rewards = [0.0, 1.0, 9.0, 0.25, 1.0, 1.0, -0.5, 0.5, 0.0, -7.0, 3.0, 1.0]
    valid_rows = [i for i in range(12) if valid is None or valid[i]]
    entropy = statistics.fmean(-logps[i] for i in valid_rows) / math.log(50)
    valid_rewards = [rewards[i] for i in valid_rows]
    low, high = min(valid_rewards), max(valid_rewards)
    success = statistics.fmean(2 * (reward - low) / (high - low) - 1 for reward in valid_rewards)
    for i in range(12):
        if i not in valid_rows:
            logps[i] = rewards[i] = trash
    expected = 0.5 * (1 + 0.2 * entropy - 0.5 * (1 - entropy) * success)
    assert temperature(mean_logps=logps, rewards=rewards, valid=valid) == pytest.approx(expected, rel=1e-12)


def test_success_is_neutral_for_equal_rewards_and_stays_in_its_range():
    """0.1 + 0.7 is one bit less than 0.8: the mean of such rewards may round to a number outside their range."""
    for greater in range(13):
        rewards = [0.8] * greater + [0.1 + 0.7] * (12 - greater)
        success = 2 * (1 - temperature(1.0, mean_logps=[0.0] * 12, rewards=rewards))
        assert -1 <= success <= 1
        assert success == 0 or 0 < greater < 12


# Log-ratio

MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def token_logps():
    mask = torch.tensor(MASK)
    logps = -torch.rand(4, 5, dtype=torch.float64)
    return logps, logps + 0.2 * torch.randn(4, 5, dtype=torch.float64), mask


def samples(logps, anchor_logps, mask, **more) -> Samples:
    one = torch.ones(len(logps), dtype=torch.float64)
    given = {"target": one, "mu": one, "weights": one, "age": one - 1, "reused": True, **more}
    return Samples(logps=logps, anchor_logps=anchor_logps, mask=mask.bool(), **given)


def opo(**fields) -> OPO:
    return OPO(ObjectiveConfig(**{"mu": 0.3, "log_ratio_clamp": 1.0, **fields}))


def of(name: str) -> Objective:
    """The objective of this name, with the default fields."""
    args = OPOConfig(objective=name, output_dir="unused", report_to="none", use_cpu=True, bf16=False)
    return objective_named(name)(args)


def test_clamp_bounds_and_marks_the_reduced_log_ratio_but_not_its_gradient():
    rows = [[-1.0, -1.0], [-9.0, -9.0], [-1.0, -1.0], [-1.0, -9.0], [-1.0, -math.inf]]
    rows_of_anchor = [[-2.0, -2.0], [-1.0, -1.0], [-9.0, -9.0], [-9.0, -2.0], [-1.0, -1.0]]
    logps, anchor = f64(rows).requires_grad_(), f64(rows_of_anchor)
    log_ratio, clamped = log_ratio_of(logps, anchor, torch.ones(5, 2), reduction="sum", clamp=2.0)
    assert log_ratio.tolist() == [2.0, -2.0, 2.0, 1.0, -2.0]
    assert clamped.tolist() == [False, True, True, False, True]  # 2 is at the bound, not beyond it
    (gradient,) = torch.autograd.grad(log_ratio.sum(), logps)
    assert gradient[:4].tolist() == [[1.0, 1.0]] * 4
    # For "mean" the bound applies to the mean: -8, not -16.
    log_ratio, clamped = log_ratio_of(logps, anchor, torch.ones(5, 2), reduction="mean", clamp=10.0)
    assert log_ratio.tolist() == [1.0, -8.0, 8.0, 0.5, -10.0]
    assert clamped.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_log_probability_that_is_not_a_number_reaches_the_gradient(form):
    """By which a step is skipped. The gradient of `clamp` is 0 there, as if the completion were none."""
    logps = f64([[-1.0, -1.0], [-1.0, -1.0]]).requires_grad_()
    anchor = f64([[-2.0, math.nan], [-2.0, -1.0]])
    loss = opo(ratio_form=form).loss(samples(logps, anchor, torch.ones(2, 2)))
    (gradient,) = torch.autograd.grad((loss.work + loss.dissipation).sum(), logps)
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_probabilities_are_upcast_before_the_subtraction(dtype):
    logps = (-8 * torch.rand(2, 300)).to(dtype).requires_grad_()
    anchor = (logps.detach().float() + 0.05 * torch.randn(2, 300)).to(dtype)
    log_ratio, _ = log_ratio_of(logps, anchor, torch.ones(2, 300))
    expected = (logps.detach().double() - anchor.double()).sum(dim=1)
    assert log_ratio.dtype == torch.float32
    assert_close(log_ratio.detach().double(), expected, rtol=0, atol=1e-5)
    assert torch.autograd.grad(log_ratio.sum(), logps)[0].dtype == dtype


# The objective as a whole


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_loss_is_the_definition_with_the_bounded_weight_of_reused_completions(form, reduction, reused):
    logps, anchor, mask = token_logps()
    anchor[3] = logps[3] - 0.3
    target, mu, sampler = f64([0.7, -0.4, 0.0, 1.1]), f64([0.3] * 4), f64([1.0, 0.5, 1.0, 2.0])
    batch = samples(logps, anchor, mask, target=target, mu=mu, weights=sampler, reused=reused)
    got = opo(ratio_form=form, log_ratio_reduction=reduction).loss(batch)
    bounds = set()
    for row in range(4):
        log_ratios = (logps[row] - anchor[row])[mask[row].bool()].tolist()
        delta = math.fsum(log_ratios)
        if reduction == "mean":
            delta /= max(len(log_ratios), 1)
        has_weight = reused and form != "truncated"
        weight = sampler[row].item() * (min(math.exp(delta), 2.0) if has_weight else 1.0)
        clamped = max(-1.0, min(delta, 1.0))
        u = math.expm1(clamped) if form == "exact" else clamped
        push, pull_back = u, u**2 / 2
        if form == "truncated":
            bounded = min(math.exp(clamped), 2.0)
            push, pull_back = bounded * clamped, bounded * (bounded - 1) * clamped
        assert got.log_ratio[row].item() == pytest.approx(clamped, rel=1e-12)
        assert got.clamped[row].item() == (abs(delta) > 1)
        assert got.weights[row].item() == pytest.approx(weight, rel=1e-12)
        work = -weight * 0.3 * target[row].item() * push
        dissipation = weight * 0.3 * pull_back
        assert got.work[row].item() == pytest.approx(work, rel=1e-12)
        assert got.dissipation[row].item() == pytest.approx(dissipation, rel=1e-12)
        bounds.add(math.exp(delta) > 2)
    assert bounds == ({True, False} if reduction == "sum" else {False})  # both sides of the bound


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_weight_of_a_completion_that_was_left_behind_stays_above_zero(form):
    batch = samples(torch.full((1, 3), -400.0), torch.zeros(1, 3), torch.ones(1, 3), weights=torch.ones(1))
    assert opo(ratio_form=form).loss(batch).weights.item() > 0


class Shortened(OPO):
    """Makes completions of more than two tokens less likely, whatever their target."""

    def terms(self, log_ratio, weights, samples):
        work, dissipation = super().terms(log_ratio, weights, samples)
        return work, dissipation + (samples.length - 2).clamp(min=0) * log_ratio


@pytest.mark.parametrize(
    ("kind", "expected"), [(OPO, [False, True, True, True]), (Shortened, [False, True, True, False])]
)
def test_zero_gradient_is_read_from_the_loss_itself(kind, expected):
    target, mask = torch.tensor([0.5, 0.0, -0.0, 0.0]), torch.tensor([[1, 1, 0]] * 3 + [[1, 1, 1]]).bool()
    assert kind(opo().args).zero_gradient(target, torch.full((4,), 0.3), mask).tolist() == expected
    unusable = torch.tensor([torch.inf, torch.nan])
    assert not opo().zero_gradient(unusable, torch.ones(2), torch.ones(2, 1).bool()).any()


class Held(TOPR):
    """TOPR with another pull-back."""

    def __init__(self, pull):
        super().__init__(of("topr").args)
        self.pull = pull

    def terms(self, log_ratio, weights, samples):
        push, _ = super().terms(log_ratio, weights, samples)
        return push, self.pull(samples.sum(samples.log_ratios), samples)


@pytest.mark.parametrize(
    "pull",
    [
        lambda total, samples: total.square(),
        lambda total, samples: (total - 0.5).clamp(min=0),
        lambda total, samples: (-total - 0.5).clamp(min=0),
        lambda total, samples: total.clamp(-0.02, 0.02).square(),
        lambda total, samples: samples.sum((samples.log_ratios - 0.5).clamp(min=0)),
        lambda total, samples: samples.sum(samples.log_ratios.clamp(-0.02, 0.02).square()),
    ],
    ids=["everywhere", "above", "below", "within", "tokens above", "tokens within"],
)
@pytest.mark.parametrize("length", [1, 3, 500])
def test_a_pull_back_is_read_from_the_loss_of_a_policy_that_has_moved(pull, length):
    mask = torch.ones(2, length).bool()
    mask[1] = False
    held = Held(pull).zero_gradient(torch.zeros(2), torch.ones(2), mask, moved=True)
    assert held.tolist() == [False, True]  # no token of the second completion counts


@pytest.mark.parametrize("name", OBJECTIVES)
def test_which_published_losses_pull_back(name):
    target, mask = torch.tensor([0.5, -0.5, 0.0]), torch.ones(3, 500).bool()
    rests = of(name).zero_gradient(target, torch.full((3,), 0.3), mask, moved=True)
    assert rests.tolist() == [False, False, name != "opo"]


def test_objective_asks_for_the_advantages_of_valid_rows():
    advantages, valid = f64([1.0, math.nan, -1.0, 0.5]), torch.tensor([True, False, True, True])
    targets = Objective(None).targets(Groups(advantages, advantages, valid, 2))
    assert targets.target.tolist() == targets.drive.tolist() == [1.0, 0.0, -1.0, 0.5]
    assert targets.mu.item() == 1.0


@pytest.mark.parametrize("group", [5, 0])
def test_incomplete_groups_are_an_error(group):
    with pytest.raises(ValueError, match=f"num_generations={group}"):
        escort_weights(f64(LOGPS), alpha=0.4, num_generations=group)
    with pytest.raises(ValueError, match=f"num_generations={group}"):
        project(f64(LOGPS), num_generations=group)
