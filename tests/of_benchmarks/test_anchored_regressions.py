"""
The neighbours of OPO: the gradient of each is that of its formula, and the committed page is that of its record.

Formulas are computed in float64 from the logits, completion by completion; they share no code with the methods.
"""

import gzip
import json
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from helpers import EXACT, Recording, Reference, Script, in_float64, make_trainer, norm, relative_error, trained

from benchmarks import anchored_methods, anchored_regressions
from benchmarks.anchored_design import CELLS
from benchmarks.anchored_report import difference
from benchmarks.objectives.neighbours import TPO
from opo_trl.methods import by_trainer


METHODS = {method.name: method for method in anchored_methods.METHODS}
TAU = 0.3
# Four groups: an unscored completion, and a zero-variance group.
REWARDS = [0.3, 1.7, 2.2, 0.1, 1.0, None, 0.2, 0.7, 0.5, 0.5, 0.5, 0.5, 3.0, 0.0, 0.4, 1.1]
# Two passes over rollouts of four micro-batches, two optimizer steps each.
PASSES = {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 4}
REPLAY = {**PASSES, "max_staleness": 2, "max_steps": 12}
# Each optimizer step has all of a rollout of two groups.
WHOLE = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 3,
    "plan_micro_batches": False,
}
UNSCALED = {"scale_rewards": "none", "mu": TAU}


def recorded(name: str, model, folder, **options):
    """A trained recorder of a method, and the reference."""
    script = Script(REWARDS)
    recorder = type("Recorded", (Recording, METHODS[name].trainer_class), {})
    trainer = trained(model, folder, script=script, trainer_class=recorder, **{"learning_rate": 0.02, **options})
    return trainer, Reference(trainer, script)


def assert_gradients(trainer, reference, formula):
    """Compare each step's gradient with that of the formula: rows and number of a step → sum of their losses."""
    moved = 0.0
    for number, record in enumerate(trainer.steps):
        policy = {name: tensor.requires_grad_() for name, tensor in in_float64(record.policy).items()}
        rows = [
            row_of(reference, policy, int(k), int(i))
            for b in record.batches
            for k, i in zip(b["rollout"], b["row"], strict=True)
        ]
        total = formula(rows, number) / len(rows)
        gradients = torch.autograd.grad(total, list(policy.values()), allow_unused=True, materialize_grads=True)
        expected = dict(zip(policy, gradients, strict=True))
        assert norm(expected) > 1e-3, "the formula has no gradient: the comparison would prove nothing"
        assert relative_error(record.gradient, expected) < EXACT
        moved = max(moved, *(abs(row.delta.item()) for row in rows))
    assert moved > 0.05, "the policy never left the behaviour policy"


def row_of(reference, policy, rollout: int, index: int) -> SimpleNamespace:
    """What formulas need of a sample; `valid` is whether it has a reward."""
    row, group = reference.script.calls[rollout][index], (rollout, index // reference.G)
    tokens, _ = reference.logps(policy, row)
    anchor = reference.anchor(rollout, index)
    drive = reference.drive(rollout)
    return SimpleNamespace(
        group=group,
        rollout=rollout,
        script_row=row,
        reward=row.rewards[0],
        advantage=drive.advantages[index],
        omega=drive.omega[index],
        target=drive.target[index],
        mu=drive.mu,
        valid=drive.valid[index],
        tokens=tokens,
        token_ratios=tokens - anchor,
        logp=tokens.sum(),
        anchor=anchor.sum(),
        delta=(tokens - anchor).sum(),
        scale=1 / reference.mean_length(rollout),
    )


def mates(reference, row) -> list[float]:
    """Rewards of a sample's complete group, less those that are missing."""
    rollout, group = row.group
    rows = reference.script.calls[rollout][group * reference.G : (group + 1) * reference.G]
    return [r.rewards[0] for r in rows if r.rewards[0] is not None]


def regression(target_of):
    """μ/2·(Δ − target)² of the scored samples."""

    def formula(rows, number):
        return sum(row.scale * row.mu / 2 * (row.delta - target_of(row)) ** 2 for row in rows if row.valid)

    return formula


def of_rewards(reference, loss):
    """Losses of the scored samples, each from the sample and the rewards of its group."""

    def formula(rows, number):
        return sum(loss(row, mates(reference, row)) for row in rows if row.valid)

    return formula


# 1. Other targets


def test_kimi(tiny_model, tmp_path):
    trainer, reference = recorded("Kimi", tiny_model, tmp_path, **PASSES, **UNSCALED)

    def loss(row, rewards):
        mean = sum(rewards) / len(rewards)
        return -row.scale * ((row.reward - mean) * row.logp - TAU / 2 * row.delta**2)

    assert_gradients(trainer, reference, of_rewards(reference, loss))


def test_oapl(tiny_model, tmp_path):
    trainer, reference = recorded("OAPL", tiny_model, tmp_path, **PASSES, **UNSCALED)

    def loss(row, rewards):
        value = TAU * math.log(sum(math.exp(r / TAU) for r in rewards) / len(rewards))
        return row.scale / (2 * TAU) * (TAU * row.delta - (row.reward - value)) ** 2

    assert_gradients(trainer, reference, of_rewards(reference, loss))


def test_target_normalized_in_the_log(tiny_model, tmp_path):
    trainer, reference = recorded("LogNormalized", tiny_model, tmp_path, **PASSES, chi2_radius=1.0)
    means = {}
    for k in range(len(trainer.rollouts)):
        drive = reference.drive(k)
        for start in range(0, 16, 4):
            kept = [drive.target[i] for i in range(start, start + 4) if drive.valid[i]]
            means[k, start // 4] = math.log(sum(map(math.exp, kept)) / len(kept))
    assert_gradients(trainer, reference, regression(lambda row: row.target - means[row.group]))
    made = trainer.rollouts[0]
    assert made.opo_target[:4].exp().mean().item() == pytest.approx(1, abs=1e-5)
    assert made.opo_target[made.opo_valid][4:7].exp().mean().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(("name", "shift"), [("Lowered", -0.5), ("Raised", 0.5)])
def test_shifted_target(tiny_model, tmp_path, name, shift):
    trainer, reference = recorded(name, tiny_model, tmp_path, **PASSES)
    assert_gradients(trainer, reference, regression(lambda row: row.target + shift))


def test_algorithm_1(tiny_model, tmp_path):
    trainer, reference = recorded("Algorithm1", tiny_model, tmp_path, **PASSES)

    def formula(rows, number):
        return sum(row.scale * (-row.omega * row.delta + row.mu / 2 * row.delta**2) for row in rows if row.valid)

    assert_gradients(trainer, reference, formula)


def test_linear_drive_has_the_radius(tiny_model, tmp_path):
    trainer, reference = recorded("Kimi", tiny_model, tmp_path, **PASSES, scale_rewards="none", chi2_radius=3.0)
    made = trainer.rollouts[0]
    kept = made.opo_target[made.opo_valid]
    assert kept.square().mean().item() == pytest.approx(3.0, rel=1e-5)
    mu = made.opo_mu[0].item()

    def formula(rows, number):
        return sum(row.scale * (mu / 2 * row.delta**2 - row.advantage * row.delta) for row in rows if row.valid)

    assert_gradients(trainer, reference, formula)


# 2. Losses of whole groups


def groups_of(rows) -> list[list[SimpleNamespace]]:
    found = defaultdict(list)
    for row in rows:
        if row.valid:
            found[row.group].append(row)
    return list(found.values())


def test_rebel(tiny_model, tmp_path):
    trainer, reference = recorded("REBEL", tiny_model, tmp_path, **WHOLE, **UNSCALED, max_steps=3)

    def formula(rows, number):
        total = 0.0
        for group in groups_of(rows):
            for one in group:
                for other in group:
                    wanted = (one.reward - other.reward) / TAU
                    error = one.delta - other.delta - wanted
                    total += one.scale * TAU / (4 * len(group)) * error**2
        return total

    assert_gradients(trainer, reference, formula)


def test_tpo(tiny_model, tmp_path):
    trainer, reference = recorded("TPO", tiny_model, tmp_path, **WHOLE, mu=1.0, max_steps=3)

    def formula(rows, number):
        total = 0.0
        for group in groups_of(rows):
            q = torch.stack([row.anchor + row.advantage for row in group]).softmax(0)
            p = torch.stack([row.logp for row in group]).softmax(0)
            total -= group[0].scale * (q * p.log()).sum()
        return total

    assert_gradients(trainer, reference, formula)


@pytest.mark.parametrize("name", ["REBEL", "TPO"])
def test_divided_groups_are_rejected(tiny_model, tmp_path, name):
    recorder = type("Recorded", (Recording, METHODS[name].trainer_class), {})
    with pytest.raises(ValueError, match=r"plan_micro_batches=True divides groups.*Set `plan_micro_batches` to False"):
        make_trainer(tiny_model, tmp_path, trainer_class=recorder)
    with pytest.raises(ValueError, match=r"steps_per_generation=4 divides groups"):
        make_trainer(tiny_model, tmp_path, trainer_class=recorder, plan_micro_batches=False, steps_per_generation=4)


# 3. Other anchors and weights


def test_behaviour_policy_as_the_anchor_of_replayed_completions(tiny_model, tmp_path):
    trainer, reference = recorded("Unweighted", tiny_model, tmp_path, **REPLAY)
    assert any(row.rollout != number // 4 for number, record in enumerate(trainer.steps) for row in replayed(record))
    assert_gradients(trainer, reference, regression(lambda row: row.target))


def replayed(record) -> list[SimpleNamespace]:
    return [SimpleNamespace(rollout=int(k)) for batch in record.batches for k in batch["rollout"]]


@pytest.mark.parametrize(
    ("name", "bound", "target_of"),
    [
        ("LatestAnchor", 2.0, lambda row: row.target),
        ("UnweightedLatestAnchor", None, lambda row: row.target),
        ("LatestLinear", 2.0, lambda row: row.advantage / row.mu),
        ("LatestWithoutProjection", 2.0, lambda row: row.omega / row.mu),
    ],
)
@pytest.mark.parametrize("regime", [PASSES, REPLAY])
def test_latest_policy_as_anchor(tiny_model, tmp_path, name, bound, target_of, regime):
    trainer, reference = recorded(name, tiny_model, tmp_path, **regime, scale_rewards="none")

    def formula(rows, number):
        total = 0.0
        first = None if number % 4 < 2 else in_float64(trainer.steps[number - number % 2].policy)  # of a later pass
        for row in rows:
            if row.valid:
                since = torch.zeros(())
                if first is not None:
                    with torch.no_grad():
                        since = reference.logps(first, row.script_row)[0].sum() - row.anchor
                weight = 1.0 if bound is None else min(math.exp(since.item()), bound)
                total += weight * row.scale * row.mu / 2 * (row.delta - since - target_of(row)) ** 2
        return total

    assert_gradients(trainer, reference, formula)


# 4. Masks


def test_m2po(tiny_model, tmp_path):
    trainer, reference = recorded("M2PO", tiny_model, tmp_path, **WHOLE, max_steps=3)
    left_out = []

    def formula(rows, number):
        ratios = sorted(x**2 for row in rows if row.valid for x in row.token_ratios.tolist())
        number = len(ratios)
        while number and sum(ratios[:number]) / number > 0.04:
            number -= 1
        left_out.append(len(ratios) - number)
        limit = ratios[number - 1]
        total = 0.0
        for row in rows:
            if row.valid:
                kept = row.token_ratios.detach() ** 2 <= limit
                total -= row.scale * row.advantage * row.token_ratios[kept].exp().sum()
        return total

    assert_gradients(trainer, reference, formula)
    assert left_out[0] == 0
    assert left_out[-1] > 0


# 5. The runs


def test_each_run_brings_the_method_that_it_names():
    runs = [cell.run(1) for cell in CELLS]
    assert METHODS["TPO"].trainer_class.objective_class is TPO
    for run in runs:
        assert run.fields["trainer"] in {*by_trainer(), *(method.name for method in run.methods)}
    assert len({run.folder for run in runs}) == len(CELLS)


def test_page_and_figure_are_those_of_the_record(tmp_path):
    anchored_regressions.report(tmp_path)
    for name in ("anchored_regressions.md", "anchored_regressions.png"):
        assert (tmp_path / name).read_bytes() == (anchored_regressions.RESULTS / name).read_bytes()


def test_rows_are_those_of_the_cells():
    record = json.loads(gzip.decompress(anchored_regressions.RECORD.read_bytes()))
    cells = [(cell.regime, cell.part, cell.name) for cell in CELLS]
    assert list(dict.fromkeys((run["regime"], run["part"], run["name"]) for run in record["runs"])) == cells


def test_differences_are_paired_by_seed():
    def run(seed, accuracy):
        return {"seed": seed, "points": [{"sampled": 0.5}, {"sampled": accuracy}]}

    baseline = [run(1, 0.7), run(2, 0.8), run(3, 0.75)]
    assert difference([run(1, 0.71), run(3, 0.77)], baseline, "sampled") == "+1.5 ± 6.4"
    higher = [run(1, 0.71), run(2, 0.81), run(3, 0.765)]
    assert difference(higher, baseline, "sampled") == "+1.2 ± 0.7 ▲"


def test_end_of_a_run_is_its_last_quarter():
    assert anchored_regressions.at_the_end([9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 1.0, 2.0]) == 1.5
    assert anchored_regressions.at_the_end([None] * 8) is None
