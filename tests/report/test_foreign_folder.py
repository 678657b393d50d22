"""A run's folder from somebody else: reports execute nothing, escape all text, and write only to `--output`."""

import gzip
import json
import os
import pickle
import shutil
import tracemalloc
import warnings
from pathlib import Path

import pytest
from test_report import CELL, SETTINGS, scripted, text_of, write_run

from opo_trl.checks import files
from opo_trl.checks.files import append_lines, read_json, write_json
from opo_trl.command.cli import main
from opo_trl.report import run_report
from opo_trl.report.run_report import write_report


SUMMARY = {"before": {"L": {"greedy": CELL}}, "after": {"L": {"greedy": CELL}}, "optimizer_steps": 40}
COMMANDS = ("report", "diagnose", "several")


@pytest.fixture
def run(bomb, tmp_path) -> Path:
    """A finished run with every file that a report reads, and code in others; reached through the user's link."""
    summary = {**SUMMARY, "train_seconds": 61.2}
    run = write_run(tmp_path / "elsewhere" / "run", scripted(), SETTINGS, summary)
    pickled = pickle.dumps(bomb)
    for name in ("training_args.bin", "checkpoint-1/optimizer.pt", "completions/completions_00001.parquet"):
        file = run / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickled)
    for name in ("matplotlib.py", "checkpoint-1/modeling.py", "report.html.j2"):
        (run / name).write_text("{{ 1 / 0 }}")
    (tmp_path / "runs").symlink_to("elsewhere")
    return tmp_path / "runs" / "run"


def change_json(file: Path, changes: dict) -> None:
    content = read_json(file)
    write_json(file, {**content, **changes})


def status_of(command: str, run: Path, *output: str) -> int:
    """Of a command on the folder; `several` is `report` of it twice, where the second is of another seed."""
    if command != "several":
        return main([command, str(run), *output])
    other = run.parent.parent / "other"
    other.mkdir(exist_ok=True)
    for name in ("settings.json", "summary.json"):
        shutil.copy(run / name, other)
    change_json(other / "settings.json", {"seed": 7})
    return main(["report", str(run), str(other), *output])


def files_below(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Path → time of its last change, and content."""
    below = {}
    for path in folder.rglob("*"):
        if path.is_file():
            below[str(path)] = (path.stat().st_mtime_ns, path.read_bytes())
    return below


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_executed_and_nothing_but_the_output_is_written(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(run)
    before = files_below(run.parent)
    page = "page.md" if command == "several" else "page.html"
    output = tmp_path / page
    assert status_of(command, run, "--output", str(output)) == 0
    assert output.is_file()
    assert files_below(run.parent) == before
    assert not (tmp_path / "harm").exists()


READ = ("settings.json", "summary.json", "log.jsonl", "log.jsonl.gz", "plan.txt")


@pytest.mark.parametrize("name", READ)
def test_no_link_inside_the_folder_is_followed(run, tmp_path, capsys, name):
    private = tmp_path / "private"
    log = run / "log.jsonl"
    if name == "log.jsonl.gz":
        content = log.read_bytes()
        private.write_bytes(gzip.compress(content))
        log.unlink()
    else:
        (run / name).rename(private)
    (run / name).symlink_to(private)
    page = tmp_path / "page.html"
    is_read_by_all = name in ("settings.json", "summary.json")
    for command in COMMANDS if is_read_by_all else ("report", "diagnose"):
        assert status_of(command, run, "--output", str(page)) == 2
        assert f"{name}' is a link" in capsys.readouterr().err
    assert not page.exists()


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_named_and_not_waited_for(run, capsys, name, make):
    for old in {name, name.removesuffix(".gz")}:
        (run / old).unlink(missing_ok=True)
    make(run / name)
    assert main(["report", str(run)]) == 2
    assert f"{name}'" in capsys.readouterr().err


def test_output_is_not_written_through_a_link(run, tmp_path):
    private = tmp_path / "private"
    private.write_text("private")
    page = run / "page.html"
    for path in (page, run / "_page.html.part"):
        path.symlink_to(private)
    assert main(["report", str(run), "--output", str(page)]) == 0
    assert private.read_text() == "private"
    html = page.read_text()
    assert html.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["log.jsonl.gz", "log.jsonl", "settings.json", "summary.json", "plan.txt"])
def test_file_of_any_size_takes_little_memory(run, capsys, monkeypatch, name):
    monkeypatch.setattr(files, "MOST_BYTES", 2**18)
    (run / "log.jsonl").unlink()
    opener = gzip.open if name.endswith(".gz") else open
    with opener(run / name, "wb") as file:
        for _ in range(64):
            file.write(b" " * 2**18)
    tracemalloc.start()
    try:
        assert main(["report", str(run)]) == 2
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 2**23
    finally:
        tracemalloc.stop()
    assert f"{name}' holds more than" in capsys.readouterr().err


def test_lines_have_a_bound(run, capsys, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINES", 39)
    assert main(["report", str(run)]) == 2
    assert "log.jsonl' holds more than 64 MiB or 39 lines" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["settings.json", "summary.json", "log.jsonl"])
@pytest.mark.parametrize("content", [b'{"a": [1,\n', b'{"a":' * 10**5 + b"\n"], ids=["cut short", "deep"])
def test_damaged_file_is_named(run, capsys, name, content):
    (run / name).write_bytes(content)
    assert main(["report", str(run)]) == 2
    assert name in capsys.readouterr().err


def test_file_that_cannot_be_unzipped_is_named(run, capsys):
    (run / "log.jsonl").unlink()
    zipped = gzip.compress(b"{}" * 100)
    cut_short = zipped[:-9]
    of_another_length = zipped[:-4] + b"1234"
    damaged = zipped[:12] + b"\xff" * 9
    for content in (b"no gzip", cut_short, of_another_length, damaged):
        (run / "log.jsonl.gz").write_bytes(content)
        assert main(["report", str(run)]) == 2
        assert "log.jsonl.gz' cannot be unzipped" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["", '"step": "x", ', '"step": null, ', '"step": NaN, ', '"step": [1], '])
def test_entry_without_a_step_is_named(run, capsys, step):
    with (run / "log.jsonl").open("a") as log:
        log.write(f'{{{step}"reward": 1.0}}\n')
    assert main(["report", str(run)]) == 2
    assert "entry 43 has no number as its `step`" in capsys.readouterr().err


FORMS = {
    "settings.json": [{"max_steps": "x"}, {"num_generations": [1]}, {"chi2_radius": "x"}],
    "summary.json": [
        {"after": [1]},
        {"after": {"L": [1]}},
        {"after": {"L": {"greedy": {"accuracy": 0.5}}}},
        {"after": {"L": {"greedy": {**CELL, "low": "x"}}}},
        {"after": {"L": {"greedy": {**CELL, "high": 10**400}}}},
        {"optimizer_steps": "x"},
    ],
}


CASES = [(name, form) for name, forms in FORMS.items() for form in forms]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_values_of_another_form_are_a_sentence(run, capsys, name, changes):
    change_json(run / name, changes)
    assert status_of("report", run) == 2
    files = "settings.json, summary.json, completions.jsonl or the log"
    assert f"In {str(run)!r}, {files} is not as" in capsys.readouterr().err
    assert status_of("several", run) in (0, 2)


def test_secrets_are_not_shown(run, tmp_path, capsys):
    write_json(run / "settings.json", {**SETTINGS, "dataset_name": "https://u:hush@host/x", "hub_token": "hush"})
    (run / "plan.txt").write_text("data  https://u:hush@host/x\n")
    pages = {}
    for command in COMMANDS:
        output = tmp_path / command
        assert status_of(command, run, "--output", str(output)) == 0
        pages[command] = output.read_text()
    for text in (*pages.values(), capsys.readouterr().out):
        assert "hush" not in text
    assert "https://&lt;secret&gt;@host/x" in pages["report"]


@pytest.mark.parametrize("value", ["x", 10**400, float("inf"), None], ids=str)
def test_log_may_hold_any_value(run, value):
    file = run / "log.jsonl"
    lines = file.read_text().splitlines()
    rows = []
    for line in lines[20:]:
        row = json.loads(line)
        row.update(dict.fromkeys(row.keys() - {"step"}, value))
        rows.append(row)
    file.unlink()
    append_lines(file, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of a mean of nothing
        assert main(["report", str(run)]) == 0


HOSTILE = "$\\foo$ <b>x</b> \0\x1b[2J\r\u2028\x85\ud83d ![x](http://evil) `" + "`_|"


def test_any_text_can_be_shown(run, tmp_path, capsys):
    texts = {"after": {HOSTILE: {HOSTILE: CELL}}, "before": {"_" + HOSTILE * 50: {"greedy": CELL}}}
    change_json(run / "summary.json", texts)
    write_json(run / "settings.json", {**SETTINGS, "dataset_name": HOSTILE, "levels": [HOSTILE]})
    (run / "plan.txt").write_text("plan\n\x1b[2J", encoding="utf-8")
    append_lines(run / "log.jsonl", [{"step": 41, HOSTILE: 1.0}])
    run = run.rename(run.parent / "_$\\foo$\n<b>![x](evil)\x1b")
    pages = {}
    for command in COMMANDS:
        ending = "md" if command == "several" else "html"
        output = tmp_path / f"{command}.{ending}"
        assert status_of(command, run, "--output", str(output)) == 0
        pages[command] = output.read_text(encoding="utf-8")
    report = text_of(pages["report"])
    assert report.count("\\x1b[2J") >= 6
    assert "![x](" not in pages["several"]
    for page in pages.values():
        assert "<b>" not in page
    for text in (*pages.values(), capsys.readouterr().out):
        assert not {"\0", "\x1b", "\r", "\u2028", "\x85"}.intersection(text)


def test_report_that_fails_is_told_in_a_line(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("a\nb")

    monkeypatch.setattr(run_report, "page", fail)
    write_report(run)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"The report could not be written: RuntimeError: a b. `opo-trl report {run}` prints it.\n"
