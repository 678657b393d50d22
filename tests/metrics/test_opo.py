"""Metrics of a rollout and of an optimizer step, against values computed by hand in float64."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from objective_by_hand import f64

from opo_trl.config import ObjectiveConfig
from opo_trl.metrics.opo import ratio_ess, rollout_metrics, target_fit
from opo_trl.metrics.step import SampleReport, metrics_of_samples
from opo_trl.objective import OPO, Groups, Samples, Targets
from opo_trl.objectives import OBJECTIVES


def displacement(form, log_ratio):
    """How far a completion has moved, in the units of its target."""
    if form == "log":
        return log_ratio
    excess = math.expm1(log_ratio)
    return min(excess, 1.0) if form == "truncated" else excess


@pytest.mark.parametrize("form", ["truncated", "log", "exact"])
def test_target_fit_is_the_weighted_share_of_the_target_that_is_reached(form):
    delta = [0.9, -0.2, 0.5, 0.1, math.nan]
    target = [1.0, -0.5, 0.0, 0.4, 2.0]
    weights = [1.0, 0.5, 1.0, 2.0, 0.0]
    squared_miss = 0.0
    squared_target = 0.0
    for log_ratio, goal, weight in zip(delta, target, weights, strict=True):
        if goal and weight:  # neither a completion without a target nor an excluded one counts
            miss = displacement(form, log_ratio) - goal
            squared_miss += weight * miss**2
            squared_target += weight * goal**2
    fit = target_fit(f64(delta), f64(target), ratio_form=form, weights=f64(weights))
    assert fit == pytest.approx(1 - squared_miss / squared_target)
    opposite = f64([1.0, -1.0])
    unmoved = target_fit(0 * opposite, opposite)
    assert unmoved == 0
    arrived = target_fit(opposite, opposite, ratio_form="log")
    assert arrived == 1
    without_target = target_fit(f64([0.1]), f64([0.0]))
    assert without_target.isnan()


def test_effective_sample_size_of_ratios_is_a_share_of_the_samples_that_take_part():
    log_ratios = f64([0.3, -0.2, 1.0, 9.0])
    keep = torch.tensor([True, True, True, False])
    ratios = log_ratios[:3].exp()
    sum_of_squares = ratios.square().sum()
    expected = ratios.sum() ** 2 / (3 * sum_of_squares)
    assert ratio_ess(log_ratios, keep) == pytest.approx(expected.item())
    equal = f64([0.7, 0.7, 0.7, 9.0])
    assert ratio_ess(equal, keep) == pytest.approx(1)
    far_apart = torch.tensor([20.0, -20.0])
    both = torch.tensor([True, True])
    assert ratio_ess(far_apart, both) == pytest.approx(0.5)
    of_none = ratio_ess(f64([1.0]), torch.tensor([False]))
    assert of_none.isnan()


def test_a_group_without_a_valid_completion_counts_in_no_metric_of_a_rollout():
    drive = f64([0.5, 0.0, 0.0, 0.0])
    omega = f64([1.5, 0.5, 0.0, 0.0])
    targets = Targets(drive, drive, f64(1.0), omega=omega, temperature=f64(2.0))
    groups = Groups(drive, drive, torch.tensor([True, True, False, False]), num_generations=2)
    metrics = rollout_metrics(targets, groups)
    assert metrics["frac_zero_drive"] == 0.5
    assert metrics["escort/ess"] == pytest.approx(2.0**2 / (1.5**2 + 0.5**2))


# Of an optimizer step, from the reports of its samples


def report(**fields: list[float]) -> SampleReport:
    """Two samples that count, with these values; other fields are 0."""
    names = [field.name for field in dataclasses.fields(SampleReport)]
    values = {"weights": [1.0, 1.0], "tokens": [1.0, 1.0], **fields}
    return SampleReport(**{name: torch.tensor(values.get(name, [0.0, 0.0])) for name in names})


def metrics(**fields: list[float]) -> dict[str, float]:
    return metrics_of_samples(report(**fields), OPO(ObjectiveConfig()), kl=False, bonus=False)


def test_a_sample_whose_log_ratio_nobody_has_computed_counts_in_no_metric_of_it():
    moved = {"log_ratio": [math.nan, 0.1], "sequence_log_ratio": [9.0, 0.1], "target": [1.0, 0.2]}
    logged = metrics(computed=[0.0, 1.0], **moved)
    v = math.expm1(0.1)
    assert logged["opo/chi2"] == pytest.approx(v**2)
    assert logged["opo/conservation_residual"] == pytest.approx(v)
    assert logged["opo/target_fit"] == pytest.approx(1 - (v - 0.2) ** 2 / 0.2**2)
    assert logged["opo/ratio/ess"] == 1
    assert (logged["opo/frac_skipped"], logged["opo/frac_masked"]) == (0.5, 0)


def test_a_log_ratio_of_nan_that_was_computed_is_logged():
    logged = metrics(log_ratio=[math.nan, 0.1], computed=[1.0, 1.0])
    assert math.isnan(logged["opo/chi2"])


def test_a_filler_is_reported_as_if_it_were_left_out_but_for_its_entropy():
    batch = {"opo_filler": torch.tensor([True, False]), "opo_counts": torch.ones(2), "opo_mu": torch.ones(2)}
    of_both = report(log_ratio=[0.5, 0.1], computed=[1.0, 1.0], entropy=[2.0, 1.0], tokens=[4.0, 2.0])
    (on_policy,) = of_both.with_left_out(batch)
    assert on_policy.computed.tolist() == [0, 1]
    assert on_policy.log_ratio.tolist() == pytest.approx([0, 0.1])
    assert (on_policy.entropy.tolist(), on_policy.tokens.tolist()) == ([2, 1], [4, 2])
    (off_policy,) = of_both.with_left_out({**batch, "old_per_token_logps": torch.zeros(2, 1)})
    assert off_policy.log_ratio.isnan().tolist() == [True, False]


def test_a_completion_without_tokens_has_no_ratio_that_could_be_clipped():
    samples = report(computed=[1.0, 1.0], tokens=[0.0, 3.0], clipped_low=[0.0, 1.0])
    logged = metrics_of_samples(samples, OBJECTIVES["gspo"](ObjectiveConfig()), kl=False, bonus=False)
    assert (logged["clip_ratio/low_min"], logged["clip_ratio/region_mean"]) == (1, 1)


@pytest.mark.parametrize(("name", "share"), [("grpo", 0.25), ("gspo", 0.5)])
def test_a_clipped_completion_counts_by_its_tokens_or_as_one(name, share):
    samples = report(computed=[1.0, 1.0], tokens=[1.0, 3.0], clipped_low=[1.0, 0.0])
    args = SimpleNamespace(**vars(ObjectiveConfig()), importance_sampling_level="token")
    logged = metrics_of_samples(samples, OBJECTIVES[name](args), kl=False, bonus=False)
    assert logged["clip_ratio/region_mean"] == share


def test_the_effective_sample_size_is_that_of_ratios_of_whole_completions():
    """Also where the loss has the mean of their tokens."""
    logps = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    before = torch.tensor([[-1.5, -2.5], [-3.0, -1.0]])
    samples = Samples.of(logps, before, torch.ones(2, 2).bool(), torch.zeros(2), torch.tensor(1.0))
    loss = OPO(ObjectiveConfig(log_ratio_reduction="mean", log_ratio_clamp=9.0)).loss(samples)
    of_samples = SampleReport.of(samples, loss)
    assert of_samples.log_ratio.tolist() == [0.5, 0]
    assert of_samples.sequence_log_ratio.tolist() == [1, 0]
