"""
The objective against the paper: every theorem and proposition, in float64, with the expected values computed here.

The references are plain loops and closed forms over Python floats, written from the definitions and not from the
code. Where the paper is wrong, the tests prove the corrected statement, and that the paper's fails.
"""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from by_hand import (
    ADVANTAGES,
    ALPHAS,
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
    in_h0,
    log_ratio_of,
)
from scipy.optimize import minimize
from torch.testing import assert_close

from opo_trl.config import ObjectiveConfig
from opo_trl.metrics.opo import step_metrics
from opo_trl.objective import (
    OPO,
    Groups,
    Objective,
    Samples,
    admissible_target,
    escort_weights,
    loss_terms,
    opo_loss,
    project,
    stiffness_for_radius,
    token_mean,
    token_sum,
)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run():
    torch.manual_seed(0)


# Escort weights: Definition 3.1 and Proposition 3.2


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.5])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_escort_weights_are_the_definition_and_have_mean_one(alpha, correction, temperature, valid):
    anchor_logps = CORRECTIONS[correction]
    omega = escort_weights(
        f64(ADVANTAGES),
        alpha=alpha,
        num_generations=G,
        temperature=temperature,
        anchor_logps=None if anchor_logps is None else f64(anchor_logps),
        valid=None if valid is None else torch.tensor(valid),
    )
    assert_tight(omega, escort_by_hand(ADVANTAGES, alpha, temperature, anchor_logps, valid))
    for rows in groups_of(len(ADVANTAGES), valid=valid):
        assert_tight(omega[rows].mean(), 1.0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_escort_distribution_is_the_geometric_mixture_of_behaviour_policy_and_oracle(alpha):
    """The self-normalized estimate is exact for a group that contains each outcome in proportion to pi_k."""
    counts, advantages = [1, 2, 3, 4], [0.7, -1.1, 0.2, 1.9]
    anchor = [count / 10 for count in counts]
    oracle = [math.exp(a) / sum(map(math.exp, advantages)) for a in advantages]
    mixture = [p**alpha * q ** (1 - alpha) for p, q in zip(anchor, oracle, strict=True)]
    rho = [m / sum(mixture) for m in mixture]

    outcomes = [y for y, count in enumerate(counts) for _ in range(count)]
    omega = escort_weights(
        f64([advantages[y] for y in outcomes]),
        alpha=alpha,
        num_generations=10,
        anchor_logps=f64([math.log(anchor[y]) for y in outcomes]),
    )
    assert_tight(omega, [rho[y] / anchor[y] for y in outcomes])


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_log_escort_weight_is_affine_in_alpha_up_to_the_normalizer(correction):
    anchor_logps = CORRECTIONS[correction]

    def log_ratios_within_group(alpha):  # the normalizer cancels
        log_omega = escort_weights(
            f64(ADVANTAGES),
            alpha=alpha,
            num_generations=G,
            anchor_logps=None if anchor_logps is None else f64(anchor_logps),
        ).log()
        return log_omega.view(-1, G) - log_omega.view(-1, G)[:, :1]

    end = log_ratios_within_group(0.0)
    for alpha in (0.25, 0.5, 0.75, 1.0):
        assert_tight(log_ratios_within_group(alpha), (1 - alpha) * end)


def test_alpha_one_gives_the_behaviour_policy():
    omega = escort_weights(f64(ADVANTAGES), alpha=1.0, num_generations=G, anchor_logps=f64(LOGPS))
    assert_exact(omega, torch.ones_like(omega))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_alpha_zero_gives_group_size_times_softmax_of_the_advantages(temperature):
    omega = escort_weights(f64(ADVANTAGES), alpha=0.0, num_generations=G, temperature=temperature)
    assert_tight(omega, (f64(ADVANTAGES).view(-1, G) / temperature).softmax(dim=1).flatten() * G)
    # Continuity: near alpha = 0 the weights are close to those at 0.
    near = escort_weights(f64(ADVANTAGES), alpha=1e-9, num_generations=G, temperature=temperature)
    assert_close(near, omega, rtol=0, atol=1e-7)


def test_temperature_may_be_a_tensor():
    omega = escort_weights(f64(ADVANTAGES), alpha=0.4, num_generations=G, temperature=f64(0.7))
    assert_tight(omega, escort_by_hand(ADVANTAGES, 0.4, 0.7))


def test_sequence_correction_degenerates_to_one_hot_on_the_least_likely_completion():
    logps = [-210.0, -340.0, -150.0, -260.0]
    omega = escort_weights(f64([2.0, -2.0, 1.0, 0.0]), alpha=0.4, num_generations=4, anchor_logps=f64(logps))
    assert_close(omega, f64([0.0, 4.0, 0.0, 0.0]), rtol=0, atol=1e-12)
    assert (omega.sum() ** 2 / omega.square().sum()).item() == pytest.approx(1.0)  # effective sample size


@pytest.mark.parametrize("shift", [-1e6, 1e6])
def test_escort_weights_do_not_overflow(shift):
    """Only differences within a group count, even if the log-weights are large."""
    advantages = f64([1.0, -1.0, 3.0, 0.5])
    omega = escort_weights(advantages + shift, alpha=0.4, num_generations=4, anchor_logps=f64([0.0, 0.0, 0.0, 0.0]))
    assert_close(omega, f64(escort_by_hand([1.0, -1.0, 3.0, 0.5], 0.4)), rtol=1e-9, atol=1e-9)
    extreme = escort_weights(f64([1e4, -1e4, 0.0, 9e3]), alpha=0.4, num_generations=4, temperature=1e-3)
    assert_exact(extreme, f64([4.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("trash", TRASH)
def test_invalid_row_has_no_effect_on_escort_weights(trash):
    valid, advantages, logps = torch.tensor(VALID), f64(ADVANTAGES), f64(LOGPS)
    clean = escort_weights(advantages, alpha=0.4, num_generations=G, anchor_logps=logps, valid=valid)
    advantages[~valid] = trash
    logps[~valid] = trash
    dirty = escort_weights(advantages, alpha=0.4, num_generations=G, anchor_logps=logps, valid=valid)
    assert_exact(dirty, clean)
    assert_exact(dirty[~valid], torch.zeros(3, dtype=torch.float64))


def test_group_without_a_valid_row_has_weight_zero_and_leaves_the_others_alone():
    valid = torch.tensor([False] * 4 + [True] * 8)
    advantages = f64([math.nan] * 4 + ADVANTAGES[4:])
    omega = escort_weights(advantages, alpha=0.4, num_generations=G, valid=valid)
    assert_tight(omega, [0.0] * 4 + escort_by_hand(ADVANTAGES[4:], 0.4))
    drive, chemical_potential = project(omega, num_generations=G, valid=valid)
    assert_tight(drive, [0.0] * 4 + drive_by_hand(escort_by_hand(ADVANTAGES[4:], 0.4)))
    assert_tight(chemical_potential, [0.0, 1.0, 1.0])


def test_the_only_valid_row_of_a_group_has_weight_one_and_no_drive():
    valid = torch.tensor([False, False, True, False])
    omega = escort_weights(f64([5.0, 1.0, -0.3, 2.0]), alpha=0.0, num_generations=4, valid=valid)
    assert_exact(omega, f64([0.0, 0.0, 1.0, 0.0]))
    for scaling in ("none", "group", "batch"):
        drive, _ = project(omega, num_generations=4, scaling=scaling, valid=valid)
        assert_exact(drive, f64([0.0] * 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_advantages_are_upcast(dtype):
    advantages = torch.tensor(ADVANTAGES, dtype=dtype)
    omega = escort_weights(advantages, alpha=0.4, num_generations=G)
    assert omega.dtype == torch.float32
    assert_exact(omega, escort_weights(advantages.float(), alpha=0.4, num_generations=G))
    drive, _ = project(omega.to(dtype), num_generations=G)
    assert drive.dtype == torch.float32


# Projection: Theorem 3.4 and Remarks 3.5 and 3.6


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
def test_projection_subtracts_the_chemical_potential_of_each_group(valid):
    field = [abs(logp) for logp in LOGPS]  # of which the mean is not 1
    drive, chemical_potential = project(
        f64(field), num_generations=G, valid=None if valid is None else torch.tensor(valid)
    )
    assert_tight(drive, drive_by_hand(field, valid))
    groups = groups_of(len(field), valid=valid)
    assert_tight(chemical_potential, [statistics.fmean(field[i] for i in rows) for rows in groups])


def test_projection_is_idempotent_and_orthogonal_to_constants():
    drive, _ = project(torch.rand(12, dtype=torch.float64), num_generations=G)
    again, chemical_potential = project(drive, num_generations=G)
    assert_tight(again, drive)
    assert_tight(chemical_potential, [0.0, 0.0, 0.0])


def test_projection_is_the_closest_point_of_the_conservation_subspace():
    omega = 3 * torch.rand(6, dtype=torch.float64)
    drive, _ = project(omega, num_generations=6)
    for _ in range(100):
        other = in_h0(3 * torch.randn(6, dtype=torch.float64))
        assert (omega - drive).norm() <= (omega - other).norm()
        assert_tight((omega - drive).dot(other), 0.0)


@pytest.mark.parametrize("trash", TRASH)
@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
def test_invalid_row_has_no_effect_on_the_drive(scaling, trash):
    valid, omega = torch.tensor(VALID), f64(LOGPS).abs()
    clean, clean_potential = project(omega, num_generations=G, scaling=scaling, valid=valid)
    omega[~valid] = trash
    dirty, dirty_potential = project(omega, num_generations=G, scaling=scaling, valid=valid)
    assert_exact(dirty, clean)
    assert_exact(dirty_potential, clean_potential)
    assert_exact(dirty[~valid], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
def test_group_scaling_divides_by_the_unbiased_standard_deviation_of_each_group(valid):
    omega = escort_by_hand(ADVANTAGES, 0.4, valid=valid)
    expected = drive_by_hand(omega, valid)
    for rows in groups_of(len(omega), valid=valid)[:2]:  # the third group has zero variance
        std = statistics.stdev([omega[i] for i in rows])
        for i in rows:
            expected[i] /= std
    expected[8:] = [0.0] * 4
    mask = None if valid is None else torch.tensor(valid)
    drive, _ = project(f64(omega), num_generations=G, scaling="group", valid=mask)
    assert_tight(drive, expected)


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
def test_batch_scaling_divides_by_the_unbiased_standard_deviation_of_all_valid_rows(valid):
    omega = escort_by_hand(ADVANTAGES, 0.4, valid=valid)
    unscaled = drive_by_hand(omega, valid)
    std = statistics.stdev([g for i, g in enumerate(unscaled) if valid is None or valid[i]])
    mask = None if valid is None else torch.tensor(valid)
    drive, _ = project(f64(omega), num_generations=G, scaling="batch", valid=mask)
    assert_tight(drive, [g / std for g in unscaled])


@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 0.0, 1e4, 1e-30])
def test_zero_variance_group_has_exactly_zero_drive(value, dtype, scaling):
    """Sums of 0.1 are rounded, and a rounding error divided by its own standard deviation would be of order 1."""
    for group in range(2, 65):
        equal = torch.full((2 * group,), value, dtype=dtype)
        omega = escort_weights(equal, alpha=0.4, num_generations=group, temperature=0.3)
        assert_exact(omega, torch.ones_like(omega))
        for weights in (omega, equal):  # also equal weights that are not 1
            drive, _ = project(weights, num_generations=group, scaling=scaling)
            assert_exact(drive, torch.zeros_like(drive))


@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
def test_zero_variance_group_has_no_drive_next_to_one_with_variance(scaling):
    drive, _ = project(f64([0.1] * 3 + [0.2, 1.1, 1.7]), num_generations=3, scaling=scaling)
    assert_exact(drive[:3], f64([0.0] * 3))
    assert drive[3:].abs().min() > 0


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_drive_over_one_minus_alpha_tends_to_the_centered_advantage_as_alpha_tends_to_one(temperature):
    """Remark 3.6, corrected: omega itself tends to 1, not to A."""
    centered = f64(drive_by_hand(ADVANTAGES)) / temperature

    def error(alpha):
        omega = escort_weights(f64(ADVANTAGES), alpha=alpha, num_generations=G, temperature=temperature)
        return ((project(omega, num_generations=G)[0] / (1 - alpha)) - centered).abs().max().item()

    errors = [error(1 - 10.0**-k) for k in (2, 3, 4)]
    assert errors[0] < 0.1
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)  # O(1 - alpha): exactly first order
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.05)
    omega = escort_weights(f64(ADVANTAGES), alpha=1 - 1e-6, num_generations=G, temperature=temperature)
    assert_close(omega, torch.ones_like(omega), rtol=0, atol=1e-4)


def test_group_scaled_drive_tends_to_the_z_scored_advantage_as_alpha_tends_to_one():
    rewards = [0.0, 1.0, 1.0, 0.25]
    z_scores = [(r - statistics.fmean(rewards)) / statistics.stdev(rewards) for r in rewards]
    for k in (3, 5):
        omega = escort_weights(f64(rewards), alpha=1 - 10.0**-k, num_generations=4)
        drive, _ = project(omega, num_generations=4, scaling="group")
        assert_close(drive, f64(z_scores), rtol=0, atol=10.0**-k)


@pytest.mark.parametrize("scaling", ["group", "batch"])
@pytest.mark.parametrize("alpha", [0.9, 0.999, 1 - 1e-6])
def test_scaled_drive_conserves_probability_near_alpha_one(alpha, scaling):
    """There, scaling divides the rounding error of the mean by a small number."""
    omega = escort_weights(torch.randn(64, dtype=torch.float64), alpha=alpha, num_generations=8)
    drive, _ = project(omega, num_generations=8, scaling=scaling)
    assert drive.view(-1, 8).mean(dim=1).abs().max() < 1e-9


# The closed form and gradient descent: Theorem 3.4, Theorem 6.1, Corollary 6.2

CONTRACTION = [(0.5, 0.4), (1.0, 0.3), (2.0, 0.1), (1.5, 1.0), (1.0, 1.0)]  # (mu, eta) with eta < 2 / mu


def coordinates(ratio_form, u):
    """The log-ratio whose coordinate in the loss is `u`."""
    return u.log1p() if ratio_form == "exact" else u


def small_target(mu):
    """A target well inside v > -1, the domain of the exact ratio."""
    omega = f64(escort_by_hand(ADVANTAGES[:8], 0.8))
    drive, _ = project(omega, num_generations=G)
    return admissible_target(drive, mu=mu, num_generations=G)[0]


@pytest.mark.parametrize("ratio_form", ["log", "exact"])
@pytest.mark.parametrize(("mu", "eta"), CONTRACTION)
def test_gradient_descent_contracts_to_the_closed_form_at_the_rate_one_minus_eta_mu(mu, eta, ratio_form):
    expected = (f64(escort_by_hand(ADVANTAGES[:8], 0.8)) - 1) / mu  # (omega - 1) / mu
    v = (expected + 0.1 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    for _ in range(60):
        loss = opo_loss(coordinates(ratio_form, v), small_target(mu), mu=mu, ratio_form=ratio_form).sum()
        (gradient,) = torch.autograd.grad(loss, v)
        stepped = (v - eta * gradient).detach().requires_grad_()
        assert_tight(stepped - expected, (1 - eta * mu) * (v - expected).detach())
        v = stepped
    assert_close(v.detach(), expected, rtol=0, atol=max(abs(1 - eta * mu) ** 60, 1e-12))


@pytest.mark.parametrize("mu", [0.5, 1.0, 4.0])
def test_gradient_descent_does_not_converge_at_step_sizes_from_two_over_mu(mu):
    target = small_target(mu)
    for eta, growth in ((2 / mu, 1.0), (2.2 / mu, 1.2)):
        u = target + 0.1
        start = (u - target).norm()
        for _ in range(20):
            u = u.requires_grad_()
            (gradient,) = torch.autograd.grad(opo_loss(u, target, mu=mu, ratio_form="log").sum(), u)
            u = (u - eta * gradient).detach()
        assert_close((u - target).norm(), start * growth**20, rtol=1e-9, atol=0)


@pytest.mark.parametrize("ratio_form", ["log", "exact"])
@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_gradient_is_minus_the_drive_plus_mu_times_the_coordinate(mu, ratio_form):
    drive = drive_by_hand(escort_by_hand(ADVANTAGES[:8], 0.4))
    target, _ = admissible_target(f64(drive), mu=mu, num_generations=G)
    u = (torch.rand(8, dtype=torch.float64) - 0.5).requires_grad_()
    loss = opo_loss(coordinates(ratio_form, u), target, mu=mu, ratio_form=ratio_form)
    (gradient,) = torch.autograd.grad(loss.sum(), u)
    assert_tight(gradient, [-g + mu * x for g, x in zip(drive, u.tolist(), strict=True)])


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("ratio_form", ["log", "exact"])
@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
def test_hessian_is_mu_times_the_identity_at_every_alpha_and_point(mu, ratio_form, alpha):
    drive, _ = project(f64(escort_by_hand(ADVANTAGES[:4], alpha)), num_generations=G)
    target, _ = admissible_target(drive, mu=mu, num_generations=G)

    def loss(u):
        return opo_loss(coordinates(ratio_form, u), target, mu=mu, ratio_form=ratio_form).sum()

    for point in (torch.zeros(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)):
        hessian = torch.autograd.functional.hessian(loss, point)
        assert_tight(hessian, mu * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9])
def test_mu_scales_the_target_and_keeps_its_direction(alpha):
    drive = f64(drive_by_hand(escort_by_hand(ADVANTAGES, alpha)))
    for mu in (0.1, 1.0, 7.0):
        target, used = admissible_target(drive, mu=mu, num_generations=G)
        assert used.item() == mu
        assert_tight(target, drive / mu)
        assert_tight(target / target.norm(), drive / drive.norm())


@pytest.mark.parametrize("ratio_form", ["log", "exact"])
@pytest.mark.parametrize("mu", [0.5, 1.0, 5.0])
def test_closed_form_minimizes_the_loss_among_fluctuations_that_conserve_probability(mu, ratio_form):
    target = small_target(mu)[:G]

    def loss(v):
        return opo_loss(coordinates(ratio_form, v), target, mu=mu, ratio_form=ratio_form).mean()

    for _ in range(100):
        step = in_h0(torch.randn(G, dtype=torch.float64))
        step *= 0.2 / step.norm()
        # Exactly quadratic: any step adds mu / 2 times its mean square.
        assert_tight(loss(target + step) - loss(target), mu / 2 * step.square().mean())
        assert loss(target + step) > loss(target)


@pytest.mark.parametrize("ratio_form", ["log", "exact"])
def test_on_the_conservation_subspace_the_loss_is_the_papers_functional(ratio_form):
    """The chemical potential is orthogonal to H0: there, -E[omega v] + mu/2 E[v²] (eq. 14) may use the raw omega."""
    mu, omega = 1.3, escort_by_hand(ADVANTAGES[:4], 0.4)
    target, _ = admissible_target(f64(drive_by_hand(omega)), mu=mu, num_generations=G)
    v = in_h0(0.3 * torch.rand(4, dtype=torch.float64))
    expected = statistics.fmean(-w * x + mu / 2 * x**2 for w, x in zip(omega, v.tolist(), strict=True))
    assert_tight(opo_loss(coordinates(ratio_form, v), target, mu=mu, ratio_form=ratio_form).mean(), expected)


@pytest.mark.parametrize("ratio_form", ["log", "exact"])
@pytest.mark.parametrize("mu", [0.3, 1.0, 5.0])
def test_completing_the_square(mu, ratio_form):
    target = torch.randn(10, dtype=torch.float64)
    u = 2 * torch.rand(10, dtype=torch.float64) - 0.9
    square = mu / 2 * (u - target) ** 2
    loss = opo_loss(coordinates(ratio_form, u), target, mu=mu, ratio_form=ratio_form)
    assert_tight(loss, square - mu / 2 * target**2)


@pytest.mark.parametrize("mu", [0.2, 1.0, 30.0])
def test_on_policy_the_dissipation_has_no_effect(mu):
    drive = f64(drive_by_hand(escort_by_hand(ADVANTAGES, 0.4)))
    target, _ = admissible_target(drive, mu=mu, num_generations=G)
    log_ratio = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    loss = opo_loss(log_ratio, target, mu=mu, ratio_form="log")
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert_exact(loss.detach(), torch.zeros_like(drive))
    assert_tight(gradient, -drive)  # without mu


def test_escort_weights_drive_and_target_carry_no_gradient():
    advantages, logps = f64(ADVANTAGES).requires_grad_(), f64(LOGPS).requires_grad_()
    alpha, temperature, mu = (f64(x).requires_grad_() for x in (0.4, 0.7, 1.1))
    omega = escort_weights(advantages, alpha=alpha, num_generations=G, temperature=temperature, anchor_logps=logps)
    drive, chemical_potential = project(omega.clone().requires_grad_(), num_generations=G, scaling="group")
    stiffness = stiffness_for_radius(drive.clone().requires_grad_(), 0.1)
    target, used = admissible_target(drive.clone().requires_grad_(), mu=mu, num_generations=G, positivity="stiffen")
    for tensor in (omega, drive, chemical_potential, stiffness, target, used):
        assert not tensor.requires_grad


# χ² trust region: Proposition 6.3, corrected, and total variation


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
@pytest.mark.parametrize("radius", [1e-3, 0.1, 2.0])
def test_stiffness_for_radius_puts_the_target_on_the_sphere(radius, valid):
    drive = drive_by_hand(escort_by_hand(ADVANTAGES, 0.4, valid=valid), valid)
    rows = [i for rows in groups_of(12, valid=valid) for i in rows]
    mu = stiffness_for_radius(f64(drive), radius, valid=None if valid is None else torch.tensor(valid))
    assert_tight(mu, math.sqrt(statistics.fmean(drive[i] ** 2 for i in rows) / radius))
    assert statistics.fmean((drive[i] / mu.item()) ** 2 for i in rows) == pytest.approx(radius, rel=1e-12)


@pytest.mark.parametrize("trash", TRASH)
def test_invalid_row_has_no_effect_on_the_chi2_coefficient(trash):
    drive, valid = f64(drive_by_hand(LOGPS, VALID)), torch.tensor(VALID)
    clean = stiffness_for_radius(drive, 0.1, valid=valid)
    drive[~valid] = trash
    assert_exact(stiffness_for_radius(drive, 0.1, valid=valid), clean)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_stiffness_for_radius_neither_underflows_nor_overflows(scale):
    """The squares of these are out of float32's range."""
    mu = stiffness_for_radius(torch.tensor([1.0, -1.0, 2.0, -2.0]) * scale, 0.1)
    assert_close(mu / scale, torch.tensor(5.0))


@pytest.mark.parametrize("valid", [None, [False] * 4], ids=["all_valid", "none_valid"])
def test_stiffness_for_radius_without_a_drive_is_positive_and_harmless(valid):
    drive = torch.zeros(4)
    mu = stiffness_for_radius(drive, 0.1, valid=None if valid is None else torch.tensor(valid))
    assert mu > 0
    target, _ = admissible_target(drive, mu=mu, num_generations=4)
    assert_exact(target, drive)
    assert_exact(opo_loss(drive, target, mu=mu, ratio_form="log"), drive)


@pytest.mark.parametrize("radius", [0.05, 0.5])
@pytest.mark.parametrize("omega", [(0.5, 1.5), (0.1, 1.45, 1.45), (0.2, 0.6, 0.9, 1.2, 2.1)])
def test_target_solves_the_chi2_constrained_problem(omega, radius):
    """max <omega, v> over v in H0 with E[v²] ≤ radius, by a generic solver."""
    drive, _ = project(f64(omega), num_generations=len(omega))
    mu = stiffness_for_radius(drive, radius)
    target, _ = admissible_target(drive, mu=mu, num_generations=len(omega))

    def work(v):
        return sum(w * x for w, x in zip(omega, v, strict=True)) / len(omega)

    solution = minimize(
        lambda v: -work(v),
        x0=[0.01 * (-1) ** i for i in range(len(omega))],
        constraints=[
            {"type": "eq", "fun": lambda v: sum(v)},
            {"type": "ineq", "fun": lambda v: radius - sum(x**2 for x in v) / len(omega)},
        ],
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    assert_close(target, f64(solution.x), rtol=0, atol=1e-5)
    assert work(target.tolist()) == pytest.approx(work(solution.x), abs=1e-8)


def test_chi2_coefficient_is_twice_the_multiplier_of_the_radius():
    """The multiplier of E[v²] ≤ radius is the work gained per unit of radius, and mu/2 multiplies E[v²]."""
    omega, h = f64([0.2, 0.6, 0.9, 1.2, 2.1]), 1e-5
    drive, _ = project(omega, num_generations=5)

    def work(radius):
        mu = stiffness_for_radius(drive, radius)
        return (omega * admissible_target(drive, mu=mu, num_generations=5)[0]).mean()

    slope = (work(0.3 + h) - work(0.3 - h)) / (2 * h)
    assert_close(2 * slope, stiffness_for_radius(drive, 0.3), rtol=1e-8, atol=0)


def test_the_appendix_optimum_does_not_conserve_probability():
    """The unconstrained v = omega / mu lies outside H0: its mean is 1 / mu, not 0."""
    omega, mu = f64(escort_by_hand(ADVANTAGES, 0.4)), 2.0
    target, _ = admissible_target(project(omega, num_generations=G)[0], mu=mu, num_generations=G)
    assert_tight(target.view(-1, G).mean(dim=1), [0.0, 0.0, 0.0])
    assert_tight(omega / mu - target, torch.full_like(omega, 1 / mu))


@pytest.mark.parametrize("size", [2, 5, 50])
def test_chi2_bounds_the_total_variation(size):
    for concentration in (0.05, 0.5, 5.0):  # from nearly one-hot to nearly uniform
        for _ in range(20):
            policy = torch.distributions.Dirichlet(torch.full((size,), concentration, dtype=torch.float64)).sample()
            policy = (policy + 1e-12) / (policy + 1e-12).sum()
            # Each outcome once: the group mean is the expectation under a uniform behaviour policy.
            log_ratio = policy.log() + math.log(size)
            got = step_metrics(log_ratio)
            chi2 = math.fsum((p - 1 / size) ** 2 * size for p in policy.tolist())
            total_variation = math.fsum(abs(p - 1 / size) for p in policy.tolist()) / 2
            assert got["chi2"].item() == pytest.approx(chi2, rel=1e-9)
            assert got["tv_bound"].item() == pytest.approx(math.sqrt(chi2) / 2, rel=1e-9)
            assert total_variation <= got["tv_bound"].item() * (1 + 1e-12)
            assert abs(got["conservation_residual"].item()) < 1e-9


# Positivity: Proposition 6.4, corrected


def test_the_papers_positivity_condition_is_not_enough():
    omega = [0.1, 1.45, 1.45]
    drive, _ = project(f64(omega), num_generations=3)
    target, used = admissible_target(drive, mu=0.45, num_generations=3)
    assert max(omega) - 1 <= 0.45 + 1e-12  # the paper's condition holds …
    assert target[0].item() == pytest.approx(-2.0)  # … and the probability is -1 times the behaviour policy's
    assert used.item() == pytest.approx(0.45)


@pytest.mark.parametrize("omega", [(0.1, 1.45, 1.45), (0.7, 0.8, 1.5), (0.2, 0.6, 0.9, 2.3)])
def test_mu_of_one_minus_the_least_weight_is_the_smallest_admissible(omega):
    drive, _ = project(f64(omega), num_generations=len(omega))
    bound = 1 - min(omega)
    assert admissible_target(drive, mu=bound, num_generations=len(omega))[0].min() >= -1 - 1e-12
    assert admissible_target(drive, mu=bound * 0.999, num_generations=len(omega))[0].min() < -1


@pytest.mark.parametrize("mu", [1.0, 1.5, 10.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_any_mu_of_at_least_one_is_admissible_for_an_unscaled_drive(alpha, mu):
    omega = escort_weights(3 * torch.randn(60, dtype=torch.float64), alpha=alpha, num_generations=6, temperature=0.3)
    drive, _ = project(omega, num_generations=6)
    plain, _ = admissible_target(drive, mu=mu, num_generations=6)
    assert plain.min() >= -1 - 1e-12
    for positivity in ("stiffen", "project"):
        assert_tight(admissible_target(drive, mu=mu, num_generations=6, positivity=positivity)[0], plain)


def test_stiffen_raises_mu_to_the_smallest_admissible_value_of_the_batch():
    drive = f64([0.5, -0.4, -0.1, 1.2, -0.9, -0.3])
    target, mu = admissible_target(drive, mu=0.2, num_generations=3, positivity="stiffen")
    assert mu.item() == 0.9  # -min g over both groups
    assert_tight(target, drive / 0.9)
    assert target.min().item() == -1.0


def test_stiffen_leaves_a_large_enough_mu_alone():
    target, mu = admissible_target(f64([0.5, -0.4, -0.1]), mu=0.7, num_generations=3, positivity="stiffen")
    assert mu.item() == 0.7
    assert_tight(target, [0.5 / 0.7, -0.4 / 0.7, -0.1 / 0.7])


@pytest.mark.parametrize("epsilon", [1e-3, 0.2])
def test_clip_bounds_the_target_from_below_and_gives_up_conservation(epsilon):
    drive = [0.9, -0.8, -0.1]
    target, mu = admissible_target(f64(drive), mu=0.5, num_generations=3, positivity="clip", epsilon=epsilon)
    assert mu.item() == 0.5
    assert_tight(target, [1.8, -1 + epsilon, -0.2])
    assert target.mean() > 0.1
    default, _ = admissible_target(f64(drive), mu=0.5, num_generations=3, positivity="clip")
    assert_tight(default, [1.8, -0.999, -0.2])
    inside, _ = admissible_target(f64(drive), mu=2.0, num_generations=3, positivity="clip", epsilon=epsilon)
    assert_tight(inside, [0.45, -0.4, -0.05])


def project_by_brute_force(y, total):
    """The closest point of {t ≥ 0, Σt = total}: the best over all supports of the equality-constrained optimum."""
    best, best_distance = None, math.inf
    for size in range(1, len(y) + 1):
        for support in itertools.combinations(range(len(y)), size):
            shift = (sum(y[i] for i in support) - total) / size
            t = [y[i] - shift if i in support else 0.0 for i in range(len(y))]
            distance = sum((a - b) ** 2 for a, b in zip(t, y, strict=True))
            if min(t) >= 0 and distance < best_distance:
                best, best_distance = t, distance
    return best


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0])
def test_project_is_the_euclidean_projection_on_the_simplex(mu, group):
    drive = in_h0(torch.randn(5, group, dtype=torch.float64)).flatten()
    target, used = admissible_target(drive, mu=mu, num_generations=group, positivity="project")
    assert used.item() == mu
    for rows in groups_of(len(drive), group):
        expected = project_by_brute_force([1 + drive[i].item() / mu for i in rows], len(rows))
        assert_tight(target[rows] + 1, expected)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # Entries exactly at the threshold reveal an off-by-one support.
        ([2.0, 1.0, -3.0], [1.0, 0.0, -1.0]),
        ([3.0, 0.0, -3.0], [2.0, -1.0, -1.0]),
        ([4.0, -2.0, -2.0], [2.0, -1.0, -1.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1.0, 1.0, -2.0], [0.5, 0.5, -1.0]),
    ],
)
def test_project_worked_by_hand(target, expected):
    assert_tight(admissible_target(f64(target), mu=1.0, num_generations=3, positivity="project")[0], expected)


def test_project_agrees_with_a_quadratic_programming_solver():
    y = [3.1, -0.4, 1.2, -2.5, 0.9]
    solution = minimize(
        lambda t: sum((a - b) ** 2 for a, b in zip(t, y, strict=True)),
        x0=[1.0] * 5,
        jac=lambda t: [2 * (a - b) for a, b in zip(t, y, strict=True)],
        bounds=[(0, None)] * 5,
        constraints={"type": "eq", "fun": lambda t: sum(t) - 5},
        method="SLSQP",
        options={"ftol": 1e-15},
    )
    target, _ = admissible_target(f64(y) - 1, mu=1.0, num_generations=5, positivity="project")
    assert_close(target + 1, f64(solution.x), rtol=0, atol=1e-6)


def test_project_ignores_invalid_rows():
    drive, valid = f64([2.0, -3.0, math.nan, 1.0, 0.6, math.inf, -0.2, -0.4]), [True, True, False, True] * 2
    valid[5], valid[6] = False, True
    target, _ = admissible_target(drive, mu=0.4, num_generations=4, positivity="project", valid=torch.tensor(valid))
    for rows in groups_of(8, valid=valid):
        expected = project_by_brute_force([1 + drive[i].item() / 0.4 for i in rows], len(rows))
        assert_tight(target[rows] + 1, expected)
        assert_tight(target[rows].sum(), 0.0)
    assert_exact(target[~torch.tensor(valid)], f64([0.0] * valid.count(False)))


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("group", [2, 16, 64])
def test_project_conserves_probability_and_is_idempotent(group, mu):
    drive = in_h0(torch.randn(4, group, dtype=torch.float64)).flatten()
    valid = torch.rand(4 * group) > 0.2
    target, _ = admissible_target(drive, mu=mu, num_generations=group, positivity="project", valid=valid)
    assert target.min() >= -1
    assert_close(target.view(4, group).sum(dim=1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)
    again, _ = admissible_target(target, mu=1.0, num_generations=group, positivity="project", valid=valid)
    assert_tight(again, target)


@pytest.mark.parametrize("mu", [1.0, 1e-1, 1e-2, 1e-3])
def test_project_in_float32_is_exact_up_to_the_rounding_of_its_largest_entry(mu):
    rewards = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0]).repeat(8)
    advantages = rewards + 1e-3 * torch.randn(64)  # near ties, which stay in the support together
    drive, _ = project(escort_weights(advantages, alpha=0.0, num_generations=8), num_generations=8)
    target, _ = admissible_target(drive, mu=mu, num_generations=8, positivity="project")
    plain, _ = admissible_target(drive, mu=mu, num_generations=8)
    tolerance = 4 * torch.finfo(torch.float32).eps * (1 + plain.abs().max().item())
    for rows in groups_of(64, 8):
        expected = project_by_brute_force([1 + x for x in plain[rows].tolist()], 8)
        assert_close(target[rows] + 1, torch.tensor(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("trash", TRASH)
@pytest.mark.parametrize("positivity", ["none", "stiffen", "clip", "project"])
def test_invalid_row_has_no_effect_on_the_target(positivity, trash):
    drive, valid = f64(drive_by_hand(LOGPS, VALID)), torch.tensor(VALID)
    clean, clean_mu = admissible_target(drive, mu=0.3, num_generations=G, positivity=positivity, valid=valid)
    drive[~valid] = trash
    dirty, dirty_mu = admissible_target(drive, mu=0.3, num_generations=G, positivity=positivity, valid=valid)
    assert_exact(dirty, clean)
    assert_exact(dirty_mu, clean_mu)
    assert_exact(dirty[~valid], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("positivity", ["none", "stiffen", "clip", "project"])
def test_zero_drive_has_zero_target_even_without_a_valid_row(positivity):
    for valid in (None, torch.zeros(4, dtype=torch.bool)):
        target, mu = admissible_target(torch.zeros(4), mu=0.5, num_generations=2, positivity=positivity, valid=valid)
        assert_exact(target, torch.zeros(4))
        assert mu.item() == 0.5


# Adaptive temperature


def temperature(base=0.5, *, mean_logps, rewards, vocab_size=50, low=1e-3, high=9.0, valid=None):
    fields = {"escort_temperature": base, "adaptive_temperature": True, "temperature_range": [low, high]}
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid)
    rewards, mean_logps = f64(rewards), f64(mean_logps)
    return OPO(SimpleNamespace(**fields)).temperature(
        Groups(rewards, rewards, valid, 1, mean_logps=mean_logps, vocab_size=vocab_size)
    )


def schedule(base, entropy, success, **options):
    """The temperature after observations with this entropy and success: of four rewards, two are the extremes."""
    rewards = [-1.0, 1.0, 2 * success, 2 * success]
    return temperature(base, mean_logps=[-entropy * math.log(50)] * 4, rewards=rewards, **options).item()


@pytest.mark.parametrize("entropy", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("success", [-0.5, 0.0, 0.3, 0.5])
def test_adaptive_temperature_is_the_schedule_of_the_authors_code(entropy, success):
    expected = 1 + 0.2 * entropy - 0.5 * (1 - entropy) * success
    assert schedule(0.5, entropy, success) == pytest.approx(0.5 * expected, rel=1e-12)
    assert schedule(2.0, entropy, success) == pytest.approx(2.0 * expected, rel=1e-12)


def test_adaptive_temperature_stays_in_its_range_and_clips_the_entropy():
    bounds = {"low": 0.2, "high": 1.5}
    assert schedule(0.1, 0.0, 0.5, **bounds) == pytest.approx(0.2)
    assert schedule(5.0, 0.0, 0.5, **bounds) == pytest.approx(1.5)
    assert schedule(0.5, 7.0, 0.5, **bounds) == pytest.approx(schedule(0.5, 1.0, 0.5)) == pytest.approx(0.6)
    assert schedule(0.5, -7.0, 0.5, **bounds) == pytest.approx(schedule(0.5, 0.0, 0.5)) == pytest.approx(0.375)


def test_confident_and_successful_policy_gets_a_smaller_temperature():
    assert schedule(0.5, 0.1, 0.45) < schedule(0.5, 0.1, 0.1) < schedule(0.5, 0.1, -0.25)
    assert schedule(0.5, 0.1, 0.45) < schedule(0.5, 0.5, 0.45) < schedule(0.5, 0.9, 0.45)


def test_temperature_is_constant_unless_adaptive():
    args = SimpleNamespace(escort_temperature=0.7, adaptive_temperature=False)
    nothing = f64([math.nan] * 4)
    assert OPO(args).temperature(Groups(nothing, nothing, nothing == 0, 4)) == 0.7


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
def test_entropy_is_the_mean_surprise_per_token_over_that_of_the_uniform_policy(valid):
    mean_logps = CORRECTIONS["length_normalized"]
    rows = [i for rows in groups_of(12, valid=valid) for i in rows]
    entropy = statistics.fmean(-mean_logps[i] for i in rows) / math.log(50)
    assert_tight(temperature(mean_logps=mean_logps, rewards=[0.3] * 12, valid=valid), 0.5 * (1 + 0.2 * entropy))
    # A uniform policy has H = 1, a deterministic one H = 0; H is clipped to this range.
    for logp, entropy in ((-math.log(7), 1.0), (0.0, 0.0), (-9.0, 1.0)):
        got = temperature(mean_logps=[logp] * 3, rewards=[1.0] * 3, vocab_size=7)
        assert_tight(got, 0.5 * (1 + 0.2 * entropy))


def success(rewards, valid=None) -> float:
    """r, from the temperature of a policy without entropy."""
    return 2 * (1 - temperature(1.0, mean_logps=[0.0] * len(rewards), rewards=rewards, valid=valid).item())


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
def test_success_is_the_mean_reward_scaled_to_the_range_of_rewards(valid):
    rewards = [0.0, 1.0, 9.0, 0.25, 1.0, 1.0, -0.5, 0.5, 0.0, -7.0, 3.0, 1.0]
    kept = [reward for i, reward in enumerate(rewards) if valid is None or valid[i]]
    low, high = min(kept), max(kept)
    expected = statistics.fmean(2 * (reward - low) / (high - low) - 1 for reward in kept)
    assert success(rewards, valid) == pytest.approx(expected, rel=1e-12)
    assert success([3.0, 5.0, 5.0, 5.0]) == 0.5  # three of four are the highest


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_give_neutral_success(reward):
    assert success([reward] * 7) == 0.0


@pytest.mark.parametrize("rows", [12, 288])
def test_success_stays_in_its_range_if_rewards_differ_by_a_rounding_error(rows):
    """0.1 + 0.7 is one bit less than 0.8: the mean of such rewards may round to a number outside their range."""
    for greater in range(1, rows):
        assert -1 <= success([0.8] * greater + [0.1 + 0.7] * (rows - greater)) <= 1


@pytest.mark.parametrize("trash", TRASH)
def test_invalid_row_has_no_effect_on_the_temperature(trash):
    values = CORRECTIONS["length_normalized"]
    dirty = [value if kept else trash for value, kept in zip(values, VALID, strict=True)]
    clean = temperature(mean_logps=values, rewards=values, valid=VALID)
    assert_exact(temperature(mean_logps=dirty, rewards=dirty, valid=VALID), clean)
    assert temperature(mean_logps=dirty, rewards=dirty, valid=[False] * 12).item() == 0.5


# Log-ratio

MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


def token_logps():
    mask = torch.tensor(MASK)
    logps = -torch.rand(4, 5, dtype=torch.float64)
    return logps, logps + 0.2 * torch.randn(4, 5, dtype=torch.float64), mask


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_log_ratio_is_the_sum_or_mean_over_the_tokens_of_the_completion(reduction):
    logps, anchor, mask = token_logps()
    expected = []
    for row in range(4):
        terms = [(logps[row, t] - anchor[row, t]).item() for t in range(5) if MASK[row][t]]
        expected.append(math.fsum(terms) / (max(len(terms), 1) if reduction == "mean" else 1))
    log_ratio, clamped = log_ratio_of(logps, anchor, mask, reduction=reduction)
    assert_tight(log_ratio, expected)
    assert clamped.tolist() == [False] * 4
    assert log_ratio[2].item() == 0.0  # the fully masked one


@pytest.mark.parametrize("trash", TRASH)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_masked_token_has_no_effect_on_value_and_gradient(reduction, trash):
    logps, anchor, mask = token_logps()

    def value_and_gradient(logps, anchor):
        logps = logps.clone().requires_grad_()
        log_ratio, _ = log_ratio_of(logps, anchor, mask, reduction=reduction, clamp=5.0)
        loss = opo_loss(log_ratio, f64([0.3, -0.2, 0.1, 0.7]), mu=1.3, ratio_form="exact")
        return loss.detach(), torch.autograd.grad(loss.sum(), logps)[0]

    clean_loss, clean_gradient = value_and_gradient(logps, anchor)
    for where in ("logps", "anchor", "both"):
        dirty_logps = logps.masked_fill(mask == 0, trash) if where != "anchor" else logps
        dirty_anchor = anchor.masked_fill(mask == 0, trash) if where != "logps" else anchor
        loss, gradient = value_and_gradient(dirty_logps, dirty_anchor)
        assert_exact(loss, clean_loss)
        assert_exact(gradient, clean_gradient)
        assert_exact(gradient[mask == 0], torch.zeros_like(gradient[mask == 0]))
    assert clean_gradient[mask == 1].abs().min() > 0


def test_clamp_bounds_and_marks_the_reduced_log_ratio_but_not_its_gradient():
    logps = f64([[-1.0, -1.0], [-9.0, -9.0], [-1.0, -1.0], [-1.0, -1.5]]).requires_grad_()
    anchor = f64([[-2.0, -2.0], [-1.0, -1.0], [-9.0, -9.0], [-2.0, -2.0]])
    mask = torch.ones(4, 2)
    log_ratio, clamped = log_ratio_of(logps, anchor, mask, reduction="sum", clamp=2.0)
    assert log_ratio.tolist() == [2.0, -2.0, 2.0, 1.5]
    assert clamped.tolist() == [False, True, True, False]  # 2 is at the bound, not beyond it
    (gradient,) = torch.autograd.grad(log_ratio.sum(), logps)
    assert gradient.tolist() == [[1.0, 1.0]] * 4
    # For "mean" the bound applies to the mean: -8, not -16.
    log_ratio, clamped = log_ratio_of(logps, anchor, mask, reduction="mean", clamp=10.0)
    assert log_ratio.tolist() == [1.0, -8.0, 8.0, 0.75]
    assert not clamped.any()
    assert not clamped.requires_grad
    # Large values that cancel do not make a large log-ratio: 8 - 7 = 1.
    log_ratio, clamped = log_ratio_of(
        f64([[-1.0, -9.0]]), f64([[-9.0, -2.0]]), torch.ones(1, 2), reduction="sum", clamp=2.0
    )
    assert log_ratio.tolist() == [1.0]
    assert not clamped.any()


def test_infinite_log_ratio_is_clamped():
    logps, anchor = f64([[-math.inf, -1.0], [-1.0, -1.0]]), f64([[-1.0, -1.0], [-math.inf, -1.0]])
    log_ratio, clamped = log_ratio_of(logps, anchor, torch.ones(2, 2), reduction="sum", clamp=20.0)
    assert log_ratio.tolist() == [-20.0, 20.0]
    assert clamped.tolist() == [True, True]


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_log_probability_that_is_not_a_number_reaches_the_gradient(form):
    """By which a step is skipped. The gradient of `clamp` is 0 there, as if the completion were none."""
    logps = f64([[-1.0, -1.0], [-1.0, -1.0]]).requires_grad_()
    made = samples(logps, f64([[-2.0, math.nan], [-2.0, -1.0]]), torch.ones(2, 2))
    loss = opo(ratio_form=form).loss(made)
    (gradient,) = torch.autograd.grad((loss.work + loss.dissipation).sum(), logps)
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_half_precision_log_probabilities_are_upcast_before_the_subtraction(reduction, dtype):
    logps = (-8 * torch.rand(2, 300)).to(dtype)
    anchor = (logps.float() + 0.05 * torch.randn(2, 300)).to(dtype)
    log_ratio, _ = log_ratio_of(logps, anchor, torch.ones(2, 300), reduction=reduction)
    difference = logps.double() - anchor.double()
    expected = difference.sum(dim=1) if reduction == "sum" else difference.mean(dim=1)
    assert log_ratio.dtype == torch.float32
    assert_close(log_ratio.double(), expected, rtol=0, atol=1e-5 if reduction == "sum" else 1e-7)


def test_half_precision_log_probabilities_get_a_gradient_of_their_dtype():
    logps = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    log_ratio_of(logps, torch.zeros(1, 2, dtype=torch.bfloat16), torch.ones(1, 2))[0].sum().backward()
    assert logps.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 7])
def test_mean_reduction_is_sum_with_mu_and_gradient_over_length(tokens):
    """Per token: grad of "mean" at (g, mu) = 1/T · grad of "sum" at (g, mu/T)."""
    mu, drive = 1.5, f64([0.4, -0.4])
    anchor = -torch.rand(2, tokens, dtype=torch.float64)
    start = anchor + 0.1 * torch.randn(2, tokens, dtype=torch.float64)

    def gradient(reduction, stiffness):
        logps = start.clone().requires_grad_()
        log_ratio, _ = log_ratio_of(logps, anchor, torch.ones(2, tokens), reduction=reduction)
        target, _ = admissible_target(drive, mu=stiffness, num_generations=2)
        return torch.autograd.grad(opo_loss(log_ratio, target, mu=stiffness, ratio_form="log").sum(), logps)[0]

    assert_tight(gradient("mean", mu), gradient("sum", mu / tokens) / tokens)


# Loss


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.0, 2.0, 1.7]], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("mu", [0.3, 2.0])
@pytest.mark.parametrize("ratio_form", ["log", "exact"])
def test_loss_is_work_plus_dissipation(ratio_form, mu, weights):
    log_ratio, target = [0.3, -0.8, 0.1, 1.1, 0.0], [0.2, -1.0, 0.4, -0.3, 0.9]
    expected = []
    for row in range(5):
        u = math.exp(log_ratio[row]) - 1 if ratio_form == "exact" else log_ratio[row]
        w = 1.0 if weights is None else weights[row]
        expected.append(w * (-mu * target[row] * u + mu / 2 * u**2))
    got = opo_loss(
        f64(log_ratio), f64(target), mu=mu, ratio_form=ratio_form, weights=None if weights is None else f64(weights)
    )
    assert_tight(got, expected)
    assert_tight(
        opo_loss(
            f64(log_ratio),
            f64(target),
            mu=f64(mu),
            ratio_form=ratio_form,
            weights=None if weights is None else f64(weights),
        ),
        expected,
    )


@pytest.mark.parametrize("log_ratio", [-3.0, -0.5, 0.0, 0.5, 0.69, 0.7, 4.0])
def test_the_default_has_the_force_of_the_truncated_chi2_form(log_ratio):
    """Value: push and pull-back times Delta. Gradient: -b · (g - mu · (b - 1)), b = min(exp(Delta), 2)."""
    delta, bounded = f64([log_ratio]).requires_grad_(), min(math.exp(log_ratio), 2.0)
    work, dissipation = loss_terms(delta, f64([0.2]), mu=1.5)
    assert_tight(work.detach(), [-bounded * 1.5 * 0.2 * log_ratio])
    assert_tight(dissipation.detach(), [bounded * 1.5 * (bounded - 1) * log_ratio])
    (gradient,) = torch.autograd.grad((work + dissipation).sum(), delta)
    assert_tight(gradient, [-bounded * 1.5 * (0.2 - (bounded - 1))])


@pytest.mark.parametrize("trash", TRASH)
@pytest.mark.parametrize("ratio_form", ["truncated", "log", "exact"])
def test_row_of_weight_zero_has_exactly_zero_loss_and_gradient(ratio_form, trash):
    log_ratio, target = f64([0.3, trash, -0.2, 0.1]).requires_grad_(), f64([0.1, trash, trash, -0.4])
    weights = f64([1.0, 0.0, 0.0, 0.6])
    loss = opo_loss(log_ratio, target, mu=1.1, ratio_form=ratio_form, weights=weights)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss[1:3].tolist() == [0.0, 0.0]
    assert gradient[1:3].tolist() == [0.0, 0.0]

    kept = f64([0.3, 0.1]).requires_grad_()
    alone = opo_loss(kept, f64([0.1, -0.4]), mu=1.1, ratio_form=ratio_form, weights=f64([1.0, 0.6]))
    assert_exact(loss[[0, 3]].detach(), alone.detach())
    assert_exact(gradient[[0, 3]], torch.autograd.grad(alone.sum(), kept)[0])


def test_exact_form_is_precise_near_the_behaviour_policy():
    """exp(Delta) - 1 in two steps would lose all digits of a log-ratio of 1e-12."""
    loss = opo_loss(f64([1e-12]), f64([1.0]), mu=1.0, ratio_form="exact")
    assert_close(loss, f64([-1e-12]), rtol=1e-11, atol=0)


# Other terms of the loss


def test_token_mean_and_sum_are_over_the_tokens_of_each_completion():
    x, _, mask = token_logps()
    expected = [[x[row, t].item() for t in range(5) if MASK[row][t]] or [0.0] for row in range(4)]
    for trash in [0.0, *TRASH]:
        for mask_dtype in (torch.int64, torch.bool, torch.float32):
            dirty, tokens = x.masked_fill(mask == 0, trash), mask.to(mask_dtype)
            assert_tight(token_mean(dirty, tokens), [statistics.fmean(row) for row in expected])
            assert_tight(token_sum(dirty, tokens), [math.fsum(row) for row in expected])


def samples(logps, anchor_logps, mask, **more) -> Samples:
    one = torch.ones(len(logps), dtype=torch.float64)
    given = {"target": one, "mu": one, "weights": one, "age": one - 1, "reused": True, **more}
    return Samples(logps=logps, anchor_logps=anchor_logps, mask=mask.bool(), **given)


@pytest.mark.parametrize("corrected", [False, True])
def test_reference_kl_is_trls_estimate_of_each_token(corrected):
    logps, reference, mask = token_logps()
    anchor = logps - 0.3 * torch.rand(4, 5, dtype=torch.float64)
    expected = []
    for row in range(4):
        terms = []
        for t in range(5):
            if MASK[row][t]:
                log_ratio = (reference[row, t] - logps[row, t]).item()
                weight = math.exp((logps[row, t] - anchor[row, t]).item()) if corrected else 1.0
                terms.append(weight * (math.exp(log_ratio) - log_ratio - 1))
        expected.append(math.fsum(terms))
    made = samples(logps, anchor, mask)
    assert_tight(made.kl(reference, made.token_log_ratios.exp() if corrected else None), expected)


def test_corrected_reference_kl_has_the_value_and_gradient_of_the_divergence_in_expectation():
    """One token, four words: the expectation under the behaviour policy is a sum over the vocabulary."""
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    anchor, reference = torch.randn(2, 4, dtype=torch.float64).log_softmax(dim=1)
    logps = logits.log_softmax(dim=0)
    divergence = (logps.exp() * (logps - reference)).sum()
    of_words = samples(logps[:, None], anchor[:, None], torch.ones(4, 1))
    estimate = of_words.kl(reference[:, None], of_words.token_log_ratios.exp())
    assert_tight((anchor.exp() * estimate).sum().detach(), divergence.detach())
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad((anchor.exp() * estimate).sum(), logits)
    assert_tight(gradient, expected)


@pytest.mark.parametrize("trash", TRASH)
def test_masked_token_has_no_effect_on_the_reference_kl(trash):
    logps, reference, mask = token_logps()

    def value_and_gradient(logps, reference, anchor):
        logps = logps.clone().requires_grad_()
        made = samples(logps, anchor, mask)
        kl = made.kl(reference, made.token_log_ratios.exp())
        return kl.detach(), torch.autograd.grad(kl.sum(), logps)[0]

    clean, clean_gradient = value_and_gradient(logps, reference, logps - 0.1)
    dirty, gradient = value_and_gradient(*(x.masked_fill(mask == 0, trash) for x in (logps, reference, logps - 0.1)))
    assert_exact(dirty, clean)
    assert_exact(gradient, clean_gradient)
    assert_exact(gradient[mask == 0], torch.zeros_like(gradient[mask == 0]))


# The objective as a whole


def opo(**fields) -> OPO:
    return OPO(ObjectiveConfig(**{"mu": 0.3, "log_ratio_clamp": 1.0, **fields}))


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_loss_is_the_definition_with_the_bounded_weight_of_reused_completions(form, reduction, reused):
    logps, anchor, mask = token_logps()
    anchor[3] = logps[3] - 0.3
    target, mu, sampler = f64([0.7, -0.4, 0.0, 1.1]), f64([0.3] * 4), f64([1.0, 0.5, 1.0, 2.0])
    made = samples(logps, anchor, mask, target=target, mu=mu, weights=sampler, reused=reused)
    got = opo(ratio_form=form, log_ratio_reduction=reduction).loss(made)
    bounds = set()
    for row in range(4):
        moved = [(logps[row, t] - anchor[row, t]).item() for t in range(5) if MASK[row][t]]
        delta = math.fsum(moved) / (max(len(moved), 1) if reduction == "mean" else 1)
        weight = sampler[row].item() * (min(math.exp(delta), 2.0) if reused and form != "truncated" else 1.0)
        clamped = max(-1.0, min(delta, 1.0))
        u = math.expm1(clamped) if form == "exact" else clamped
        push, pull_back = u, u**2 / 2
        if form == "truncated":
            bounded = min(math.exp(clamped), 2.0)
            push, pull_back = bounded * clamped, bounded * (bounded - 1) * clamped
        assert got.log_ratio[row].item() == pytest.approx(clamped, rel=1e-12)
        assert got.clamped[row].item() == (abs(delta) > 1)
        assert got.weights[row].item() == pytest.approx(weight, rel=1e-12)
        assert got.work[row].item() == pytest.approx(-weight * 0.3 * target[row].item() * push, rel=1e-12)
        assert got.dissipation[row].item() == pytest.approx(weight * 0.3 * pull_back, rel=1e-12)
        bounds.add(math.exp(delta) > 2)
    assert bounds == ({True, False} if reduction == "sum" else {False})  # both sides of the bound


def test_steering_tokens_alone_have_a_ratio_while_the_weight_is_of_the_whole_completion():
    logps, anchor, mask = token_logps()
    steering = mask.bool() & (torch.arange(5) < 2)
    made = samples(logps, anchor, mask, steering=steering)
    assert_tight(made.sum(made.log_ratios), [(logps - anchor)[i, steering[i]].sum().item() for i in range(4)])
    assert_tight(made.moved, [(logps - anchor)[i, mask[i].bool()].sum().item() for i in range(4)])


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_weight_of_a_completion_that_was_left_behind_stays_above_zero(form):
    logps = torch.full((1, 3), -400.0)
    made = samples(logps, torch.zeros(1, 3), torch.ones(1, 3), weights=torch.ones(1))
    assert opo(ratio_form=form).loss(made).weights.item() > 0


class Pulled(OPO):
    """Pulls each completion down, whatever its target."""

    def terms(self, log_ratio, weights, samples):
        work, dissipation = super().terms(log_ratio, weights, samples)
        return work, dissipation + log_ratio


@pytest.mark.parametrize(("kind", "expected"), [(OPO, [False, True, True]), (Pulled, [False, False, False])])
def test_zero_gradient_is_read_from_the_loss_itself(kind, expected):
    target = torch.tensor([0.5, 0.0, -0.0])
    found = kind(opo().args).zero_gradient(target, torch.full((3,), 0.3), torch.ones(3, 2).bool())
    assert found.tolist() == expected
    unusable = torch.tensor([torch.inf, torch.nan])
    assert opo().zero_gradient(unusable, torch.ones(2), torch.ones(2, 1).bool()).tolist() == [False, False]


class Shortened(OPO):
    """Makes completions of more than two tokens less likely."""

    def terms(self, log_ratio, weights, samples):
        work, dissipation = super().terms(log_ratio, weights, samples)
        return work, dissipation + (samples.length - 2).clamp(min=0) * log_ratio


def test_zero_gradient_takes_the_length_into_account():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    assert Shortened(opo().args).zero_gradient(torch.zeros(2), torch.ones(2), mask).tolist() == [True, False]


def test_objective_asks_for_the_advantages_of_valid_rows():
    advantages, valid = f64([1.0, math.nan, -1.0, 0.5]), torch.tensor([True, False, True, True])
    found = Objective(None).targets(Groups(advantages, advantages, valid, 2))
    assert found.target.tolist() == found.drive.tolist() == [1.0, 0.0, -1.0, 0.5]
    assert found.mu.item() == 1.0


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: project(f64(LOGPS), num_generations=G, scaling="zscore"), "zscore"),
        (lambda: admissible_target(f64(LOGPS), mu=1.0, num_generations=G, positivity="relu"), "relu"),
        (lambda: opo_loss(f64([0.1]), f64([0.1]), mu=1.0, ratio_form="linear"), "linear"),
    ],
    ids=["scaling", "positivity", "ratio_form"],
)
def test_unknown_option_is_named_in_the_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("group", [5, 7, 0, -4])
def test_incomplete_groups_are_an_error(group):
    rows = f64(LOGPS)
    calls = [
        lambda: escort_weights(rows, alpha=0.4, num_generations=group),
        lambda: project(rows, num_generations=group),
        lambda: admissible_target(rows, mu=1.0, num_generations=group, positivity="project"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"num_generations={group}"):
            call()


def test_matrix_of_rows_is_an_error():
    with pytest.raises(ValueError, match="1-D"):
        escort_weights(f64(LOGPS).view(3, 4), alpha=0.4, num_generations=4)
