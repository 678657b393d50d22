"""Files of a run: nothing is lost, and an error of reading names the file."""

import os

import pytest
from started_programs import limited_files

from opo_trl.checks.files import append_lines, read_json, read_lines, write, write_json, write_lines
from opo_trl.checks.text import printable


# What a tokenizer or a tool can leave in a completion.
HOSTILE = "a\u2028b\u2029c\x85d\x0be\x1cf\ud83dg\rh\r\ni\0j\x1b[2Jk\udc00\u202el" + "😀χ²"


def test_log_survives_a_kill_in_mid_line_and_a_crash_of_the_machine(tmp_path):
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"step": step, "said": "χ²"} for step in range(6)])
    whole = log.read_bytes()
    line = '{"step": 6, "said": "χ²"}'.encode()
    for end in (1, 9, len(line) - 3):
        cut_line = line[:end]
        log.write_bytes(whole + cut_line)
        entries = read_lines(log)
        assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4, 5]
    log.write_bytes(whole + b"\0" * 512)
    assert len(read_lines(log)) == 6
    cut_line_at_first = line[:9] + b"\n"
    log.write_bytes(cut_line_at_first + whole)
    with pytest.raises(ValueError, match=r"log.jsonl' cannot be read: line 1: "):
        read_lines(log)


def test_completion_of_any_characters_stays_in_its_line_and_controls_no_terminal(tmp_path):
    log = tmp_path / "completions.jsonl"
    entries = [{"step": step, "completion": HOSTILE} for step in range(4)]
    write_lines(log, entries[:2])
    append_lines(log, entries[2:])
    assert read_lines(log) == entries
    lines = log.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4  # for readers that are less careful
    text = printable(HOSTILE)
    assert text.encode()
    _, last_line = text.split("\n")
    assert last_line.isprintable()
    assert text.endswith("😀χ²")
    assert "\\x1b[2J" in text


def test_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"before": 1})
    with limited_files(1000), pytest.raises(OSError, match=r"summary\.json"):
        write(path, "x" * 2000)
    assert read_json(path) == {"before": 1}
    assert os.listdir(tmp_path) == ["summary.json"]
    assert read_json(tmp_path / "absent.json") == {}
    with pytest.raises(OSError, match="absent"):
        write(tmp_path / "absent" / "x.json", "x")


@pytest.mark.parametrize("content", ["", "[1]", '{"a": '])
def test_json_of_another_form_is_named(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=r"summary.json' cannot be read: "):
        read_json(tmp_path / "summary.json")
