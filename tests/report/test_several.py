"""`opo-trl report RUN RUN …`: runs of recipes as methods over seeds, in one table."""

import shutil
from pathlib import Path

import pytest
from test_report import CELL, SETTINGS, scripted, write_run

from opo_trl.checks.files import read_json, write_json
from opo_trl.command.cli import main


def cell(accuracy: float) -> dict:
    return {**CELL, "accuracy": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}


@pytest.fixture
def make(tmp_path):
    """Make a finished run of a method with a seed and an accuracy."""

    def make_run(method: str, seed: int, accuracy: float, **settings) -> Path:
        summary = {"after": {"L": {"greedy": cell(accuracy), "sampled": cell(0.5)}}}
        folder = tmp_path / method / f"seed-{seed}"
        return write_run(folder, scripted(), {**SETTINGS, **settings, "seed": seed}, summary)

    return make_run


def table(capsys, *runs: Path) -> dict[str, list[str]]:
    """Title of a row → its cells."""
    assert main(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    rows = {}
    for line in printed.splitlines():
        title, *cells = line.strip("|\n").split(" | ")
        rows[title.strip()] = [cell.strip(" |") for cell in cells]
    return rows


def test_seeds_are_paired_and_only_fields_that_differ_are_shown(make, capsys):
    grpo = [make("grpo", seed, 0.6, mu=0.3) for seed in (1, 2, 3)]
    opo = [make("opo", seed, 0.6 + seed / 10, mu=0.1) for seed in (3, 1, 2)]
    rows = table(capsys, *grpo, *opo)
    first_of_grpo = str(grpo[0])
    first_of_opo = str(opo[0])
    assert rows[""] == [first_of_grpo, first_of_opo]
    assert rows["seeds"] == ["1, 2, 3", "3, 1, 2"]
    assert rows["mu"] == ["0.3", "0.1"]
    assert "output_dir" not in rows
    assert "num_generations" not in rows
    # Differences 10, 20 and 30 points: t = 4.3027 with 2 degrees of freedom, standard error 10/√3.
    assert rows["L, greedy"] == ["60.0 ± 0.0 %", "80.0 ± 24.8 %"]
    assert rows[f"L, greedy, less {first_of_grpo}"] == ["", "+20.0 ± 24.8 points"]
    assert rows[f"L, sampled, less {first_of_grpo}"] == ["", "+0.0 ± 0.0 points"]


def test_single_runs_have_the_interval_of_their_problems(make, capsys):
    one = make("one", 1, 0.6, mu=0.3)
    two = make("two", 1, 0.5, mu=0.1)
    three = make("three", 2, 0.5, mu=1.0)
    rows = table(capsys, one, two, three)
    assert rows["L, greedy"][0] == "60.0 % [50.0, 70.0]"
    assert rows[f"L, greedy, less {one}"] == ["", "−10.0 points (one seed)", "no common seed"]


def test_what_cannot_be_compared_is_named(make, tmp_path, capsys):
    run = make("opo", 1, 0.6)
    same = shutil.copytree(run, tmp_path / "again")
    assert main(["report", str(run), str(same)]) == 2
    assert "has several runs of seed 1. Leave one of them out." in capsys.readouterr().err
    accuracies = read_json(run / "summary.json")["after"]
    write_json(same / "summary.json", {"before": accuracies})
    assert main(["report", str(run), str(same)]) == 2
    assert f"{str(same)!r} is not the folder of a finished run" in capsys.readouterr().err
