"""The index of the benchmarks: every page, with a command that exists or a commit that its page names."""

import importlib.util
import re
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PLAN = BENCHMARKS / "losses" / "objectives" / "plan.md"


def rows() -> list[tuple[Path, str]]:
    """Page and command of each row."""
    index = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| .* \| \[\w+\]\((.*)\) \| (.*) \|$", index, re.MULTILINE)
    return [(BENCHMARKS / page, command) for page, command in cells]


def test_every_page_is_in_the_index_once():
    pages = set(BENCHMARKS.rglob("*.md")) - {PLAN, BENCHMARKS / "README.md"}
    assert sorted(page for page, _ in rows()) == sorted(pages)


@pytest.mark.parametrize(("page", "command"), rows())
def test_command_exists_or_the_page_names_the_commit(page, command):
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ([\w.]+)", command):
        assert importlib.util.find_spec(module) is not None
    for commit in re.findall(r"^[0-9a-f]{7,8}$", command):
        assert commit in text
