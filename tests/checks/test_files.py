"""Files of a run and of others: nothing is lost, and reading ends with one line that names the file."""

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from opo_trl.checks import errors, files
from opo_trl.checks.errors import report_error
from opo_trl.checks.files import append_lines, read_json, read_lines, read_text, write, write_json, write_lines
from opo_trl.checks.text import printable


# What a tokenizer or a tool can leave in a completion.
HOSTILE = "a\u2028b\u2029c\x85d\x0be\x1cf\ud83dg\rh\r\ni\0j\x1b[2Jk\udc00\u202el" + "😀χ²"


def test_log_survives_a_kill_in_mid_line_and_a_crash_of_the_machine(tmp_path):
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"step": step, "said": "χ²"} for step in range(6)])
    whole = log.read_bytes()
    line = '{"step": 6, "said": "χ²"}'.encode()
    for end in range(1, len(line)):
        log.write_bytes(whole + line[:end])
        assert [line["step"] for line in read_lines(log)] == [0, 1, 2, 3, 4, 5]
    log.write_bytes(whole + b"\0" * 512)
    assert len(read_lines(log)) == 6
    log.write_bytes(line[:9] + b"\n" + whole)
    with pytest.raises(ValueError, match=r"log.jsonl' cannot be read: line 1: "):
        read_lines(log)


def test_completion_of_any_characters_stays_in_its_line(tmp_path):
    log = tmp_path / "completions.jsonl"
    entries = [{"step": step, "completion": HOSTILE} for step in range(4)]
    write_lines(log, entries[:2])
    append_lines(log, entries[2:])
    assert read_lines(log) == entries
    assert len(log.read_text(encoding="utf-8").splitlines()) == 4  # for readers that are less careful


def test_printable_text_can_be_written_and_controls_no_terminal():
    shown = printable(HOSTILE)
    assert shown.encode()
    assert shown.split("\n")[1].isprintable()
    assert shown.endswith("😀χ²")
    assert "\\x1b[2J" in shown


def test_an_error_that_one_process_alone_has_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(errors, "_PATIENCE", 0.2)
    monkeypatch.setenv("RANK", "1")
    began = time.monotonic()
    assert report_error("opo-trl train", ValueError("no GPU here"), debug=False) == 2
    assert time.monotonic() - began > 0.1  # the launcher ends it in this time, if the first process failed, too
    assert capsys.readouterr().err == "opo-trl train: error: no GPU here\n"


def test_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"before": 1})
    circle = {}
    circle["self"] = circle
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, circle)
    with pytest.raises(TypeError), files.replacing(path) as file:
        file.writelines([b"half", None])
    assert read_json(path) == {"before": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["summary.json"]
    assert read_json(tmp_path / "absent.json") == {}


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[1]", b'{"a": ', b'{"a":' * 10**5, b'{"a": ' + b"9" * 10**5], ids=len
)
def test_json_of_another_form_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"summary.json' cannot be read: ") as raised:
        read_json(tmp_path / "summary.json")
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


def test_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "a.json").write_text('{"step": 1}\n', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == read_lines(tmp_path / "a.json")[0] == {"step": 1}


def test_nothing_is_read_without_end_or_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 2**20)
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") == ""
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**40)  # takes no space
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(bytes(10**8), 1))
    for name, read in (("a.json", read_json), ("log.jsonl.gz", read_lines)):
        with pytest.raises(ValueError, match=rf"{name}' cannot be read: it has more than 1,048,576 bytes"):
            read(tmp_path / name)
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1}\n')[:-9])
    with pytest.raises(ValueError, match=r"log.jsonl.gz' cannot be read: Compressed file ended"):
        read_lines(tmp_path / "log.jsonl.gz")
    (tmp_path / "mine").write_text("precious")
    for name in ("report.html", "_report.html.part"):
        (tmp_path / name).symlink_to("mine")
    write(tmp_path / "report.html", "ours")
    assert (tmp_path / "mine").read_text() == "precious"
    assert (tmp_path / "report.html").read_text() == "ours"


def test_error_of_the_disk_names_the_file(tmp_path):
    for path in (tmp_path / "absent" / "x.json", Path("/proc/x.json")):
        with pytest.raises(OSError, match=path.name):
            write(path, "x")
    with pytest.raises(OSError, match=r"No space left on device.*full.json"), files.replacing(tmp_path / "full.json"):
        Path("/dev/full").write_text("x" * 10**6)
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        append_lines(Path("/dev/full"), [json.loads('{"step": 1}')])
