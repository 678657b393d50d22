"""What holds for all inputs: finite results, and no effect of invalid rows."""

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_by_hand import log_ratio_of
from torch.testing import assert_close

from opo_trl.metrics.opo import rollout_metrics, step_metrics
from opo_trl.objective import (
    Groups,
    Targets,
    admissible_target,
    escort_weights,
    opo_loss,
    project,
    stiffness_for_radius,
)


# The same examples in every run and on every machine.
every_example = settings(deadline=None, derandomize=True, max_examples=75)

ALPHAS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.4, 1.0]))
SCALINGS = st.sampled_from(["none", "group", "batch"])
POSITIVITIES = st.sampled_from(["none", "stiffen", "clip", "project"])
RATIO_FORMS = st.sampled_from(["truncated", "log", "exact"])
TRASH = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0])
# Moderate values next to extreme ones: without them nearly every example would be one-hot.
ADVANTAGES = st.one_of(st.floats(-3, 3), st.floats(-1e4, 1e4), st.sampled_from([0.1, 1.0, -1.0]))
LOGPS = st.one_of(st.floats(-30, 0), st.floats(-1e4, 0))


@dataclass
class Rollout:
    """Complete groups, and the options of the target."""

    group: int
    advantages: torch.Tensor
    anchor_logps: torch.Tensor | None
    valid: torch.Tensor | None
    alpha: float
    temperature: float
    mu: float
    scaling: str
    positivity: str

    @property
    def keep(self) -> torch.Tensor:
        if self.valid is None:
            return torch.ones_like(self.advantages, dtype=torch.bool)
        return self.valid

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.group)


@st.composite
def rollouts(draw, dtypes=(torch.float32, torch.float64)):
    group = draw(st.integers(1, 9))
    groups = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(dtypes))

    def by_row(elements, dtype):
        n = group * groups
        values = draw(st.lists(elements, min_size=n, max_size=n))
        return torch.tensor(values, dtype=dtype)

    advantages = by_row(ADVANTAGES, dtype)
    logps = by_row(LOGPS, dtype)
    has_mask = draw(st.booleans())
    valid = by_row(st.booleans(), torch.bool) if has_mask else None
    anchor_logps = draw(st.sampled_from([None, logps]))
    alpha = draw(ALPHAS)
    temperature = 10 ** draw(st.floats(-3, 3))
    mu = 10 ** draw(st.floats(-3, 3))
    scaling = draw(SCALINGS)
    positivity = draw(POSITIVITIES)
    return Rollout(group, advantages, anchor_logps, valid, alpha, temperature, mu, scaling, positivity)


def steps_one_to_five(r: Rollout):
    """Omega, drive, chemical potential, target and μ."""
    rows = {"num_generations": r.group, "valid": r.valid}
    omega = escort_weights(r.advantages, alpha=r.alpha, temperature=r.temperature, anchor_logps=r.anchor_logps, **rows)
    drive, chemical_potential = project(omega, scaling=r.scaling, **rows)
    target, mu = admissible_target(drive, mu=r.mu, positivity=r.positivity, **rows)
    return omega, drive, chemical_potential, target, mu


@every_example
@given(rollouts())
def test_drive_and_target_are_finite_and_zero_on_invalid_rows(r):
    keep = r.keep
    omega, drive, _, target, mu = steps_one_to_five(r)
    for field in (omega, drive, target):
        assert field.dtype == r.advantages.dtype
        assert field.isfinite().all()
        assert (field[~keep] == 0).all()
    assert (omega >= 0).all()
    assert mu >= r.mu * (1 - 1e-6)
    if r.positivity != "none":
        assert (target >= -1).all()
    by_group = map(r.by_group, (omega, drive, keep))
    for group_omega, group_drive, group_keep in zip(*by_group, strict=True):
        distinct = group_omega[group_keep].unique()
        if len(distinct) <= 1:
            assert not group_drive.any()


@every_example
@given(rollouts())
def test_escort_weights_have_mean_one_and_an_unscaled_drive_conserves_probability(r):
    r.scaling = "none"
    omega, drive, chemical_potential, _, _ = steps_one_to_five(r)
    eps = torch.finfo(omega.dtype).eps
    counts = r.by_group(r.keep).sum(dim=1)
    has_rows = (counts > 0).to(omega.dtype)
    total = r.by_group(omega).sum(dim=1)
    assert_close(total, counts.to(omega.dtype), rtol=10 * eps, atol=0)
    assert_close(chemical_potential, has_rows, rtol=10 * eps, atol=0)
    residuals = r.by_group(drive).sum(dim=1)
    assert residuals.abs().max() <= 10 * eps * r.group


@every_example
@given(group=st.integers(2, 9), data=st.data(), alpha=st.floats(0, 0.99), temperature=st.floats(0.1, 10))
def test_scaled_by_group_the_drive_of_two_valued_rewards_is_the_z_scored_advantage(group, data, alpha, temperature):
    right = data.draw(st.integers(1, group - 1))
    rewards = torch.zeros(group, dtype=torch.float64)
    rewards[:right] = 1.0
    centered = rewards - rewards.mean()
    advantages = centered / rewards.std()
    omega = escort_weights(advantages, alpha=alpha, num_generations=group, temperature=temperature)
    drive, _ = project(omega, num_generations=group, scaling="group")
    assert_close(drive, advantages)


@every_example
@given(rollouts(), st.floats(-4, 2), TRASH)
def test_target_of_a_chi2_radius_has_that_radius(r, log_radius, trash):
    radius = 10**log_radius
    keep = r.keep
    _, drive, _, _, _ = steps_one_to_five(r)
    mu = stiffness_for_radius(drive, radius, valid=r.valid)
    with_trash = drive.masked_fill(~keep, trash)
    mu_with_trash = stiffness_for_radius(with_trash, radius, valid=r.valid)
    assert torch.equal(mu, mu_with_trash)
    assert mu.isfinite()
    assert mu > 0
    target = drive / mu
    if drive.any():
        mean_square = target[keep].square().mean()
        assert_close(mean_square.item(), radius, rtol=1e-5, atol=0)
    else:
        assert not target.any()


@every_example
@given(rollouts(), TRASH)
def test_value_of_an_invalid_row_never_changes_anything_else(r, trash):
    invalid = ~r.keep
    with_trash = replace(r, advantages=r.advantages.masked_fill(invalid, trash))
    if r.anchor_logps is not None:
        with_trash.anchor_logps = r.anchor_logps.masked_fill(invalid, trash)
    clean = steps_one_to_five(r)
    dirty = steps_one_to_five(with_trash)
    for expected, actual in zip(clean, dirty, strict=True):
        assert torch.equal(expected, actual)


@every_example
@given(rollouts(), RATIO_FORMS, st.floats(0.1, 20), st.sampled_from(["sum", "mean"]), st.data())
def test_loss_gradient_and_diagnostics_are_finite_when_log_ratios_are_clamped(r, ratio_form, clamp, reduction, data):
    keep = r.keep
    dtype = r.advantages.dtype
    omega, drive, _, target, mu = steps_one_to_five(r)
    width = data.draw(st.integers(1, 5))
    size = len(keep) * width

    def matrix(elements, dtype):
        values = data.draw(st.lists(elements, min_size=size, max_size=size))
        return torch.tensor(values).to(dtype).view(-1, width)

    mask = matrix(st.booleans(), torch.bool)
    trash = data.draw(TRASH)  # stands wherever a token is masked
    logps = matrix(LOGPS, dtype).masked_fill(~mask, trash)
    logps.requires_grad_()
    behaviour_logps = matrix(LOGPS, dtype).masked_fill(~mask, trash)
    log_ratio, clamped = log_ratio_of(logps, behaviour_logps, mask, reduction=reduction, clamp=clamp)
    assert log_ratio.abs().max() <= clamp * (1 + 1e-6)

    weights = keep.to(dtype)
    loss = opo_loss(log_ratio, target, mu=mu, ratio_form=ratio_form, weights=weights)
    loss.mean().backward()
    assert loss.isfinite().all()
    assert logps.grad.isfinite().all()
    assert (loss[~keep] == 0).all()
    silent = ~mask | ~keep[:, None]
    assert (logps.grad[silent] == 0).all()

    logged = step_metrics(log_ratio, weights, clamped)
    if keep.any():
        targets = Targets(drive, target, mu, omega, torch.tensor(r.temperature))
        groups = Groups(drive, drive, keep, r.group)
        logged |= rollout_metrics(targets, groups)
        assert 1 - 1e-5 <= logged["escort/ess"] <= r.group * (1 + 1e-5)
    for value in logged.values():
        assert value.isfinite()
