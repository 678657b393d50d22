"""A run's folder from somebody else: reports execute nothing, escape all text, and write only to `--output`."""

import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
from helpers import Bomb
from test_report import CELL, SETTINGS, scripted, text_of, write_run

from opo_trl.checks.files import append_lines, read_json, write_json
from opo_trl.launch.cli import main
from opo_trl.report import run_report
from opo_trl.report.run_report import write_report


SUMMARY = {"before": {"L": {"greedy": CELL}}, "after": {"L": {"greedy": CELL}}, "optimizer_steps": 40}
COMMANDS = ("report", "diagnose", "several")


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run with every file that a report reads, and code in others; reached through the user's link."""
    run = write_run(tmp_path / "elsewhere" / "run", scripted(), SETTINGS, {**SUMMARY, "train_seconds": 61.2})
    for name in ("training_args.bin", "checkpoint-1/optimizer.pt", "completions/completions_00001.parquet"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    for name in ("matplotlib.py", "checkpoint-1/modeling.py", "report.html.j2"):
        (run / name).write_text("{{ 1 / 0 }}")
    (tmp_path / "runs").symlink_to("elsewhere")
    return tmp_path / "runs" / "run"


def status_of(command: str, run: Path, *output: str) -> int:
    """Of a command on the folder; `several` is `report` of it twice, where the second is of another seed."""
    if command != "several":
        return main([command, str(run), *output])
    other = run.parent.parent / "other"
    other.mkdir(exist_ok=True)
    for name in ("settings.json", "summary.json"):
        shutil.copy(run / name, other)
    write_json(other / "settings.json", {**read_json(other / "settings.json"), "seed": 7})
    return main(["report", str(run), str(other), *output])


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_executed_and_nothing_but_the_output_is_written(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(run)
    before = content(run.parent)
    output = tmp_path / ("page.md" if command == "several" else "page.html")
    assert status_of(command, run, "--output", str(output)) == 0
    assert output.is_file()
    assert content(run.parent) == before
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["settings.json", "summary.json", "log.jsonl"])
def test_damaged_file_is_named(run, capsys, name):
    (run / name).write_bytes(b'{"a": [1,\n')
    assert main(["report", str(run)]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("value", ["x", 10**400, float("inf"), None], ids=str)
def test_log_may_hold_any_value(run, value):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (run / "log.jsonl").unlink()
    append_lines(run / "log.jsonl", [{**row, **dict.fromkeys(row.keys() - {"step"}, value)} for row in log[20:]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of a mean of nothing
        assert main(["report", str(run)]) == 0


HOSTILE = "$\\foo$ <b>x</b> \0\x1b[2J\r\u2028\x85\ud83d ![x](http://evil) `" + "`_|"


def test_any_text_can_be_shown(run, tmp_path, capsys):
    texts = {"after": {HOSTILE: {HOSTILE: CELL}}, "before": {"_" + HOSTILE * 50: {"greedy": CELL}}}
    write_json(run / "summary.json", {**read_json(run / "summary.json"), **texts})
    write_json(run / "settings.json", {**SETTINGS, "dataset_name": HOSTILE, "levels": [HOSTILE]})
    (run / "plan.txt").write_text("plan\n\x1b[2J", encoding="utf-8")
    append_lines(run / "log.jsonl", [{"step": 41, HOSTILE: 1.0}])
    run = run.rename(run.parent / "_$\\foo$\n<b>![x](evil)\x1b")
    for command in COMMANDS:
        ending = "md" if command == "several" else "html"
        assert status_of(command, run, "--output", str(tmp_path / f"{command}.{ending}")) == 0
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.*")}
    assert text_of(pages["report.html"]).count("\\x1b[2J") >= 6
    assert "![x](" not in pages["several.md"]
    for page in pages.values():
        assert "<b>" not in page
    for text in (*pages.values(), capsys.readouterr().out):
        assert not {"\0", "\x1b", "\r", "\u2028", "\x85"} & set(text)


def test_report_that_fails_is_told_in_a_line(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("a\nb")

    monkeypatch.setattr(run_report, "page", fail)
    write_report(run)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"The report could not be written: RuntimeError: a b. `opo-trl report {run}` prints it.\n"
