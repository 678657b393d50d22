"""
The GPU benchmarks, on a CPU: the loop of recorded completions, resuming, and tiny runs of everything.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import RecordingOPO, environment, make_trainer, run_to_its_end

from benchmarks.bounds import Held
from benchmarks.gpu import recorded
from benchmarks.record import Limit, measure_missing


ROOT = Path(__file__).resolve().parents[2]

# What `benchmarks/gpu/run.sh` writes, and the number of cases at tiny size.
PARTS = {"update_phase.json": 2}
TRIALS = 7 * 2
REPORTS = 7 * 2 * 2


# Recorded completions


@pytest.fixture(scope="module")
def bench(tiny_model, tmp_path_factory) -> recorded.Bench:
    bench = recorded.Bench(tiny_model, tmp_path_factory.mktemp("recorded"), "tiny")
    bench.record(811)
    return bench


def recorded_groups(bench: recorded.Bench) -> list[dict]:
    text = (bench.output / "recorded-811.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def rows_of_rollouts(group: dict, prompt: str) -> list[dict]:
    """The group as rows of the field `rollouts`, with a log-probability spread evenly over its completion."""
    rows = []
    for ids, logp, reward in zip(group["completions"], group["logps"], group["rewards"], strict=True):
        rows.append(
            {
                "prompt": prompt,
                "completion_ids": ids,
                "logprobs": [logp / len(ids)] * len(ids),
                "temperature": 1.0,
                "reward": reward,
            }
        )
    return rows


def fields_of_form(form: str) -> dict:
    """The fields of OPOTrainer's configuration for a form of the benchmark."""
    if form == "OPO":
        return {}
    bounds = recorded.FORMS[form]
    return {
        "objective": "topr",
        "push": "escort",
        "positive_bounds": list(map(float, bounds.right)),
        "negative_bounds": list(map(float, bounds.wrong)),
    }


class RecordingHeld(RecordingOPO):
    objective_class = Held


@pytest.mark.parametrize("form", recorded.FORMS)
def test_first_gradients_are_those_of_opo_trainer(bench, tiny_model, tmp_path, form):
    groups = recorded_groups(bench)[:2]
    assert [sum(group["rewards"]) for group in groups] == [8, 2]  # one without a push, which OPO pulls back
    rows = []
    for group in groups:
        rows += rows_of_rollouts(group, bench.tokenizer.decode(group["prompt"]))
    lines = [json.dumps(row) + "\n" for row in rows]
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(lines))
    kind = recorded.FORMS[form]
    trainer = make_trainer(
        tiny_model,
        tmp_path / "run",
        trainer_class=RecordingHeld if kind.hinge else RecordingOPO,
        trainer_arguments=dict.fromkeys(("train_dataset", "reward_funcs", "rollout_func")),
        rollouts=str(file),
        num_iterations=4,
        max_steps=4,
        num_generations=recorded.GROUP,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        optim="adamw_torch_fused",
        **fields_of_form(form),
    )
    trainer.train()
    bench.model.load_state_dict(bench.base)
    assert len(trainer.steps) == 4
    run = recorded.Run("few", form, 1e-3, 811, True)
    steps = bench.steps(run, groups)
    # Where the first gradient is rounding, as that of the group that is at its target, Adam's first step is not.
    of_second_step = 0.03 if kind.mu or kind.hinge else 1e-4
    for step, tolerance, _ in zip(trainer.steps, (1e-4, of_second_step), steps, strict=False):
        for name, parameter in bench.model.named_parameters():
            expected = step.gradient[name]
            error = parameter.grad.cpu() - expected
            assert error.norm() <= tolerance * expected.norm(), name


# Everything at tiny size


def test_what_is_measured_stays_and_what_is_missing_is_measured(tmp_path, capsys):
    measured = []
    broken = ["b"]

    def case(name):
        if name == "large":
            raise torch.OutOfMemoryError
        if name in broken:
            raise ValueError(f"no {name}")
        measured.append(name)

    file = tmp_path / "new" / "results.json"
    cases = {name: partial(case, name) for name in ("large", "a", "b", "c")}
    first_cases = {name: cases[name] for name in ("large", "a")}
    measure_missing(file, {"rows": 8}, first_cases, Limit(60))
    measure_missing(file, {"rows": 8}, cases, Limit(0))
    assert measured == ["a"]
    assert "the same command resumes" in capsys.readouterr().out
    results = measure_missing(file, {"rows": 8}, cases, Limit(60))
    assert results["failed"] == {"b": "ValueError: no b"}
    assert measured == ["a", "c"]  # what fails does not stop the others
    broken.clear()
    results = measure_missing(file, {"rows": 8}, cases, Limit(60))
    assert results["failed"] == {}
    assert measured == ["a", "c", "b"]
    results = json.loads(file.read_text())
    assert results["cases"] == {"large": "out of memory", "a": None, "b": None, "c": None}
    assert {"command", "date", "device", "versions"} <= results.keys()
    with pytest.raises(ValueError, match=r"settings=\{'rows': 8\}.*Choose another output"):
        measure_missing(file, {"rows": 4}, cases, Limit(60))


@pytest.mark.slow
def test_everything_runs_to_its_end_on_a_device_within_limits_and_resumes(library, shared, tmp_path):
    command = [shared / "tools" / "fakecuda" / "run.sh", ROOT / "benchmarks" / "gpu" / "run.sh", tmp_path]

    def run(limit: int) -> str:
        options = {"TINY": "1", "LIMIT_SECONDS": str(limit), "PARTS": "checks update_phase online recorded"}
        env = environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0", **options)
        status, printed = run_to_its_end(command, env, limit=900)
        assert status == 0, printed[-6000:]
        return printed

    def read_results() -> dict[str, dict]:
        return {part: json.loads((tmp_path / part).read_text()) for part in PARTS}

    printed = run(0)
    assert printed.count("no time left, the same command resumes") == 4
    assert " passed" in run(3000)
    results = read_results()
    for part, number_of_cases in PARTS.items():
        of_part = results[part]
        assert of_part["failed"] == {}
        assert len(of_part["cases"]) == number_of_cases
        assert of_part["device"].startswith("pretend GPU")
        assert "out of memory" not in of_part["cases"].values()
    for case in results["update_phase.json"]["cases"].values():
        opo = case["OPO"]
        assert 0 < opo["peak_memory"] < 1e9
        assert opo["planned_memory"] > 0
        assert opo["flops"] < case["GRPO"]["flops"]
        assert opo["ratio"]["low"] <= opo["ratio"]["high"]
        assert opo["share_of_peak"] is None  # of a device that is not known
    online = json.loads((tmp_path / "online" / "online.json").read_text())
    assert online["killed"]["status"] == -9
    assert online["resumed"]["status"] == 0
    assert [step for step, _ in online["curve"]] == [0, 8, 16]
    assert online["seconds_per_step"]["update"] > 0
    runs = (tmp_path / "recorded" / "runs.jsonl").read_text()
    assert runs.count("\n") == TRIALS + REPORTS
    assert "passed" not in run(3000)
    assert read_results() == results
