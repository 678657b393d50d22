"""`objective: topr`: its gradient with any bounds and push, and its fields."""

from dataclasses import replace

import pytest
import torch
from float64_reference import EXACT
from named_tensors import norm, relative_error
from objective_by_hand import table
from recording_trainers import RecordingOPO, logged, trained
from scripted_rollouts import Script

from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Groups, Samples, escort_weights
from opo_trl.objectives import TOPR


TRUNCATED = {"positive_bounds": [0, 2], "negative_bounds": [0, 2]}


def topr(**fields) -> TOPR:
    config = ObjectiveConfig(objective="topr", log_ratio_clamp=20.0, **fields)
    return TOPR(config)


def potential(ratio, low, high):
    """Whose derivative by the logarithm of the ratio is the ratio within bounds."""

    def beyond(bound):
        log_of_excess = (ratio / bound).log()
        return bound * (log_of_excess + 1)

    below = beyond(low) if low else torch.zeros_like(ratio)
    not_above = torch.where(ratio < low, below, ratio)
    return torch.where(ratio > high, beyond(high), not_above)


@pytest.mark.parametrize("right", [(0, 2), (1, 1), (1, 2)])
@pytest.mark.parametrize("wrong", [(0, 2), (0, 1)])
def test_gradient_is_that_of_the_potential_of_its_bounds(right, wrong):
    """With bounds of 0 and 2, and ratios within them, of the expected reward."""
    random = torch.Generator().manual_seed(3)
    logits_before, change, push = torch.randn(3, 8, generator=random, dtype=torch.float64)
    before = logits_before.softmax(0)
    objective = topr(positive_bounds=list(right), negative_bounds=list(wrong))
    for size in (0.4, 3.0):
        logits = before.log() + size * change
        logits.requires_grad_()
        policy = logits.softmax(0)
        samples = table(push, policy, before)
        loss = objective.loss(samples)
        expected_loss = before @ (loss.work + loss.dissipation)
        (gradient,) = torch.autograd.grad(-expected_loss, logits, retain_graph=True)
        ratio = policy / before
        potentials = torch.where(push > 0, potential(ratio, *right), potential(ratio, *wrong))
        expected_potential = before @ (push * potentials)
        (expected,) = torch.autograd.grad(expected_potential, logits, retain_graph=True)
        assert torch.allclose(gradient, expected, atol=1e-12)
        assert expected.norm() > 0.05
        if right == wrong == (0, 2) and size < 1:
            assert ratio.max() < 2
            (of_expected_reward,) = torch.autograd.grad(policy @ push, logits)
            assert torch.allclose(gradient, of_expected_reward, atol=1e-12)


def test_pushes_are_rewards_advantages_or_escort_weights():
    random = torch.Generator().manual_seed(5)
    rewards = torch.randn(12, generator=random).round(decimals=1)
    advantages = rewards.sign()
    valid = torch.arange(12) != 7
    groups = Groups(advantages=advantages, rewards=rewards, valid=valid, num_generations=4)
    pushes = {
        "reward": rewards,
        "advantage": advantages,
        "escort": escort_weights(advantages, alpha=0.2, **groups.rows),
    }
    for name, push in pushes.items():
        fields = {"alpha": 0.2} if name == "escort" else {}
        objective = topr(push=name, **fields)
        target = objective.targets(groups).target
        of_groups = zip(push.view(3, 4), valid.view(3, 4), target.view(3, 4), strict=True)
        for group_push, group_valid, group_target in of_groups:
            mean = group_push[group_valid].mean()
            centered = torch.where(group_valid, group_push - mean, 0.0)
            assert torch.allclose(group_target, centered, atol=1e-6)


@pytest.mark.parametrize("push", ["reward", "advantage", "escort"])
def test_nothing_is_pushed_where_all_rewards_are_equal(push):
    """Also where rounding leaves something of the advantages, as for 0.9 in float32."""
    rewards = torch.full((8,), 0.9)
    rounding_errors = rewards - rewards.mean()
    advantages = rounding_errors / (rewards.std() + 1e-4)
    assert advantages.any()
    every = torch.ones(8).bool()
    groups = Groups(advantages=advantages, rewards=rewards, valid=every, num_generations=8)
    targets = topr(push=push).targets(groups)
    assert not targets.target.any()


def test_weights_of_samples_count_and_0_excludes_one_whatever_it_contains():
    logps = torch.tensor([[0.5], [torch.nan]]).log().requires_grad_()
    before = torch.tensor([0.4, 0.6])
    samples = table(torch.tensor([0.5, -0.5]), torch.ones(2), before)
    weighted = replace(samples, logps=logps, weights=torch.tensor([0.5, 0.0]))
    loss = topr(**TRUNCATED).loss(weighted)
    loss.work.sum().backward()
    assert loss.weights.tolist() == pytest.approx([0.5 * 1.25, 0])
    gradient = logps.grad.squeeze(1)
    assert gradient.tolist() == pytest.approx([-0.5 * 1.25 * 0.5, 0])


@pytest.mark.parametrize(("reduction", "ratio"), [("sum", 1.5), ("mean", 1.5**0.5)])
def test_the_ratio_of_a_completion_is_the_product_or_the_geometric_mean_of_those_of_its_tokens(reduction, ratio):
    before = torch.tensor([[0.2, 0.5, 0.5]])
    policy = torch.tensor([[0.3, 0.5, 0.9]])
    mask = torch.tensor([[True, True, False]])
    samples = Samples.of(policy.log(), before.log(), mask, target=torch.tensor([-1.0]), mu=torch.tensor(1.0))
    loss = topr(log_ratio_reduction=reduction, **TRUNCATED).loss(samples)
    assert loss.weights.item() == pytest.approx(ratio)


def test_a_rollout_without_rewards_is_an_error(tiny_model, tmp_path):
    class MadeFromScratch(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            del rollout["rewards_per_func"]
            return rollout

    with pytest.raises(ValueError, match="no `rewards_per_func`"):
        trained(tiny_model, tmp_path, trainer_class=MadeFromScratch, max_steps=1, objective="topr")


class Held(TOPR):
    """TOPR with Kimi's pull-back, μ/2 · Δ²."""

    def terms(self, log_ratio, weights, samples):
        push, _ = super().terms(log_ratio, weights, samples)
        return push, 0.15 * log_ratio.square()


class HeldTrainer(RecordingOPO):
    objective_class = Held


@pytest.mark.parametrize(
    ("objective", "trainer_class", "skipped"),
    [("topr", RecordingOPO, 0.5), ("opo", RecordingOPO, 0.0), ("topr", HeldTrainer, 0.0)],
)
def test_groups_of_equal_rewards_are_not_computed_where_nothing_pulls_them_back(
    tiny_model, tmp_path, objective, trainer_class, skipped
):
    """In the second pass, when the policy has moved: the gradient is as with them."""
    options = {
        "objective": objective,
        "trainer_class": trainer_class,
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.02,
    }
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    computing_all = trained(tiny_model, tmp_path / "all", script=Script(rewards), skip_inert_rows=False, **options)
    skipping = trained(tiny_model, tmp_path / "skipping", script=Script(rewards), skip_inert_rows=True, **options)
    _, second = logged(skipping)
    assert second["opo/frac_skipped"] == skipped
    assert second["opo/frac_masked"] == 0
    assert second["opo/chi2"] > 1e-8
    expected = computing_all.steps[1].gradient
    assert norm(expected) > 1e-3
    assert relative_error(skipping.steps[1].gradient, expected) < EXACT
