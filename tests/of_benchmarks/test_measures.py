"""Measures of runs, and how they are drawn and written."""

import numpy as np
import pytest

from benchmarks.compare.measures import Comparison
from benchmarks.compare.report import _estimate, number
from benchmarks.compare.runs import Run, by_label


def make_run(rows: list[dict], label: str = "opo", seed: int = 1, **summary) -> Run:
    settings = {"reward_funcs": ["my.solved"], "generation_batch_size": 48, "steps_per_generation": 2}
    settings |= {"num_iterations": 1, "gradient_accumulation_steps": 1}
    return Run(label, seed, settings, environment={}, summary={"after": {}, **summary}, log=rows)


def rewards(values, every: int = 1) -> list[dict]:
    return [{"step": 1 + every * i, "rewards/solved/mean": value} for i, value in enumerate(values)]


def measured(*runs: Run):
    return Comparison(by_label(runs))


def test_final_reward_is_the_mean_of_the_last_twenty_steps():
    run = make_run([*rewards([0.0] * 20 + [0.5] * 10, every=2), {"step": 59, "grad_norm": 1.0}])
    values = measured(run).values[run.name]
    assert values["final reward"] == 0.5  # steps 40 to 59: the ten rollouts at 41, 43, …, 59
    assert values["mean reward"] == pytest.approx(10 * 0.5 / 30)


def test_steps_to_80_percent_are_counted_from_the_base_model_to_the_best_final_reward():
    slow, fast = np.linspace(0.2, 0.7, 101), np.clip(np.linspace(0.2, 1.7, 101), 0, 1.0)
    result = measured(make_run(rewards(slow), "slow"), make_run(rewards(fast), "fast"))
    assert result.target == pytest.approx(0.2 + 0.8 * 0.8)
    # 0.2 + 0.015·(step − 1), averaged over ten entries, lags 4.5 steps behind: 0.84 at step 1 + 42.67 + 4.5.
    assert result.values["fast, seed 1"]["steps to 80 %"] == 49
    assert result.values["slow, seed 1"]["steps to 80 %"] is None
    assert _estimate(result, "slow", "steps to 80 %") == "–"


def test_steps_that_some_seeds_never_reach_have_no_mean():
    flat = make_run(rewards([0.2] * 101), seed=2)
    result = measured(make_run(rewards(np.linspace(0.2, 0.9, 101))), flat)
    assert result.estimate("opo", "steps to 80 %") is None
    assert _estimate(result, "opo", "steps to 80 %") == "– (1 of 2 seeds)"


def budgeted(passes: int, rollouts: int, label: str) -> Run:
    """Rollouts of 48 completions, of two optimizer steps per pass; the reward is 0.1 more in each."""
    per_rollout, rows = 2 * passes, []
    for step in range(rollouts * per_rollout):
        rows.append({"step": step + 1, "entropy": 0.5 + step % per_rollout})
        if step % per_rollout == 0:
            of = step // per_rollout
            rows[-1] |= {"rewards/solved/mean": 0.1 * of, "completions/generated": 48.0 * (of + 1)}
    rows.append({"step": rows[-1]["step"], "validation/accuracy": 0.9})
    run = make_run(rows, label)
    run.settings.update(num_iterations=passes, max_completions=48 * rollouts)
    return run


def test_runs_with_a_budget_of_completions_are_measured_over_completions():
    once, often = budgeted(1, 50, "once"), budgeted(8, 50, "often")
    found = measured(once, often)
    assert (found.unit, found.window) == ("completions", 20 * 24)
    first, other = found.values.values()
    # The last ten rollouts, of 50, whatever the number of passes.
    assert first["final reward"] == other["final reward"] == pytest.approx(4.45)
    assert first["entropy"] == pytest.approx(1.0)
    assert other["entropy"] == pytest.approx(8.0)
    # 80 % of 4.45, with the mean of ten rewards 0.45 behind the last: rollout 41 of 50.
    assert first["completions to 80 %"] == other["completions to 80 %"] == 42 * 48
    assert "steps to 80 %" not in first
    cost = found.tables()["Cost"]
    assert cost == ["completions to 80 %", "completions"]


@pytest.mark.parametrize(
    ("value", "measure", "signed", "text"),
    [
        (0.93456, "final reward", False, "0.935"),
        (-0.0001, "final reward", True, "+0.000"),
        (-0.02, "final reward", True, "−0.020"),
        (0.931, "validation accuracy", False, "93.1 %"),
        (0.02, "Level 4, greedy", True, "+2.0 pp"),
        (1234567.0, "tokens", False, "1,234,567"),
        (float("inf"), "gradient norm", False, "not finite"),
    ],
)
def test_numbers_are_written_with_a_fixed_number_of_decimals(value, measure, signed, text):
    assert number(value, measure, signed) == text
