"""The report of a run: verdicts that tell a healthy run from a broken one, in a self-contained file."""

import json
import math
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import TrainerControl, TrainerState

from opo_trl.checks import files
from opo_trl.checks.files import append_lines, write_json
from opo_trl.command.callbacks import LogFile, ProgressBar
from opo_trl.command.cli import main
from opo_trl.report.diagnostics import conclusion, diagnostics, judge, trend
from opo_trl.report.examples import LONGEST, Example, examples
from opo_trl.report.run_report import describe, page, write_report


SETTINGS = {"trainer": "opo", "num_generations": 6, "model_name_or_path": "arithmetic", "seed": 42, "max_steps": 40}


def healthy_metrics(share: float, reused: int) -> dict[str, float]:
    """
    Metrics of an optimizer step of a healthy run.

    Args:
        share: of the run that is over, from 0 to 1.
        reused: 1 in an off-policy step, otherwise 0.
    """
    return {
        "grad_norm": 3 + share,
        "entropy": 0.05 - 0.03 * share,
        "completions/clipped_ratio": 0.01,
        "completions/generated": 400 + 3600 * share,
        "opo/escort/ess": 4.8,
        "opo/chi2": 0.05 * reused,
        "opo/conservation_residual": -0.04 * reused,
        "opo/frac_zero_drive": 0.4,
        "opo/ratio/ess": 1 - 0.1 * reused,
        "opo/target_fit": 0.2 * reused,
        "opo/frac_masked": 0.0,
        "opo/frac_clamped": 0.0,
        "opo/off_policy_steps": float(reused),
        "opo/skipped_steps": 0.0,
        "reward/timeouts": 0.0,
        "reward/errors": 0.0,
    }


def scripted(*, validated: tuple[float, float] | None = (0.2, 0.8), rewards=(0.4, 0.9), **changed) -> list[dict]:
    """
    A log of 40 optimizer steps, two per rollout.

    In `changed`, a name has `__` for `/`, and its value is a function of `share` and `reused`, or the same everywhere.
    """
    first_reward, last_reward = rewards
    log = []
    for step in range(1, 41):
        share = (step - 1) / 39
        reused = (step - 1) % 2
        row = {"step": step, **healthy_metrics(share, reused)}
        for name, value in changed.items():
            row[name.replace("__", "/")] = value(share, reused) if callable(value) else value
        rise = (last_reward - first_reward) * share
        wobble = 0.03 * (step % 4 - 1)
        row["reward"] = first_reward + rise + wobble
        log.append(row)
    if validated:
        accuracy_before, accuracy_after = validated
        log.insert(0, validation(0, accuracy_before))
        log.append(validation(40, accuracy_after))
    return log


def validation(step: int, accuracy: float) -> dict:
    return {
        "step": step,
        "validation/accuracy": accuracy,
        "validation/low": accuracy - 0.1,
        "validation/high": accuracy + 0.1,
    }


def write_run(folder: Path, log: list[dict], settings: dict = SETTINGS, summary: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("alpha: 0.4\n")
    (folder / "plan.txt").write_text("OPO training plan\n  rollout    8 prompts × 6 completions = 48\n")
    write_json(folder / "settings.json", settings)
    write_json(folder / "environment.json", {"python": "3.11.7", "devices": ["cpu"], "packages": {"trl": "1.16.0"}})
    append_lines(folder / "log.jsonl", log)
    if summary is not None:
        write_json(folder / "summary.json", summary)
    return folder


# Verdicts


def sentences_of(log: list[dict], **settings) -> dict[str, str]:
    """Sentences by metric; that of off-policy steps has its own key."""
    sentences = {}
    for verdict in judge(log, SETTINGS | settings):
        is_off_policy = "norm of off-policy" in verdict.sentence
        key = f"{verdict.metric} off-policy" if is_off_policy else verdict.metric
        sentences[key] = verdict.sentence
    return sentences


def poor_metrics(log: list[dict], **settings) -> list[str]:
    verdicts = judge(log, SETTINGS | settings)
    return [verdict.metric for verdict in verdicts if verdict.healthy is False]


def test_healthy_run_is_called_healthy_in_every_respect():
    assert {verdict.healthy for verdict in judge(scripted(), SETTINGS)} == {True}
    sentences = sentences_of(scripted())
    assert len(sentences) == 17
    assert sentences["reward"] == "Reward went from 0.426 to 0.887 (linear trend +0.5 ± 0.037)."


def at_end(before: float, after: float) -> Callable:
    """A metric that changes in the middle of the run."""
    return lambda share, reused: after if share > 0.5 else before


def off_policy(value: float, on_policy: float = 0.0) -> Callable:
    """A metric that differs in off-policy steps."""
    return lambda share, reused: value if reused else on_policy


def off_policy_at_end(value: float, before: float) -> Callable:
    """A metric that differs in off-policy steps of the last 30% of the run."""
    return lambda share, reused: value if reused and share > 0.7 else before


# Case → changes of the log, and the sentence that they cause.
BROKEN = {
    "reward": ({"rewards": (0.5, 0.45)}, r"went from 0\.\d+ to 0\.\d+ \(.*: no rise beyond the noise"),
    "opo/frac_zero_drive": ({"opo__frac_zero_drive": at_end(0.4, 0.96)}, "held 96% .*: these carry"),
    "completions/clipped_ratio": ({"completions__clipped_ratio": at_end(0, 0.6)}, "were 60% .*: their"),
    "entropy": ({"entropy": at_end(0.05, 0.001)}, "went from 0.05 to 0.001 nats: the policy barely explores"),
    "entropy up": ({"entropy": at_end(0.05, 0.3)}, "went from 0.05 to 0.3 nats: the policy becomes random"),
    "grad_norm": ({"grad_norm": at_end(3, 300)}, "went from 3 to 300: training becomes unstable"),
    "grad_norm down": ({"grad_norm": at_end(3, 0)}, "went from 3 to 0: it vanished"),
    "grad_norm always 0": ({"grad_norm": 0}, "was exactly 0 in all 40 entries: nothing was trained"),
    "grad_norm off-policy": ({"grad_norm": off_policy(200, on_policy=4)}, "was 50 times"),
    "opo/escort/ess": ({"opo__escort__ess": 1.3}, "at 1.3: one completion has nearly"),
    "opo/chi2": ({"opo__chi2": off_policy(0.9)}, "was 0.9: the policy drifts off"),
    "opo/conservation_residual": ({"opo__conservation_residual": off_policy(-0.7)}, "had 30% of the probability"),
    "opo/ratio/ess": ({"opo__ratio__ess": off_policy_at_end(0.3, before=1)}, "at least 30%"),
    "opo/target_fit": ({"opo__target_fit": off_policy(-60)}, "was -60 in off-policy steps.*: adrift"),
    "opo/frac_clamped": ({"opo__frac_clamped": at_end(0, 0.25)}, "were 25% at most: the policy is far from the one"),
    "opo/frac_masked": ({"opo__frac_masked": 0.3}, "were 30%: they are excluded from training"),
    "opo/skipped_steps": ({"opo__skipped_steps": at_end(0, 2)}, "non-finite gradient were 2"),
    "reward/timeouts": ({"reward__timeouts": at_end(2, 4)}, r"were 120 \(3.0%\)"),
    "reward/errors": ({"reward__errors": at_end(2, 4)}, r"were 120 \(3.0%\)"),
    "validation/accuracy": ({"validated": (0.8, 0.2)}, r"accuracy fell from 80.0% \[70.0%, 90.0%\] to 20.0%"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_metric_is_reported_with_a_remedy_and_the_rest_is_healthy(case):
    changes, sentence = BROKEN[case]
    log = scripted(**changes)
    (poor,) = [verdict for verdict in judge(log, SETTINGS) if verdict.healthy is False]
    assert re.search(sentence, poor.sentence)
    assert case.startswith(poor.metric)
    assert poor.remedy


def test_without_any_gradient_off_policy_steps_have_no_verdict():
    healthy = scripted()
    without_gradient = scripted(grad_norm=0)
    assert "grad_norm off-policy" in sentences_of(healthy)
    assert "grad_norm off-policy" not in sentences_of(without_gradient)


def test_solved_groups_and_large_ratios_of_old_completions_are_healthy():
    log = scripted(opo__frac_zero_drive=at_end(0.4, 0.81), opo__chi2=off_policy(90))
    assert poor_metrics(log, max_staleness=0) == ["opo/chi2"]
    assert poor_metrics(log, max_staleness=8) == []
    few = scripted(opo__ratio__ess=off_policy(0.2, on_policy=1))
    assert poor_metrics(few, max_staleness=0) == ["opo/ratio/ess"]
    assert poor_metrics(few, max_staleness=8) == []


def test_figures_of_a_healthy_run_are_said_in_plain_words():
    log = scripted(opo__conservation_residual=off_policy(0))
    verdicts = {verdict.metric: verdict for verdict in judge(log, SETTINGS)}
    kept = verdicts["opo/conservation_residual"]
    sentence = "Completions had 100% of the probability that they were sampled with, in off-policy steps."
    assert (kept.sentence, kept.range) == (sentence, "at least 0.5 of it in the median")
    assert verdicts["reward"].range == "a rise of at least its ±"


def test_run_without_reward_is_not_called_healthy():
    log = [{**row, "reward": 0.0} for row in scripted(validated=None)]
    assert poor_metrics(log) == ["reward"]


def test_bounds_depend_on_settings():
    sentences = sentences_of(scripted(), chi2_radius=0.01)
    assert "was 0.05: the policy drifts off" in sentences["opo/chi2"]
    log = scripted(opo__escort__ess=1.8)
    of_pairs = sentences_of(log, num_generations=2)
    of_six = sentences_of(log)
    assert of_pairs["opo/escort/ess"] == "Escort effective sample size stayed at 1.8."
    assert "nearly all the weight" in of_six["opo/escort/ess"]
    cases = [({}, 0.2, 0.01), ({"objective": "gspo"}, 0.2, 0.5), ({"reward_funcs": ["first_line_reward"]}, 1.0, 0.01)]
    for settings, truncated, clipped in cases:
        high = {diagnostic.name: diagnostic.high for diagnostic in diagnostics(settings)}
        assert high["truncated"] == truncated
        assert high["clipped"] == clipped
    every = {diagnostic.name for diagnostic in diagnostics({})}
    cases = [
        ({"mu": 0.0}, {"χ²", "pull-back"}),
        ({"mu": None, "chi2_radius": 0.1}, set()),
        ({"rollouts": "logs"}, {"χ²"}),
    ]
    for settings, left_out in cases:
        assert {diagnostic.name for diagnostic in diagnostics(settings)} == every - left_out


def test_non_finite_values_and_short_logs_give_no_verdict():
    log = scripted(opo__escort__ess=math.nan)
    assert "opo/escort/ess" not in sentences_of(log)
    short = sentences_of(log[:5])
    assert short["reward"] == "Too little in this log for a verdict on `reward`."
    assert "validation/accuracy" not in short
    assert judge([], SETTINGS) == []


def test_trend_is_that_of_least_squares():
    values = [0.1, 0.4, 0.2, 0.5, 0.3, 0.9, 0.4]
    (slope, _), covariance = np.polyfit(range(7), values, 1, cov=True)
    # The 97.5 % quantile of Student's t with five degrees of freedom is 2.5706.
    standard_error = covariance[0, 0] ** 0.5
    expected = (6 * slope, 6 * standard_error * 2.570582)
    assert trend(values) == pytest.approx(expected, rel=1e-6)
    assert trend([0.5] * 6) == (0, 0)


@pytest.mark.parametrize("validated", [(0.4, 0.55), (0.55, 0.4)])
def test_overlapping_validations_are_undecided(validated):
    """The accuracy of each is outside the interval of the other."""
    verdicts = judge(scripted(validated=validated), SETTINGS)
    assert verdicts[-1].healthy is None
    assert "too early to say, the intervals overlap" in verdicts[-1].sentence
    assert conclusion(verdicts) == "Healthy: 16 of 17 diagnostics. Too early to say: `validation/accuracy`."


# The page


def text_of(page: str) -> str:
    return unescape(re.sub("<.*?>", "", page, flags=re.DOTALL))


CELL = {"accuracy": 0.5, "low": 0.4, "high": 0.6}


@pytest.fixture(scope="module")
def broken_run(tmp_path_factory) -> Path:
    """The folder of a finished run that fills every part of a report."""
    summary = {time: {"Level 3": {"sampled": CELL}} for time in ("before", "after")}
    summary |= {"optimizer_steps": 40, "train_seconds": 61.2}
    folder = tmp_path_factory.mktemp("runs") / "a <b>run"
    log = scripted(entropy=at_end(0.05, 0.001))
    run = write_run(folder, log, SETTINGS, summary)
    write_report(run)
    return run


def test_report_is_self_contained(broken_run):
    html = (broken_run / "report.html").read_text()
    curves = re.findall('<polyline points="(.*?)"', html)
    assert len(curves) == 17
    for points in curves:
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 100
            assert 0 <= y <= 24
    assert not re.search(r"https?:|//|file:|@import|url\(|<(script|link|iframe|img)", html)
    assert str(broken_run.parent) not in html


def test_report_has_every_part(broken_run):
    html = (broken_run / "report.html").read_text()
    page = text_of(html)
    for text in (
        "Run: a <b>run",
        "model_name_or_path arithmetic, seed 42",
        "Finished: 40 optimizer steps in 61 seconds.",
        "Look at 1 of 17 diagnostics: entropy.",
        "8 prompts × 6 completions = 48",
        "50.0% [40.0%, 60.0%]",
        "Escort effective sample size stayed at 4.8.",
    ):
        assert text in page, text
    _, tried = page.split("What to try next")
    assert "Entropy per token went from 0.05 to 0.001 nats" in tried


def test_terminal_says_what_the_page_says(broken_run, tmp_path, capsys):
    page = tmp_path / "again.html"
    assert main(["report", str(broken_run), "--output", str(page)]) == 0
    printed = capsys.readouterr().out
    assert page.read_bytes() == (broken_run / "report.html").read_bytes()
    for text in ("Finished: 40", "Level 3, sampled: 50.0% [40.0%, 60.0%] → 50.0%", "look     Entropy per token went"):
        assert text in printed


def test_interrupted_run_has_a_report(tmp_path):
    run = write_run(tmp_path / "run", scripted(validated=None), summary={"before": {"Level 3": {"greedy": CELL}}})
    write_report(run)
    html = (run / "report.html").read_text()
    page = text_of(html)
    assert "Not finished: 40 of 40 optimizer steps." in page
    assert "No diagnostic is beyond its bound." in page
    ((_, *accuracies),) = describe(run)["accuracies"]
    assert accuracies == ["50.0% [40.0%, 60.0%]", "–"]


def test_facts_alone_are_not_called_healthy():
    verdicts = judge([{"step": 1, "reward": 1.0}], {})
    assert conclusion(verdicts) == "Too little has been logged for a verdict."


def test_progress_bar_accepts_none():
    """Which TRL logs if all values were NaN."""
    bar = ProgressBar()
    args = SimpleNamespace(max_completions=None)
    state = TrainerState(max_steps=2, is_world_process_zero=True)
    control = TrainerControl()
    bar.on_train_begin(args, state, control)
    metrics = dict.fromkeys(("reward", "validation/accuracy", "entropy", "grad_norm"))
    bar.on_log(None, state, control, logs=metrics)
    bar.on_train_end(None, state, control)


def test_log_of_an_own_run_may_be_of_any_size_and_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINES", 2)
    rows = [{"step": step, "reward": 1.0} for step in range(1, 9)]
    append_lines(tmp_path / "elsewhere", rows)
    log = tmp_path / "log.jsonl"
    log.symlink_to("elsewhere")
    state = TrainerState(global_step=6, is_world_process_zero=True)
    LogFile(tmp_path).on_train_begin(None, state, None)
    remaining = files.read_lines(log, bounded=False)
    assert [row["step"] for row in remaining] == [1, 2, 3, 4, 5, 6]


def test_a_metric_named_step_does_not_hide_the_optimizer_step(tmp_path):
    state = TrainerState(global_step=3, is_world_process_zero=True)
    LogFile(tmp_path).on_log(None, state, None, logs={"reward": 1.0, "step": 0.25})
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 3, "reward": 1.0}\n'


# The completions that it shows


def completion_of(step: int, reward: float | None, completion: object = "4", prompt: object = "2 + 2 =") -> dict:
    return {"step": step, "prompt": prompt, "completion": completion, "reward": reward}


def test_best_and_worst_of_the_first_and_the_last_validation_are_shown():
    entries = [completion_of(0, 0.5, "a"), completion_of(0, None, "b"), completion_of(0, 1.0, "c")]
    entries += [
        completion_of(8, 0.0, "d"),
        completion_of(16, 0.25, "e"),
        completion_of(16, 0.75, "f"),
        completion_of(16, 0.5, "g"),
    ]
    shown = [(example.step, example.reward, example.completion) for example in examples(entries)]
    assert shown == [(0, "1", "c"), (0, "no score", "b"), (16, "0.75", "f"), (16, "0.25", "e")]


def test_one_completion_is_shown_once():
    assert examples([completion_of(0, 1.0)]) == [Example(0, "1", "2 + 2 =", "4")]
    assert examples([]) == []


def test_long_completions_are_cut_and_messages_are_named():
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    [example] = examples([completion_of(3, 0.0, completion="x" * (LONGEST + 1_234), prompt=messages)])
    assert example.prompt == "user: 2 + 2?\n\nassistant: 4"
    assert example.completion == "x" * LONGEST + " … (1,234 characters more)"


@pytest.fixture
def run_with_markup(tmp_path: Path) -> Path:
    """The folder of a run whose completions look like a page."""
    (tmp_path / "settings.json").write_text('{"seed": 1}')
    completion = "<script>alert(1)</script> and \x1b[2J"
    lines = [json.dumps(completion_of(step, 1.0, completion)) for step in (0, 4)]
    (tmp_path / "completions.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_completions_are_text_on_the_page(run_with_markup):
    html = page(describe(run_with_markup))
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; and \\x1b[2J") == 2
    assert "<script" not in html
    assert "\x1b" not in html


def test_completions_that_are_none_are_named_in_the_error(run_with_markup):
    (run_with_markup / "completions.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"completions\.jsonl or the log is not as opo-trl writes it: KeyError"):
        describe(run_with_markup)
