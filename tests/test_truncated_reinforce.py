"""`trainer: truncated_reinforce`: its gradient, its fields, and a run on recorded completions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import DEVICE_FIELDS, RecordingOPO, trained

from benchmarks.objectives.grid import CELLS
from opo_trl.asynchronous.targets import group_targets
from opo_trl.checks.files import read_json
from opo_trl.config import ObjectiveConfig, TruncatedReinforceConfig
from opo_trl.launch.help import short_help
from opo_trl.launch.recipe import make_parser
from opo_trl.methods import method_of
from opo_trl.objective import Groups, Samples, TruncatedReinforce
from opo_trl.report.diagnostics import diagnostics
from opo_trl.train import main


RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "arithmetic" / "reuse.yaml"
FIELDS = ObjectiveConfig(log_ratio_clamp=20.0)


def table(target, policy, before):
    """A completion of one token for each entry."""
    one = torch.ones_like(before)
    tokens = {"logps": policy.log()[:, None], "anchor_logps": before.log()[:, None], "mask": one.bool()[:, None]}
    return Samples(**tokens, target=target, mu=one, weights=one, age=0 * one, reused=True)


@pytest.mark.parametrize("size", [0.4, 3.0], ids=["within the bound", "beyond it"])
def test_gradient_is_that_of_the_expected_reward_within_the_bound(size):
    random = torch.Generator().manual_seed(3)
    before, moved, push = torch.randn(3, 6, generator=random, dtype=torch.float64)
    before = before.softmax(0)
    logits = (before.log() + size * moved).requires_grad_()
    policy = logits.softmax(0)
    loss = TruncatedReinforce(FIELDS).loss(table(push, policy, before))
    (found,) = torch.autograd.grad(-before @ (loss.work + loss.dissipation), logits, retain_graph=True)
    ratio = policy / before
    bounded = before @ (torch.where(ratio < 2, ratio, 2 + 2 * (ratio / 2).log()) * push)
    (expected,) = torch.autograd.grad(policy @ push if size < 1 else bounded, logits)
    assert (ratio.max() < 2) == (size < 1)
    assert torch.allclose(found, expected, atol=1e-12)
    assert expected.norm() > 0.05


def test_it_is_the_simplest_form_of_the_ablation():
    """So that the published figures are this method's."""
    random = torch.Generator().manual_seed(5)
    rewards, before, policy = torch.randn(3, 12, generator=random)
    valid = torch.arange(12) != 7
    groups = Groups(advantages=rewards.sign(), rewards=rewards.round(), valid=valid, num_generations=4)
    found = []
    for kind in (TruncatedReinforce, CELLS["reward-bounded-none"]):
        objective = kind(ObjectiveConfig(mu=0.3, log_ratio_clamp=20.0))
        targets, logits = objective.targets(groups), policy.clone().requires_grad_()
        samples = table(targets.target, logits.softmax(0), before.softmax(0))
        loss = objective.loss(samples) if targets.mu == 1 else objective.loss(scaled(samples, targets.mu))
        loss.work.sum().backward()
        found.append(torch.cat([targets.drive, loss.work.detach(), loss.dissipation.detach(), logits.grad]))
    assert torch.allclose(*found, atol=1e-6)
    assert found[0][:4].abs().max() > 0.5


def test_unscored_completions_do_not_count_in_asynchronous_training_either():
    rewards = torch.tensor([1.0, 0.0, torch.nan, 0.5], dtype=torch.float64)
    targets, _ = group_targets(rewards, TruncatedReinforce(FIELDS))
    assert targets.target.tolist() == [0.5, -0.5, 0.0, 0.0]


def scaled(samples, mu):
    return Samples(**{**vars(samples), "mu": mu * samples.mu})


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("alpha", 0.2, "rewards less the mean"),
        ("temperature_range", [0.3, 1.0], "rewards less the mean"),
        ("scale_rewards", "batch", "rewards less the mean"),
        ("mu", 0.3, "nothing pulls"),
        ("ratio_form", "log", "nothing pulls"),
        ("epsilon", 0.1, "not clipped"),
        ("scale_rewards", False, "rewards less the mean"),
    ],
)
def test_fields_without_effect_are_rejected(tmp_path, name, value, text):
    assert TruncatedReinforceConfig(str(tmp_path), use_cpu=True, bf16=False).log_ratio_reduction == "sum"
    with pytest.raises(ValueError, match=rf"^{name}=.* has no effect.*{text}.*Remove `{name}`"):
        TruncatedReinforceConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: value})


def run(folder: Path, **changes) -> Path:
    """A run of the recipe with OPO's fields left out."""
    recipe = yaml.safe_load(RECIPE.read_text())
    fields = {name: value for name, value in recipe.items() if name not in TruncatedReinforceConfig.rejected_fields}
    short = {"report_levels": ["Level 3"], "report_size": 200, "validation_steps": 1000, "max_staleness": 0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**fields, **short, **DEVICE_FIELDS, **changes}))
    assert main(["--config", str(folder / "recipe.yaml")]) == 0
    return Path(changes["output_dir"])


def test_no_value_that_is_rejected_is_filled_in(tmp_path):
    args = TruncatedReinforceConfig(str(tmp_path), use_cpu=True, bf16=False, num_iterations=2, scale_rewards=True)
    assert args.mu is None
    assert "χ²" not in args.describe_policy()


def test_a_rollout_without_rewards_is_an_error(tiny_model, tmp_path):
    class MadeFromScratch(RecordingOPO):
        objective_class = TruncatedReinforce

        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            del rollout["rewards_per_func"]
            return rollout

    with pytest.raises(ValueError, match="no `rewards_per_func`"):
        trained(tiny_model, tmp_path, trainer_class=MadeFromScratch, max_steps=1)


def test_help_has_no_field_that_is_rejected():
    shown = short_help(make_parser("truncated_reinforce"))
    assert "--log_ratio_clamp" in shown
    assert "--alpha" not in shown


def test_a_sample_of_weight_0_has_no_gradient_whatever_it_contains():
    logps = torch.tensor([[0.5], [torch.nan]]).log().requires_grad_()
    samples = table(torch.tensor([0.5, -0.5]), torch.ones(2), torch.tensor([0.4, 0.6]))
    loss = TruncatedReinforce(FIELDS).loss(replace(samples, logps=logps, weights=torch.tensor([1.0, 0.0])))
    loss.work.sum().backward()
    assert loss.weights.tolist() == pytest.approx([1.25, 0])
    assert logps.grad[:, 0].tolist() == pytest.approx([-1.25 * 0.5, 0])


def test_it_learns_from_recorded_completions(tmp_path):
    once = {"num_iterations": 1, "learning_rate": 1e-12, "max_completions": 720, "save_rollouts": True}
    base = run(tmp_path, trainer="opo", output_dir=str(tmp_path / "base"), report_levels=[], **once)
    own = run(
        tmp_path,
        trainer="truncated_reinforce",
        output_dir=str(tmp_path / "own"),
        rollouts=str(base / "rollouts"),
        num_iterations=1,
        max_completions=4 * 720,  # four epochs
        learning_rate=1e-4,
    )
    found = read_json(own / "summary.json")
    before, after = (found[when]["Level 3"]["sampled"]["accuracy"] for when in ("before", "after"))
    assert after > before + 0.15
    assert method_of(read_json(own / "settings.json")).label == "Truncated REINFORCE"
    assert ">Truncated REINFORCE, model arithmetic" in (own / "report.html").read_text().replace("\n", "")
    assert "objective  TruncatedReinforce, log-ratio sum" in (own / "plan.txt").read_text()
    assert "χ²" not in [each.name for each in diagnostics(read_json(own / "settings.json"))]
