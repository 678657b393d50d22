"""
The GPU benchmarks, on a CPU: the loop of recorded completions, resuming, and tiny runs of everything.
"""

import json
import sys
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
TRIALS, REPORTS = 7 * 2, 7 * 2 * 2


# Recorded completions


@pytest.fixture(scope="module")
def bench(tiny_model, tmp_path_factory) -> recorded.Bench:
    bench = recorded.Bench(tiny_model, tmp_path_factory.mktemp("recorded"), "tiny")
    bench.record(811)
    return bench


def recorded_groups(bench: recorded.Bench) -> list[dict]:
    return [json.loads(line) for line in (bench.output / "recorded-811.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("form", recorded.FORMS)
def test_first_gradients_are_those_of_opo_trainer(bench, tiny_model, tmp_path, form):
    groups = recorded_groups(bench)[:2]
    assert [sum(group["rewards"]) for group in groups] == [8, 2]  # one without a push, which OPO pulls back
    rows = [
        {
            "prompt": bench.tokenizer.decode(group["prompt"]),
            "completion_ids": ids,
            "logprobs": [logp / len(ids)] * len(ids),
            "temperature": 1.0,
            "reward": reward,
        }
        for group in groups
        for ids, logp, reward in zip(group["completions"], group["logps"], group["rewards"], strict=True)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = recorded.FORMS[form]
    bounds = {"positive_bounds": [*map(float, own.right)], "negative_bounds": [*map(float, own.wrong)]}
    kind = {"objective_class": Held} if own.hinge else {}
    trainer = make_trainer(
        tiny_model,
        tmp_path / "run",
        trainer_class=type("Trainer", (RecordingOPO,), kind),
        trainer_arguments=dict.fromkeys(("train_dataset", "reward_funcs", "rollout_func")),
        rollouts=str(tmp_path / "rollouts.jsonl"),
        num_iterations=4,
        max_steps=4,
        num_generations=recorded.GROUP,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        optim="adamw_torch_fused",
        **({} if form == "OPO" else {"objective": "topr", "push": "escort", **bounds}),
    )
    trainer.train()
    bench.model.load_state_dict(bench.base)
    assert len(trainer.steps) == 4
    steps = bench.steps(recorded.Run("few", form, 1e-3, 811, True), groups)
    # Where the first gradient is rounding, as that of the group that is at its target, Adam's first step is not.
    of_second = 0.03 if own.mu or own.hinge else 1e-4
    for step, tolerance, _ in zip(trainer.steps, (1e-4, of_second), steps, strict=False):
        for name, parameter in bench.model.named_parameters():
            expected = step.gradient[name]
            assert (parameter.grad.cpu() - expected).norm() <= tolerance * expected.norm(), name


# Everything at tiny size


def test_what_is_measured_stays_and_what_is_missing_is_measured(tmp_path, capsys):
    measured, broken = [], ["b"]

    def case(name):
        if name == "large":
            raise torch.OutOfMemoryError
        if name in broken:
            raise ValueError(f"no {name}")
        measured.append(name)

    file, cases = (
        tmp_path / "new" / "results.json",
        {name: lambda name=name: case(name) for name in ("large", "a", "b", "c")},
    )
    first = {name: cases[name] for name in ("large", "a")}
    measure_missing(file, {"rows": 8}, first, Limit(60))
    measure_missing(file, {"rows": 8}, cases, Limit(0))
    assert measured == ["a"]
    assert "the same command resumes" in capsys.readouterr().out
    assert measure_missing(file, {"rows": 8}, cases, Limit(60))["failed"] == {"b": "ValueError: no b"}
    assert measured == ["a", "c"]  # what fails does not stop the others
    broken.clear()
    assert measure_missing(file, {"rows": 8}, cases, Limit(60))["failed"] == {}
    assert measured == ["a", "c", "b"]
    results = json.loads(file.read_text())
    assert results["cases"] == {"large": "out of memory", "a": None, "b": None, "c": None}
    assert {"command", "date", "device", "versions"} <= results.keys()
    with pytest.raises(ValueError, match=r"settings=\{'rows': 8\}.*Choose another output"):
        measure_missing(file, {"rows": 4}, cases, Limit(60))


@pytest.mark.slow
def test_everything_runs_to_its_end_on_a_device_within_limits_and_resumes(library, shared, tmp_path):
    def run(limit: int) -> str:
        options = {"TINY": "1", "LIMIT_SECONDS": str(limit), "PARTS": "checks update_phase online recorded"}
        env = environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="0", **options)
        command = [shared / "tools" / "fakecuda" / "run.sh", ROOT / "benchmarks" / "gpu" / "run.sh", tmp_path]
        status, printed = run_to_its_end(command, env, limit=900)
        assert status == 0, printed[-6000:]
        return printed

    assert run(0).count("no time left, the same command resumes") == 4
    assert " passed" in run(3000)
    results = {part: json.loads((tmp_path / part).read_text()) for part in PARTS}
    for part, cases in PARTS.items():
        found = results[part]
        assert found["failed"] == {}
        assert len(found["cases"]) == cases
        assert found["device"].startswith("pretend GPU")
        assert "out of memory" not in found["cases"].values()
    for case in results["update_phase.json"]["cases"].values():
        assert 0 < case["OPO"]["peak_memory"] < 1e9
        assert case["OPO"]["planned_memory"] > 0
        assert case["OPO"]["flops"] < case["GRPO"]["flops"]
        assert case["OPO"]["ratio"]["low"] <= case["OPO"]["ratio"]["high"]
        assert case["OPO"]["share_of_peak"] is None  # of a device that is not known
    found = json.loads((tmp_path / "online" / "online.json").read_text())
    assert (found["killed"]["status"], found["resumed"]["status"]) == (-9, 0)
    assert [step for step, _ in found["curve"]] == [0, 8, 16]
    assert found["seconds_per_step"]["update"] > 0
    runs = (tmp_path / "recorded" / "runs.jsonl").read_text()
    assert runs.count("\n") == TRIALS + REPORTS
    assert "passed" not in run(3000)
    assert results == {part: json.loads((tmp_path / part).read_text()) for part in PARTS}
