"""Metrics logged under `opo/`, against values computed by hand in float64."""

import math
import statistics

import pytest
import torch
from by_hand import ADVANTAGES, LOGPS, TRASH, VALID, G, assert_exact, escort_by_hand, f64, groups_of

from opo_trl.metrics.opo import gradient_response_efficiency, ratio_ess, rollout_metrics, step_metrics, target_fit
from opo_trl.objective import Groups, Targets, admissible_target, escort_weights, project


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run():
    torch.manual_seed(0)


def test_gradient_response_efficiency_is_the_gradient_per_half_advantage_range():
    assert gradient_response_efficiency(0.6, 3.0) == pytest.approx(0.4)
    assert math.isnan(gradient_response_efficiency(0.6, 0.0))


def metrics(targets: Targets, group: int, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    nothing = torch.zeros(len(valid))  # what targets are made of is not read
    return rollout_metrics(targets, Groups(nothing, nothing, valid, group))


@pytest.mark.parametrize("valid", [None, VALID], ids=["all_valid", "some_invalid"])
@pytest.mark.parametrize("positivity", ["none", "stiffen", "clip", "project"])
def test_rollout_metrics_are_the_definitions(positivity, valid):
    mask = torch.tensor([True] * 12 if valid is None else valid)
    rows = [i for rows in groups_of(12, valid=valid) for i in rows]
    omega = escort_by_hand(ADVANTAGES, 0.0, 0.5, valid=valid)
    drive, chemical_potential = project(f64(omega), num_generations=G, valid=mask)
    target, mu = admissible_target(drive, mu=0.6, num_generations=G, positivity=positivity, valid=mask)
    got = metrics(Targets(drive, target, mu, f64(omega), chemical_potential, f64(0.5)), G, mask)
    ess = [sum(omega[i] for i in rows) ** 2 / sum(omega[i] ** 2 for i in rows) for rows in groups_of(12, valid=valid)]
    expected = {
        "escort/min": min(omega[i] for i in rows),
        "escort/max": max(omega[i] for i in rows),
        "escort/ess": statistics.fmean(ess),
        "escort/chemical_potential": 1.0,
        "temperature": 0.5,
        "mu": mu.item(),
        "positivity_margin": 1 + min(target[i].item() for i in rows),
        "frac_target_clipped": statistics.fmean(abs(target[i] - drive[i] / mu).item() > 1e-5 for i in rows),
        "frac_zero_drive": statistics.fmean(drive[i].item() == 0 for i in rows),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].item() == pytest.approx(value, rel=1e-12, abs=1e-12), name
        assert got[name].dim() == 0
    assert (expected["frac_target_clipped"] > 0) == (positivity in ("clip", "project"))
    assert expected["frac_zero_drive"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_target_that_positivity_moved_by_a_rounding_error_only_is_not_counted_as_clipped(dtype):
    omega = escort_weights(torch.randn(64, dtype=dtype), alpha=0.4, num_generations=8)
    drive, chemical_potential = project(omega, num_generations=8)
    target, mu = admissible_target(drive, mu=1.0, num_generations=8, positivity="project")
    assert not torch.equal(target, drive)  # so there is a rounding error to ignore
    got = metrics(Targets(drive, target, mu, omega, chemical_potential, mu), 8, torch.ones(64, dtype=torch.bool))
    assert got["frac_target_clipped"].item() == 0.0


@pytest.mark.parametrize("trash", TRASH)
def test_invalid_row_has_no_effect_on_rollout_metrics(trash):
    valid = torch.tensor([True, True, False, False, False, False])  # the second group has no valid row
    omega, drive = f64([1.5, 0.5] + [trash] * 4), f64([0.5, -0.5] + [trash] * 4)
    got = metrics(Targets(drive, drive, f64(1.0), omega, f64([1.0, trash]), f64(1.0)), 3, valid)
    assert got["escort/min"].item() == 0.5
    assert got["escort/max"].item() == 1.5
    assert got["escort/ess"].item() == pytest.approx(4 / 2.5)
    assert got["escort/chemical_potential"].item() == 1.0
    assert got["positivity_margin"].item() == 0.5
    assert got["frac_target_clipped"].item() == 0.0
    assert got["frac_zero_drive"].item() == 0.0


def test_rollout_metrics_without_a_valid_row_are_nan():
    zeros = torch.zeros(4)
    made = Targets(zeros, zeros, torch.tensor(1.0), zeros, torch.zeros(2), torch.tensor(0.7))
    got = metrics(made, 2, torch.zeros(4, dtype=torch.bool))
    assert got.pop("mu").item() == pytest.approx(1.0)
    assert got.pop("temperature").item() == pytest.approx(0.7)
    assert all(value.isnan() for value in got.values())


def test_targets_that_are_not_made_of_escort_weights_have_no_metrics_of_them():
    drive = f64([0.5, -0.5, 0.0, 0.0])
    got = metrics(Targets(drive, drive / 2, f64(2.0)), 2, torch.ones(4, dtype=torch.bool))
    assert {name: value.item() for name, value in got.items()} == {
        "mu": 2.0,
        "positivity_margin": 0.75,
        "frac_target_clipped": 0.0,
        "frac_zero_drive": 0.5,
    }


@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 0.5, 2.0]], ids=["unweighted", "weighted"])
def test_step_metrics_are_the_definitions(weights):
    log_ratio = [0.3, 5.0, -1.2, 0.1]
    rows = [0, 1, 2, 3] if weights is None else [0, 2, 3]
    got = step_metrics(
        f64(log_ratio),
        weights=None if weights is None else f64(weights),
        clamped=torch.tensor([False, True, True, False]),
    )
    v = [math.exp(x) - 1 for x in log_ratio]
    chi2 = statistics.fmean(v[i] ** 2 for i in rows)
    expected = {
        "chi2": chi2,
        "tv_bound": math.sqrt(chi2) / 2,
        "conservation_residual": statistics.fmean(v[i] for i in rows),
        "log_ratio/mean": statistics.fmean(log_ratio[i] for i in rows),
        "log_ratio/absmax": max(abs(log_ratio[i]) for i in rows),
        "approximation_gap": statistics.fmean(abs(v[i] - log_ratio[i]) for i in rows),
        "frac_clamped": 0.5 if weights is None else 1 / 3,
        "frac_masked": 0.0 if weights is None else 1 / 4,
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].item() == pytest.approx(value, rel=1e-6), name  # the fractions are float32
        assert got[name].dim() == 0


@pytest.mark.parametrize("trash", TRASH)
def test_row_of_weight_zero_has_no_effect_on_step_metrics(trash):
    weights, clamped = f64([1.0, 0.0, 0.7]), torch.tensor([False, True, True])
    clean = step_metrics(f64([0.2, 0.0, -0.5]), weights=weights, clamped=clamped)
    dirty = step_metrics(f64([0.2, trash, -0.5]), weights=weights, clamped=clamped)
    for name in clean:
        assert_exact(dirty[name], clean[name])


def test_step_metrics_without_a_valid_row_are_zero():
    got = step_metrics(f64([math.nan] * 3), weights=torch.zeros(3, dtype=torch.float64))
    assert got.pop("frac_masked").item() == 1.0
    assert all(value.item() == 0.0 for value in got.values())


def test_step_metrics_carry_no_gradient_and_count_nothing_clamped_unless_told():
    got = step_metrics(f64([0.2, -0.1]).requires_grad_())
    assert got["frac_clamped"].item() == 0.0
    assert not any(value.requires_grad for value in got.values())


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_target_fit_is_the_weighted_share_of_the_target_that_is_reached(form):
    delta, target, weights = [0.9, -0.2, 0.5, 0.1, math.nan], [1.0, -0.5, 0.0, 0.4, 2.0], [1.0, 0.5, 1.0, 2.0, 0.0]
    missing = asked = 0.0
    for d, v, w in zip(delta, target, weights, strict=True):
        if v and w:  # neither a sample without a target nor an excluded one counts
            u = {"truncated": min(math.expm1(d), 1.0), "log": d, "exact": math.expm1(d)}[form]
            missing += w * (u - v) ** 2
            asked += w * v**2
    got = target_fit(f64(delta), f64(target), ratio_form=form, weights=f64(weights))
    assert got.item() == pytest.approx(1 - missing / asked)
    assert target_fit(f64([0.0, 0.0]), f64([1.0, -1.0])).item() == 0
    assert target_fit(f64([1.0, -1.0]), f64([1.0, -1.0]), ratio_form="log").item() == 1
    assert target_fit(f64([0.1]), f64([0.0])).isnan()


def test_effective_sample_size_of_ratios_is_a_share_of_the_samples_that_take_part():
    keep = torch.tensor([True, True, True, False])
    ratios = [math.exp(d) for d in (0.3, -0.2, 1.0)]
    expected = sum(ratios) ** 2 / (3 * sum(r**2 for r in ratios))
    assert ratio_ess(f64([0.3, -0.2, 1.0, 9.0]), keep).item() == pytest.approx(expected)
    assert ratio_ess(f64([0.7, 0.7, 0.7, 9.0]), keep).item() == pytest.approx(1)
    assert ratio_ess(f64([20.0, -20.0]).float(), torch.tensor([True, True])).item() == pytest.approx(0.5)
    assert ratio_ess(f64([1.0]), torch.tensor([False])).isnan()


@pytest.mark.parametrize("group", [5, 7, 0, -4])
def test_incomplete_groups_are_an_error(group):
    rows, valid = f64(LOGPS), torch.ones(len(LOGPS), dtype=torch.bool)
    with pytest.raises(ValueError, match=f"num_generations={group}"):
        metrics(Targets(rows, rows, f64(1.0), rows, rows, f64(1.0)), group, valid)
