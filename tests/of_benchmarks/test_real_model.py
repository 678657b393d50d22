"""The comparison on a pretrained model: what a run is asked for."""

import pytest

from benchmarks import real_model
from benchmarks.real_model import METHODS, TASKS, Run
from opo_trl.launch.recipe import parse


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
