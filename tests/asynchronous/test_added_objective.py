"""A class of a few lines, named by `objective:`, trains in both trainers."""

import scripted
from helpers import EXACT, Recording, Reference, Script, assert_step_equals, norm, relative_error, trained

from opo_trl import OPOTrainer


NAME = "added_objective.Cautious"


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
