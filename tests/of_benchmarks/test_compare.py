"""`python -m benchmarks.compare`: the report on runs of recipes over seeds."""

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.compare import curves
from benchmarks.compare.__main__ import main
from benchmarks.compare.measures import final, reward
from benchmarks.compare.runs import read_run
from opo_trl.checks.files import append_lines, read_json, read_lines, write_json


RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "evidence" / "experiment2" / "opo" / "seed-1"


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


def edit(folder: Path, file: str = "settings.json", **values):
    write_json(folder / file, {**read_json(folder / file), **values})


def report_of(tmp_path: Path, *inputs: Path, options: tuple[str, ...] = ()) -> str:
    output = tmp_path / "report"
    assert main([*map(str, inputs), "--output", str(output), *options]) == 0
    return (output / "report.md").read_text()


def rows_of(report: str, title: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    table = re.search(rf"^#+ {re.escape(title)}$.*?(^\|.*?)\n\n", report, re.M | re.S).group(1)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line]


@pytest.fixture
def one_figure(monkeypatch):
    """Drawing takes most of a report's time; tests that read its tables need only one figure."""
    monkeypatch.setattr(curves, "CURVES", curves.CURVES[:1])


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("dataset_name", "other/data"), ("temperature", 0.7), ("chat_template_kwargs", {"enable_thinking": False})],
)
def test_run_of_another_task_is_rejected_with_the_field_named(runs, tmp_path, capsys, field, value):
    earlier = read_json(runs / "opo" / "seed-2" / "settings.json")[field]
    for seed in (1, 2, 3):
        edit(runs / "opo" / f"seed-{seed}", **{field: value})
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "not comparable" in said
    expected = f"  {field}: {earlier!r} in grpo, seed 1 and 2 more; {value!r} in opo, seed 1 and 2 more\n"
    assert expected in said
    assert said.count(" in grpo, ") == 1  # nothing else is blamed
    assert not (tmp_path / "report").exists()
