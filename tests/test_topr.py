"""`objective: topr`: its gradient with any bounds and push, its fields, and a run on recorded completions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import DEVICE_FIELDS, EXACT, RecordingOPO, Script, norm, relative_error, trained

from benchmarks.objectives.grid import CELLS
from opo_trl import OPOConfig
from opo_trl.asynchronous.targets import group_targets
from opo_trl.checks.files import read_json
from opo_trl.config import ObjectiveConfig
from opo_trl.launch.recipe import read
from opo_trl.methods import method_of
from opo_trl.metrics.step import metrics_of_samples
from opo_trl.objective import Groups, Samples, escort_weights
from opo_trl.objectives import TOPR
from opo_trl.report.diagnostics import diagnostics
from opo_trl.train import main


RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "arithmetic" / "reuse.yaml"
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
    below = low * (1 + (ratio / low).log()) if low else 0 * ratio
    above = high * (1 + (ratio / high).log())
    return torch.where(ratio < low, below, torch.where(ratio > high, above, ratio))


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
        (found,) = torch.autograd.grad(-before @ (loss.work + loss.dissipation), logits, retain_graph=True)
        ratio = policy / before
        objective = torch.where(push > 0, push * potential(ratio, *right), push * potential(ratio, *wrong))
        (expected,) = torch.autograd.grad(before @ objective, logits, retain_graph=True)
        assert torch.allclose(found, expected, atol=1e-12)
        assert expected.norm() > 0.05
        if right == wrong == (0, 2) and size < 1:
            assert ratio.max() < 2
            assert torch.allclose(found, torch.autograd.grad(policy @ push, logits)[0], atol=1e-12)


def groups(rewards, **fields) -> Groups:
    valid = torch.arange(len(rewards)) != 7
    return Groups(**{"advantages": rewards.sign(), "rewards": rewards, "valid": valid, "num_generations": 4} | fields)


def test_pushes_are_rewards_advantages_or_escort_weights():
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(5)).round(decimals=1)
    known = groups(rewards)
    centred = {
        "reward": rewards,
        "advantage": rewards.sign(),
        "escort": escort_weights(rewards.sign(), alpha=0.2, **known.rows),
    }
    for push, given in centred.items():
        options = {"alpha": 0.2} if push == "escort" else {}
        found = topr(push=push, **options).targets(known).target
        for group in range(3):
            rows = slice(4 * group, 4 * group + 4)
            kept, own = known.valid[rows], given[rows]
            assert torch.allclose(found[rows], torch.where(kept, own - own[kept].mean(), 0.0), atol=1e-6)


def test_without_lower_bounds_it_is_the_simplest_form_of_the_ablation():
    """So that the published figures are this objective's."""
    random = torch.Generator().manual_seed(5)
    rewards, before, policy = torch.randn(3, 12, generator=random)
    found = []
    for objective in (topr(**TRUNCATED), CELLS["reward-bounded-none"](ObjectiveConfig(mu=0.3, log_ratio_clamp=20.0))):
        targets, logits = objective.targets(groups(rewards.round())), policy.clone().requires_grad_()
        samples = table(targets.target, logits.softmax(0), before.softmax(0))
        loss = objective.loss(replace(samples, mu=targets.mu * samples.mu))
        loss.work.sum().backward()
        found.append(torch.cat([targets.drive, loss.work.detach(), loss.dissipation.detach(), logits.grad]))
    assert torch.allclose(*found, atol=1e-6)
    assert found[0][:4].abs().max() > 0.5


@pytest.mark.parametrize("push", ["reward", "advantage", "escort"])
def test_nothing_is_pushed_where_all_rewards_are_equal(push):
    """Also where rounding leaves something of the advantages, as for 0.9 in float32."""
    rewards = torch.full((8,), 0.9)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert advantages.any()
    every = torch.ones(8).bool()
    known = Groups(advantages=advantages, rewards=rewards, valid=every, num_generations=8)
    assert not topr(push=push).targets(known).target.any()


def test_unscored_completions_do_not_count_in_asynchronous_training_either():
    rewards = torch.tensor([1.0, 0.0, torch.nan, 0.5], dtype=torch.float64)
    targets, _ = group_targets(rewards, topr())
    assert targets.target.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_sample_of_weight_0_has_no_gradient_whatever_it_contains():
    logps = torch.tensor([[0.5], [torch.nan]]).log().requires_grad_()
    samples = table(torch.tensor([0.5, -0.5]), torch.ones(2), torch.tensor([0.4, 0.6]))
    loss = topr(**TRUNCATED).loss(replace(samples, logps=logps, weights=torch.tensor([1.0, 0.0])))
    loss.work.sum().backward()
    assert loss.weights.tolist() == pytest.approx([1.25, 0])
    assert logps.grad[:, 0].tolist() == pytest.approx([-1.25 * 0.5, 0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mu": 0.3}, r"mu=0\.3 has no effect with objective='topr'.*Remove `mu`"),
        ({"ratio_form": "log"}, r"ratio_form='log' has no effect"),
        ({"alpha": 0.2}, r"alpha=0\.2 has no effect with objective='topr' and push='reward'"),
        ({"scale_rewards": "batch"}, r"scale_rewards='batch' has no effect with objective='topr' and push='reward'"),
        ({"epsilon": 0.1}, r"epsilon=0\.1 has no effect"),
        (
            {"positive_bounds": [2, 1]},
            r"positive_bounds=\[2, 1\] is not allowed.*two numbers, the lower first, the upper above 0",
        ),
        ({"negative_bounds": [0, 0]}, r"negative_bounds=\[0, 0\] is not allowed.*the upper above 0"),
        ({"objective": "opo_trl.objectives.TOPR", "mu": 0.3}, r"mu=0\.3 has no effect with objective='topr'"),
        ({"objective": ".a.b"}, r"objective='\.a\.b' is none of opo, topr.*TypeError"),
        ({"negative_bounds": [-1, 1]}, r"negative_bounds=\[-1, 1\] is not allowed"),
        ({"negative_bounds": [1]}, r"negative_bounds=\[1\] is not allowed"),
        ({"push": "loud"}, r"push='loud' is not allowed. Set `push` to one of escort, reward, advantage"),
        ({"objective": "opo", "push": "escort"}, r"push='escort' has no effect with objective='opo'"),
        ({"objective": "torp"}, r"objective='torp' is none of opo, topr, .* and not the dotted path"),
        ({"objective": "json.loads"}, r"objective='json.loads' is none of opo, topr"),
        ({"objective": "opo_trl.nowhere.Kind"}, r"No module named 'opo_trl.nowhere'"),
    ],
)
def test_wrong_fields_are_named(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says):
        OPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{"objective": "topr", **fields})


def test_trainer_of_older_recipes_is_an_objective(tmp_path):
    (tmp_path / "recipe.yaml").write_text("trainer: truncated_reinforce\n")
    with pytest.raises(ValueError, match=r"truncated_reinforce.*is an objective.*`objective: topr`, `positive_bounds"):
        read(["--config", str(tmp_path / "recipe.yaml")])


def test_a_rollout_without_rewards_is_an_error(tiny_model, tmp_path):
    class MadeFromScratch(RecordingOPO):
        def _generate_and_score_completions(self, inputs):
            rollout = super()._generate_and_score_completions(inputs)
            del rollout["rewards_per_func"]
            return rollout

    with pytest.raises(ValueError, match="no `rewards_per_func`"):
        trained(tiny_model, tmp_path, trainer_class=MadeFromScratch, max_steps=1, objective="topr")


@pytest.mark.parametrize(("objective", "skipped"), [("topr", 0.5), ("opo", 0.0)])
def test_groups_of_equal_rewards_are_not_computed_where_nothing_pulls_them_back(
    tiny_model, tmp_path, monkeypatch, objective, skipped
):
    """In the second pass, when the policy has moved: the gradient is as with them, and χ² that of the others."""
    steps = []

    def noted(samples, *rest, **named):
        steps.append(samples)
        return metrics_of_samples(samples, *rest, **named)

    monkeypatch.setattr("opo_trl.trainer.metrics_of_samples", noted)
    options = {"objective": objective, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.02}
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    with_all, without = (
        trained(
            tiny_model,
            tmp_path / str(skips),
            script=Script(rewards),
            trainer_class=RecordingOPO,
            skip_inert_rows=skips,
            **options,
        )
        for skips in (False, True)
    )
    entries = [entry for entry in without.state.log_history if "grad_norm" in entry]
    assert entries[1]["opo/frac_skipped"] == skipped
    assert entries[1]["opo/frac_masked"] == 0
    everything = steps[1]  # of the second step with all samples
    kept = torch.ones(8).bool() if objective == "opo" else everything.target != 0
    assert kept.sum() == 8 * (1 - skipped)
    assert entries[0]["opo/chi2"] == 0
    moved = everything.log_ratio[kept].expm1().square().mean().item()
    assert moved > 1e-8
    assert entries[1]["opo/chi2"] == pytest.approx(moved, rel=1e-3)
    assert norm(with_all.steps[1].gradient) > 1e-3
    assert relative_error(without.steps[1].gradient, with_all.steps[1].gradient) < EXACT


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"trainer": "opo"}, "OPO"),
        ({"trainer": "opo", "objective": "opo"}, "OPO"),
        ({"trainer": "async_opo"}, "Asynchronous OPO"),
        (
            {"trainer": "opo", "push": "advantage", "positive_bounds": [1.0, 1.0], "negative_bounds": [0.0, 1.0]},
            "TOPR",
        ),
        ({"trainer": "opo", "push": "escort", "positive_bounds": [1.0, 2.0], "negative_bounds": [0.0, 1.0]}, None),
        ({"trainer": "async_opo", "push": "reward"}, None),
        ({"trainer": "opo", "objective": "my_module.Mine"}, None),
    ],
)
def test_reports_name_a_method_only_by_its_own_settings(settings, label):
    objective = {"objective": "topr"} if "push" in settings else {}
    found = method_of({**objective, **settings})
    assert (found and found.label) == label


def run(folder: Path, **changes) -> Path:
    """A run of the recipe; with `topr`, without OPO's fields."""
    recipe = yaml.safe_load(RECIPE.read_text())
    if changes.get("objective") == "topr":
        recipe = {name: value for name, value in recipe.items() if name != "mu"}
    short = {"report_levels": ["Level 3"], "report_size": 200, "validation_steps": 1000, "max_staleness": 0}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **short, **DEVICE_FIELDS, **changes}))
    assert main(["--config", str(folder / "recipe.yaml")]) == 0
    return Path(changes["output_dir"])


def test_it_learns_from_recorded_completions(tmp_path):
    once = {"num_iterations": 1, "learning_rate": 1e-12, "max_completions": 720, "save_rollouts": True}
    base = run(tmp_path, output_dir=str(tmp_path / "base"), report_levels=[], **once)
    own = run(
        tmp_path,
        output_dir=str(tmp_path / "own"),
        rollouts=str(base / "rollouts"),
        num_iterations=1,
        max_completions=4 * 720,  # four epochs
        learning_rate=1e-4,
        **TRUNCATED,
    )
    found = read_json(own / "summary.json")
    before, after = (found[when]["Level 3"]["sampled"]["accuracy"] for when in ("before", "after"))
    assert after > before + 0.15
    assert method_of(read_json(own / "settings.json")).label == "Truncated REINFORCE"
    assert ">Truncated REINFORCE, model arithmetic" in (own / "report.html").read_text().replace("\n", "")
    plan = (own / "plan.txt").read_text()
    assert "objective  TOPR, push reward, ratio within [0, 2] for right and [0, 2] for wrong" in plan
    assert "χ²" not in plan
    assert "χ²" not in [each.name for each in diagnostics(read_json(own / "settings.json"))]
