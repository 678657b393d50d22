"""A class of a few lines, named by `objective:`, trains in both trainers; plan and report show it."""

from pathlib import Path

import scripted
import yaml
from helpers import EXACT, Recording, Reference, Script, assert_step_equals, norm, relative_error, trained

from opo_trl import OPOTrainer
from opo_trl.checks.files import read_lines
from opo_trl.train import main


NAME = "added_objective.Cautious"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHORT = {
    "accelerate_config": str(RECIPES / "accelerate" / "cpu.yaml"),
    "objective": NAME,
    "per_device_train_batch_size": 12,
    "max_steps": 2,
    "validation_size": 2,
    "report_levels": ["Level 4"],
    "report_size": 2,
    "save_strategy": "no",
}


def test_gradient_is_that_of_its_formula(tiny_model, tmp_path):
    script = Script()
    recorder = type("Recorded", (Recording, OPOTrainer), {})
    options = {"max_steps": 8, "steps_per_generation": 4, "num_iterations": 2, "max_staleness": 1}
    options |= {"learning_rate": 0.02, "objective": NAME}
    trainer = trained(tiny_model, tmp_path, script=script, trainer_class=recorder, **options)
    reference = Reference(trainer, script)

    def half_if_pushed_down(rollout, row):
        return 0.5 if reference.drive(rollout).target[row] < 0 else 1.0

    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, reference.step(k, row_weight=half_if_pushed_down))
    assert relative_error(trainer.steps[0].gradient, reference.step(0).gradient) > 0.1


def test_gradient_in_asynchronous_training_is_that_of_its_formula(tiny_model, tmp_path):
    groups = scripted.conversations(tiny_model, groups=4)
    args = scripted.config(tmp_path, objective=NAME)
    rows = scripted.samples(groups, args)
    args.per_device_train_batch_size = len(rows)
    (step,) = scripted.train(tiny_model, args, rows).recorder.steps
    own, opo = (
        scripted.reference(tiny_model, step.policy, groups, args, row_weight=lambda v, half=half: half if v < 0 else 1)
        for half in (0.5, 1.0)
    )
    assert norm(own.gradient) > 1e-3
    assert relative_error(step.gradient, own.gradient) < EXACT
    assert relative_error(step.gradient, opo.gradient) > 0.1


def test_recipes_name_it(tmp_path):
    fields = (
        yaml.safe_load((RECIPES / "arithmetic/async/opo.yaml").read_text())
        | SHORT
        | {"output_dir": str(tmp_path / "run")}
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
    assert main(["--config", str(tmp_path / "recipe.yaml")]) == 0
    assert len([line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]) == 2
    assert "  objective  Cautious, " in (tmp_path / "run" / "plan.txt").read_text()
