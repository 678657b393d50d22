"""What a run's log says, in plain sentences: a verdict for each diagnostic, and the watches that fired."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..metrics.diagnostics import Diagnostic, diagnostics
from ..metrics.log import number, validations
from ..metrics.step_clock import PHASES
from ..metrics.watches import Watch
from .intervals import t_quantile


Row = Mapping[str, Any]
Points = list[tuple[float, float]]

_FEWEST_OF_A_TREND = 6  # entries


@dataclass(frozen=True)
class Verdict:
    """
    What is said of a run.

    Args:
        metric (`str`), sentence (`str`):
            Metric of the log, and what it says.
        healthy (`bool`, *optional*):
            Whether it is within its bounds; `None` for a fact that is not judged.
        remedy (`str`, *optional*):
            What to try; empty where nothing needs to be done.
        points (`list[tuple[float, float]]`, *optional*):
            Optimizer step and value of every entry.
    """

    metric: str
    sentence: str
    healthy: bool | None
    remedy: str = ""
    points: Sequence[tuple[float, float]] = ()


class Facts:
    """
    Numbers of a metric that sentences and bounds refer to.

    Args:
        values (`Sequence[float]`):
            Its finite values in the order of the log.
        fresh (`Sequence[float]`):
            Those of optimizer steps in which the policy is its rollout's anchor.
        generated (`float`):
            Completions generated in the run; NaN where not logged.
    """

    def __init__(self, values: Sequence[float], fresh: Sequence[float], generated: float):
        tenth = min(max(len(values) // 10, 3), len(values))
        self.first, self.last = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
        self.ratio = _ratio(self.last, self.first)
        self.mean, self.median = float(np.mean(values)), float(np.median(values))
        self.most, self.total = max(values), sum(values)
        self.share = self.total / generated
        self.over_fresh = _ratio(self.median, float(np.median(fresh))) if len(fresh) else math.nan
        self.change, self.margin = trend(values)
        self.rise = _ratio(self.change, self.margin)


def _ratio(value: float, other: float) -> float:
    """`value` / `other`; 0 where both are 0."""
    return value / other if other else math.copysign(math.inf, value) if value else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change along a straight line from the first value to the last, and half of its 95 % t interval."""
    n = len(values)
    if n < _FEWEST_OF_A_TREND:
        return math.nan, math.nan
    x, y = np.linspace(-0.5, 0.5, n), np.array(values)
    if np.ptp(y) == 0:
        return 0.0, 0.0  # where rounding would leave a slope
    slope = float(x @ y / (x @ x))
    residuals = y - y.mean() - slope * x
    error = math.sqrt(float(residuals @ residuals) / (n - 2) / float(x @ x))
    return slope, t_quantile(0.975, n - 2) * error


def judge(log: Sequence[Row], settings: Row) -> list[Verdict]:
    """
    Verdicts of a run.

    Args:
        log (`Sequence[Mapping]`):
            Lines of its `log.jsonl`.
        settings (`Mapping`):
            Its settings.

    Returns:
        `list[Verdict]`: one for each diagnostic that was logged, that of the validation, and the slowest phase.
    """
    found = [_judge(diagnostic, log) for diagnostic in diagnostics(settings)]
    return [verdict for verdict in (*found, _validation(log), _slowest_phase(log)) if verdict is not None]


def _judge(diagnostic: Diagnostic, log: Sequence[Row]) -> Verdict | None:
    logged = {name for row in log for name in row}
    metric = next((name for name in diagnostic.metrics if name in logged), "")
    points = series(log, metric, lambda row: not diagnostic.reused or number(row, "opo/off_policy_steps") > 0)
    if not points:
        return None
    fresh = series(log, metric, lambda row: row.get("opo/off_policy_steps") == 0)
    generated = [value for _, value in series(log, "completions/generated")]
    facts = Facts([value for _, value in points], [value for _, value in fresh], max(generated, default=math.nan))
    value = getattr(facts, diagnostic.fact)
    if math.isnan(value):
        return Verdict(metric, f"{diagnostic.name}: nothing can be said from this log.", None, "", points)
    beyond = diagnostic.low if diagnostic.low and value < diagnostic.low.limit else None
    beyond = diagnostic.high if diagnostic.high and value > diagnostic.high.limit else beyond
    said = (beyond or diagnostic).says.format_map(vars(facts))
    sentence = f"{diagnostic.name} {said}{'' if beyond else ': healthy'}."
    return Verdict(metric, sentence, not beyond, beyond.remedy if beyond else "", points)


def series(log: Sequence[Row], metric: str, chosen: Callable[[Row], bool] = lambda row: True) -> Points:
    """Optimizer step and value of a metric, where it is a finite number."""
    found = [(row["step"], number(row, metric)) for row in log if chosen(row)]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _validation(log: Sequence[Row]) -> Verdict | None:
    """The first and the last validation, which differ where their intervals do not meet."""
    rows = validations(log)
    if len(rows) < 2:
        return None
    (before, low, high), (after, last_low, last_high) = (
        [row[f"validation/{name}"] for name in ("accuracy", "low", "high")] for row in (rows[0], rows[-1])
    )
    change = f"from {before:.1%} [{low:.1%}, {high:.1%}] to {after:.1%} [{last_low:.1%}, {last_high:.1%}]"
    points = series(rows, "validation/accuracy")
    if last_low > high:
        return Verdict("validation/accuracy", f"Validation accuracy rose {change}: healthy.", True, "", points)
    if last_high >= low:
        said = f"Validation accuracy went {change}: the intervals meet, so nothing can be said."
        return Verdict("validation/accuracy", said, None, "", points)
    remedy = (
        "If the reward rose, the policy earns it by something else than right answers: read the completions, and "
        "mend the reward. Else lower `learning_rate`."
    )
    return Verdict("validation/accuracy", f"Validation accuracy fell {change}.", False, remedy, points)


_FASTER = {
    "generate": "`use_vllm` generates faster.",
    "score": "More `reward_workers`, or a cheaper reward, score faster.",
    "anchor": "Larger micro-batches (`per_device_train_batch_size`) make forward passes cheaper.",
    "update": "`max_tokens_per_micro_batch`, `padding_free` and `skip_inert_rows` make updates cheaper.",
    "sync": "Weights go to vLLM once a rollout: let one serve more optimizer steps (`steps_per_generation`).",
}


def _slowest_phase(log: Sequence[Row]) -> Verdict | None:
    points = {phase: series(log, f"opo/time/{phase}") for phase in PHASES}
    if not any(points.values()):
        return None
    seconds = {
        phase: float(np.mean([value for _, value in found])) if found else 0.0 for phase, found in points.items()
    }
    phase, total = max(PHASES, key=lambda name: seconds[name]), sum(seconds.values())
    share = seconds[phase] / max(total, 1e-9)
    said = f"Slowest phase: {phase}, {share:.0%} of {total:.3g} s per optimizer step. {_FASTER[phase]}"
    return Verdict(f"opo/time/{phase}", said, None, "", points[phase])


@dataclass(frozen=True)
class Fired:
    """A watch that fired: its text, the optimizer step and value, and what to try."""

    text: str
    step: int
    value: float
    remedy: str


def fired(log: Sequence[Row], settings: Row) -> list[Fired]:
    """The watches of a run that fired, each where it did so first, found again in its log."""
    found = []
    for watch in map(Watch, settings.get("watches") or []):
        row = next((row for row in log if watch.fires(row)), None)
        if row is not None:
            found.append(Fired(watch.text, row["step"], row[watch.metric], _remedy(watch, settings)))
    return found


def _remedy(watch: Watch, settings: Row) -> str:
    below = "<" in watch.text
    for diagnostic in diagnostics(settings):
        bound = diagnostic.low if below else diagnostic.high
        if watch.metric in diagnostic.metrics and bound:
            return bound.remedy
    return f"Look at `{watch.metric}` in `log.jsonl`, and at the diagnostics above that moved with it."
