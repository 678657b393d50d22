"""
The objective against the paper's definitions, in float64; docs/paper.md has what follows from them.

The references are plain loops and closed forms over Python floats, written from the definitions and not from the
code. What holds for whole ranges of inputs is in `test_objective_properties.py`.
"""

import itertools
import math
import operator
import statistics
from types import SimpleNamespace

import pytest
import torch
from objective_by_hand import (
    ADVANTAGES,
    CORRECTIONS,
    LOGPS,
    TRASH,
    VALID,
    G,
    assert_exactly_everywhere,
    assert_tight,
    drive_by_hand,
    escort_by_hand,
    f64,
    gradient_of_sum,
    groups_of,
    log_ratio_of,
    valid_rows_of,
    values_at,
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


def optional_bools(valid):
    return None if valid is None else torch.tensor(valid)


def optional_f64(values):
    return None if values is None else f64(values)


# Escort weights: Definition 3.1 and Proposition 3.2


@with_invalid_rows
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 0.2), (0.4, 1.0), (0.9, f64(1.5)), (1.0, 1.0)])
def test_escort_weights_are_the_definition(alpha, temperature, correction, valid):
    corrections = CORRECTIONS[correction]
    omega = escort_weights(
        f64(ADVANTAGES),
        alpha=alpha,
        num_generations=G,
        temperature=temperature,
        anchor_logps=optional_f64(corrections),
        valid=optional_bools(valid),
    )
    expected = escort_by_hand(ADVANTAGES, alpha, float(temperature), corrections, valid)
    assert_tight(omega, expected)


# Projection: Theorem 3.4 and Remarks 3.5 and 3.6


@with_invalid_rows
def test_projection_subtracts_the_chemical_potential_of_each_group(valid):
    field = [abs(logp) for logp in LOGPS]  # of which the mean is not 1
    drive, chemical_potential = project(f64(field), num_generations=G, valid=optional_bools(valid))
    expected_drive = drive_by_hand(field, valid)
    assert_tight(drive, expected_drive)
    means = []
    for rows in groups_of(len(field), valid=valid):
        mean = statistics.fmean(values_at(field, rows))
        means.append(mean)
    assert_tight(chemical_potential, means)


@with_invalid_rows
@pytest.mark.parametrize("scaling", ["group", "batch"])
def test_scaling_divides_by_the_unbiased_standard_deviation(scaling, valid):
    omega = escort_by_hand(ADVANTAGES, 0.4, valid=valid)
    expected = drive_by_hand(omega, valid)
    first, second, third = groups_of(len(omega), valid=valid)
    # By group, the third has no variance to divide by.
    scaled_together = [first, second] if scaling == "group" else [first + second + third]
    for rows in scaled_together:
        std = statistics.stdev(values_at(expected, rows))
        for row in rows:
            expected[row] /= std
    without_variance = slice(8, 12)
    expected[without_variance] = [0.0] * 4
    drive, _ = project(f64(omega), num_generations=G, scaling=scaling, valid=optional_bools(valid))
    assert_tight(drive, expected)
    assert_exactly_everywhere(drive[without_variance], 0.0)


@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e4])
def test_zero_variance_group_has_exactly_zero_drive(value, scaling):
    """Sums of 0.1 are rounded, and a rounding error divided by its own standard deviation would be of order 1."""
    for group in range(2, 65):
        equal = torch.full((2 * group,), value)
        omega = escort_weights(equal, alpha=0.4, num_generations=group, temperature=0.3)
        assert_exactly_everywhere(omega, 1.0)
        for weights in (omega, equal):  # also equal weights that are not 1
            drive, _ = project(weights, num_generations=group, scaling=scaling)
            assert_exactly_everywhere(drive, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_drive_over_one_minus_alpha_tends_to_the_centered_advantage_as_alpha_tends_to_one(temperature):
    """Remark 3.6, corrected: omega itself tends to 1, not to A. With scaling, the limit is the z-score."""
    advantages = f64(ADVANTAGES)
    centered = f64(drive_by_hand(ADVANTAGES)) / temperature
    z_scores, _ = project(advantages, num_generations=G, scaling="group")
    largest_errors = []
    for distance_to_one in (1e-2, 1e-3, 1e-4):
        alpha = 1 - distance_to_one
        omega = escort_weights(advantages, alpha=alpha, num_generations=G, temperature=temperature)
        drive, _ = project(omega, num_generations=G)
        errors = drive / (1 - alpha) - centered
        largest = errors.abs().max()
        largest_errors.append(largest.item())
        scaled, _ = project(omega, num_generations=G, scaling="group")
        tolerance = 4 * distance_to_one
        assert_close(scaled, z_scores, rtol=0, atol=tolerance)
        assert_close(omega, torch.ones_like(omega), rtol=0, atol=tolerance)
    at_hundredth, at_thousandth, at_ten_thousandth = largest_errors
    assert at_hundredth < 0.1
    assert at_hundredth / at_thousandth == pytest.approx(10, rel=0.05)  # O(1 - alpha): exactly first order
    assert at_thousandth / at_ten_thousandth == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("scaling", ["group", "batch"])
def test_scaled_drive_conserves_probability_near_alpha_one(scaling):
    """There, scaling divides the rounding error of the mean by a small number."""
    advantages = torch.randn(64, dtype=torch.float64)
    omega = escort_weights(advantages, alpha=1 - 1e-6, num_generations=8)
    drive, _ = project(omega, num_generations=8, scaling=scaling)
    mean_of_group = drive.view(-1, 8).mean(dim=1)
    assert mean_of_group.abs().max() < 1e-9


# The loss


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 0.5, 0.0, 2.0, 1.7]], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("mu", [0.3, f64(2.0)])
@pytest.mark.parametrize("ratio_form", ["log", "exact"])
def test_loss_is_work_plus_dissipation(ratio_form, mu, weights):
    """Its gradient is −g + mu · u, so that the Hessian is mu everywhere, and mu has no effect at u = 0."""
    deltas = [0.3, -0.8, 0.1, 1.1, 0.0]
    targets = [0.2, -1.0, 0.4, -0.3, 0.9]
    is_exact = ratio_form == "exact"
    stiffness = float(mu)
    expected_losses = []
    expected_gradient = []
    for delta, target, weight in zip(deltas, targets, weights, strict=True):
        u = math.exp(delta) - 1 if is_exact else delta
        force = stiffness * target
        work = -force * u
        dissipation = stiffness / 2 * u**2
        slope = stiffness * u - force
        expected_losses.append(weight * (work + dissipation))
        expected_gradient.append(weight * slope)
    u = f64(deltas)
    if is_exact:
        u = u.expm1()
    u.requires_grad_()
    log_ratio = u.log1p() if is_exact else u
    loss = opo_loss(log_ratio, f64(targets), mu=mu, ratio_form=ratio_form, weights=f64(weights))
    assert_tight(loss.detach(), expected_losses)
    assert_tight(gradient_of_sum(loss, u), expected_gradient)


def test_exact_form_is_precise_near_the_behaviour_policy():
    """exp(Delta) - 1 in two steps would lose all digits of a log-ratio of 1e-12."""
    loss = opo_loss(f64([1e-12]), f64([1.0]), mu=1.0, ratio_form="exact")
    assert_close(loss, f64([-1e-12]), rtol=1e-11, atol=0)


def leaf(values):
    """A float64 copy that requires a gradient."""
    copy = torch.as_tensor(values, dtype=torch.float64).clone()
    return copy.requires_grad_()


def test_escort_weights_drive_and_target_carry_no_gradient():
    options = {"alpha": leaf(0.4), "temperature": leaf(0.7), "anchor_logps": leaf(LOGPS)}
    omega = escort_weights(leaf(ADVANTAGES), num_generations=G, **options)
    drive, chemical_potential = project(leaf(omega), num_generations=G, scaling="group")
    stiffness = stiffness_for_radius(leaf(drive), 0.1)
    target, mu = admissible_target(leaf(drive), mu=leaf(1.1), num_generations=G, positivity="stiffen")
    for result in (omega, drive, chemical_potential, stiffness, target, mu):
        assert not result.requires_grad


# χ² trust region: Proposition 6.3, corrected


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_stiffness_for_radius_neither_underflows_nor_overflows(scale):
    """The squares of these are out of float32's range."""
    signs_and_sizes = torch.tensor([1.0, -1.0, 2.0, -2.0])
    drive = scale * signs_and_sizes
    mu = stiffness_for_radius(drive, 0.1)
    assert_close(mu / scale, torch.tensor(5.0))


@pytest.mark.parametrize("omega", [(0.5, 1.5), (0.2, 0.6, 0.9, 1.2, 2.1)])
def test_target_solves_the_chi2_constrained_problem(omega):
    """max <omega, v> over v in H0 with E[v²] ≤ radius, by a generic solver."""
    size = len(omega)
    drive, _ = project(f64(omega), num_generations=size)
    mu = stiffness_for_radius(drive, 0.3)
    target, _ = admissible_target(drive, mu=mu, num_generations=size)

    def negative_mean(v):
        products = map(operator.mul, omega, v)
        return -statistics.fmean(products)

    def room_in_radius(v):
        squares = [value**2 for value in v]
        return 0.3 - statistics.fmean(squares)

    start = [0.01 if i % 2 == 0 else -0.01 for i in range(size)]
    constraints = [{"type": "eq", "fun": sum}, {"type": "ineq", "fun": room_in_radius}]
    solution = minimize(negative_mean, x0=start, constraints=constraints, method="SLSQP", options={"ftol": 1e-14})
    assert_close(target, f64(solution.x), rtol=0, atol=1e-5)


# Positivity: Proposition 6.4, corrected


def test_stiffen_raises_mu_to_the_smallest_admissible_value_of_the_batch():
    drive = f64([0.5, -0.4, -0.1, 1.2, -0.9, -0.3])
    for configured, expected in ((0.2, 0.9), (0.95, 0.95)):  # 0.9 is −min g over both groups
        target, mu = admissible_target(drive, mu=configured, num_generations=3, positivity="stiffen")
        assert mu.item() == expected
        assert_tight(target, drive / expected)


def test_clip_bounds_the_target_from_below_and_gives_up_conservation():
    drive = f64([0.9, -0.8, -0.1])
    for options, least in (({}, -0.999), ({"epsilon": 0.2}, -0.8)):
        target, mu = admissible_target(drive, mu=0.5, num_generations=3, positivity="clip", **options)
        assert mu.item() == 0.5
        assert_tight(target, [1.8, least, -0.2])


def closest_point_with_support(y, total, support):
    """The point t closest to y of which the sum is total, and which is 0 outside of the support."""
    sum_of_support = sum(values_at(y, support))
    shift = (sum_of_support - total) / len(support)
    t = [0.0] * len(y)
    for i in support:
        t[i] = y[i] - shift
    return t


def squared_distance(one, other):
    differences = map(operator.sub, one, other)
    return sum(difference**2 for difference in differences)


def project_by_brute_force(y, total):
    """The closest point of {t ≥ 0, Σt = total}: the best over all supports of the equality-constrained optimum."""
    closest = None
    least_distance = math.inf
    indices = range(len(y))
    for size in range(1, len(y) + 1):
        for support in itertools.combinations(indices, size):
            t = closest_point_with_support(y, total, support)
            distance = squared_distance(t, y)
            if min(t) >= 0 and distance < least_distance:
                closest = t
                least_distance = distance
    return closest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mu", [1e-3, 0.05, 0.3, 1.0])
def test_project_is_the_euclidean_projection_on_the_simplex(mu, dtype):
    """Of the valid rows of a group; exact up to the rounding of the largest entry, also with near ties."""
    ties = torch.randn(10, 6, dtype=dtype).round()
    near_ties = ties + 1e-3 * torch.randn(10, 6, dtype=dtype)
    centered = near_ties - near_ties.mean(dim=1, keepdim=True)
    drive = centered.flatten()
    valid = torch.rand(60) > 0.2
    drive[~valid] = math.nan
    target, effective_mu = admissible_target(drive, mu=mu, num_generations=6, positivity="project", valid=valid)
    assert effective_mu.item() == pytest.approx(mu)
    largest_drive = drive[valid].abs().max().item()
    rounding_error = torch.finfo(dtype).eps * (1 + largest_drive / mu)
    tolerance = 4 * rounding_error
    unprojected = 1 + drive / effective_mu
    for rows in groups_of(60, 6, valid.tolist()):
        entries = unprojected[rows].tolist()
        projected = project_by_brute_force(entries, total=len(rows))
        expected = torch.tensor(projected, dtype=dtype)
        assert_close(target[rows] + 1, expected, rtol=0, atol=tolerance)
    assert_exactly_everywhere(target[~valid], 0.0)


# Adaptive temperature


def temperature(base=0.5, *, mean_logps, rewards, vocab_size=50, low=1e-3, high=9.0, valid=None) -> float:
    args = SimpleNamespace(escort_temperature=base, adaptive_temperature=True, temperature_range=[low, high])
    if valid is None:
        valid = [True] * len(rewards)
    scores = f64(rewards)
    groups = Groups(scores, scores, torch.tensor(valid), 1, mean_logps=f64(mean_logps), vocab_size=vocab_size)
    return OPO(args).temperature(groups).item()


def scheduled_temperature(base, entropy, success):
    warming = 0.2 * entropy
    cooling = 0.5 * (1 - entropy) * success
    return base * (1 + warming - cooling)


@pytest.mark.parametrize("entropy", [-7.0, 0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("success", [-0.5, 0.0, 0.3, 0.5])
@pytest.mark.parametrize(("base", "low", "high"), [(0.5, 1e-3, 9.0), (1.4, 1.1, 1.5)])
def test_adaptive_temperature_is_the_schedule_of_the_authors_code(entropy, success, base, low, high):
    """For four rewards, of which two are the extremes."""
    mean_logp = -entropy * math.log(50)
    reward = 2 * success
    adapted = temperature(base, low=low, high=high, mean_logps=[mean_logp] * 4, rewards=[-1.0, 1.0, reward, reward])
    bounded_entropy = min(max(entropy, 0), 1)
    scheduled = scheduled_temperature(base, bounded_entropy, success)
    within_range = min(max(scheduled, low), high)
    assert adapted == pytest.approx(within_range, rel=1e-12)


@pytest.mark.parametrize("trash", [0.0, *TRASH])
@with_invalid_rows
def test_entropy_and_success_are_those_of_the_valid_completions(valid, trash):
    """Mean surprise per token over that of the uniform policy; mean reward scaled to the range of rewards."""
    logps = list(CORRECTIONS["length_normalized"])
    rewards = [0.0, 1.0, 9.0, 0.25, 1.0, 1.0, -0.5, 0.5, 0.0, -7.0, 3.0, 1.0]
    valid_rows = valid_rows_of(range(12), valid)
    mean_logp = statistics.fmean(values_at(logps, valid_rows))
    entropy = -mean_logp / math.log(50)
    valid_rewards = values_at(rewards, valid_rows)
    low = min(valid_rewards)
    high = max(valid_rewards)
    mean_reward = statistics.fmean(valid_rewards)
    success = 2 * (mean_reward - low) / (high - low) - 1
    for row in range(12):
        if row not in valid_rows:
            logps[row] = trash
            rewards[row] = trash
    adapted = temperature(mean_logps=logps, rewards=rewards, valid=valid)
    expected = scheduled_temperature(0.5, entropy, success)
    assert adapted == pytest.approx(expected, rel=1e-12)


def test_success_is_neutral_for_equal_rewards_and_stays_in_its_range():
    """0.1 + 0.7 is one bit less than 0.8: the mean of such rewards may round to a number outside their range."""
    for greater in range(13):
        rewards = [0.1 + 0.7] * 12
        rewards[:greater] = [0.8] * greater
        adapted = temperature(1.0, mean_logps=[0.0] * 12, rewards=rewards)
        success = 2 * (1 - adapted)
        assert -1 <= success <= 1
        assert success == 0 or 0 < greater < 12


# Log-ratio

MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def token_logps():
    """Log-probabilities of tokens under a policy and the behaviour policy near it, and their mask."""
    logps = -torch.rand(4, 5, dtype=torch.float64)
    change = 0.2 * torch.randn(4, 5, dtype=torch.float64)
    return logps, logps + change, torch.tensor(MASK)


def samples(logps, anchor_logps, mask, **fields) -> Samples:
    ones = torch.ones(len(logps), dtype=torch.float64)
    zeros = torch.zeros_like(ones)
    defaults = {"target": ones, "mu": ones, "weights": ones, "age": zeros, "reused": True}
    return Samples(logps=logps, anchor_logps=anchor_logps, mask=mask.bool(), **defaults | fields)


def opo(**fields) -> OPO:
    defaults = {"mu": 0.3, "log_ratio_clamp": 1.0}
    return OPO(ObjectiveConfig(**defaults | fields))


def objective_with_default_fields(name: str) -> Objective:
    args = OPOConfig(objective=name, output_dir="unused", report_to="none", use_cpu=True, bf16=False)
    return objective_named(name)(args)


def test_clamp_bounds_and_marks_the_reduced_log_ratio_but_not_its_gradient():
    surprise = f64([[1.0, 1.0], [9.0, 9.0], [1.0, 1.0], [1.0, 9.0], [1.0, math.inf]])
    surprise_of_behaviour = f64([[2.0, 2.0], [1.0, 1.0], [9.0, 9.0], [9.0, 2.0], [1.0, 1.0]])
    logps = leaf(-surprise)
    behaviour_logps = -surprise_of_behaviour
    mask = torch.ones(5, 2)
    log_ratio, clamped = log_ratio_of(logps, behaviour_logps, mask, reduction="sum", clamp=2.0)
    assert log_ratio.tolist() == [2.0, -2.0, 2.0, 1.0, -2.0]
    assert clamped.tolist() == [False, True, True, False, True]  # 2 is at the bound, not beyond it
    gradient = gradient_of_sum(log_ratio, logps)
    assert gradient[:4].tolist() == [[1.0, 1.0]] * 4
    # For "mean" the bound applies to the mean: -8, not -16.
    log_ratio, clamped = log_ratio_of(logps, behaviour_logps, mask, reduction="mean", clamp=10.0)
    assert log_ratio.tolist() == [1.0, -8.0, 8.0, 0.5, -10.0]
    assert clamped.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_log_probability_that_is_not_a_number_reaches_the_gradient(form):
    """By which a step is skipped. The gradient of `clamp` is 0 there, as if the completion were none."""
    mask = torch.ones(2, 2)
    logps = leaf(-mask)
    behaviour_logps = f64([[-2.0, math.nan], [-2.0, -1.0]])
    batch = samples(logps, behaviour_logps, mask)
    loss = opo(ratio_form=form).loss(batch)
    gradient = gradient_of_sum(loss.work + loss.dissipation, logps)
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_probabilities_are_upcast_before_the_subtraction(dtype):
    surprise = 8 * torch.rand(2, 300)
    change = 0.05 * torch.randn(2, 300)
    logps = -surprise.to(dtype)
    behaviour_logps = (logps.float() + change).to(dtype)
    differences = logps.double() - behaviour_logps.double()
    expected = differences.sum(dim=1)
    logps.requires_grad_()
    log_ratio, _ = log_ratio_of(logps, behaviour_logps, torch.ones(2, 300))
    assert log_ratio.dtype == torch.float32
    assert_close(log_ratio.detach().double(), expected, rtol=0, atol=1e-5)
    assert gradient_of_sum(log_ratio, logps).dtype == dtype


# The objective as a whole


def reduced_by_hand(log_ratios, reduction):
    """The log-ratio of a completion from those of its tokens."""
    total = math.fsum(log_ratios)
    if reduction == "mean":
        return total / max(len(log_ratios), 1)
    return total


def terms_by_hand(form, log_ratio):
    """What a unit of target is multiplied by, and the pull-back to the behaviour policy."""
    if form == "truncated":
        bounded = min(math.exp(log_ratio), 2.0)
        push = bounded * log_ratio
        return push, (bounded - 1) * push
    u = math.expm1(log_ratio) if form == "exact" else log_ratio
    return u, u**2 / 2


def age_by_hand(form, log_ratio, reused):
    """The bounded weight of a reused completion; the truncated form has it in its terms."""
    if reused and form != "truncated":
        return min(math.exp(log_ratio), 2.0)
    return 1.0


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_loss_is_the_definition_with_the_bounded_weight_of_reused_completions(form, reduction, reused):
    logps, behaviour_logps, mask = token_logps()
    behaviour_logps[3] = logps[3] - 0.3
    target = f64([0.7, -0.4, 0.0, 1.1])
    mu = f64([0.3] * 4)
    weights = f64([1.0, 0.5, 1.0, 2.0])
    batch = samples(logps, behaviour_logps, mask, target=target, mu=mu, weights=weights, reused=reused)
    loss = opo(ratio_form=form, log_ratio_reduction=reduction).loss(batch)
    is_beyond_bound = set()
    differences = logps - behaviour_logps
    for row, counts in enumerate(mask.bool()):
        log_ratios = differences[row, counts].tolist()
        log_ratio = reduced_by_hand(log_ratios, reduction)
        clamped = max(-1.0, min(log_ratio, 1.0))
        push, pull_back = terms_by_hand(form, clamped)
        age = age_by_hand(form, log_ratio, reused)
        weight = age * weights[row].item()
        stiffness = 0.3 * weight
        force = stiffness * target[row].item()
        work = -force * push
        dissipation = stiffness * pull_back
        expected = {"log_ratio": clamped, "weights": weight, "work": work, "dissipation": dissipation}
        for name, value in expected.items():
            computed = getattr(loss, name)[row]
            assert computed.item() == pytest.approx(value, rel=1e-12)
        assert loss.clamped[row].item() == (abs(log_ratio) > 1)
        is_beyond_bound.add(math.exp(log_ratio) > 2)
    assert is_beyond_bound == ({True, False} if reduction == "sum" else {False})  # both sides of the bound


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_weight_of_a_completion_that_was_left_behind_stays_above_zero(form):
    logps = torch.full((1, 3), -400.0)
    mask = torch.ones(1, 3)
    batch = samples(logps, 0 * logps, mask, weights=torch.ones(1))
    loss = opo(ratio_form=form).loss(batch)
    assert loss.weights.item() > 0


class Shortened(OPO):
    """Makes completions of more than two tokens less likely, whatever their target."""

    def terms(self, log_ratio, weights, samples):
        work, dissipation = super().terms(log_ratio, weights, samples)
        excess_length = (samples.length - 2).clamp(min=0)
        return work, dissipation + excess_length * log_ratio


@pytest.mark.parametrize(
    ("kind", "expected"), [(OPO, [False, True, True, True]), (Shortened, [False, True, True, False])]
)
def test_zero_gradient_is_read_from_the_loss_itself(kind, expected):
    target = torch.tensor([0.5, 0.0, -0.0, 0.0])
    mu = torch.full((4,), 0.3)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]).bool()
    default = opo()
    at_rest = kind(default.args).zero_gradient(target, mu, mask)
    assert at_rest.tolist() == expected
    unusable = torch.tensor([torch.inf, torch.nan])
    mask_of_one_token = torch.ones(2, 1).bool()
    at_rest = default.zero_gradient(unusable, torch.ones(2), mask_of_one_token)
    assert not at_rest.any()


class Held(TOPR):
    """TOPR with another pull-back."""

    def __init__(self, pull):
        super().__init__(objective_with_default_fields("topr").args)
        self.pull = pull

    def terms(self, log_ratio, weights, samples):
        push, _ = super().terms(log_ratio, weights, samples)
        total = samples.sum(samples.log_ratios)
        return push, self.pull(total, samples)


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
    objective = Held(pull)
    at_rest = objective.zero_gradient(torch.zeros(2), torch.ones(2), mask, moved=True)
    assert at_rest.tolist() == [False, True]  # no token of the second completion counts


@pytest.mark.parametrize("name", OBJECTIVES)
def test_which_published_losses_pull_back(name):
    target = torch.tensor([0.5, -0.5, 0.0])
    mu = torch.full((3,), 0.3)
    mask = torch.ones(3, 500).bool()
    objective = objective_with_default_fields(name)
    at_rest = objective.zero_gradient(target, mu, mask, moved=True)
    assert at_rest.tolist() == [False, False, name != "opo"]


def test_objective_asks_for_the_advantages_of_valid_rows():
    advantages = f64([1.0, math.nan, -1.0, 0.5])
    valid = torch.tensor([True, False, True, True])
    groups = Groups(advantages, advantages, valid, 2)
    targets = Objective(None).targets(groups)
    expected = [1.0, 0.0, -1.0, 0.5]
    assert targets.target.tolist() == expected
    assert targets.drive.tolist() == expected
    assert targets.mu.item() == 1.0


@pytest.mark.parametrize("group", [5, 0])
def test_incomplete_groups_are_an_error(group):
    logps = f64(LOGPS)
    with pytest.raises(ValueError, match=f"num_generations={group}"):
        escort_weights(logps, alpha=0.4, num_generations=group)
    with pytest.raises(ValueError, match=f"num_generations={group}"):
        project(logps, num_generations=group)
