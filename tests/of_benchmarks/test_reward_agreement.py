"""The published verdicts, and the committed table of agreement with them."""

import logging
import re
from collections import Counter

import pytest

from benchmarks import reward_agreement
from opo_trl.rewards import accuracy


# Argued in benchmarks/results/reward_agreement.md: a missing unit or name on the left side is no error.
ACCEPTED = [
    ("10cm", "10"),
    (r"3.5 \text{gal}", "3.5"),
    (r"2 * 3.5 \text{gal}", "7"),
    ("4 gal", "4"),
    ("x", "y=x"),
    ("y=x", "x"),
]


@pytest.fixture(autouse=True)
def no_logs():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def committed() -> dict[str, list[int]]:
    """Source → numbers of its row."""
    page = reward_agreement.PAGE.read_text(encoding="utf-8")
    block = re.search(r"<!-- agreement -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
    rows = re.findall(r"^\| ([^|]+) \| (\d.*) \|$", block, re.MULTILINE)
    return {source: [int(number) for number in numbers.split(" | ")] for source, numbers in rows}


def test_the_committed_table_is_of_the_committed_verdicts(committed: dict[str, list[int]]):
    verdicts = reward_agreement.published()
    of_source = Counter(verdict["source"] for verdict in verdicts)
    wrong = Counter(verdict["source"] for verdict in verdicts if not verdict["equal"])
    assert {*of_source, "all"} == {*committed} == {*reward_agreement.SOURCES, "all"}
    assert {source: (numbers[0], numbers[3]) for source, numbers in committed.items() if source != "all"} == {
        source: (of_source[source], wrong[source]) for source in of_source
    }
    assert len({(verdict["gold"], verdict["answer"]) for verdict in verdicts}) == len(verdicts) >= 800


def test_few_wrong_answers_are_accepted(committed: dict[str, list[int]], monkeypatch):
    for limit in ("PARSING_LIMIT", "VERIFYING_LIMIT"):
        monkeypatch.setattr(accuracy, limit, 1.0)  # some of them reach both limits
    wrong = [verdict for verdict in reward_agreement.published() if not verdict["equal"]]
    accepted = [(verdict["gold"], verdict["answer"]) for verdict in wrong if reward_agreement.ours(verdict) == 1]
    assert accepted == ACCEPTED
    assert committed["all"][4] == len(ACCEPTED)


@pytest.mark.slow
def test_the_committed_agreement_is_reproduced(committed: dict[str, list[int]]):
    verdicts = reward_agreement.published()
    agreed = Counter(verdict["source"] for verdict in verdicts if reward_agreement.ours(verdict) == verdict["equal"])
    assert agreed == {source: numbers[1] for source, numbers in committed.items() if source != "all"}
