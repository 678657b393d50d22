"""Files of a folder that may come from somebody else: nothing outside is read or written, and nothing is lost."""

import gzip
import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from opo_trl.checks import errors, files
from opo_trl.checks.errors import never_fail_to_print, report_error
from opo_trl.checks.files import append_lines, inner_folder, read_json, read_lines, rewind, write, write_json
from opo_trl.checks.text import printable, shortened


# What a tokenizer or a tool can leave in a completion.
HOSTILE = "a\u2028b\u2029c\x85d\x0be\x1cf\ud83dg\rh\r\ni\0j\x1b[2Jk\udc00\u202el" + "😀χ²"


def test_log_survives_a_kill_in_mid_line_and_rewinds_to_a_checkpoint(tmp_path):
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"step": step, "said": "χ²"} for step in range(6)])
    whole = log.read_bytes()
    line = '{"step": 6, "said": "χ²"}'.encode()
    for end in range(1, len(line)):
        log.write_bytes(whole + line[:end])
        assert [line["step"] for line in read_lines(log)] == [0, 1, 2, 3, 4, 5]
    rewind(log, 3)
    append_lines(log, [{"step": 4}])
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4]
    log.write_bytes(log.read_bytes().rstrip() + b"\0" * 512)  # as file systems do when the machine crashes
    assert len(read_lines(log)) == 4
    rewind(log, -1)
    assert log.read_bytes() == b""


@pytest.mark.parametrize("line", [b'{"step": 1, "said": "\xff"}', b'\0{"step": 1}'])
def test_last_line_that_no_kill_has_written_is_an_error(tmp_path, line):
    log = tmp_path / "log.jsonl"
    append_lines(log, [{"step": 0}])
    log.write_bytes(log.read_bytes() + line)
    with pytest.raises(ValueError, match="line 2"):
        read_lines(log)


def test_completion_of_any_characters_stays_in_its_line(tmp_path):
    log = tmp_path / "completions.jsonl"
    entries = [{"step": step, "completion": HOSTILE} for step in range(4)]
    append_lines(log, entries)
    assert read_lines(log) == entries
    assert len(log.read_text(encoding="utf-8").splitlines()) == 4  # for readers that are less careful
    rewind(log, 2)
    assert read_lines(log) == entries[:3]


def test_printable_text_can_be_written_and_controls_no_terminal():
    shown = printable(HOSTILE)
    assert shown.encode()
    assert shown.split("\n")[1].isprintable()
    assert shown.endswith("😀χ²")
    assert "\\x1b[2J" in shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_is_printed_in_any_locale(monkeypatch, encoding):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    never_fail_to_print()
    print(HOSTILE)
    report_error("opo-trl", ValueError(HOSTILE), debug=True)
    sys.stderr.flush()
    assert b"opo-trl: error: a\\u2028b" in sys.stderr.buffer.getvalue()


def test_an_error_that_one_process_alone_has_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(errors, "_PATIENCE", 0.2)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
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


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"3", b'{"a": ', b'{"\xff": 1}', b'{"a":' * 10**5], ids=str)
def test_json_of_another_form_is_named(tmp_path, content):
    for name, read in (("summary.json", read_json), ("log.jsonl", read_lines)):
        (tmp_path / name).write_bytes(content + b"\n" * (name == "log.jsonl" and bool(content)))
        if name == "log.jsonl" and not content:
            assert read(tmp_path / name) == []
            continue
        with pytest.raises(ValueError, match=rf"{name}' cannot be read: ") as raised:
            read(tmp_path / name)
        assert len(str(raised.value)) < 400
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("step", ["1", None, float("nan"), 1.5, -1, 10**30, True, [1]], ids=str)
def test_line_without_a_step_is_named(tmp_path, step):
    append_lines(tmp_path / "log.jsonl", [{"step": 1}, {"step": step}, {"step": 2}])
    with pytest.raises(ValueError, match=r"log.jsonl' cannot be read: line 2: step is .*, not a whole number"):
        read_lines(tmp_path / "log.jsonl")


def test_byte_order_mark_is_skipped(tmp_path):
    for name, read in (("a.json", read_json), ("a.jsonl", lambda path: read_lines(path)[0])):
        (tmp_path / name).write_text('{"step": 1}\n', encoding="utf-8-sig")
        assert read(tmp_path / name) == {"step": 1}


def test_form_names_the_place():
    form = {"a": {"*": [files.SHARE]}, "b?": files.TEXT}
    for content, said in (
        ({}, "it has no 'a'"),
        ({"a": 1}, "a is 1, not a mapping"),
        ({"a": {"x": 1}}, "a.'x' is 1, not a list"),
        ({"a": {"x": [0.5, 2]}}, r"a.'x'\[1\] is 2, not a number from 0 to 1"),
        ({"a": {}, "b": {"c" * 999: 1}}, "b is .*, not text"),
    ):
        with pytest.raises(ValueError, match=f"^{said}$") as raised:
            files._check_form(content, form, "")
        assert len(str(raised.value)) < 300
    files._check_form({"a": {"x": [0.5]}, "b": None, "c": object()}, form, "")


# Folders of somebody else


def links_and_others(folder: Path, outside: Path) -> dict[str, Path]:
    """A link to a file outside, one to nothing, one to endless zeros, a pipe and a folder."""
    for name, target in (("link", outside), ("broken", outside.parent / "absent"), ("zeros", Path("/dev/zero"))):
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def outside(tmp_path) -> Path:
    path = tmp_path / "authorized_keys"
    path.write_text('{"step": 1, "secret": "mine"}\n')
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder reached through a link, which is the user's choice."""
    (tmp_path / "run-1").mkdir()
    (tmp_path / "latest").symlink_to("run-1")
    return tmp_path / "latest"


def test_only_regular_files_are_read(folder, outside):
    readers = (read_json, read_lines, files.read_text, files.tail)
    for name, path in links_and_others(folder, outside).items():
        for read in readers:
            with pytest.raises(ValueError, match=rf"{name}' is (a link|not a regular file)"):
                read(path)
    assert read_json(folder / "link", linked=True) == {"step": 1, "secret": "mine"}  # as in a folder of a model


def test_nothing_is_written_through_a_link(folder, outside):
    before = outside.read_text()
    for name, path in links_and_others(folder, outside).items():
        with pytest.raises(OSError if name == "folder" else ValueError, match=name):
            append_lines(path, [{"step": 2}])
        if name == "folder":
            with pytest.raises(IsADirectoryError, match=name):
                write(path, "ours")
            continue
        write(path, "ours")
        assert path.read_text() == "ours"
        assert not path.is_symlink()
    assert outside.read_text() == before
    assert not (outside.parent / "absent").exists()
    assert len(list(folder.iterdir())) == 5


def test_folder_inside_is_not_a_link(folder, outside):
    (folder / "figures").symlink_to(outside.parent)
    (folder / "file").touch()
    for name in ("figures", "file"):
        with pytest.raises(ValueError, match=f"{name}' is a link or a file, not a folder"):
            inner_folder(folder, name)
    assert inner_folder(inner_folder(folder, "new"), "newer").is_dir()


def test_files_are_read_within_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 2**20)
    monkeypatch.setattr(files, "_MOST_LINES", 1000)
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(ValueError, match=r"a.json' has more than 1,048,576 bytes"):
        read_json(tmp_path / "a.json")
    for content, said in (
        (bytes(10**8), "line 1 is longer than 67,108,864 bytes"),
        (b'{"step": 1}\n' * 10**4, "more than 1,000 lines"),
        ((b'{"step": 1, "x": "%s"}\n' % bytes(10**5).replace(b"\0", b" ")) * 20, "more than 1,048,576 bytes"),
    ):
        (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(content, 1))
        with pytest.raises(ValueError, match=rf"log.jsonl.gz' .*{said}"):
            read_lines(tmp_path / "log.jsonl.gz")
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1}\n')[:-9])
    with pytest.raises(ValueError, match=r"log.jsonl.gz' cannot be read: Compressed file ended"):
        read_lines(tmp_path / "log.jsonl.gz")


def test_error_of_the_disk_names_the_file(tmp_path):
    (tmp_path / "full.json").touch()
    for path in (tmp_path / "absent" / "x.json", Path("/proc/x.json"), tmp_path / ("x" * 300)):
        with pytest.raises(OSError, match=path.name):
            write(path, "x")
    with pytest.raises(OSError, match=r"No space left on device.*full.json"), files.replacing(tmp_path / "full.json"):
        Path("/dev/full").write_text("x" * 10**6)


@pytest.mark.parametrize(
    "value", ["x" * 10_000, ["x"] * 10_000, {"x": ["[" * 300] * 300}, {"x": {"y": "'\"" * 5000}}, "\\'" * 5000]
)
def test_message_shows_the_beginning_of_a_long_value_and_the_fix(value):
    said = shortened(f"field={value!r} isn't allowed, don't set it. Set `field` to 'a' or ['b'].")
    assert said.startswith(f"field={value!r}"[:150])
    assert said.endswith("isn't allowed, don't set it. Set `field` to 'a' or ['b'].")
    assert len(said) <= 1000
