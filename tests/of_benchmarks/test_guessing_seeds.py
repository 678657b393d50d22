"""Learning in the guessing game: the committed page is that of its record, and the documentation quotes it."""

import json
from pathlib import Path

from benchmarks.guessing import RESULTS, report, signed


RECORD = json.loads((RESULTS / "guessing.json").read_text())
DOCS = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def test_page_is_that_of_the_record():
    assert report(RECORD) == (RESULTS / "guessing.md").read_text()


def test_every_seed_has_learned_and_the_documentation_has_the_means():
    page = DOCS.read_text()
    for name in RECORD["runs"][0]["accuracy"]:
        before, after = zip(*(run["accuracy"][name] for run in RECORD["runs"]), strict=True)
        assert all(late > early for early, late in zip(before, after, strict=True))
        means = [100 * sum(values) / len(values) for values in (before, after)]
        assert f"| {means[0]:.1f} % | {means[1]:.1f} % | {signed(means[1] - means[0])} [" in page
