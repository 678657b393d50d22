"""
The diagnostics of a run, healthy bounds, what it means to exceed one and what to try; and verdicts on a run's log, one
for each diagnostic.

The bounds separate runs that learn from runs that were broken on purpose; none is a law. Bounds and sentences refer to
[`facts`] about a metric.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from scipy import stats

from ..checks.text import printable
from ..metrics.log import Entry, Points, finite, number, off_policy, values_of


_FEWEST_OF_A_TREND = 6  # entries
# With fewer optimizer steps, a few prompts decide: then the only verdict is that nothing can be learned.
_FEWEST_STEPS = 10


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
        """The healthy values of this diagnostic, in words."""
        if self.fact == "rise":  # of the reward, in units of the ± of its trend; its lower bound is 1
            return "a rise of at least its ±"
        if math.isinf(self.high):
            bounds = f"at least {self.low:g}"
        elif math.isinf(self.low):
            bounds = f"at most {self.high:g}"
        else:
            bounds = f"{self.low:g} to {self.high:g}"
        return bounds + _RANGES[self.fact]


def diagnostics(settings: Mapping[str, Any]) -> list[Diagnostic]:
    """
    The diagnostics for a run with these settings, which decide some bounds, and which diagnostics say nothing of it.
    Without a setting, its default counts.
    """
    group_size = settings.get("num_generations") or 8
    most_chi2 = settings.get("chi2_radius") or 0.7
    # Replay bounds the weights of old completions, and healthy runs have 0.2 to 0.5.
    least_ess = 0.1 if settings.get("max_staleness") else 0.5
    # Whole completions, as in GSPO, are clipped a hundred times as often as tokens.
    clips_sequences = settings.get("objective") == "gspo" or settings.get("importance_sampling_level") == "sequence"
    most_clipped = 0.5 if clips_sequences else 0.01
    # What is cut off after the first line is not read.
    most_truncated = 1.0 if settings.get("reward_funcs") == ["first_line_reward"] else 0.2
    lost_by_truncation = max(most_truncated, 0.5)  # with a larger share, a run that does not learn is "wrong"
    table = [
        # Does the policy learn, and from what?
        Diagnostic("reward", "reward", "rise", low=1, wrong=(-1, math.inf)),
        Diagnostic("groups", "opo/frac_zero_drive frac_reward_zero_std", "end", high=0.75, wrong=(0, 0.95)),
        Diagnostic(
            "truncated", "completions/clipped_ratio", "end", high=most_truncated, wrong=(0, lost_by_truncation)
        ),
        Diagnostic("entropy", "entropy", "ratio", low=0.1, high=3),
        Diagnostic("gradient", "grad_norm", "ratio", low=0.01, high=10, wrong=(1e-4, math.inf)),
        # Where do completions pull the policy that has moved since they were written, and how far is it from theirs?
        Diagnostic("pull-back", "grad_norm", "over_on_policy", high=10, off_policy=True),
        Diagnostic("escort", "opo/escort/ess", "median", low=min(2.0, 0.6 * group_size)),
        Diagnostic("χ²", "opo/chi2", "median", high=most_chi2, off_policy=True),
        Diagnostic("kept", "opo/conservation_residual", "left", low=0.5, off_policy=True),
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
    left_out = set()
    if "mu" in settings and not settings["mu"] and not settings.get("chi2_radius"):
        left_out |= {"χ²", "pull-back"}  # Nothing pulls the policy back.
    if settings.get("max_staleness") or settings.get("rollouts"):
        left_out.add("χ²")  # A few old completions with large ratios decide on it, also in runs that learn.
    return [diagnostic for diagnostic in table if diagnostic.name not in left_out]


_RANGES = {
    "end": " at the end",
    "ratio": " times the first",
    "over_on_policy": " times on-policy",
    "median": " in the median",
    "left": " of it in the median",
    "mean": " on average",
    "low": " in nine of ten",
    "most": " in every entry",
    "share": " of completions",
}

_SENTENCES = {
    "reward": "Reward went from {first:.3g} to {last:.3g} (linear trend {change:+.2g} ± {margin:.2g})",
    "groups": "Zero-variance groups held {end:.0%} of completions at the end",
    "truncated": "Truncated completions were {end:.0%} at the end",
    "entropy": "Entropy per token went from {start:.2g} to {late:.2g} nats",
    "gradient": "Gradient norm went from {start:.3g} to {late:.3g}",
    "pull-back": "Gradient norm of off-policy steps was {over_on_policy:.2g} times that of on-policy steps",
    "escort": "Escort effective sample size stayed at {median:.1f}",
    "χ²": "χ² to the behaviour policy in off-policy steps was {median:.2g}",
    "kept": "Completions had {left:.0%} of the probability that they were sampled with, in off-policy steps",
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


_REMEDY_OF_NO_GRADIENT = (
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
        if self.wrong:
            return "wrong"
        if self.healthy is None:
            return "–"
        return "healthy" if self.healthy else "look"

    @property
    def line(self) -> str:
        """The verdict in a line of a terminal."""
        parts = [f"{self.word:7} ", self.sentence]
        if self.range:
            parts.append(f"Healthy: {self.range}.")
        if self.remedy:
            parts.append(self.remedy)
        return printable(" ".join(parts))


def facts(
    values: Sequence[float], on_policy: Sequence[float], generated: float, steps_per_value: float = 1.0
) -> dict[str, float]:
    """
    What sentences and bounds of a metric refer to, from its finite values in the order of the log.

    `on_policy`: those of optimizer steps in which the policy is still the one that generated the rollout.
    `generated`: completions generated in the run; NaN if not logged.
    `steps_per_value`: optimizer steps that a value stands for.
    """
    tenth = min(max(len(values) // 10, 3), len(values))  # number of values at either end: a tenth, and at least 3
    first = _median(values[:tenth])
    last = _median(values[-tenth:])
    median = _median(values)
    # Where a step has one group, the gradient is 0 in each step whose group has zero variance.
    n_late = max(tenth, math.ceil(_FEWEST_STEPS / steps_per_value))
    n_start = min(n_late, max(len(values) // 2, tenth))
    start = _median_of_nonzero(_nonzero(values)[:n_start])
    late = _median_of_nonzero(values[-n_late:])
    change, margin = trend(values)
    rise = _ratio(change, margin)
    # The mean of |x - y| is 1.13 standard deviations of the noise, so that this is about twice the standard error of a
    # median.
    changes = np.abs(np.diff(values))
    noise = float(np.mean(changes)) if len(values) > 1 else 0.0
    if last < median - 2.5 * noise / tenth**0.5:  # It has fallen at the end, whatever the trend of the whole is.
        rise = min(rise, -1.0)
    return {
        "first": first,
        "last": last,
        "start": start,
        "late": late,
        "end": _share_at_end(values, tenth),
        "ratio": _ratio(late, start) if len(values) >= _FEWEST_OF_A_TREND else math.nan,
        "mean": float(np.mean(values)),
        "median": median,
        "left": 1 + median,  # of a residual that is 0 where nothing is lost, and -1 where all is
        "low": float(np.quantile(values, 0.1)),
        "most": max(values),
        "total": sum(values),
        "share": sum(values) / generated,
        "over_on_policy": _ratio(median, _median(on_policy)) if len(on_policy) else math.nan,
        "change": change,
        "margin": margin,
        "rise": rise,
    }


def _median(values: Sequence[float] | np.ndarray) -> float:
    return float(np.median(values))


def _share_at_end(shares: Sequence[float], fewest: int) -> float:
    """
    The mean of the last shares, at least `fewest` of them and of [`_FEWEST_STEPS`] groups: a share of k independent
    groups varies by p · (1 − p) / k.
    """
    mean = float(np.mean(shares))
    variance_of_enough = mean * (1 - mean) / _FEWEST_STEPS
    n_values = fewest
    if variance_of_enough > 0:
        n_values = max(fewest, math.ceil(np.var(shares) / variance_of_enough))
    return float(np.mean(shares[-n_values:]))


def _nonzero(values: Sequence[float]) -> list[float]:
    return [value for value in values if value]


def _median_of_nonzero(values: Sequence[float]) -> float:
    """The median of the values that are not 0; 0 if all are."""
    return _median(_nonzero(values) or [0.0])


def _ratio(value: float, other: float) -> float:
    """`value` / `other`; 0 if both are 0, and infinite if only `other` is."""
    if other:
        return value / other
    return math.copysign(math.inf, value) if value else 0.0


def trend(values: Sequence[float]) -> tuple[float, float]:
    """
    Change along the least-squares line from the first value to the last, and half the width of its 95 % t interval;
    both are NaN with fewer than 6 values, and 0 if all are equal.
    """
    n = len(values)
    if n > 1 and np.ptp(values) == 0:
        return 0.0, 0.0  # without this, rounding would leave a small slope
    if n < _FEWEST_OF_A_TREND:
        return math.nan, math.nan
    line = stats.linregress(np.linspace(-0.5, 0.5, n), values)
    quantile = float(stats.t.ppf(0.975, n - 2))
    return float(line.slope), quantile * float(line.stderr)


def judge(log: Sequence[Entry], settings: Mapping[str, Any]) -> list[Verdict]:
    """
    Verdicts on a run, from the lines of its `log.jsonl` and its settings: one for each diagnostic that was logged, one
    for each reward function that falls while the reward rises, and one for the validation.
    """
    rewards = values_of(finite(log, "reward"))
    learns = bool(rewards) and facts(rewards, [], math.nan)["rise"] >= 1  # the reward has risen by more than its ±
    # An entry without a finite reward says nothing of the variance in groups.
    with_reward = [entry for entry in log if "reward" not in entry or math.isfinite(number(entry, "reward"))]
    verdicts = [_verdict_on_nan(log, metric) for metric in _REMEDIES_OF_NAN]
    for diagnostic in diagnostics(settings):
        if diagnostic.name == "groups":
            if learns:  # Then groups have no variance because most problems are solved.
                diagnostic = replace(diagnostic, high=diagnostic.wrong[1])
            verdicts.append(_judge(diagnostic, with_reward, learns))
        else:
            verdicts.append(_judge(diagnostic, log, learns))
    if learns:
        verdicts += _falling_functions(log)
    verdicts.append(_validation(log))
    return [verdict for verdict in verdicts if verdict is not None]


_REMEDIES_OF_NAN = {
    "reward": "Fix the reward function, or the solutions: it returns `None` where it cannot read one.",
    "grad_norm": "Lower `learning_rate`, and use bfloat16 instead of float16. Go back to a checkpoint from before.",
}


def _verdict_on_nan(log: Sequence[Entry], metric: str) -> Verdict | None:
    """
    The verdict on a metric that is not a number in some entries of a log, `None` if it always is one. It is "wrong"
    if the last tenth of the entries, at least 3, have no number.
    """
    are_nan = [math.isnan(number(entry, metric)) for entry in log if metric in entry]
    if not any(are_nan):
        return None
    n_nan = sum(are_nan)
    n_last = max(len(are_nan) // 10, 3)
    return Verdict(
        metric,
        f"`{metric}` was not a number in {n_nan:,} of {len(are_nan):,} entries.",
        healthy=False,
        remedy=_REMEDIES_OF_NAN[metric],
        points=finite(log, metric),
        range="a number in every entry",
        wrong=all(are_nan[-n_last:]),
    )


def _judge(diagnostic: Diagnostic, log: Sequence[Entry], learns: bool) -> Verdict | None:
    """
    The verdict of one diagnostic: healthy or not by its bounds, or too early to say. `None` if its metric was not
    logged, or it has nothing to say of this log. `learns`: whether the run's reward has risen; then nothing is
    "wrong".
    """
    metric = _first_that_was_logged(diagnostic.metrics.split(), log)
    if metric is None:
        return None
    all_points = finite(log, metric)
    points = finite(log, metric, off_policy) if diagnostic.off_policy else all_points
    if not points:
        return None
    if metric == "grad_norm" and not any(values_of(all_points)):
        if diagnostic.name != "gradient":  # It compares the norms of off-policy steps with those of others: 0 by 0.
            return None
        if _steps_of(points) >= _FEWEST_STEPS:
            sentence = f"Gradient norm was exactly 0 in all {len(points):,} entries: nothing was trained."
            return Verdict(metric, sentence, False, _REMEDY_OF_NO_GRADIENT, points, "above 0", wrong=True)
    on_policy = finite(log, metric, lambda entry: entry.get("opo/off_policy_steps") == 0)
    generated = max(values_of(finite(log, "completions/generated")), default=math.nan)
    steps_per_value = _steps_of(points) / len(points)
    facts_of_metric = facts(values_of(points), values_of(on_policy), generated, steps_per_value)
    value = facts_of_metric[diagnostic.fact]  # the number that the bounds are about
    if math.isnan(value):
        return Verdict(metric, f"Too little in this log for a verdict on `{metric}`.", None, "", points)
    sentence = _SENTENCES[diagnostic.name].format_map(facts_of_metric)
    meaning, remedy = _meaning_and_remedy(diagnostic, value)  # empty if the value is healthy
    least, most = diagnostic.wrong
    wrong = not learns and not least <= value <= most
    interval_holds_0 = diagnostic.fact == "rise" and abs(value) < 1 and facts_of_metric["margin"] > 0
    if not wrong and (interval_holds_0 or _steps_of(all_points) < _FEWEST_STEPS):
        reason = "the interval holds 0" if interval_holds_0 else f"fewer than {_FEWEST_STEPS} steps"
        return Verdict(metric, f"{sentence}: too early to say, {reason}.", None, remedy, points, diagnostic.range())
    if meaning:
        sentence += f": {meaning}"
    return Verdict(metric, f"{sentence}.", not meaning, remedy, points, diagnostic.range(), wrong)


def _first_that_was_logged(metrics: Sequence[str], log: Sequence[Entry]) -> str | None:
    """The first of these metrics that an entry of the log has."""
    for metric in metrics:
        if any(metric in entry for entry in log):
            return metric
    return None


def _meaning_and_remedy(diagnostic: Diagnostic, value: float) -> tuple[str, str]:
    """What a value means, and what to try; both are empty if it is within the bounds."""
    if value < diagnostic.low:
        advice = _ADVICE[f"{diagnostic.name} <"]
    elif value > diagnostic.high:
        advice = _ADVICE[f"{diagnostic.name} >"]
    else:
        return "", ""
    meaning, _, remedy = advice.partition(". ")
    return meaning, remedy


def _steps_of(points: Points) -> float:
    """
    Number of optimizer steps that points stand for: each for those since the point before it, and the first for as
    many as are usual between two. But not more than the run has made, whose first step may be called 0 or 1.
    """
    steps = [step for step, _ in points]
    interval = _median(np.diff(steps)) if len(steps) > 1 else 1.0
    first, last = steps[0], steps[-1]
    n_steps = last - first + interval
    n_steps_of_run = last - min(first, 1) + 1
    return min(n_steps, n_steps_of_run)


def _falling_functions(log: Sequence[Entry]) -> list[Verdict]:
    """Verdicts on the reward functions that fall, each by its own mean, in a run whose reward rises."""
    verdicts = []
    for metric in sorted(set(chain(*log))):
        if not (metric.startswith("rewards/") and metric.endswith("/mean")):
            continue
        points = finite(log, metric)
        facts_of_metric = facts(values_of(points), [], math.nan)
        if facts_of_metric["rise"] <= -1 and _steps_of(points) >= _FEWEST_STEPS:
            change = "went from {first:.3g} to {last:.3g} while the reward rose.".format_map(facts_of_metric)
            verdicts.append(Verdict(metric, f"`{metric}` {change}", False, _REMEDY_OF_A_FALL, points))
    return verdicts


def _validation(log: Sequence[Entry]) -> Verdict | None:
    """
    The verdict on the accuracy of the last validation against the first: healthy if it rose, not if it fell, and too
    early to say if their intervals overlap. `None` with fewer than two.
    """
    names = ("validation/accuracy", "validation/low", "validation/high")
    validations = []
    for entry in log:
        values = [number(entry, name) for name in names]
        if all(map(math.isfinite, values)):
            validations.append(entry)
    if len(validations) < 2:
        return None
    first, last = validations[0], validations[-1]
    healthy: bool | None = None
    verb = "went"
    remedy = ""
    doubt = ""
    if last["validation/low"] > first["validation/high"]:
        healthy, verb = True, "rose"
    elif last["validation/high"] < first["validation/low"]:
        healthy, verb = False, "fell"
        remedy = _REMEDY_OF_A_FALL
    else:
        doubt = ": too early to say, the intervals overlap"
    accuracy = "{validation/accuracy:.1%} [{validation/low:.1%}, {validation/high:.1%}]"
    before, after = accuracy.format_map(first), accuracy.format_map(last)
    return Verdict(
        "validation/accuracy",
        f"Validation accuracy {verb} from {before} to {after}{doubt}.",
        healthy,
        remedy,
        points=finite(validations, "validation/accuracy"),
    )


_REMEDY_OF_A_FALL = (
    "If the reward rose, the policy earns it by something other than correct answers: read the completions and "
    "fix the reward. Otherwise lower `learning_rate`."
)


def conclusion(verdicts: Sequence[Verdict]) -> str:
    """The verdicts in up to three sentences: what is wrong, what to look at, and of what it is too early to say."""
    wrong = _metrics_with("wrong", verdicts)
    look = _metrics_with("look", verdicts)
    early = _metrics_with("–", verdicts)
    n_judged = len(verdicts) - len(early)
    if not verdicts:
        return "Nothing has been logged yet."
    if not n_judged:
        if any(verdict.range for verdict in verdicts):  # some were compared with their bounds
            return f"Too early to say: none of {len(verdicts)} diagnostics has a verdict yet."
        return "Too little has been logged for a verdict."
    sentences = []
    if wrong:
        sentences.append(f"Wrong: {len(wrong)} of {n_judged} diagnostics, {', '.join(wrong)}.")
    if look and wrong:
        sentences.append(f"Also look at {', '.join(look)}.")
    elif look:
        sentences.append(f"Look at {len(look)} of {n_judged} diagnostics: {', '.join(look)}.")
    if not sentences:
        some_are_healthy = f"Healthy: {n_judged} of {len(verdicts)} diagnostics."
        sentences.append(some_are_healthy if early else f"All {n_judged} diagnostics are healthy.")
    if early:
        sentences.append(f"Too early to say: {', '.join(early)}.")
    return " ".join(sentences)


def _metrics_with(word: str, verdicts: Sequence[Verdict]) -> list[str]:
    """The metrics whose verdict is this word."""
    return [f"`{verdict.metric}`" for verdict in verdicts if verdict.word == word]


def spark(points: Points) -> str:
    """
    A curve of a metric as the `points` of an SVG polyline. Values next to each other are averaged, to at most as many
    as the curve is wide.
    """
    width, height, margin = 100, 24, 2  # in the units of the SVG
    bins = np.array_split(values_of(points), min(len(points), width))
    means = np.array([values.mean() for values in bins])
    middle = (means.max() + means.min()) / 2
    span = np.ptp(means) or 1  # equal values make a line in the middle
    xs = np.linspace(0, width, len(means))
    ys = height / 2 - (means - middle) / span * (height - 2 * margin)
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
