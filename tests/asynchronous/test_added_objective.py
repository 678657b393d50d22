"""A class of a few lines and its registration train in both trainers; plan, report and comparison show it."""

from pathlib import Path

import pytest
import scripted
import yaml
from added_objective import ASYNC_METHOD, METHOD, Cautious
from helpers import EXACT, Recording, Reference, Script, assert_step_equals, norm, relative_error, trained

from opo_trl import OPOTrainer
from opo_trl.checks.files import read_json, read_lines
from opo_trl.methods import METHODS, register
from opo_trl.train import main


RECIPES = Path(__file__).resolve().parents[2] / "recipes"
OF_METHOD = {
    "opo": RECIPES / "arithmetic" / "experiment1" / "opo.yaml",
    "cautious": RECIPES / "arithmetic" / "experiment1" / "opo.yaml",
    "async_cautious": RECIPES / "arithmetic" / "async" / "opo.yaml",
}
SHORT = {
    "accelerate_config": str(RECIPES / "accelerate" / "cpu.yaml"),
    "per_device_train_batch_size": 12,
    "max_steps": 2,
    "validation_steps": 2,
    "validation_size": 2,
    "report_levels": ["Level 4"],
    "report_size": 2,
    "save_strategy": "no",
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    before = list(METHODS)
    register(METHOD)
    register(ASYNC_METHOD)
    yield
    METHODS[:] = before


def half_if_pushed_down(reference: Reference):
    return lambda rollout, row: 0.5 if reference.drive(rollout).target[row] < 0 else 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 2, "steps_per_generation": 4},
        {"max_steps": 8, "steps_per_generation": 4, "num_iterations": 2, "max_staleness": 1, "learning_rate": 0.02},
    ],
    ids=["once", "replay"],
)
def test_gradient_is_that_of_its_formula(tiny_model, tmp_path, options):
    script = Script()
    recorder = type("Recorded", (Recording, METHOD.trainer_class), {})
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=recorder, **options)
    reference = Reference(trainer, script)
    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, reference.step(k, row_weight=half_if_pushed_down(reference)))
    assert relative_error(trainer.steps[0].gradient, reference.step(0).gradient) > 0.1


def test_gradient_in_asynchronous_training_is_that_of_its_formula(tiny_model, tmp_path):
    groups = scripted.conversations(tiny_model, groups=4)
    args = scripted.config(tmp_path)
    rows = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(rows)
    kind = type("Own", (scripted.AsyncOPOTrainer,), {"objective_class": Cautious})
    (step,) = scripted.train(tiny_model, args, rows, kind).recorder.steps
    own, opo = (
        scripted.reference(tiny_model, step.policy, groups, args, row_weight=lambda v, half=half: half if v < 0 else 1)
        for half in (0.5, 1.0)
    )
    assert norm(own.gradient) > 1e-3
    assert relative_error(step.gradient, own.gradient) < EXACT
    assert relative_error(step.gradient, opo.gradient) > 0.1


def test_no_sample_with_a_gradient_is_skipped(tiny_model, tmp_path):
    """As in OPO, only a completion without a target has none."""
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    recorder = type("Recorded", (Recording, METHOD.trainer_class), {})
    trainer = trained(
        tiny_model, tmp_path, script=Script(rewards), trainer_class=recorder, skip_inert_rows=True, max_steps=1
    )
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert entry["opo/frac_skipped"] == 0.5


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of each method, in a folder of its name, with the same seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, recipe in OF_METHOD.items():
        fields = yaml.safe_load(recipe.read_text()) | SHORT | {"trainer": name, "output_dir": str(folder / name)}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(fields))
        assert main(["--config", str(path)]) == 0
    return folder


def test_recipes_name_it_in_both_trainers(runs):
    for name in OF_METHOD:
        assert read_json(runs / name / "settings.json")["trainer"] == name
        assert [line["step"] for line in read_lines(runs / name / "log.jsonl") if "grad_norm" in line] == [1, 2]
    own, plain = (
        [line["grad_norm"] for line in read_lines(runs / name / "log.jsonl") if "grad_norm" in line]
        for name in ("cautious", "opo")
    )
    assert own[0] < 0.95 * plain[0]


@pytest.mark.parametrize(("name", "label"), [(m.name, m.label) for m in (METHOD, ASYNC_METHOD)])
def test_plan_and_report_name_it(runs, name, label):
    plan = (runs / name / "plan.txt").read_text()
    assert plan.startswith(f"{label} training plan\n")
    assert "  objective  Cautious; alpha = 0.4, " in plan
    assert f">{label}, model arithmetic" in (runs / name / "report.html").read_text().replace("\n", "")


def test_plan_of_opo_names_no_class(runs):
    assert "  objective  alpha = 0.4, " in (runs / "opo" / "plan.txt").read_text()


def test_other_methods_keep_their_objective():
    assert OPOTrainer.objective_class is None
    assert METHOD.trainer_class.objective_class is Cautious
    assert METHOD.trainer_class is METHOD.trainer_class
