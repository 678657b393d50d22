"""Measures of runs, and how they are drawn and written."""

import numpy as np
import pytest

from benchmarks.compare.curves import CURVES, _points, band, on_common_grid
from benchmarks.compare.measures import Comparison, completions, first_step_at, reward, seconds, smooth, wall_time
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


def test_reward_of_another_name_than_its_path_is_found():
    """TRL logs an object by the name of its function or class."""
    run = make_run(rewards([0.5] * 3))
    run.settings["reward_funcs"] = ["my.isolated", "my.shape"]
    assert reward(run) == [(1, 0.5), (2, 0.5), (3, 0.5)]


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


def test_nothing_is_reached_where_nothing_was_learned():
    result = measured(make_run(rewards(np.linspace(0.5, 0.3, 40))))
    assert result.values["opo, seed 1"]["steps to 80 %"] is None


def test_first_step_at_waits_for_a_full_window():
    assert first_step_at(0.5, rewards_points([1.0] * 12)) == 10
    assert first_step_at(0.5, rewards_points([1.0] * 9)) is None


def rewards_points(values):
    return reward(make_run(rewards(values)))


def test_completions_are_logged_or_computed_from_the_settings():
    rows = rewards([0.1, 0.2, 0.3], every=2)
    assert completions(make_run(rows)) == [(1, 48), (3, 96), (5, 144)]
    rows[1]["completions/generated"] = 192
    assert completions(make_run(rows))[1] == (3, 192)


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


def test_curves_over_completions_have_one_point_per_rollout():
    curves = {curve.name: curve for curve in CURVES}
    run = budgeted(2, 3, "twice")
    assert _points(curves["entropy"], run) == [(48, 2.0), (96, 2.0), (144, 2.0)]
    run.log.insert(0, {"step": 0, "validation/accuracy": 0.2})
    run.log.insert(3, {"step": 2, "validation/accuracy": 0.3})
    run.log.insert(6, {"step": 4, "validation/accuracy": 0.4})
    assert _points(curves["validation"], run) == [(0, 0.2), (48, 0.4), (144, 0.9)]


def test_seconds_count_every_step_since_the_last_entry():
    rows = [{"step": 1, "step_time": 2.0}, {"step": 4, "step_time": 1.0}]
    assert seconds(make_run(rows)) == [(1, 2.0), (4, 5.0)]
    assert wall_time(make_run(rows, train_seconds=7.0)) == 7.0
    assert wall_time(make_run(rows, train_seconds=1.5)) == 5.0  # resumed: `train_seconds` is that of its last part


def test_efficiency_is_averaged_over_the_steps_that_define_it():
    key = "opo/gradient_response_efficiency"
    rows = [*rewards([0.5, 0.5]), {"step": 1, key: 2.0}, {"step": 2, key: float("nan")}, {"step": 2, "grad_norm": 1}]
    assert measured(make_run(rows)).values["opo, seed 1"]["gradient response efficiency"] == 2.0


def test_non_finite_gradient_norm_is_kept():
    run = make_run([*rewards([0.5] * 3), {"step": 3, "grad_norm": float("nan")}])
    value = measured(run).values[run.name]["gradient norm"]
    assert number(value, "gradient norm") == "not finite"


def test_smoothing_trails():
    assert smooth([1.0, 2.0, 3.0]) == pytest.approx([1.0, 1.5, 2.0])
    assert smooth([0.0] * 10 + [1.0] * 10)[-1] == 1.0


def test_curves_share_a_grid_that_no_run_is_extrapolated_to():
    x, values = on_common_grid([[(0, 0.0), (4, 4.0)], [(1, 1.0), (2, 0.0), (6, 4.0)]], smoothed=False)
    assert list(x) == [1, 2, 4]
    assert values == pytest.approx(np.array([[1, 2, 4], [1, 0, 2]]))


def test_band_is_the_t_interval_from_three_seeds_on():
    low, high = band(np.array([[1.0], [2.0], [3.0]]))
    assert (low[0], high[0]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-4)
    low, high = band(np.array([[1.0], [3.0]]))
    assert (low[0], high[0]) == (1.0, 3.0)


def test_runs_without_a_common_range_have_no_band():
    x, values = on_common_grid([[(1, 0.1)], [(2, 0.2)], [(3, 0.3)]], smoothed=False)
    assert [len(x), *map(len, band(values))] == [0, 0, 0]


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
