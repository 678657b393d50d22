"""`objective: topr`: its gradient with any bounds and push, and its fields."""

from dataclasses import replace

import pytest
import torch
from helpers import EXACT, RecordingOPO, Script, logged, norm, relative_error, trained

from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Groups, Samples, escort_weights
from opo_trl.objectives import TOPR


TRUNCATED = {"objective": "topr", "positive_bounds": [0, 2], "negative_bounds": [0, 2]}


def topr(**fields) -> TOPR:
    return TOPR(ObjectiveConfig(**{"objective": "topr", "log_ratio_clamp": 20.0, **fields}))


def table(target, policy, before):
    """A completion of one token for each entry."""
    one = torch.ones_like(before)
    tokens = {"logps": policy.log()[:, None], "anchor_logps": before.log()[:, None], "mask": one.bool()[:, None]}
    return Samples(**tokens, target=target, mu=one, weights=one, age=0 * one, reused=True)


def potential(ratio, low, high):
    """Whose derivative by the logarithm of the ratio is the ratio within bounds."""
    below = low * ((ratio / low).log() + 1) if low else 0 * ratio
    above = high * ((ratio / high).log() + 1)
    not_above = torch.where(ratio < low, below, ratio)
    return torch.where(ratio > high, above, not_above)


@pytest.mark.parametrize("right", [(0, 2), (1, 1), (1, 2)])
@pytest.mark.parametrize("wrong", [(0, 2), (0, 1)])
def test_gradient_is_that_of_the_potential_of_its_bounds(right, wrong):
    """With bounds of 0 and 2, and ratios within them, of the expected reward."""
    random = torch.Generator().manual_seed(3)
    before, moved, push = torch.randn(3, 8, generator=random, dtype=torch.float64)
    before = before.softmax(0)
    for size in (0.4, 3.0):
        logits = (before.log() + size * moved).requires_grad_()
        policy = logits.softmax(0)
        loss = topr(positive_bounds=list(right), negative_bounds=list(wrong)).loss(table(push, policy, before))
        losses = loss.work + loss.dissipation
        (gradient,) = torch.autograd.grad(-before @ losses, logits, retain_graph=True)
        ratio = policy / before
        potentials = torch.where(push > 0, potential(ratio, *right), potential(ratio, *wrong))
        (expected,) = torch.autograd.grad(before @ (push * potentials), logits, retain_graph=True)
        assert torch.allclose(gradient, expected, atol=1e-12)
        assert expected.norm() > 0.05
        if right == wrong == (0, 2) and size < 1:
            assert ratio.max() < 2
            (of_expected_reward,) = torch.autograd.grad(policy @ push, logits)
            assert torch.allclose(gradient, of_expected_reward, atol=1e-12)


def groups(rewards, **fields) -> Groups:
    valid = torch.arange(len(rewards)) != 7
    return Groups(**{"advantages": rewards.sign(), "rewards": rewards, "valid": valid, "num_generations": 4} | fields)


def test_pushes_are_rewards_advantages_or_escort_weights():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(5)).round(decimals=1)
    known = groups(rewards)
    pushes = {
        "reward": rewards,
        "advantage": rewards.sign(),
        "escort": escort_weights(rewards.sign(), alpha=0.2, **known.rows),
    }
    for name, push in pushes.items():
        fields = {"alpha": 0.2} if name == "escort" else {}
        target = topr(push=name, **fields).targets(known).target
        for group in range(3):
            rows = slice(4 * group, 4 * group + 4)
            valid, of_group = known.valid[rows], push[rows]
            centred = torch.where(valid, of_group - of_group[valid].mean(), 0.0)
            assert torch.allclose(target[rows], centred, atol=1e-6)


@pytest.mark.parametrize("push", ["reward", "advantage", "escort"])
def test_nothing_is_pushed_where_all_rewards_are_equal(push):
    """Also where rounding leaves something of the advantages, as for 0.9 in float32."""
    rewards = torch.full((8,), 0.9)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert advantages.any()
    every = torch.ones(8).bool()
    known = Groups(advantages=advantages, rewards=rewards, valid=every, num_generations=8)
    assert not topr(push=push).targets(known).target.any()


def test_a_sample_of_weight_0_has_no_gradient_whatever_it_contains():
    logps = torch.tensor([[0.5], [torch.nan]]).log().requires_grad_()
    samples = table(torch.tensor([0.5, -0.5]), torch.ones(2), torch.tensor([0.4, 0.6]))
    loss = topr(**TRUNCATED).loss(replace(samples, logps=logps, weights=torch.tensor([1.0, 0.0])))
    loss.work.sum().backward()
    assert loss.weights.tolist() == pytest.approx([1.25, 0])
    assert logps.grad[:, 0].tolist() == pytest.approx([-1.25 * 0.5, 0])


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
    with_all, without = (
        trained(tiny_model, tmp_path / str(skips), script=Script(rewards), skip_inert_rows=skips, **options)
        for skips in (False, True)
    )
    second = logged(without)[1]
    assert (second["opo/frac_skipped"], second["opo/frac_masked"]) == (skipped, 0)
    assert second["opo/chi2"] > 1e-8
    assert norm(with_all.steps[1].gradient) > 1e-3
    assert relative_error(without.steps[1].gradient, with_all.steps[1].gradient) < EXACT
