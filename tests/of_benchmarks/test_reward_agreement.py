"""The published verdicts, and the committed table of agreement with them."""

import logging
import re
from collections import Counter

import pytest

from benchmarks.rewards import reward_agreement
from opo_trl.rewards import accuracy


# Argued in benchmarks/rewards/reward_agreement.md: a missing unit or name on the left side is no error.
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
    (block,) = re.findall(r"<!-- agreement -->\n(.*?)<!-- end -->", page, re.DOTALL)
    table = {}
    for source, numbers in re.findall(r"^\| ([^|]+) \| (\d.*) \|$", block, re.MULTILINE):
        table[source] = list(map(int, numbers.split(" | ")))
    return table


def by_source(verdicts: list[dict]) -> Counter:
    """Source → number of verdicts."""
    return Counter(verdict["source"] for verdict in verdicts)


def unequal(verdicts: list[dict]) -> list[dict]:
    return [verdict for verdict in verdicts if not verdict["equal"]]


def answer_of(verdict: dict) -> tuple[str, str]:
    return verdict["gold"], verdict["answer"]


def column(committed: dict[str, list[int]], place: int) -> dict[str, int]:
    """Source → number in that column; without the sum over the sources."""
    return {source: numbers[place] for source, numbers in committed.items() if source != "all"}


def test_the_committed_table_is_of_the_committed_verdicts(committed: dict[str, list[int]]):
    verdicts = reward_agreement.published()
    counts = by_source(verdicts)
    assert set(committed) == {*counts, "all"} == {*reward_agreement.SOURCES, "all"}
    assert column(committed, 0) == counts
    assert column(committed, 3) == by_source(unequal(verdicts))
    distinct = set(map(answer_of, verdicts))
    assert len(distinct) == len(verdicts) >= 800


def test_few_wrong_answers_are_accepted(committed: dict[str, list[int]], monkeypatch):
    for limit in ("PARSING_LIMIT", "VERIFYING_LIMIT"):
        monkeypatch.setattr(accuracy, limit, 1.0)  # some of them reach both limits
    wrong = unequal(reward_agreement.published())
    accepted = [answer_of(verdict) for verdict in wrong if reward_agreement.ours(verdict) == 1]
    assert accepted == ACCEPTED
    assert committed["all"][4] == len(ACCEPTED)


@pytest.mark.slow
def test_the_committed_agreement_is_reproduced(committed: dict[str, list[int]]):
    verdicts = reward_agreement.published()
    agreed = [verdict for verdict in verdicts if reward_agreement.ours(verdict) == verdict["equal"]]
    assert by_source(agreed) == column(committed, 1)
