"""The comparison on a pretrained model: what a run is asked for."""

import pytest

from benchmarks import real_model
from benchmarks.objectives import published
from benchmarks.real_model import METHODS, TASKS, Run
from opo_trl.launch.recipe import parse
from opo_trl.objectives import objective_named


@pytest.mark.parametrize("tuning", [True, False])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_command_line_asks_for_what_the_plan_says(method, task, tuning, tmp_path):
    run = Run(method, task, 2e-5, 3, tuning)
    script, args, _, _ = parse(run.command_line(tmp_path))
    assert script.levels == script.report_levels == [task]
    assert script.dataset_test_split == ("validation" if tuning else "test")
    assert (args.learning_rate, args.seed, args.generation_batch_size) == (2e-5, 3, real_model.COMPLETIONS)
    assert args.max_completions == (384 if tuning else 768)
    assert (args.num_iterations, args.max_staleness) == ((2, 0) if method == "GRPO" else (4, 8))


def test_run_with_lora_differs_from_opos_in_adapters_and_rate(tmp_path):
    with_lora = real_model.WITH_LORA
    whole = parse(Run("OPO", with_lora.task, 1e-5, with_lora.seed, False).command_line(tmp_path))
    script, args, model, _ = parse(with_lora.command_line(tmp_path))
    assert model.use_peft
    assert not whole[2].use_peft
    assert script == whole[0]
    theirs = whole[1].to_dict()
    assert {name for name, value in args.to_dict().items() if value != theirs[name]} == {"learning_rate"}


def test_objectives_are_the_packages_and_those_of_the_ablation(tmp_path):
    """Clip ranges are the recipes', with which these losses run on the other task."""
    for name, loss in real_model.LOSSES.items():
        recipe = parse(Run(name, "addition", 1e-5, 3, False).command_line(tmp_path))[1]
        objective = objective_named(loss)
        assert issubclass(objective, getattr(published, name))
        assert objective.low == objective.high == recipe.epsilon
