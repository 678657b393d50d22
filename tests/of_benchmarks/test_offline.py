"""Training on completions that exist already: what each method is given."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks import offline
from opo_trl import OPOConfig
from opo_trl.objective import Samples
from opo_trl.reuse.reading import RECORDED, load_rollouts


@pytest.mark.parametrize("task", offline.TASKS)
def test_recorded_completions_are_rollouts_of_the_base_model(tmp_path, task):
    if task == "spell_backward":
        pytest.importorskip("reasoning_gym", reason="install the extra `gym`")
    if not Path(offline.TASKS[task].base).exists():
        pytest.skip(f"no model in {offline.TASKS[task].base}: run benchmarks.smollm2")
    few = replace(offline.TASKS[task], prompts=4)
    rows = few.record(1)
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = load_rollouts(str(file), offline.GROUP)
    assert len(groups) == 4
    assert all(len(group) == offline.GROUP for group in groups[RECORDED])
    assert all(sample["logprobs"][0] < 0 for group in groups[RECORDED] for sample in group)
    assert rows != few.record(2)


@pytest.mark.parametrize("method", offline.WITHOUT_PULL_BACK)
def test_what_is_not_computed_has_no_gradient_wherever_the_policy_is(method):
    for name, moved in product((method, "OPO"), (-1.0, -0.1, 0.1, 1.0)):
        logps = torch.full((1, 3), moved, requires_grad=True)
        token = {"logps": logps, "anchor_logps": torch.zeros(1, 3), "mask": torch.ones(1, 3).bool()}
        sample = {"target": torch.zeros(1), "mu": torch.full((1,), 0.3), "weights": torch.ones(1)}
        objective = offline.OBJECTIVES[name](OPOConfig(output_dir="unused", use_cpu=True, bf16=False))
        loss = objective.loss(Samples(**token, **sample, age=torch.ones(1), reused=True))
        (loss.work + loss.dissipation).sum().backward()
        assert (logps.grad == 0).all() == (name == method)
