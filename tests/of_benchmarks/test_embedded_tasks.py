"""Learning in the tasks with an embedded model: each page is that of its record, and the documentation quotes it."""

import json
from pathlib import Path

import pytest

from benchmarks.embedded_tasks import RECIPES, RESULTS, TASKS, report, signed


DOCS = Path(__file__).resolve().parents[2] / "docs"
QUOTED = {"guessing": "environments.md", "spelling": "tasks.md"}


@pytest.fixture(params=TASKS)
def task(request) -> str:
    return request.param


@pytest.fixture
def record(task) -> dict:
    return json.loads((RESULTS / f"{task}.json").read_text())


def test_page_is_that_of_the_record(task, record):
    assert report(task, record) == (RESULTS / f"{task}.md").read_text()
    assert [run["seed"] for run in record["runs"]] == [*TASKS[task].seeds]
    assert (RECIPES / TASKS[task].recipe).is_file()


def test_every_seed_has_learned_and_the_documentation_has_the_means(task, record):
    page = (DOCS / QUOTED[task]).read_text()
    for name in record["runs"][0]["accuracy"]:
        before, after = zip(*(run["accuracy"][name] for run in record["runs"]), strict=True)
        assert all(late > early for early, late in zip(before, after, strict=True))
        means = [100 * sum(values) / len(values) for values in (before, after)]
        assert f"| {means[0]:.1f} % | {means[1]:.1f} % | {signed(means[1] - means[0])} [" in page
