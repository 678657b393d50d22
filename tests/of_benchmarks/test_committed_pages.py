"""The committed pages of results come out of the committed records byte for byte."""

import json
import re
import shutil

import pytest

from benchmarks import claims, offline, real_model, saturation, update_phase
from benchmarks.objectives import design, report
from benchmarks.objectives.__main__ import FRESH, RECORD, read


RESULTS = claims.HERE / "results"
PAGES = {
    "claims.md": claims.page,
    "offline.md": lambda: offline.page(offline.read(offline.Run, offline.RECORD)),
    "real_model.md": lambda: real_model.page(real_model.read(real_model.Run, real_model.RECORD)),
    "update_phase.md": lambda: update_phase.page(json.loads(update_phase.RESULTS.read_text())),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_that_of_its_record(name):
    assert PAGES[name]() == (RESULTS / name).read_text()


def test_tables_within_a_page_are_what_the_program_gives():
    page = (RESULTS / "saturation.md").read_text()
    for name, table in saturation.tables().items():
        assert re.findall(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", page, flags=re.DOTALL) == [table]


def test_objectives_are_on_their_pages(tmp_path):
    (tmp_path / "docs").mkdir()
    pages = ("README.md", "docs/objectives.md")
    for page in pages:
        shutil.copy(report.ROOT / page, tmp_path / page)
    found, fresh = read(RECORD), read(FRESH)
    assert fresh.keys() == {*design.of_fresh_seeds(found)}
    report.write_report(found, fresh, tmp_path, tmp_path)
    assert (tmp_path / "objectives.md").read_text() == RECORD.with_suffix(".md").read_text()
    for page in pages:
        assert (tmp_path / page).read_text() == (report.ROOT / page).read_text()


def test_committed_runs_name_no_path_of_the_machine_that_made_them():
    for path in (claims.HERE / "evidence").rglob("*.json"):
        assert '"/' not in path.read_text(), path
