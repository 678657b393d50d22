"""`opo-trl diagnose`: the logs of TRL's own trainer, as TRL, trackio and wandb keep them."""

import gzip
import json
import math
import os
import random
import re
import sys
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset
from helpers import PROMPTS, RecordingGRPO, Script, even_tokens, limited_files, trained

from opo_trl.checks.files import write_json
from opo_trl.launch.cli import main
from opo_trl.report.diagnosis import COMPLETIONS, GRADIENTS, reuse
from opo_trl.report.foreign_log import GENERATION, read
from opo_trl.report.verdicts import judge


ROOT = Path(__file__).resolve().parents[2]
SAVING = {"trainer_class": RecordingGRPO, "save_strategy": "steps", "save_steps": 4, "save_only_model": True}
EVALUATED = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS})}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
GENERATED = {"rollout_func": None, "reward_funcs": even_tokens}


@pytest.fixture(scope="module")
def dead(tiny_model, tmp_path_factory) -> Path:
    """Every group has zero variance; logged in every second step, and evaluated between."""
    folder = tmp_path_factory.mktemp("runs") / "dead"
    script = Script(rewards=[1.0] * 8)
    options = {**SAVING, **EVALUATING, "max_steps": 12, "logging_steps": 2}
    trained(tiny_model, folder, script=script, trainer_arguments=EVALUATED, **options)
    return folder


@pytest.fixture(scope="module")
def clipped(tiny_model, tmp_path_factory) -> Path:
    """Four passes over each rollout at a large learning rate."""
    folder = tmp_path_factory.mktemp("runs") / "clipped"
    trained(tiny_model, folder, **SAVING, max_steps=24, num_iterations=4, learning_rate=0.03)
    return folder


@pytest.fixture(scope="module")
def truncated(tiny_model, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Completions end at the limit; with the rows that trackio has kept of it."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path_factory.mktemp("runs") / "truncated"
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
                patch.setattr(module, "TRACKIO_DIR", folder.parent / "trackio")
        options = {**SAVING, **EVALUATING, "report_to": "trackio", "project": "tested", "max_steps": 8}
        options["max_completion_length"] = 6
        trained(tiny_model, folder, trainer_arguments={**GENERATED, **EVALUATED}, **options)
        found = SQLiteStorage.query_project("tested", "SELECT * FROM metrics ORDER BY id")
    return folder, found["rows"]


def entries(path: Path) -> list[dict]:
    return read(path)[0]


def words(capsys, run: Path, *more: str) -> tuple[int, dict[str, str], str]:
    """Exit status of the command, the verdict on each subject, and all that is printed."""
    status = main(["diagnose", str(run), *more])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()[1:]]
    return status, {" ".join(line[1:3]): line[0] for line in lines if line[0] != "–"}, printed


def test_run_of_dead_groups(dead, capsys):
    status, said, printed = words(capsys, dead)
    assert status == 1
    assert said["Zero-variance groups"] == said["Gradient norm"] == "wrong"
    assert said["Reward went"] == "look"
    assert said["Truncated completions"] == said["Entropy per"] == said["Clipped ratios"] == "healthy"
    assert "held 100% of completions at the end" in printed
    assert "Healthy: at most 0.75 at the end. If rewards are high" in printed
    assert "On-policy, or nearly: no ratio was clipped in any entry." in printed
    assert "Over the run, 100% of completions were in zero-variance groups" in printed
    assert "over 84% of a step, which this log does not time" in printed
    assert "steps: 12. Entries: 6." in printed


def test_run_that_is_clipped(clipped, capsys):
    status, said, printed = words(capsys, clipped)
    assert status == 0
    assert said["Clipped ratios"] == "look"
    assert "Healthy: at most 0.01 on average. Use completions for fewer passes" in printed
    assert said["Zero-variance groups"] == "healthy"
    assert "Off-policy: a rollout serves 4 optimizer steps." in printed
    assert "Estimate" not in printed


def test_run_that_is_truncated(truncated, capsys):
    status, said, printed = words(capsys, truncated[0])
    assert status == 1
    assert said["Truncated completions"] == "wrong"
    assert said["Zero-variance groups"] == said["Entropy per"] == said["Gradient norm"] == "healthy"
    assert "On-policy: every optimizer step has a rollout of its own" in printed


def test_run_that_diverges_is_wrong_in_every_form(tiny_model, tmp_path, capsys):
    trained(tiny_model, tmp_path / "run", **SAVING, max_steps=8, num_iterations=4, learning_rate=1e4)
    state = tmp_path / "run" / "checkpoint-8" / "trainer_state.json"
    frame = pd.DataFrame(json.loads(state.read_text())["log_history"])
    frame.to_csv(tmp_path / "run.csv")
    frame.to_json(tmp_path / "run.json")
    for path in (tmp_path / "run", tmp_path / "run.csv", tmp_path / "run.json"):
        status, _, printed = words(capsys, path)
        assert status == 1
        assert re.search(r"^wrong +Gradient norm was not finite in \d of 8 entries", printed, re.MULTILINE)


# Exports


def exports(rows: list[dict], folder: Path) -> list[Path]:
    """The rows of trackio, as it exports them and as wandb would, which numbers all calls."""
    (folder / "trackio.json").write_text(json.dumps({"columns": [*rows[0]], "rows": rows}))
    plain = [json.loads(row["metrics"]) for row in rows]
    frame = pd.DataFrame({"_step": i, "_timestamp": 1.7e9 + i, **row} for i, row in enumerate(plain))
    frame = frame.map(lambda value: float(value) if value in ("NaN", "Infinity", "-Infinity") else value)
    frame["gradients/layer"] = [{"_type": "histogram", "bins": [0, 1]}] * len(frame)
    frame.to_csv(folder / "run.csv")
    frame.to_json(folder / "columns.json")
    frame.to_json(folder / "records.json", orient="records")
    frame.to_json(folder / "lines.jsonl", orient="records", lines=True)
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_exports_say_what_trl_has_kept(truncated, tmp_path):
    folder, rows = truncated
    kept = entries(folder)
    assert [entry["step"] for entry in kept] == [*range(1, 9)]
    paths = exports(rows, tmp_path)
    assert len(paths) == 5
    for path in paths:
        log = entries(path)
        assert len(log) == len(kept)
        for entry, own in zip(log, kept, strict=True):
            shared = own.keys() - {"epoch"}
            assert {name: entry[name] for name in shared} == pytest.approx(
                {name: own[name] for name in shared}, abs=1e-9
            )
            assert not [name for name in entry if "eval" in name]
            assert 0 < entry[GENERATION] < entry["step_time"]
        assert [v.sentence for v in judge(log, {})] == [v.sentence for v in judge(kept, {})]
        (said,) = [fact.sentence for fact in reuse(log) if fact.sentence.startswith("Estimate")]
        share = float(re.search(r"take (\d+)% of a step", said)[1]) / 100
        times = float(re.search(r"takes ([\d.]+) times", said)[1])
        assert times == pytest.approx(COMPLETIONS * (share + GRADIENTS * (1 - share)), abs=0.02)


def test_tables_of_spreadsheets_with_long_cells_are_read(tmp_path):
    rows = "".join(f"{step},0.5,{'x' * 200_000}\n" for step in range(1, 4))
    (tmp_path / "run.csv").write_text(f"step,reward,completions\n{rows}", encoding="utf-8-sig")
    assert [(entry["step"], entry["reward"]) for entry in entries(tmp_path / "run.csv")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]


def test_estimate_is_that_of_the_page():
    page = (ROOT / "docs" / "reuse.md").read_text(encoding="utf-8")
    assert f"OPO's, divided by the method's | | 0.91 [0.71, 1.18] | {COMPLETIONS} [0.53, 0.83]" in page
    assert f"OPO here computes {GRADIENTS} gradients for each completion" in page


def rows_of(*steps: int, **more: float) -> list[dict]:
    return [{"step": step, "reward": step / 10, "grad_norm": 1.0, "step_time": 2.0, **more} for step in steps]


def written(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    repeated = [{**row, "reward": 9.0} for row in rows_of(5, 6, 7)]
    log = entries(written(tmp_path / "log.jsonl", [*rows_of(*range(1, 9)), *repeated]))
    assert [entry["step"] for entry in log] == [*range(1, 8)]
    assert [entry["reward"] for entry in log[3:]] == [0.4, 9.0, 9.0, 9.0]


def test_entries_that_come_again_are_counted(tmp_path, capsys):
    rows = [*rows_of(*range(1, 9)), *rows_of(5, 6, 7)]
    for name, log in (("oldest", rows), ("newest", rows[::-1])):
        assert [entry["step"] for entry in entries(written(tmp_path / f"{name}.jsonl", log))] == [*range(1, 8)]
        assert "Left out: 4 earlier entries" in words(capsys, tmp_path / f"{name}.jsonl")[2]
    assert "Left out" not in words(capsys, written(tmp_path / "once.jsonl", rows[:8]))[2]


@pytest.mark.parametrize("order", ["text", "shuffled", "a last row of step 0"])
def test_rows_in_another_order_are_sorted(tmp_path, order):
    steps = [*range(1, 101), 0]
    if order == "text":
        steps.sort(key=str)
    if order == "shuffled":
        random.Random(0).shuffle(steps)
    found = entries(written(tmp_path / "log.jsonl", rows_of(*steps)))
    assert [(entry["step"], entry["reward"]) for entry in found] == [
        (row["step"], row["reward"]) for row in rows_of(*range(101))
    ]


def test_metrics_may_be_nested(tmp_path):
    rows = rows_of(*range(1, 9))
    nested = [{"run_name": "a", "metrics": row if row["step"] % 2 else json.dumps(row)} for row in rows]
    assert entries(written(tmp_path / "log.jsonl", nested)) == rows


def test_an_empty_column_does_not_hide_one_of_the_same_name(tmp_path):
    rows = [{"step": 1, "entropy": 1.0, "reward": None, "train/reward": 0.5, "train/entropy": None}]
    assert entries(written(tmp_path / "log.jsonl", rows)) == [{"step": 1, "reward": 0.5, "entropy": 1.0}]


def test_a_gradient_that_is_zero_at_first_is_healthy(tmp_path, capsys):
    rows = rows_of(*range(1, 61))
    first = dict.fromkeys(range(1, 9), 0.0) | {9: 0.02}
    rows = [row | {"grad_norm": first.get(row["step"], 0.5)} for row in rows]
    assert words(capsys, written(tmp_path / "log.jsonl", rows))[1]["Gradient norm"] == "healthy"


def test_generation_of_evaluations_and_of_samples_is_left_out(tmp_path):
    profile = {"profiling/Time taken: GRPOTrainer.vLLM.generate": 1.0}
    evaluation = {"eval/reward": 1.0, "train/global_step": 1}
    calls = [profile, {"train/global_step": 1, **rows_of(1)[0]}, profile, evaluation, profile, profile]
    rows = [*calls, {"train/global_step": 2, **rows_of(2)[0]}]
    numbered = [{**row, "_step": i} for i, row in enumerate(rows)]
    assert [entry[GENERATION] for entry in entries(written(tmp_path / "all.jsonl", numbered))] == [1, 2]
    sample = [row for row in numbered if row["_step"] != 4]
    assert not any(GENERATION in entry for entry in entries(written(tmp_path / "sample.jsonl", sample)))


def test_ratios_of_whole_completions_have_a_bound_of_their_own(tmp_path, capsys):
    for most, word in ((1.0, "healthy"), (0.1, "look")):
        clips = {"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": most}
        _, said, _ = words(capsys, written(tmp_path / "log.jsonl", rows_of(*range(1, 9), **clips)))
        assert said["Clipped ratios"] == word
    averaged = rows_of(*range(10, 90, 10), **{"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 0.44})
    assert words(capsys, written(tmp_path / "log.jsonl", averaged))[1]["Clipped ratios"] == "healthy"
    # A run of ours says what its ratios are.
    (tmp_path / "recipe.yaml").touch()
    write_json(tmp_path / "settings.json", {"importance_sampling_level": "sequence"})
    assert words(capsys, tmp_path)[1]["Clipped ratios"] == "healthy"


@pytest.mark.parametrize(("crashed", "status"), [(False, 0), (True, 1)])
def test_groups_without_signal_are_not_wrong_where_the_problems_are_solved(tmp_path, capsys, crashed, status):
    rows = [{**row, "reward": min(row["step"] / 25, 1), "frac_reward_zero_std": 0.3} for row in rows_of(*range(1, 31))]
    for row in rows[-5:]:
        row |= {"frac_reward_zero_std": 1.0, **({"reward": 0.0} if crashed else {})}
    found, said, _ = words(capsys, written(tmp_path / "log.jsonl", rows))
    assert (found, said["Zero-variance groups"]) == (status, "wrong" if crashed else "look")


@pytest.mark.parametrize(("end", "word"), [(140, "look"), (180, "look"), (200, "healthy")])
def test_a_reward_that_was_lost_is_not_healthy(tmp_path, capsys, end, word):
    """It rises from 0.2 to 0.7, with noise, and from some step on is as low as in the beginning."""
    rng = random.Random(0)
    rows = [
        {**row, "reward": (0.2 + 0.5 * step / 200 if step < end else 0.2) + rng.gauss(0, 0.05)}
        for step, row in enumerate(rows_of(*range(1, 201)))
    ]
    assert words(capsys, written(tmp_path / "log.jsonl", rows))[1]["Reward went"] == word


def test_a_reward_that_stays_high_is_healthy(tmp_path, capsys):
    for seed in range(20):
        rng = random.Random(seed)
        rows = [{**row, "reward": min(row["step"] / 40, 0.9) + rng.gauss(0, 0.05)} for row in rows_of(*range(1, 201))]
        assert words(capsys, written(tmp_path / "log.jsonl", rows))[1]["Reward went"] == "healthy"
    solved = [0.3, 0.5, 0.6, 0.8, 0.9, *[1.0] * 20, 0.98, 1.0, 0.98]
    rows = [{**row, "reward": reward} for row, reward in zip(rows_of(*range(1, 29)), solved, strict=True)]
    assert words(capsys, written(tmp_path / "log.jsonl", rows))[1]["Reward went"] == "healthy"


@pytest.mark.parametrize(("unscored", "status", "word"), [(8, 1, None), (2, 0, "healthy")])
def test_completions_that_are_never_scored_are_named(tmp_path, capsys, unscored, status, word):
    rows = [{**row, "frac_reward_zero_std": 0.0} for row in rows_of(*range(1, 9))]
    for row in rows[:unscored]:
        row["reward"] = None
    found, said, printed = words(capsys, written(tmp_path / "log.jsonl", rows))
    assert f"The reward was not a number in {unscored} of 8 entries." in printed
    assert (found, said.get("Zero-variance groups")) == (status, word)


def test_groups_are_not_judged_by_a_metric_of_the_whole_batch():
    rows = rows_of(*range(1, 9), frac_reward_zero_std=0.0)
    for settings in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        assert not any("Zero-variance" in verdict.sentence for verdict in judge(rows, settings))


def test_a_checkpoint_is_judged_as_its_run(tmp_path, capsys):
    (tmp_path / "recipe.yaml").touch()
    write_json(tmp_path / "settings.json", {"max_staleness": 8})
    (tmp_path / "checkpoint-8").mkdir()
    log = rows_of(*range(1, 9), **{"opo/ratio/ess": 0.3})
    write_json(tmp_path / "checkpoint-8" / "trainer_state.json", {"log_history": log})
    for path in (tmp_path / "checkpoint-8", tmp_path / "checkpoint-8" / "trainer_state.json"):
        assert words(capsys, path)[1]["Effective sample"] == "healthy"


def test_words_that_no_command_knows_are_rejected(tmp_path, capsys):
    log = written(tmp_path / "log.jsonl", rows_of(*range(1, 9)))
    for more in (["--outptu", "x.html"], [str(log)]):
        with pytest.raises(SystemExit):
            main(["diagnose", str(log), *more])
        assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo"])
def test_committed_runs_that_learn_are_within_the_bounds(tmp_path, capsys, method):
    logs = sorted((ROOT / "benchmarks" / "evidence").glob(f"*/{method}/seed-*/log.jsonl.gz"))
    assert len(logs) >= 15
    for log in logs:
        (tmp_path / "log.jsonl").write_bytes(gzip.decompress(log.read_bytes()))
        status, said, printed = words(capsys, tmp_path / "log.jsonl")
        assert status == 0
        assert said["Clipped ratios"] == said["Reward went"] == said["Gradient norm"] == "healthy"
        assert "Off-policy: a rollout serves 2 optimizer steps." in printed


def test_newest_checkpoint_is_read_unless_training_went_further(dead, tmp_path):
    def save(folder: str, step: int) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        state = {"global_step": step, "log_history": rows_of(*range(1, step + 1))}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))

    save("checkpoint-9", 9)
    save("checkpoint-10", 10)
    (tmp_path / "checkpoint-11").mkdir()
    assert len(entries(tmp_path)) == 10
    assert len(entries(tmp_path / "checkpoint-9")) == 9
    save(".", 8)
    assert len(entries(tmp_path)) == 10
    save(".", 12)
    assert len(entries(tmp_path)) == 12


@pytest.mark.parametrize("missing", ["reward", "step_time", "grad_norm", "entropy", "frac_reward_zero_std"])
def test_any_metric_may_be_missing(clipped, tmp_path, capsys, missing):
    rows = json.loads((clipped / "checkpoint-24" / "trainer_state.json").read_text())["log_history"]
    status, said, _ = words(capsys, written(tmp_path / "log.jsonl", [{**row, missing: None} for row in rows]))
    assert status == (missing in ("grad_norm", "reward"))  # TRL logs what is not finite as null
    assert said["Clipped ratios"] == "look"
    without = [{name: value for name, value in row.items() if name != missing} for row in rows]
    assert words(capsys, written(tmp_path / "log.jsonl", without))[0] == 0


@pytest.mark.parametrize("left", [{"learning_rate": 1e-5}, {"frac_reward_zero_std": 0.0}])
def test_what_is_left_to_log_at_the_end_has_no_gradient(tmp_path, capsys, left):
    rows = [{**row, **left} for row in rows_of(*range(1, 9))]
    end = {"step": 12, "reward": 0.9, "step_time": 2.0, "train_runtime": 30.0}
    assert words(capsys, written(tmp_path / "log.jsonl", [*rows, end]))[0] == 0


def test_gradient_and_reward_that_are_lost_are_wrong_in_logs_of_older_versions(tmp_path, capsys):
    """Which have neither `step_time` nor `frac_reward_zero_std`."""
    rows = [{"step": i, "learning_rate": 1e-5, "grad_norm": 1.0, "reward": 0.1 * i, "kl": 0.1} for i in range(1, 31)]
    rows = [{**row, "completion_length": 9.0} for row in rows]
    for name, said in (("grad_norm", "Gradient norm was not finite"), ("reward", "The reward was not a number")):
        lost = [{**row, name: math.nan} if row["step"] > 20 else row for row in rows]
        status, _, printed = words(capsys, written(tmp_path / "log.jsonl", lost))
        assert (status, f"{said} in 10 of 30 entries" in printed) == (1, True)


def test_evaluations_under_the_names_of_training_are_left_out(tmp_path):
    rows = rows_of(*range(1, 9))
    evaluations = [{"step": row["step"], "eval_loss": 0.1, "reward": -1.0} for row in rows]
    mixed = [row for pair in zip(rows, evaluations, strict=True) for row in pair]
    assert entries(written(tmp_path / "log.jsonl", mixed)) == entries(written(tmp_path / "own.jsonl", rows))


def test_a_few_entries_have_no_trend(tmp_path, capsys):
    rows = [{**row, "grad_norm": 10.0 ** row["step"]} for row in rows_of(1, 3, 5)]
    printed = words(capsys, written(tmp_path / "log.jsonl", rows))[2]
    assert "Too little in this log for a verdict on `grad_norm`" in printed
    assert "healthy" not in printed


def test_what_has_no_verdict_is_named(tmp_path, capsys):
    printed = words(capsys, written(tmp_path / "log.jsonl", rows_of(*range(1, 9), entropy=1.0)))[2]
    missing = "`frac_reward_zero_std`, `completions/clipped_ratio`, `clip_ratio`"
    assert f"Without a verdict, because not in this log: {missing}." in printed


def test_a_callback_may_log_a_step_again(tmp_path):
    rows = rows_of(*range(1, 9))
    more = [{"step": row["step"], "step_time": 2.0, "own": 1.0} for row in rows]
    both = [row for pair in zip(rows, more, strict=True) for row in pair]
    assert entries(written(tmp_path / "log.jsonl", both)) == [{**row, "own": 1.0} for row in rows]


def test_generation_before_an_evaluation_between_entries_is_not_that_of_the_entry(tmp_path):
    profile = {"profiling/Time taken: GRPOTrainer.transformers.generate": 1.8}
    rows: list[dict] = []
    for step in range(1, 41):
        rows.append(profile)
        if step % 5 == 0:
            rows += rows_of(step)
        if step % 8 == 0:
            rows += [profile, {"step": step, "eval/reward": 1.0}]
    log = entries(written(tmp_path / "log.jsonl", [{"_step": i, **row} for i, row in enumerate(rows)]))
    assert {entry["step"] for entry in log if GENERATION not in entry} == {10, 20, 25, 35}
    (said,) = [fact.sentence for fact in reuse(log) if fact.sentence.startswith("Estimate")]
    assert "generation and scoring take 90% of a step" in said


@pytest.mark.parametrize(
    ("served", "clipped", "said"),
    [
        ((1, 1), 0.0, "On-policy: every optimizer step has a rollout of its own"),
        (
            (1, 1),
            0.1,
            "Off-policy, although every optimizer step has a rollout of its own: an earlier policy wrote it.",
        ),
        ((1, 2), 0.0, "Off-policy: a rollout serves 1.5 optimizer steps on average."),
    ],
)
def test_what_is_off_policy(served, clipped, said):
    log, step = [], 0
    for steps in served * 10:
        for number in range(steps):
            step += 1
            log.append({"step": step, "grad_norm": 1.0, "clip_ratio": clipped, **({} if number else {"reward": 0.5})})
    assert reuse(log)[0].sentence.startswith(said)


def test_calls_are_not_taken_for_optimizer_steps(tmp_path, capsys):
    rows = [{"_step": row.pop("step"), **row} for row in rows_of(*range(1, 9))]
    printed = words(capsys, written(tmp_path / "log.jsonl", rows))[2]
    assert "`_step`, which counts calls that log: export `train/global_step`, too." in printed
    assert "every optimizer step has" not in printed


def test_entries_without_a_step_are_counted(tmp_path, capsys):
    rows = [{**row, "step": None} if row["step"] > 6 else row for row in rows_of(*range(1, 9))]
    assert (
        "Left out: 2 entries without a whole number in `step`."
        in words(capsys, written(tmp_path / "a.jsonl", rows))[2]
    )


def test_a_resumed_run_may_log_other_steps(tmp_path):
    steps = [*range(10, 110, 10), *range(57, 121, 7)]
    log = entries(written(tmp_path / "log.jsonl", rows_of(*steps)))
    assert [entry["step"] for entry in log] == [*range(10, 60, 10), *range(57, 121, 7)]


def test_the_file_that_is_read_is_named_and_one_that_is_cut_short_is_not(tmp_path, capsys):
    for name, step in (("checkpoint-8", 8), ("checkpoint-9", 9), ("last-checkpoint", 7)):
        (tmp_path / name).mkdir()
        state = {"global_step": step, "log_history": rows_of(*range(1, step + 1))}
        (tmp_path / name / "trainer_state.json").write_text(json.dumps(state)[: -9 if step == 9 else None])
    assert f"Read: {tmp_path}/checkpoint-8/trainer_state.json." in words(capsys, tmp_path)[2]


def test_an_export_beside_a_run_of_ours_is_not_judged_as_that_run(tmp_path, capsys):
    (tmp_path / "recipe.yaml").touch()
    write_json(tmp_path / "settings.json", {"reward_funcs": ["first_line_reward"]})
    log = rows_of(*range(1, 9), **{"completions/clipped_ratio": 0.9})
    assert words(capsys, written(tmp_path / "other.jsonl", log))[1]["Truncated completions"] == "look"
    assert words(capsys, written(tmp_path / "log.jsonl", log))[1]["Truncated completions"] == "healthy"


@pytest.mark.parametrize(
    "form", ["lines.json", "whole.jsonl", "run.JSONL", "run.jsonl.gz", "run.tsv", "semicolons.csv"]
)
def test_forms_are_read_whatever_their_name(tmp_path, form):
    rows = rows_of(*range(1, 9))
    frame, path = pd.DataFrame(rows), tmp_path / form
    if form == "whole.jsonl":
        path.write_text(json.dumps(rows))
    elif form.endswith((".tsv", ".csv")):
        frame.rename(columns=" {}".format).to_csv(path, sep="\t" if form == "run.tsv" else ";", index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    assert entries(path) == rows


# The page


def test_page_says_what_the_terminal_says(dead, tmp_path, capsys):
    page = tmp_path / "diagnosis.html"
    status, _, printed = words(capsys, dead, "--output", str(page))
    assert status == 1
    assert printed.endswith(f"{page}\n")
    html = page.read_text()
    text = unescape(re.sub("<.*?>", "", html))
    for line in printed.splitlines()[1:-1]:
        assert line[9:].replace("`", "").partition(" Healthy:")[0] in text
    assert "Run: dead" in text
    assert re.search(r'class="poor">\s*wrong', html)
    assert "healthy: at most 0.75 at the end" in text
    assert "Plan" not in text
    assert "Made with" not in text


@pytest.mark.parametrize("name", ["log.jsonl", "page.html", "page.html/x.html", "log.jsonl/page.html"])
def test_page_replaces_neither_a_log_nor_another_page(tmp_path, capsys, name):
    log = written(tmp_path / "log.jsonl", rows_of(*range(1, 9)))
    (tmp_path / "page.html").write_text("mine")
    before = log.read_bytes()
    assert main(["diagnose", str(log), "--output", str(tmp_path / name)]) == 2
    assert "output=" in capsys.readouterr().err
    assert log.read_bytes() == before
    assert (tmp_path / "page.html").read_text() == "mine"


def test_a_page_that_cannot_be_written_does_not_say_that_the_run_is_wrong(tmp_path, capsys):
    log = written(tmp_path / "log.jsonl", rows_of(*range(1, 9)))
    with limited_files(1):
        assert main(["diagnose", str(log), "--output", str(tmp_path / "page.html")]) == 2
    assert "File too large" in capsys.readouterr().err


# What is no log

GOOD = json.dumps(rows_of(1)[0])
BAD = {
    "empty.csv": (b"", "found nothing"),
    "empty.jsonl": (b"", "found nothing"),
    "empty.json": (b"", "Expecting value"),
    "header.csv": (b"step,reward\n", "found nothing"),
    "none.json": (b"[]", "found nothing"),
    "sft.jsonl": (b'{"step": 1, "loss": 2.5, "grad_norm": 1, "entropy": 1}\n', "found entropy, grad_norm, loss, step"),
    "nosteps.csv": (b"reward,entropy\n0.5,1\n", "found entropy, reward"),
    "words.csv": (b"step,reward\none,high\n", "`step` is 'one' in a row, not a number"),
    "huge.csv": (b"step,reward\n1,1e999\n2," + b"9" * 5000 + b"\n", "found reward, step"),
    "negative.csv": (b"step,reward\n-1,0.5\n1.5,0.5\n", "found reward, step"),
    "nested.jsonl": (b'{"step": 1, "train": {"reward": 0.5}}\n', "found step, train"),
    "scalar.json": (b"3", "it holds 3, not rows"),
    "list.json": (b"[1, 2]", "it holds [1, 2], not rows"),
    "mapping.json": (b'{"reward": 0.5}', "it holds reward, but neither `log_history` nor `rows`"),
    "history.json": (b'{"log_history": {"step": 1}}', "not rows with names"),
    "deep.json": (b'{"a":' * 10**5, "nested too deeply"),
    "deep.jsonl": (b'{"step": 1, "metrics": "' + b'{\\"a\\":' * 10**4 + b'"}\n', "nested too deeply"),
    "binary.csv": (bytes(range(256)) * 8, "not the log"),
    "binary.json": (bytes(range(128, 256)), "Expecting value"),
    "pickle.bin": (b"\x80\x04.", "its name ends with '.bin'"),
    "quotes.csv": (b'step,reward\n1,"0.5\n', "unexpected end of data"),
    "field.csv": (b"step,reward\n1," + b"x" * 200_000, "`reward` is 'xxx"),
    "escapes.jsonl": (b'{"step": 1, "\\u001b[31mred": 1}\n', r"found \x1b[31mred, step"),
    "runs.jsonl": (
        b'{"run_name": "a", "step": 1, "reward": 0}\n{"run_name": "b", "step": 1, "reward": 0}\n',
        "it holds 2 runs by `run_name`, a, b. Export one",
    ),
    "numbered.jsonl": (
        b'{"run": 1, "step": 1, "reward": 0}\n{"run": 2, "step": 1, "reward": 0}\n',
        "it holds 2 runs by `run`, 1, 2. Export one",
    ),
    "ids.csv": (b"run_id,step,reward\na,1,0.5\nb,1,0.5\n", "it holds 2 runs by `run_id`, a, b. Export one"),
    "tensors.csv": (b"step,reward,grad_norm\n1,0.5,tensor(0.5)\n", "`grad_norm` is 'tensor(0.5)' in a row, not a"),
    "thousands.csv": (b'step,reward\n999,0.5\n"1,000",0.5\n', "`step` is '1,000' in a row, not a number"),
    "table.csv": (
        b"Name,train/global_step,train/reward\na,8,0.5\nb,8,0.5\n",
        "it holds 2 runs by `Name`, a, b. Export",
    ),
    "chart.csv": (b"Step,a - train/reward,a - train/reward__MIN\n1,0.5,0.5\n", "a chart of wandb: export the run"),
    "long.csv": (b"step,reward\n" + b"1,1\n" * 2**18, "more than 131,072 rows, the limit"),
    "wide.csv": (b"step," * 1000 + b"reward\n" + b"1\n" * 2**13, "more than 4,190 rows, the limit"),
    "long.jsonl": (b'{"reward":1}\n' * 2**18, "more than 131,072 rows, the limit"),
    "long.json": (b"[" + b"{}," * 2**18 + b"{}]", "more than 131,072 rows, the limit"),
    "wide.json": (
        json.dumps({"a": dict.fromkeys(range(2**13))} | {str(n): {} for n in range(1000)}).encode(),
        "4,190",
    ),
    "cut.json": (b'{"log_history": [{"step": 1, "rew', "Unterminated string"),
    "middle.jsonl": (b'{"step": 1, \n' + GOOD.encode() + b"\n", "line 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_named_with_what_was_found_and_what_is_expected(tmp_path, capsys, name):
    content, says = BAD[name]
    (tmp_path / name).write_bytes(content)
    assert main(["diagnose", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert "\x1b" not in error
    assert len(error) < 1200
    for part in (name, says, "RUN is a folder of TRL with trainer_state.json, that file, or an export"):
        assert part in error, error


def test_path_without_a_log_is_named(tmp_path, capsys):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert main(["diagnose", str(tmp_path)]) == 2
    assert (
        "has no trainer_state.json, nor has a checkpoint in it; found checkpoint-3, checkpoint-x"
        in capsys.readouterr().err
    )
    assert main(["diagnose", str(tmp_path / "absent.json")]) == 2
    assert "absent.json' does not exist" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert main(["diagnose", str(tmp_path / "pipe.jsonl")]) == 2
    assert "pipe.jsonl' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["one row", "strings", "huge", "cut", "linked", "reversed"])
def test_odd_logs_are_judged_as_far_as_they_go(tmp_path, capsys, form):
    rows = rows_of(*range(1, 2 if form == "one row" else 9))
    if form == "strings":
        rows = [{name: str(value) for name, value in row.items()} for row in rows]
    if form == "huge":
        rows[3] |= {"reward": 1e39, "grad_norm": -1e300, "entropy": True}
    path = written(tmp_path / "log.jsonl", rows[::-1] if form == "reversed" else rows)
    if form == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    if form == "linked":
        path = path.rename(tmp_path / "blob")
        (tmp_path / "log.jsonl").symlink_to(path)
    status, said, printed = words(capsys, tmp_path / "log.jsonl")
    assert status == 0
    assert "Traceback" not in printed
    assert said.get("Reward went") == {"one row": None, "huge": "look"}.get(form, "healthy")
