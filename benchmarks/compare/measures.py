"""Measures of a run and of several: tables of estimates over seeds, and of differences from a baseline."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from opo_trl.metrics.log import Points, finite, number
from opo_trl.report.run_files import by_decoding

from ..intervals import Difference, Estimate, estimate, paired_difference
from .runs import Run, completions_per_optimizer_step, optimizer_steps_per_rollout


LAST_STEPS = 20  # "final": the mean over these optimizer steps, or over as many completions as they have in one pass
WINDOW = 10  # log entries that a smoothed curve averages
SHARE = 0.8  # of the way from the base model's reward to the best final one

Values = dict[str, float | None]

# Measures by table, with the decimals of their numbers; `None` for an accuracy, and what is missing here is one, too.
_REWARD = {"final reward": 3, "mean reward": 3, "validation accuracy": None}
_POLICY = {"gradient norm": 3, "gradient response efficiency": 3, "entropy": 4, "completion length": 1}
_COST = {"steps to 80 %": 0, "completions to 80 %": 0, "wall time (s)": 0, "tokens": 0, "completions": 0}
DECIMALS: dict[str, int | None] = {**_REWARD, **_POLICY, **_COST}


class Comparison:
    """All measures of the runs of some methods, given by label; the first method is the baseline."""

    def __init__(self, methods: dict[str, list[Run]]):
        runs = [run for members in methods.values() for run in members]
        self.methods, self.baseline = methods, runs[0].label
        self.target = reward_target(methods)  # the smoothed reward that "steps to 80 %" waits for
        self.values = {run.name: measure(run, self.target) for run in runs}
        # The axis that the runs share is their budget: completions, or optimizer steps; "final" covers a window of it.
        self.over_completions = runs[0].settings.get("max_completions") is not None
        self.unit = "completions" if self.over_completions else "optimizer steps"
        self.window = _window(runs[0])

    def estimate(self, label: str, measure: str) -> Estimate | None:
        """Mean over the method's seeds; `None` unless all of them have a value."""
        values = [self.values[run.name].get(measure) for run in self.methods[label]]
        return None if None in values else estimate(values)

    def difference(self, label: str, measure: str) -> Difference | None:
        """Difference from the baseline on common seeds; `None` without common seeds, or if a value is missing."""
        pairs = [[self.values[run.name].get(measure) for run in pair] for pair in self.pairs(label)]
        if not pairs or any(None in pair for pair in pairs):
            return None
        own, of_baseline = zip(*pairs, strict=True)
        return paired_difference(own, of_baseline)

    def pairs(self, label: str) -> list[tuple[Run, Run]]:
        """The method's runs, each with the baseline's run of the same seed."""
        others = {run.seed: run for run in self.methods[self.baseline]}
        return [(run, others[run.seed]) for run in self.methods[label] if run.seed in others]

    def tables(self) -> dict[str, list[str]]:
        """The tables of a report: heading → measures, without those that no run has."""
        present = [name for values in self.values.values() for name, value in values.items() if value is not None]
        present.append(_reached(self.over_completions))  # never reaching it is a result, too
        tables = {
            "Reward": _REWARD,
            "Accuracy after training": dict.fromkeys(name for name in present if name not in DECIMALS),
            f"Policy and gradient, last {self.window:,.0f} {self.unit}": _POLICY,
            "Cost": _COST,
        }
        kept = {title: [name for name in measures if name in present] for title, measures in tables.items()}
        return {title: measures for title, measures in kept.items() if measures}


def measure(run: Run, target: float) -> Values:
    """All measures of a run; `target` is the reward that "steps to 80 %" waits for."""
    step = first_step_at(target, reward(run))
    return {
        "final reward": final(reward(run), run),
        "mean reward": mean(reward(run)),
        "validation accuracy": _last(series(run, "validation/accuracy")),
        "gradient norm": final(series(run, "grad_norm"), run),
        "gradient response efficiency": final(efficiency(run), run),
        "entropy": final(series(run, "entropy"), run),
        "completion length": final(series(run, "completions/mean_length"), run),
        _reached(run.settings.get("max_completions") is not None): step and clock(run)(step),
        "wall time (s)": wall_time(run),
        "tokens": _last(series(run, "num_tokens")),
        "completions": _last(completions(run)),
        **accuracies(run),
    }


def _reached(over_completions: bool) -> str:
    return "completions to 80 %" if over_completions else "steps to 80 %"


def _last(points: Points) -> float | None:
    return points[-1][1] if points else None


def series(run: Run, key: str) -> Points:
    """Optimizer step and value of every log entry that has `key`, NaN included; TRL logs `None` for no number."""
    return [(row["step"], number(row, key)) for row in run.log if row.get(key) is not None]


def reward(run: Run) -> Points:
    """
    Mean over each rollout of the first reward function, which decides what counts as solved; a `ValueError` without.
    """
    key = reward_key(run)
    points = series(run, key)
    if not points:
        raise ValueError(f"The log of {run.name} has no {key!r}. Train with `logging_steps` set and compare again.")
    return points


def reward_key(run: Run) -> str:
    """Name of the reward in the log, without shaping terms, which differ between methods."""
    keys = [key for row in run.log for key in row if key.startswith("rewards/") and key.endswith("/mean")]
    named = run.settings["reward_funcs"] or ("…",)
    own = f"rewards/{named[0].rpartition('.')[2]}/mean"
    # An object's reward is logged under the name of its class or function, which only the log has.
    return own if own in keys else next(iter(keys), own)


def efficiency(run: Run) -> Points:
    """Gradient response efficiency; NaN, in steps where all advantages are 0, is left out."""
    return finite(run.log, "opo/gradient_response_efficiency")


def completions(run: Run) -> Points:
    """Completions generated up to each reward, computed from the settings if the log does not count them."""
    rollout, steps = run.settings["generation_batch_size"], optimizer_steps_per_rollout(run.settings)
    key = reward_key(run)
    points = []
    for row in run.log:
        if row.get(key) is not None:
            n_rollouts = math.ceil(row["step"] / steps)
            points.append((row["step"], row.get("completions/generated") or n_rollouts * rollout))
    return points


def clock(run: Run) -> Callable[[float], float]:
    """What is compared at equal amounts: optimizer steps, or the completions generated up to one."""
    if run.settings.get("max_completions") is None:
        return lambda step: step
    steps, totals = zip(*completions(run), strict=True)
    generated = [0, *totals]
    return lambda step: generated[bisect_right(steps, step)]


def _window(run: Run) -> float:
    """How much of the clock "final" covers."""
    if run.settings.get("max_completions") is None:
        return LAST_STEPS
    return LAST_STEPS * completions_per_optimizer_step(run.settings)


def seconds(run: Run) -> Points:
    """Seconds of training steps, without validation, up to each entry."""
    points = series(run, "step_time")  # each the mean of the steps since the last entry
    passed = np.diff([step for step, _ in points], prepend=0)
    totals = np.cumsum([value for _, value in points] * passed)
    return [(step, float(total)) for (step, _), total in zip(points, totals, strict=True)]


def wall_time(run: Run) -> float | None:
    """Seconds of training with validation. A resumed run has timed its last part: at least those of all steps."""
    measured = run.summary.get("train_seconds"), _last(seconds(run))
    return max((value for value in measured if value is not None), default=None)


def accuracies(run: Run) -> Values:
    """Accuracy after training on each reported level, greedy and sampled, and pass@k if it was measured."""
    values: Values = {}
    for name, result in by_decoding(run.summary["after"]).items():
        values[name] = result["accuracy"]
        level, passed = name.rpartition(", ")[0], result.get("pass_at") or {}
        values |= {f"{level}, pass@{k}": value for k, value in passed.items() if k != "1"}
    return values


def final(points: Points, run: Run) -> float | None:
    """Mean of the values at the end of the run."""
    at, last = clock(run), max(row["step"] for row in run.log)
    start = at(last) - _window(run)
    at_end = [point for point in points if at(point[0]) > start]
    return mean(at_end or points[-1:])


def mean(points: Points) -> float | None:
    return float(np.mean([value for _, value in points])) if points else None


def smooth(values: Sequence[float]) -> np.ndarray:
    """Mean of each value and up to nine values before it."""
    means = []
    for end in range(1, len(values) + 1):
        first = max(end - WINDOW, 0)
        means.append(np.mean(values[first:end]))
    return np.array(means)


def reward_target(methods: Mapping[str, list[Run]]) -> float:
    """80 % of the way from the base model's reward (mean of all runs' first entries) to the best final reward."""
    first_rewards = []
    final_rewards = []  # means over the runs of each method
    for runs in methods.values():
        rewards = [reward(run) for run in runs]
        first_rewards += [points[0][1] for points in rewards]
        final_rewards.append(np.mean(list(map(final, rewards, runs))))
    start = np.mean(first_rewards)
    best = max(final_rewards)
    if best > start:
        return float(start + SHARE * (best - start))
    return math.inf  # no method has learned


def first_step_at(target: float, points: Points) -> float | None:
    """First optimizer step at which the mean of the last ten entries reaches `target`; `None` if it never does."""
    smoothed = smooth([value for _, value in points])
    rows = zip(points[WINDOW - 1 :], smoothed[WINDOW - 1 :], strict=True)
    return next((step for (step, _), value in rows if value >= target), None)
