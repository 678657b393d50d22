"""
The pages of benchmarks: they come out of the committed records byte for byte, and the index has each of them, with a
command that exists or a commit that the page names.
"""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.losses import bounds, offline, real_model, stale_pretrained
from benchmarks.losses.objectives import design, report
from benchmarks.losses.objectives.__main__ import FRESH, RECORD, read
from benchmarks.paper import claims, saturation
from benchmarks.paper.recorded_runs import EXPERIMENTS, unpack
from benchmarks.updates import prefetch, update_phase


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PLAN = BENCHMARKS / "losses" / "objectives" / "plan.md"

pytestmark = pytest.mark.pages


def offline_page():
    runs = offline.read(offline.Run, offline.RECORD)
    return offline.page(runs)


def prefetch_page():
    results = json.loads(prefetch.RESULTS.read_text())
    return prefetch.page(results)


def real_model_page():
    runs = real_model.read(real_model.Run, real_model.RECORD)
    return real_model.page(runs)


def update_phase_page():
    results = json.loads(update_phase.RESULTS.read_text())
    return update_phase.page(results)


def bounds_page():
    runs = bounds.read(bounds.Run, bounds.RECORD)
    return bounds.page(runs)


def stale_pretrained_page():
    runs = stale_pretrained.read(stale_pretrained.Run, stale_pretrained.RECORD)
    return stale_pretrained.page(runs)


PAGES = {
    "losses/bounds.md": bounds_page,
    "paper/claims.md": claims.page,
    "losses/offline.md": offline_page,
    "updates/prefetch.md": prefetch_page,
    "losses/real_model.md": real_model_page,
    "losses/stale_pretrained.md": stale_pretrained_page,
    "updates/update_phase.md": update_phase_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_that_of_its_record(name):
    committed = (BENCHMARKS / name).read_text()
    assert PAGES[name]() == committed


def test_tables_within_a_page_are_what_the_program_gives():
    page = (BENCHMARKS / "paper/saturation.md").read_text()
    for name, table in saturation.tables().items():
        tables_of_page = re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", page, flags=re.DOTALL)
        assert tables_of_page == [table]


def test_tables_of_a_page_with_its_own_code_are_what_the_code_prints(monkeypatch, capsys):
    page = (BENCHMARKS / "losses/bounds_checked.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(bounds, "MARGIN", bounds.MARGIN)  # which the code changes
    exec(code, {})
    printed = capsys.readouterr().out.strip().split("\n\n")
    tables = re.findall(r"^\|.*?\|(?=\n\n)", page, flags=re.DOTALL | re.MULTILINE)
    assert printed == tables


def test_objectives_are_on_their_pages(tmp_path):
    (tmp_path / "docs").mkdir()
    pages = ("README.md", "docs/objectives.md")
    for page in pages:
        shutil.copy(report.ROOT / page, tmp_path / page)
    recorded = read(RECORD)
    of_fresh_seeds = read(FRESH)
    assert of_fresh_seeds.keys() == set(design.of_fresh_seeds(recorded))
    report.write_report(recorded, of_fresh_seeds, tmp_path, tmp_path)
    committed_report = RECORD.with_suffix(".md").read_text()
    assert (tmp_path / "objectives.md").read_text() == committed_report
    for page in pages:
        committed = (report.ROOT / page).read_text()
        assert (tmp_path / page).read_text() == committed


def test_committed_runs_name_no_path_of_the_machine_that_made_them(tmp_path):
    for experiment in EXPERIMENTS:
        settings = list(unpack(experiment, tmp_path).rglob("*.json"))
        assert len(settings) >= 45
        for path in settings:
            assert '"/' not in path.read_text(), path


# The index


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
