"""`python -m benchmarks.compare`: the report on runs of recipes over seeds."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare import curves
from benchmarks.compare.__main__ import main
from benchmarks.compare.measures import Comparison, final, reward
from benchmarks.compare.runs import Run, by_label, read_run
from benchmarks.paper.recorded_runs import unpack
from opo_trl.checks.files import append_lines, read_json, read_lines, write_json


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    """The folder of Experiment 2's committed runs."""
    return unpack("experiment2", tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def committed_run(experiment) -> Path:
    return experiment / "opo" / "seed-1"


@pytest.fixture
def runs(committed_run, tmp_path):
    """Copies of a committed run as three seeds of two methods; the second has 0.1, 0.2 and 0.3 more reward."""
    for label in ("grpo", "opo"):
        for seed in (1, 2, 3):
            folder = tmp_path / "runs" / label / f"seed-{seed}"
            if label == "opo":
                copy_run(committed_run, folder, seed=seed, reward=seed / 10, learning_rate=1e-4)
            else:
                copy_run(committed_run, folder, seed=seed)
    return tmp_path / "runs"


def copy_run(run: Path, folder: Path, *, seed: int, reward: float = 0.0, **settings) -> None:
    """Copy a run, adding `reward` to every reward."""
    folder.mkdir(parents=True)
    for name in ("recipe.yaml", "environment.json", "summary.json"):
        shutil.copy(run / name, folder)
    committed = read_json(run / "settings.json")
    write_json(folder / "settings.json", {**committed, **settings, "seed": seed})
    rows = read_lines(run / "log.jsonl")
    for row in rows:
        if "rewards/arithmetic_reward/mean" in row:
            row["rewards/arithmetic_reward/mean"] += reward
    append_lines(folder / "log.jsonl", rows)


def report_of(tmp_path: Path, runs: Path) -> str:
    output = tmp_path / "report"
    assert main([str(runs), "--output", str(output)]) == 0
    return (output / "report.md").read_text()


def rows_of(report: str, title: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    table = re.search(rf"^#+ {re.escape(title)}$.*?(^\|.*?)\n\n", report, re.M | re.S)
    rows = []
    for line in table[1].splitlines():
        if "---" not in line:
            cells = line.strip("|").split("|")
            rows.append([cell.strip() for cell in cells])
    return rows


def reward_difference(report: str) -> list[str]:
    """The row of the first metric in the table of differences."""
    _, _, differences = report.partition("## Differences from grpo")
    return rows_of(differences, "Reward")[1]


def without_curves(report: str) -> str:
    tables, _, _ = report.partition("## Curves")
    return tables


@pytest.fixture
def one_curve(monkeypatch):
    """Drawing takes most of a report's time; tests that read its tables need only one curve."""
    monkeypatch.setattr(curves, "CURVES", curves.CURVES[:1])


def test_committed_tables_are_those_of_the_committed_runs(one_curve, experiment, tmp_path):
    """Fields and versions, which the rest of the page lists, are those of today's releases."""
    report = report_of(tmp_path, experiment)
    committed = (BENCHMARKS / "paper" / "experiment2" / "report.md").read_text()
    assert without_curves(report) == without_curves(committed)
    assert rows_of(report, "Every run") == rows_of(committed, "Every run")


def test_report_has_means_differences_and_verdicts(one_curve, runs, tmp_path):
    report = report_of(tmp_path, runs)
    grpo = read_run(runs / "grpo" / "seed-1")
    base = final(reward(grpo), grpo)
    assert report.startswith("# Comparison: grpo, opo\n")
    # Differences 0.1, 0.2, 0.3: t = 4.3027 with 2 degrees of freedom, standard error 0.1/√3.
    mean = base + 0.2
    half_width = 4.302653 * 0.1 / 3**0.5
    assert f"opo (3 seeds): final reward {mean:.3f} [{mean - half_width:.3f}, {mean + half_width:.3f}]; " in report
    assert "differs from grpo by +0.200 [−0.048, +0.448]: undecided; " in report
    head, grpo, opo = rows_of(report, "Reward")
    assert head[:2] == ["method", "final reward"]
    assert grpo[:2] == ["grpo", f"{base:.3f} ± 0.000"]
    assert opo[:2] == ["opo", f"{mean:.3f} ± 0.248"]
    difference = reward_difference(report)
    assert difference == ["final reward", "opo", "+0.200", "[−0.048, +0.448]", "[+0.100, +0.300]", "3", "undecided"]
    _, *fields = rows_of(report, "What differs")
    assert fields == [["learning_rate", "0.0002", "0.0001"]]
    assert len(rows_of(report, "Every run")) == 7


def test_names_are_escaped(one_curve, runs, tmp_path):
    (runs / "opo").rename(runs / "<b>|opo")
    report = report_of(tmp_path, runs)
    assert r"| &lt;b>\|opo | 1 |" in report
    assert "<b>" not in report


def test_only_common_seeds_are_paired(one_curve, runs, tmp_path):
    (runs / "opo" / "seed-3").rename(tmp_path / "moved")
    shutil.rmtree(runs / "grpo" / "seed-1")
    report = report_of(tmp_path, runs)
    assert reward_difference(report) == ["final reward", "opo", "+0.200", "–", "–", "1", "undecided"]
    shutil.rmtree(runs / "opo" / "seed-2")
    report = report_of(tmp_path, runs)
    assert "opo has no seed in common with grpo, so there is no difference." in report
    assert reward_difference(report) == ["final reward", "opo", "–", "–", "–", "–", "–"]


def test_run_of_another_task_is_rejected_with_the_field_named(committed_run, runs, tmp_path, capsys):
    field = "chat_template_kwargs"
    value = {"enable_thinking": False}
    committed = read_json(committed_run / "settings.json")[field]
    for seed in (1, 2, 3):
        file = runs / "opo" / f"seed-{seed}" / "settings.json"
        settings = read_json(file)
        settings[field] = value
        write_json(file, settings)
    output = tmp_path / "report"
    assert main([str(runs), "--output", str(output)]) == 2
    error = capsys.readouterr().err
    assert "not comparable" in error
    assert f"  {field}: {committed!r} in grpo, seed 1 and 2 more; {value!r} in opo, seed 1 and 2 more\n" in error
    assert error.count(" in grpo, ") == 1  # nothing else is blamed
    assert not output.exists()


# Measures


def comparison_of(*logs: list[dict], **settings) -> Comparison:
    """Of runs of one method, with a seed for each log."""
    all_settings = {
        "reward_funcs": ["my.solved"],
        "generation_batch_size": 48,
        "steps_per_generation": 2,
        "num_iterations": 1,
        "gradient_accumulation_steps": 1,
        **settings,
    }
    runs = [Run("opo", seed, all_settings, {}, {"after": {}}, log) for seed, log in enumerate(logs)]
    return Comparison(by_label(runs))


def rising_log(last_reward: float) -> list[dict]:
    """101 steps whose reward rises from 0.2, to at most 1."""
    rewards = np.clip(np.linspace(0.2, last_reward, 101), 0, 1.0)
    return [{"step": step, "rewards/solved/mean": reward} for step, reward in enumerate(rewards, 1)]


def test_steps_to_80_percent_are_counted_to_the_best_final_reward():
    comparison = comparison_of(rising_log(0.7), rising_log(1.7))
    best_final_reward = (0.6525 + 1) / 2
    assert comparison.target == pytest.approx(0.2 + 0.8 * (best_final_reward - 0.2))
    # 0.2 + 0.015·(step − 1), averaged over ten entries, lags 4.5 steps behind: 0.701 at step 1 + 33.4 + 4.5.
    slow, fast = comparison.values.values()
    assert slow["steps to 80 %"] is None
    assert fast["steps to 80 %"] == 39
    assert comparison.estimate("opo", "steps to 80 %") is None  # one seed never reaches it


def log_of_rollouts(passes: int) -> list[dict]:
    """50 rollouts of 48 completions, of two optimizer steps per pass; the reward is 0.1 more in each."""
    steps_per_rollout = 2 * passes
    log = []
    for step in range(50 * steps_per_rollout):
        rollout, step_of_rollout = divmod(step, steps_per_rollout)
        entry = {"step": step + 1, "entropy": 0.5 + step_of_rollout}
        if step_of_rollout == 0:
            entry["rewards/solved/mean"] = 0.1 * rollout
            entry["completions/generated"] = 48.0 * (rollout + 1)
        log.append(entry)
    return log


@pytest.mark.parametrize("passes", [1, 8])
def test_runs_with_a_budget_of_completions_are_measured_over_completions(passes):
    log = log_of_rollouts(passes)
    comparison = comparison_of(log, num_iterations=passes, max_completions=48 * 50)
    (values,) = comparison.values.values()
    # The last ten rollouts, of 50, whatever the number of passes.
    assert comparison.window == 20 * 24
    assert values["final reward"] == pytest.approx(4.45)
    assert values["entropy"] == pytest.approx(passes)
    # 80 % of 4.45, with the mean of ten rewards 0.45 behind the last: rollout 41 of 50.
    assert values["completions to 80 %"] == 42 * 48
    assert comparison.tables()["Cost"] == ["completions to 80 %", "completions"]
