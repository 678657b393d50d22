"""The committed page on zero-variance groups in asynchronous training is that of its runs."""

from benchmarks import async_groups


def test_committed_page_is_that_of_the_committed_runs():
    assert set(async_groups.RUNS) <= async_groups.read().keys()
    assert async_groups.PAGE.read_text() == async_groups.page()
