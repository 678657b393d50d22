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
from opo_trl.checks.files import append_lines, read_json, read_lines, write_json


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN = BENCHMARKS / "evidence" / "experiment2" / "opo" / "seed-1"


@pytest.fixture
def runs(tmp_path):
    """Copies of a committed run as three seeds of two methods; the second has 0.1, 0.2 and 0.3 more reward."""
    for label in ("grpo", "opo"):
        for seed in (1, 2, 3):
            better = {"reward": seed / 10, "settings": {"learning_rate": 1e-4}} if label == "opo" else {}
            copy_run(tmp_path / "runs" / label / f"seed-{seed}", seed=seed, **better)
    return tmp_path / "runs"


def copy_run(folder: Path, *, seed: int, reward: float = 0.0, settings: dict | None = None) -> Path:
    """Copy the run, adding `reward` to every reward."""
    folder.mkdir(parents=True)
    for name in ("recipe.yaml", "environment.json", "summary.json"):
        shutil.copy(RUN / name, folder)
    write_json(folder / "settings.json", {**read_json(RUN / "settings.json"), **(settings or {}), "seed": seed})
    key = "rewards/arithmetic_reward/mean"
    rows = [row | ({key: row[key] + reward} if key in row else {}) for row in read_lines(RUN / "log.jsonl.gz")]
    append_lines(folder / "log.jsonl", rows)
    return folder


def report_of(tmp_path: Path, *inputs: Path) -> str:
    output = tmp_path / "report"
    assert main([*map(str, inputs), "--output", str(output)]) == 0
    return (output / "report.md").read_text()


def rows_of(report: str, title: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    table = re.search(rf"^#+ {re.escape(title)}$.*?(^\|.*?)\n\n", report, re.M | re.S).group(1)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line]


@pytest.fixture
def one_figure(monkeypatch):
    """Drawing takes most of a report's time; tests that read its tables need only one figure."""
    monkeypatch.setattr(curves, "CURVES", curves.CURVES[:1])


def test_committed_tables_are_those_of_the_committed_runs(one_figure, tmp_path):
    """Fields and versions, which the rest of the page lists, are those of today's releases."""
    report = report_of(tmp_path, BENCHMARKS / "evidence" / "experiment2")
    committed = (BENCHMARKS / "results" / "experiment2" / "report.md").read_text()
    assert report.partition("## Curves")[0] == committed.partition("## Curves")[0]
    assert rows_of(report, "Every run") == rows_of(committed, "Every run")


def test_report_has_means_differences_and_verdicts(one_figure, runs, tmp_path):
    report = report_of(tmp_path, runs)
    grpo = read_run(runs / "grpo" / "seed-1")
    base = final(reward(grpo), grpo)
    assert report.startswith("# Comparison: grpo, opo\n")
    # Differences 0.1, 0.2, 0.3: t = 4.3027 with 2 degrees of freedom, standard error 0.1/√3.
    mean, half = base + 0.2, 4.302653 * 0.1 / 3**0.5
    assert f"opo (3 seeds): final reward {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]; " in report
    assert "differs from grpo by +0.200 [−0.048, +0.448]: undecided; " in report
    head, grpo, opo = rows_of(report, "Reward")
    assert head[:2] == ["method", "final reward"]
    assert grpo[:2] == ["grpo", f"{base:.3f} ± 0.000"]
    assert opo[:2] == ["opo", f"{base + 0.2:.3f} ± 0.248"]
    difference = rows_of(report.partition("## Differences from grpo")[2], "Reward")[1]
    assert difference == ["final reward", "opo", "+0.200", "[−0.048, +0.448]", "[+0.100, +0.300]", "3", "undecided"]
    assert rows_of(report, "What differs")[1:] == [["learning_rate", "0.0002", "0.0001"]]
    assert len(rows_of(report, "Every run")) == 7


def test_names_are_escaped(one_figure, runs, tmp_path):
    (runs / "opo").rename(runs / "<b>|opo")
    report = report_of(tmp_path, runs)
    assert r"| &lt;b>\|opo | 1 |" in report
    assert "<b>" not in report


def test_only_common_seeds_are_paired(one_figure, runs, tmp_path):
    (runs / "opo" / "seed-3").rename(tmp_path / "moved")
    shutil.rmtree(runs / "grpo" / "seed-1")
    report = report_of(tmp_path, runs)
    difference = rows_of(report.partition("## Differences from grpo")[2], "Reward")[1]
    assert difference == ["final reward", "opo", "+0.200", "–", "–", "1", "undecided"]
    shutil.rmtree(runs / "opo" / "seed-2")
    report = report_of(tmp_path, runs)
    assert "opo has no seed in common with grpo, so there is no difference." in report
    assert rows_of(report.partition("## Differences from grpo")[2], "Reward")[1][2:] == ["–"] * 5


def test_run_of_another_task_is_rejected_with_the_field_named(runs, tmp_path, capsys):
    field, value = "chat_template_kwargs", {"enable_thinking": False}
    for seed in (1, 2, 3):
        file = runs / "opo" / f"seed-{seed}" / "settings.json"
        write_json(file, {**(settings := read_json(file)), field: value})
    earlier = settings[field]
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "not comparable" in said
    expected = f"  {field}: {earlier!r} in grpo, seed 1 and 2 more; {value!r} in opo, seed 1 and 2 more\n"
    assert expected in said
    assert said.count(" in grpo, ") == 1  # nothing else is blamed
    assert not (tmp_path / "report").exists()


# Measures


def measured(*logs: list[dict], **settings) -> Comparison:
    given = {"reward_funcs": ["my.solved"], "generation_batch_size": 48, "steps_per_generation": 2}
    given |= {"num_iterations": 1, "gradient_accumulation_steps": 1, **settings}
    return Comparison(by_label([Run("opo", seed, given, {}, {"after": {}}, log) for seed, log in enumerate(logs)]))


def test_steps_to_80_percent_are_counted_to_the_best_final_reward():
    rewards = (np.linspace(0.2, 0.7, 101), np.clip(np.linspace(0.2, 1.7, 101), 0, 1.0))
    logs = [[{"step": 1 + i, "rewards/solved/mean": value} for i, value in enumerate(each)] for each in rewards]
    found = measured(*logs)
    assert found.target == pytest.approx(0.2 + 0.8 * ((0.6525 + 1) / 2 - 0.2))
    # 0.2 + 0.015·(step − 1), averaged over ten entries, lags 4.5 steps behind: 0.701 at step 1 + 33.4 + 4.5.
    assert [values["steps to 80 %"] for values in found.values.values()] == [None, 39]
    assert found.estimate("opo", "steps to 80 %") is None  # one seed never reaches it


@pytest.mark.parametrize("passes", [1, 8])
def test_runs_with_a_budget_of_completions_are_measured_over_completions(passes):
    """Rollouts of 48 completions, of two optimizer steps per pass; the reward is 0.1 more in each."""
    per_rollout, log = 2 * passes, []
    for step in range(50 * per_rollout):
        log.append({"step": step + 1, "entropy": 0.5 + step % per_rollout})
        if step % per_rollout == 0:
            rollout = step // per_rollout
            log[-1] |= {"rewards/solved/mean": 0.1 * rollout, "completions/generated": 48.0 * (rollout + 1)}
    found = measured(log, num_iterations=passes, max_completions=48 * 50)
    (values,) = found.values.values()
    # The last ten rollouts, of 50, whatever the number of passes.
    assert (found.window, values["final reward"]) == (20 * 24, pytest.approx(4.45))
    assert values["entropy"] == pytest.approx(passes)
    # 80 % of 4.45, with the mean of ten rewards 0.45 behind the last: rollout 41 of 50.
    assert values["completions to 80 %"] == 42 * 48
    assert found.tables()["Cost"] == ["completions to 80 %", "completions"]
