"""The committed evidence: reports come out of the committed runs byte for byte, and settings follow from the sweep."""

import json
from pathlib import Path

import pytest

from benchmarks import (
    balance,
    claims,
    clipping,
    communication,
    evidence,
    group_weights,
    regime,
    regime_design,
    regime_report,
    server_noise,
)
from benchmarks.compare.__main__ import main as compare
from opo_trl.launch.recipe import parse


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", evidence.REPORTS)
def test_report_of_the_committed_runs_is_the_committed_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert compare([*map(str, evidence.REPORTS[name]), "--output", str(tmp_path)]) == 0
    assert files(tmp_path) == files(RESULTS / name)


def test_claims_of_the_committed_runs_are_the_committed_ones(tmp_path):
    claims.write_claims(ROOT / evidence.KEPT, evidence.sweep_table(), tmp_path / "claims.md")
    assert (tmp_path / "claims.md").read_text() == (RESULTS / "claims.md").read_text()


def test_regime_report_of_the_committed_runs_is_the_committed_one(tmp_path):
    regime_report.write_report(regime.read(), tmp_path)
    written = ("regime.md", "regime_reuse.png")
    assert files(tmp_path) == {name: (RESULTS / name).read_bytes() for name in written}


@pytest.mark.parametrize("benchmark", [clipping, communication, server_noise], ids=lambda module: module.__name__)
def test_page_of_the_committed_measurements_is_the_committed_one(benchmark):
    name = benchmark.__name__.rpartition(".")[2]
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    assert benchmark.report(measured) == (RESULTS / f"{name}.md").read_text()


def test_every_seed_of_every_method_is_there():
    for experiment in evidence.COLLECTED:
        methods = evidence.FIELDS_OF_FORMS if experiment == evidence.FORMS else evidence.METHODS
        folders = {path.parent.name: path for path in (ROOT / evidence.KEPT / experiment).glob("*/seed-1")}
        assert folders.keys() == set(methods)
        for method in methods:
            seeds = {path.name for path in folders[method].parent.iterdir()}
            assert seeds == {f"seed-{seed}" for seed in evidence.SEEDS}


def test_weights_of_groups_are_the_committed_ones():
    assert group_weights.main() == group_weights.RESULT.read_text()


def test_balance_of_processes_is_the_committed_one():
    assert balance.main() == (RESULTS / "balance.md").read_text()


def test_learning_rates_are_the_best_of_the_sweep():
    assert evidence.recipe_rates() == evidence.best_rates()


def test_committed_runs_name_no_path_of_the_machine_that_made_them():
    for path in (ROOT / evidence.KEPT).rglob("*.json"):
        assert '"/' not in path.read_text(), path


def test_runs_of_the_regime_map_are_distinct_and_can_be_parsed():
    runs = list(regime.runs())
    assert len({regime.folder(run) for run in runs}) == len(runs)
    for run in runs[:: len(runs) // 40]:
        script, args, *_ = parse(regime.command_line(run))
        assert args.optimizer_steps_per_rollout == run["steps_per_rollout"]
        assert (args.learning_rate, args.seed) == (run["learning_rate"], run["seed"])
        assert script.trainer == regime_design.METHODS[run["method"]]["trainer"]
