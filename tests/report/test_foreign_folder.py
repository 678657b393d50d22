"""A run's folder from somebody else, or a damaged one: reports execute nothing, and write only to `--output`."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from test_report import CELL, SETTINGS, Page, scripted, write_run

from opo_trl.checks.files import append_lines, read_json, write_json
from opo_trl.launch.cli import main
from opo_trl.report import run_report
from opo_trl.report.run_report import write_or_say_why


SUMMARY = {"before": {"L": {"greedy": CELL}}, "after": {"L": {"greedy": CELL}}, "optimizer_steps": 40}
COMMANDS = ("report", "diagnose", "several")


class Bomb:
    """Loading its pickle creates a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


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


@pytest.mark.parametrize("name", ["plan.txt", "log.jsonl", "settings.json", "summary.json"])
@pytest.mark.parametrize("target", ["private", "endless", "pipe"])
def test_private_endless_and_waiting_files_are_not_read(run, tmp_path, capsys, name, target):
    (run / name).unlink()
    (tmp_path / "id_rsa").write_text('{"step": 0, "seed": "secret"}')
    if target == "pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(tmp_path / "id_rsa" if target == "private" else "/dev/zero")
    assert main(["report", str(run)]) == 2
    printed = capsys.readouterr()
    assert name in printed.err or name == "settings.json"  # without which it is no run
    assert "secret" not in printed.out + printed.err


@pytest.mark.parametrize("name", ["settings.json", "summary.json", "log.jsonl"])
@pytest.mark.parametrize("damage", [b"", b'{"a": [1,', b"[1, 2]"], ids=range(3))
def test_damaged_file_is_named(run, capsys, name, damage):
    (run / name).write_bytes(damage)
    is_cut = name == "log.jsonl" and damage in (b"", b'{"a": [1,')  # as a kill leaves it
    assert main(["report", str(run)]) == (0 if is_cut else 2)
    error = capsys.readouterr().err
    assert is_cut or (name in error and error.count("\n") == 1)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("settings.json", "levels", [1]),
        ("settings.json", "trainer", []),
        ("settings.json", "num_generations", "many"),
        ("settings.json", "max_steps", {}),
        ("settings.json", "seed", ["x"]),
        ("summary.json", "after", None),
        ("summary.json", "after", 3),
        ("summary.json", "after", {"L": {"greedy": {}}}),
        ("summary.json", "after", {"L": {"greedy": {**CELL, "accuracy": "x"}}}),
        ("summary.json", "after", {"L": {"greedy": {**CELL, "accuracy": 1e400}}}),
        ("summary.json", "train_seconds", [1]),
        ("log.jsonl", "step", "x"),
    ],
)
def test_value_of_another_kind_ends_with_a_line(run, capsys, name, field, value):
    if name.endswith(".json"):
        write_json(run / name, {**read_json(run / name), field: value})
    else:
        append_lines(run / name, [{"step": 41, "reward": 1.0, field: value}])
    for command in COMMANDS:
        status = status_of(command, run)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert (status, error.count("\n")) in ((0, 0), (2, 1)), error


@pytest.mark.parametrize("value", ["x", [1], 10**400, -1e308, True, float("inf"), float("nan"), None], ids=str)
def test_log_may_hold_any_value(run, capsys, value):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for name in sorted({name for row in log for name in row} - {"step"}):
        run_report.judge([{**row, name: value} if name in row and i > 20 else row for i, row in enumerate(log)], {})
    (run / "log.jsonl").unlink()
    append_lines(run / "log.jsonl", [{**row, **dict.fromkeys(row.keys() - {"step"}, value)} for row in log[20:]])
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
    assert Page(pages["report.html"]).text.count("\\x1b[2J") >= 6
    assert "![x](" not in pages["several.md"]
    for page in pages.values():
        assert "<b>" not in page
    for text in (*pages.values(), capsys.readouterr().out):
        assert not {"\0", "\x1b", "\r", "\u2028", "\x85"} & set(text)


def test_report_that_fails_is_told_in_a_line(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("a\nb")

    monkeypatch.setattr(run_report, "render", fail)
    write_or_say_why(run)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"The report could not be written: RuntimeError: a b. `opo-trl report {run}` prints it.\n"
