"""
The diagnostics of a run, healthy bounds, what it means to exceed one and what to try; and verdicts on a run's log, one
for each diagnostic.

The bounds separate runs that learn from runs that were broken on purpose; none is a law. Bounds and sentences refer to
[`facts`] about a metric.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from ..checks.text import printable
from ..metrics.log import Entry, Points, finite, number, off_policy


_FEWEST_OF_A_TREND = 6  # entries
_FEWEST_STEPS = 10  # of a verdict, unless nothing can be learned: with fewer, a few prompts decide


@dataclass(frozen=True)
class Diagnostic:
    """One line of the table below. Both bounds are inclusive."""

    name: str  # of its texts
    metrics: str  # of the log, separated by spaces; the first one that was logged is read
    fact: str  # that is compared with the bounds
    low: float = -math.inf
    high: float = math.inf
    off_policy: bool = False  # whether only off-policy steps count: before them, the policy is the behaviour policy
    wrong: tuple[float, float] = (-math.inf, math.inf)  # outside of these, the run no longer learns

    def range(self) -> str:
        """The values within the bounds, in words."""
        least, most = math.isfinite(self.low), math.isfinite(self.high)
        span = f"{self.low:g} to {self.high:g}" if least and most else ""
        return f"{span or (f'at least {self.low:g}' if least else f'at most {self.high:g}')}{_RANGES[self.fact]}"


def diagnostics(settings: Mapping[str, Any]) -> list[Diagnostic]:
    """The table for a run with these settings."""
    group, radius = settings.get("num_generations") or 8, settings.get("chi2_radius") or 0.7
    # Replay bounds the weights of old completions, and healthy runs have 0.2 to 0.5.
    least_ess = 0.1 if settings.get("max_staleness") else 0.5
    # Whole completions, as in GSPO, are clipped a hundred times as often as tokens.
    of_completions = settings.get("objective") == "gspo" or settings.get("importance_sampling_level") == "sequence"
    most_clipped = 0.5 if of_completions else 0.01
    # What is cut off after the first line is not read.
    most_truncated = 1.0 if settings.get("reward_funcs") == ["first_line_reward"] else 0.2
    found = [
        # Does the policy learn, and from what?
        Diagnostic("reward", "reward", "rise", low=1, wrong=(-1, math.inf)),
        Diagnostic("groups", "opo/frac_zero_drive frac_reward_zero_std", "last", high=0.75, wrong=(0, 0.95)),
        Diagnostic(
            "truncated", "completions/clipped_ratio", "last", high=most_truncated, wrong=(0, max(most_truncated, 0.5))
        ),
        Diagnostic("entropy", "entropy", "ratio", low=0.1, high=3),
        Diagnostic("gradient", "grad_norm", "ratio", low=0.01, high=10, wrong=(1e-4, math.inf)),
        # Where do completions pull the policy that has moved since they were written, and how far is it from theirs?
        Diagnostic("pull-back", "grad_norm", "over_on_policy", high=10, off_policy=True),
        Diagnostic("escort", "opo/escort/ess", "median", low=min(2.0, 0.6 * group)),
        Diagnostic("χ²", "opo/chi2", "median", high=radius, off_policy=True),
        Diagnostic("kept", "opo/conservation_residual", "median", low=-0.5, off_policy=True),
        Diagnostic("ratios", "opo/ratio/ess", "low", low=least_ess),
        Diagnostic("clipped", "clip_ratio/region_mean clip_ratio", "mean", high=most_clipped),
        Diagnostic("target", "opo/target_fit", "median", low=-0.05, off_policy=True),
        Diagnostic("clamp", "opo/frac_clamped", "most", high=0.1),
        # Which completions and steps are lost?
        Diagnostic("masked", "opo/frac_masked", "mean", high=0.2),
        Diagnostic("skipped", "opo/skipped_steps", "most", high=0),
        Diagnostic("timeouts", "reward/timeouts", "share", high=0.01),
        Diagnostic("errors", "reward/errors", "share", high=0.01),
    ]
    is_free = "mu" in settings and not (settings["mu"] or settings.get("chi2_radius"))  # nothing pulls the policy back
    left_out = {"χ²", "pull-back"} if is_free else set()
    if settings.get("max_staleness") or settings.get("rollouts"):
        left_out |= {"χ²"}  # of old completions, a few with large ratios decide on it, also in runs that learn
    return [each for each in found if each.name not in left_out]


_RANGES = {
    "rise": " times the ± of the trend",
    "last": " at the end",
    "ratio": " times the first",
    "over_on_policy": " times on-policy",
    "median": " in the median",
    "mean": " on average",
    "low": " in nine of ten",
    "most": " in every entry",
    "share": " of completions",
}

_SENTENCES = {
    "reward": "Reward went from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g})",
    "groups": "Zero-variance groups held {last:.0%} of completions at the end",
    "truncated": "Truncated completions were {last:.0%} at the end",
    "entropy": "Entropy per token went from {start:.2g} to {last:.2g} nats",
    "gradient": "Gradient norm went from {start:.3g} to {last:.3g}",
    "pull-back": "Gradient norm of off-policy steps was {over_on_policy:.2g} times that of on-policy steps",
    "escort": "Escort effective sample size stayed at {median:.1f}",
    "χ²": "χ² to the behaviour policy in off-policy steps was {median:.2g}",
    "kept": "Probability kept by the completions trained on changed by {median:+z.0%} in off-policy steps",
    "ratios": "Effective sample size of the ratios to the behaviour policy was at least {low:.0%} of the completions "
    "in nine of ten optimizer steps",
    "clipped": "Clipped ratios were {mean:.2%} on average, and {most:.2%} at most",
    "target": "Target fit was {median:.2g} in off-policy steps, where 1 is the change that the target asks for",
    "clamp": "Completions at the clamp of the log-ratio were {most:.0%} at most",
    "masked": "Masked completions were {mean:.0%}",
    "skipped": "Optimizer steps skipped for a non-finite gradient were {most:.0f}",
    "timeouts": "Completions whose scoring timed out were {total:.0f} ({share:.1%})",
    "errors": "Completions whose scoring failed were {total:.0f} ({share:.1%})",
}

_SLOWER = "Lower `learning_rate`, or use a rollout for fewer optimizer steps (`steps_per_generation`)."
_TIGHTER = f"In OPO, raise `mu`, or set `chi2_radius`, to keep the policy near the behaviour policy. {_SLOWER}"
_FIX_REWARD = "Fix the reward function; the run's warnings say what failed."

# Of each bound: what it means to be beyond it (up to the first full stop), and what to try.
_ADVICE = {
    "reward <": "no rise beyond the noise, or one that was lost. First check the zero-variance groups and the "
    "truncated completions. If both are healthy, train longer, with more prompts per rollout (less noise) or a higher "
    "`learning_rate`; lower it if the reward fell.",
    "groups >": "these carry no learning signal. If rewards are high, the problems are solved: use harder ones "
    "(`levels`). If they are low, use easier ones, or more completions per prompt (`num_generations`). "
    "`max_sampling_rounds`, of this package, replaces such groups.",
    "truncated >": "their answers are cut off. Raise `max_completion_length`, or reward short answers "
    "(`soft_overlong_punishment`).",
    "entropy <": "the policy barely explores. If validation rises, this is learning. If not, the policy collapses: "
    "lower `learning_rate`, set `entropy_coef` or `beta`, and check the completions for a trick that earns reward.",
    "entropy >": f"the policy becomes random. {_SLOWER}",
    "gradient <": "it vanished. Check the zero-variance groups: no completion carries a learning signal any more.",
    "gradient >": f"training becomes unstable. {_SLOWER}",
    "pull-back >": "every step pulls back to the behaviour policy and overshoots. Lower `mu`, or `learning_rate`.",
    "escort <": "one completion has nearly all the weight of its group. Raise `alpha` or `escort_temperature`, or "
    "keep `anchor_correction: absorbed`.",
    "χ² >": f"the policy drifts off. {_TIGHTER}",
    "kept <": f"the policy is far from the behaviour policy. {_TIGHTER}",
    "ratios <": "in the others, a few completions dominate because the policy is far from the one that sampled them. "
    "Use completions for fewer passes (`num_iterations`), less old ones (`max_staleness`), or a lower "
    "`learning_rate`. In OPO, raise `mu`, too.",
    "clipped >": f"the policy moves far from the one that wrote the completions, and clipping removes their gradient. "
    f"Use completions for fewer passes (`num_iterations`). {_SLOWER}",
    "target <": "adrift, the policy is further from the target than the behaviour policy is. Lower `learning_rate`. "
    "If gradient norms of off-policy steps are large, lower `mu`, too.",
    "clamp >": f"the policy is far from the one that sampled them. {_TIGHTER}",
    "masked >": "they are excluded from training. They are truncated (`mask_truncated_completions`), unscored, too "
    "far off-policy (`off_policy_mask_threshold`), or vLLM and the trainer disagree about their probabilities "
    "(`vllm_importance_sampling_mode`).",
    "skipped >": "those steps changed nothing. Often bfloat16 instead of float16, or a lower `learning_rate`, helps.",
    "timeouts >": f"they have no reward. Raise `reward_timeout` or `reward_workers`. {_FIX_REWARD}",
    "errors >": f"they have no reward. {_FIX_REWARD}",
}


_NO_GRADIENT = (
    "Either no group has different rewards, or recorded log-probabilities are not those of sampling: zeros that were "
    "filled in leave completions without weight."
)


@dataclass(frozen=True)
class Verdict:
    """A verdict on a run, in a sentence, from the points of one metric of its log."""

    metric: str
    sentence: str
    healthy: bool | None  # whether it is within its bounds; `None` if it is too early to say
    remedy: str  # what to try; empty if nothing needs to be done
    points: Points
    range: str = ""  # of healthy values, in words; empty if the sentence says it
    wrong: bool = False  # whether the run no longer learns

    @property
    def word(self) -> str:
        """The verdict in a word."""
        return "wrong" if self.wrong else {True: "healthy", False: "look", None: "–"}[self.healthy]

    @property
    def line(self) -> str:
        """The verdict in a line of a terminal."""
        healthy = f"Healthy: {self.range}." if self.range else ""
        return printable(" ".join(filter(None, (f"{self.word:7} ", self.sentence, healthy, self.remedy))))


def facts(values: Sequence[float], on_policy: Sequence[float], generated: float) -> dict[str, float]:
    """
    What sentences and bounds of a metric refer to, from its finite values in the order of the log.

    `on_policy`: those of optimizer steps in which the policy is still the one that generated the rollout.
    `generated`: completions generated in the run; NaN if not logged.
    """
    tenth = min(max(len(values) // 10, 3), len(values))
    first, last, median = (float(np.median(part)) for part in (values[:tenth], values[-tenth:], values))
    nonzero = [value for value in values if value][:tenth]  # the first groups may all have zero variance
    start = first or (float(np.median(nonzero)) if nonzero else 0.0)
    change, margin = trend(values)
    rise = _ratio(change, margin)
    # The mean of |x - y| is 1.13 standard deviations of the noise, so that this is about twice the standard error of a
    # median.
    noise = float(np.mean(np.abs(np.diff(values)))) if len(values) > 1 else 0.0
    has_fallen = last < median - 2.5 * noise / tenth**0.5
    return {
        "first": first,
        "last": last,
        "start": start,
        "ratio": _ratio(last, start) if len(values) >= _FEWEST_OF_A_TREND else math.nan,
        "mean": float(np.mean(values)),
        "median": median,
        "low": float(np.quantile(values, 0.1)),
        "most": max(values),
        "total": sum(values),
        "share": sum(values) / generated,
        "over_on_policy": _ratio(median, float(np.median(on_policy))) if len(on_policy) else math.nan,
        "change": change,
        "margin": margin,
        "rise": min(rise, -1.0) if has_fallen else rise,
    }


def _ratio(value: float, other: float) -> float:
    """`value` / `other`; 0 if both are 0."""
    return value / other if other else math.copysign(math.inf, value) if value else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change along the least-squares line from the first value to the last, and half of its 95 % t interval."""
    n = len(values)
    if n > 1 and np.ptp(values) == 0:
        return 0.0, 0.0  # rounding would leave a slope
    if n < _FEWEST_OF_A_TREND:
        return math.nan, math.nan
    line = stats.linregress(np.linspace(-0.5, 0.5, n), values)
    return float(line.slope), float(stats.t.ppf(0.975, n - 2)) * float(line.stderr)


def judge(log: Sequence[Entry], settings: Mapping[str, Any]) -> list[Verdict]:
    """
    Verdicts on a run, from the lines of its `log.jsonl` and its settings: one for each diagnostic that was logged, and
    one for the validation.
    """
    rewards = [value for _, value in finite(log, "reward")]
    # Without a signal, a run whose reward has risen has solved its problems.
    learns = bool(rewards) and facts(rewards, [], math.nan)["rise"] >= 1
    scored = [row for row in log if "reward" not in row or math.isfinite(number(row, "reward"))]
    found = [_judge(each, scored if each.name == "groups" else log, learns) for each in diagnostics(settings)]
    everything = (*(_not_finite(log, metric) for metric in _NOT_FINITE), *found, _validation(log))
    return [verdict for verdict in everything if verdict is not None]


_NOT_FINITE = {
    "reward": "Fix the reward function, or the solutions: it returns `None` where it cannot read one.",
    "grad_norm": "Lower `learning_rate`, and use bfloat16 instead of float16. Go back to a checkpoint from before.",
}


def _not_finite(log: Sequence[Entry], metric: str) -> Verdict | None:
    lost = [math.isnan(number(row, metric)) for row in log if metric in row]
    if not any(lost):
        return None
    said = f"`{metric}` was not a number in {sum(lost):,} of {len(lost):,} entries."
    at_end = all(lost[-max(len(lost) // 10, 3) :])
    return Verdict(metric, said, False, _NOT_FINITE[metric], finite(log, metric), "a number in every entry", at_end)


def _judge(diagnostic: Diagnostic, log: Sequence[Entry], learns: bool) -> Verdict | None:
    if learns and diagnostic.name == "groups":  # most are solved
        diagnostic = replace(diagnostic, high=diagnostic.wrong[1])
    metric = next((name for name in diagnostic.metrics.split() if any(name in row for row in log)), None)
    points = metric and finite(log, metric, lambda row: not diagnostic.off_policy or off_policy(row))
    if not points:
        return None
    on_policy = finite(log, metric, lambda row: row.get("opo/off_policy_steps") == 0)
    generated = [value for _, value in finite(log, "completions/generated")]
    found = facts([y for _, y in points], [y for _, y in on_policy], max(generated, default=math.nan))
    value = found[diagnostic.fact]
    if metric == "grad_norm" and not any(norm for _, norm in finite(log, metric)):
        if diagnostic.name != "gradient":  # that of some steps is in no proportion to that of others
            return None
        if _steps_of(points) >= _FEWEST_STEPS:
            sentence = f"Gradient norm was exactly 0 in all {len(points):,} entries: nothing was trained."
            return Verdict(metric, sentence, False, _NO_GRADIENT, points, "above 0", wrong=True)
    if math.isnan(value):
        return Verdict(metric, f"Too little in this log for a verdict on `{metric}`.", None, "", points)
    side = "<" if value < diagnostic.low else ">" if value > diagnostic.high else ""
    meaning, _, remedy = _ADVICE.get(f"{diagnostic.name} {side}", "").partition(". ")
    sentence = _SENTENCES[diagnostic.name].format_map(found)
    lost = not learns and not diagnostic.wrong[0] <= value <= diagnostic.wrong[1]
    holds_0 = diagnostic.fact == "rise" and abs(value) < 1 and found["margin"] > 0
    if not lost and (holds_0 or _steps_of(finite(log, metric)) < _FEWEST_STEPS):
        reason = "the interval holds 0" if holds_0 else f"fewer than {_FEWEST_STEPS} steps"
        return Verdict(metric, f"{sentence}: too early to say, {reason}.", None, remedy, points, diagnostic.range())
    said = sentence + (f": {meaning}" if side else "")
    return Verdict(metric, f"{said}.", not side, remedy, points, diagnostic.range(), lost)


def _steps_of(points: Points) -> float:
    """Optimizer steps that points stand for, each for those since the one before it. The first step may be 0 or 1."""
    steps = [step for step, _ in points]
    interval = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return min(steps[-1] - steps[0] + interval, steps[-1] - min(steps[0], 1) + 1)


def _validation(log: Sequence[Entry]) -> Verdict | None:
    """The first validation against the last; they differ if their intervals do not overlap."""
    names = [f"validation/{name}" for name in ("accuracy", "low", "high")]
    rows = [row for row in log if all(math.isfinite(number(row, name)) for name in names)]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    rose, fell = last["validation/low"] > first["validation/high"], last["validation/high"] < first["validation/low"]
    verb = "rose" if rose else "fell" if fell else "went"
    undecided = "" if rose or fell else ": too early to say, the intervals overlap"
    shown = "{validation/accuracy:.1%} [{validation/low:.1%}, {validation/high:.1%}]"
    said = f"Validation accuracy {verb} from {shown.format_map(first)} to {shown.format_map(last)}{undecided}."
    points = finite(rows, "validation/accuracy")
    return Verdict("validation/accuracy", said, rose if rose or fell else None, _CHEATED if fell else "", points)


_CHEATED = (
    "If the reward rose, the policy earns it by something other than correct answers: read the completions and "
    "fix the reward. Otherwise lower `learning_rate`."
)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in up to three sentences: what is wrong, what to look at, and of what it is too early to say."""
    words = ("wrong", "look", "–")
    wrong, look, early = ([f"`{v.metric}`" for v in verdicts if v.word == word] for word in words)
    judged = len(verdicts) - len(early)
    if not judged:
        if any(verdict.range for verdict in verdicts):
            return f"Too early to say: none of {len(verdicts)} diagnostics has a verdict yet."
        return "Too little has been logged for a verdict." if verdicts else "Nothing has been logged yet."
    sentences = [f"Wrong: {len(wrong)} of {judged} diagnostics, {', '.join(wrong)}."] if wrong else []
    sentences += [f"Look at {len(look)} of {judged} diagnostics: {', '.join(look)}."] if look else []
    if not sentences:
        healthy = f"Healthy: {judged} of {len(verdicts)} diagnostics."
        sentences = [healthy if early else f"All {judged} diagnostics are healthy."]
    sentences += [f"Too early to say: {', '.join(early)}."] if early else []
    return " ".join(sentences)


def spark(points: Points) -> str:
    """Points of an SVG polyline, with values averaged to at most its width in points."""
    width, height, margin = 100, 24, 2
    parts = np.array_split([value for _, value in points], min(len(points), width))
    means = np.array([part.mean() for part in parts])
    middle, span = (means.max() + means.min()) / 2, np.ptp(means) or 1
    places = height / 2 - (means - middle) / span * (height - 2 * margin)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(np.linspace(0, width, len(means)), places, strict=True))
