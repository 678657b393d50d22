"""The experiment on logs of an agent: its rule, and how often it finds what is there."""

import numpy as np
import pytest

from benchmarks.agents import agent_logs
from benchmarks.agents.agent_logs import ARMS, HELD_OUT, RATES, SEEDS, STARTS, Run, stages


@pytest.mark.parametrize(("mean", "words"), [(5.0, "win more games"), (-5.0, "win fewer games"), (0.1, "undecided")])
def test_verdict_is_that_of_the_interval(mean, words):
    spread = np.linspace(-3, 3, len(SEEDS))
    assert words in agent_logs.verdict(mean + spread)


def test_rule_finds_large_gains_and_seldom_what_is_not_there():
    assert agent_logs.simulate(gain=8, spread=5) > 0.95
    assert agent_logs.simulate(gain=0, spread=5) == pytest.approx(0.025, abs=0.01)


def found_runs(gain: dict[str, float]) -> dict:
    """All trials and reports, where an arm gains so much over the start, most of it at the third rate."""
    found = {run: measured(run, 0.2) for run in STARTS}
    for arm in ARMS:
        while runs := stages(arm).next_runs(found):
            for run in runs:
                share = 1.0 if run.learning_rate == RATES[2] else 0.5
                found[run] = measured(run, 0.2 + share * gain[arm] + run.seed / 1e5)
    return found


def measured(run: Run, won: float) -> dict:
    return {**dict.fromkeys((*agent_logs.KINDS, HELD_OUT, "trained"), won), "seconds": 60.0, "steps": 1}


def test_page_has_the_chosen_rates_and_the_decision():
    found = found_runs({"SFT": 0.2, "rollouts": 0.3, "pivots": 0.5, "online": 0.6})
    page = agent_logs.page(found)
    assert "| pivots less SFT | +30.0 ± 0.0 | +30.0 ± 0.0 |" in page
    assert "| pivots | 0.0005 | 70.7" in page
    assert "**By the rule:** pivots win more games" in page
    assert "Not finished" not in page
    finished = {run: line for run, line in found.items() if run.arm != "online"}
    assert "Not finished: online." in agent_logs.page(finished)
