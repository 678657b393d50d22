"""A run folder from somebody else, or a damaged one: reports, figures and comparisons touch nothing outside of it."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from test_report import CELL, SETTINGS, Page, scripted, write_run

from opo_trl.checks import files
from opo_trl.checks.files import append_lines, read_json, write_json
from opo_trl.launch.cli import main
from opo_trl.report import run_report
from opo_trl.report.run_report import describe, write_or_say_why


SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
SETTINGS = {
    **SETTINGS,
    "reward_funcs": ["arithmetic_reward"],
    "generation_batch_size": 48,
    "steps_per_generation": 2,
    "num_iterations": 1,
    "gradient_accumulation_steps": 1,
}
SUMMARY = {"before": {"L": {"greedy": CELL}}, "after": {"L": {"greedy": CELL}}, "optimizer_steps": 40}
COMMANDS = ("report", "figures", "several")


def foreign(folder: Path) -> Path:
    """A finished run with every file that a report reads."""
    log = [{**row, "rewards/arithmetic_reward/mean": row["reward"]} if "reward" in row else row for row in scripted()]
    run = write_run(folder, log, SETTINGS, {**SUMMARY, "train_seconds": 61.2})
    append_lines(run / "completions.jsonl", [{"step": 0, "prompt": "1+1=", "completion": "2", "reward": 1.0}])
    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return foreign(tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def run(original, tmp_path) -> Path:
    """A copy, reached through a link, which is the user's choice."""
    shutil.copytree(original, tmp_path / "elsewhere" / "run")
    (tmp_path / "runs").symlink_to("elsewhere")
    return tmp_path / "runs" / "run"


@pytest.fixture
def outside(tmp_path) -> Path:
    path = tmp_path / "home" / "id_rsa"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def status_of(command: str, run: Path) -> int:
    """Of a command on the folder; `several` is `report` of it twice, where the second is of another seed."""
    if command != "several":
        return main([command, str(run)])
    other = run.parent / "other"
    if not other.exists():
        other.mkdir()
        for name in ("settings.json", "summary.json"):
            if (run / name).is_file():
                shutil.copy(run / name, other)
        write_json(other / "settings.json", {**read_json(other / "settings.json"), "seed": 7})
    return main(["report", str(run), str(other)])


def said(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert len(error) < 1100
    return error


@pytest.mark.parametrize("command", COMMANDS)
def test_run_behind_a_link_is_read(run, command):
    assert status_of(command, run) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["figures", "report.html", "figures/training.png"])
def test_nothing_outside_is_written(run, outside, command, name):
    place = run / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside if "." in name else outside.parent)
    before = outside.read_bytes()
    assert status_of(command, run) == (2 if name == "figures" and command != "several" else 0)
    assert outside.read_bytes() == before
    assert [path.name for path in outside.parent.iterdir()] == ["id_rsa"]
    for page in run.parent.rglob("report.*"):
        assert page.is_symlink() or SECRET not in page.read_text()


@pytest.mark.parametrize("command", ["figures", "report"])
def test_gigabytes_behind_gzip_are_not_read(run, capsys, monkeypatch, command):
    (run / "log.jsonl").unlink()
    monkeypatch.setattr(files, "LONGEST", 2**20)
    with gzip.open(run / "log.jsonl.gz", "wb", 1) as file:
        file.write(bytes(2**24))
    assert status_of(command, run) == 2
    assert "log.jsonl.gz' cannot be read: it has more than 1,048,576 bytes" in said(capsys)


DAMAGED = {
    "empty": b"",
    "truncated": b'{"a": [1,',
    "null": b"null",
    "list": b"[1, 2]",
    "deep": b'{"a":' * 10**5,
    "digits": b'{"a": ' + b"9" * 10**5 + b"}\n",
}


@pytest.mark.parametrize("name", ["settings.json", "summary.json", "environment.json", "log.jsonl"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_named(run, capsys, name, damage):
    (run / name).write_bytes(DAMAGED[damage] + b"\n" * (damage not in ("empty", "truncated")))
    if name == "log.jsonl" and damage in ("empty", "truncated"):  # as a kill leaves it
        assert main(["report", str(run)]) == 0
        return
    assert main(["report", str(run)]) == 2
    assert name in said(capsys)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, 10**400, 1e308, -1e308, True, float("inf")], ids=str)
def test_log_may_hold_any_value(run, capsys, value):
    names = {name for line in (run / "log.jsonl").read_text().splitlines() for name in json.loads(line)}
    for name in sorted(names - {"step"}):
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        described = [{**row, name: value} if name in row and i > 20 else row for i, row in enumerate(log)]
        run_report.judge(described, SETTINGS)
    (run / "log.jsonl").unlink()
    append_lines(run / "log.jsonl", [{**row, **dict.fromkeys(row.keys() - {"step"}, value)} for row in log[20:]])
    for command in COMMANDS:
        assert status_of(command, run) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


def test_run_that_diverged_is_reported(run):
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    log[-1] |= dict.fromkeys(("reward", "entropy", "grad_norm"), float("inf"))
    (run / "log.jsonl").unlink()
    append_lines(run / "log.jsonl", log)
    assert [status_of(command, run) for command in ("report", "figures")] == [0, 0]


# Texts of others


HOSTILE = "$\\foo$ <b>x</b> \0\x1b[2J\r\u2028\x85\ud83d ![x](http://evil) `" + "`_|"


def test_any_text_can_be_shown(run, capsys):
    texts = {"after": {HOSTILE: {HOSTILE: CELL}}, "before": {"_" + HOSTILE * 50: {"greedy": CELL}}}
    texts["before"][HOSTILE] = {HOSTILE: CELL}
    write_json(run / "summary.json", {**read_json(run / "summary.json"), **texts})
    write_json(run / "settings.json", {**SETTINGS, "dataset_name": HOSTILE, "levels": [HOSTILE]})
    write_json(run / "environment.json", {"devices": [HOSTILE], "packages": {HOSTILE: HOSTILE}})
    (run / "plan.txt").write_text("plan\n\x1b[2J", encoding="utf-8")
    entry = {"prompt": HOSTILE, "completion": [{"content": HOSTILE, "tool_calls": [3, {"function": 1}]}], "reward": 1}
    append_lines(run / "completions.jsonl", [{"step": step, **entry} for step in (0, 1)])
    run = run.rename(run.parent / "_$\\foo$\n<b>![x](evil)\x1b")
    for command in COMMANDS:
        capsys.readouterr()
        assert status_of(command, run) == 0
    markdown = capsys.readouterr().out
    html = (run / "report.html").read_text(encoding="utf-8")
    assert Page(html).text.count("\\x1b[2J") >= 6
    shown = [row["completion"] for sample in describe(run)["samples"] for row in sample["rows"]]
    assert shown == ["2", HOSTILE, HOSTILE]
    assert "evil" in markdown
    for page in (html, markdown):
        assert "<b>" not in page
        assert "![x](" not in page or page != markdown
        assert not {"\0", "\x1b", "\r", "\u2028", "\x85"} & set(page)


def test_matplotlibrc_in_the_current_folder_is_not_obeyed(run, tmp_path):
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    assert status_of("figures", run) == 0
    expected = {path.name: path.read_bytes() for path in (run / "figures").iterdir()}
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 20\nsavefig.bbox: tight\n")
    with mpl.rc_context(fname=tmp_path / "matplotlibrc"):
        assert plt.rcParams["font.size"] == 20
        assert status_of("figures", run) == 0
    assert {path.name: path.read_bytes() for path in (run / "figures").iterdir()} == expected


def test_report_that_fails_is_told_in_a_line(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("a\nb")

    monkeypatch.setattr(run_report, "render", fail)
    write_or_say_why(run)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (
        printed.err == f"The report could not be written: RuntimeError: a b. `opo-trl report {run}` writes it again.\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_errors_of_the_file_system_take_a_line(run, capsys, command):
    if command != "several":
        name = "figures/training.png" if command == "figures" else "report.html"
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir(parents=True)  # where a file belongs
        assert status_of(command, run) == 2
        assert f"Is a directory: '{run / name}'" in said(capsys)
    assert main(["report", "x" * 300]) == 2
    assert "File name too long" in said(capsys)
