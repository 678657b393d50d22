"""Training on completions that exist already: what each method is given."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.losses import offline
from opo_trl import OPOConfig
from opo_trl.objective import Samples
from opo_trl.reuse.reading import RECORDED, load_rollouts


@pytest.mark.parametrize("task", offline.TASKS)
def test_recorded_completions_are_rollouts_of_the_base_model(tmp_path, task):
    if task == "spell_backward":
        pytest.importorskip("reasoning_gym", reason="install the extra `gym`")
    base = offline.TASKS[task].base
    if not Path(base).exists():
        pytest.skip(f"no model in {base}: run benchmarks.models.smollm2")
    few = replace(offline.TASKS[task], prompts=4)
    rows = few.record(1)
    lines = [json.dumps(row) + "\n" for row in rows]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(lines))
    groups = load_rollouts(str(file), offline.GROUP)
    assert len(groups) == 4
    for group in groups[RECORDED]:
        assert len(group) == offline.GROUP
        for completion in group:
            assert completion["logprobs"][0] < 0
    assert rows != few.record(2)


def gradient_at(name, log_ratio):
    """The gradient by the log-probabilities of a completion of three tokens with a target of 0."""
    args = OPOConfig(output_dir="unused", use_cpu=True, bf16=False)
    logps = torch.full((1, 3), log_ratio, requires_grad=True)
    samples = Samples(
        logps=logps,
        anchor_logps=torch.zeros(1, 3),
        mask=torch.ones(1, 3, dtype=torch.bool),
        target=torch.zeros(1),
        mu=torch.full((1,), 0.3),
        weights=torch.ones(1),
        age=torch.ones(1),
        reused=True,
    )
    objective = offline.OBJECTIVES[name](args)
    loss = objective.loss(samples)
    total = (loss.work + loss.dissipation).sum()
    total.backward()
    return logps.grad


@pytest.mark.parametrize("method", offline.WITHOUT_PULL_BACK)
def test_what_is_not_computed_has_no_gradient_wherever_the_policy_is(method):
    for log_ratio in (-1.0, -0.1, 0.1, 1.0):
        assert not gradient_at(method, log_ratio).any()
        assert gradient_at("OPO", log_ratio).any()
