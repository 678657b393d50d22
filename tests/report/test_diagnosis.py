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
from helpers import PROMPTS, RecordingGRPO, even_tokens, limited_files, trained

from opo_trl.checks.files import write_json
from opo_trl.launch.cli import main
from opo_trl.report.diagnosis import COMPLETIONS, GRADIENTS, reuse
from opo_trl.report.foreign_log import GENERATION, read
from opo_trl.report.verdicts import judge


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def truncated(tiny_model, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run of TRL whose completions end at the limit, evaluated between; with the rows that trackio has kept."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path_factory.mktemp("runs") / "truncated"
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
                patch.setattr(module, "TRACKIO_DIR", folder.parent / "trackio")
        options = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True, "max_completion_length": 6}
        options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "max_steps": 8}
        options |= {"report_to": "trackio", "project": "tested", "trainer_class": RecordingGRPO}
        arguments = {"rollout_func": None, "reward_funcs": even_tokens}
        arguments["eval_dataset"] = Dataset.from_dict({"prompt": PROMPTS})
        trained(tiny_model, folder, trainer_arguments=arguments, **options)
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


def rows_of(*steps: int, **more: float) -> list[dict]:
    return [{"step": step, "reward": step / 10, "grad_norm": 1.0, "step_time": 2.0, **more} for step in steps]


def written(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(rows: list[dict], last: int, **values) -> list[dict]:
    """The rows, with other values in the last ones."""
    return [*rows[:-last], *({**row, **values} for row in rows[-last:])]


def noisy(reward) -> list[dict]:
    rng = random.Random(0)
    return [{**row, "reward": reward(row["step"]) + rng.gauss(0, 0.05)} for row in rows_of(*range(1, 201))]


OLD = [{"step": i, "learning_rate": 1e-5, "grad_norm": 1.0, "reward": i / 10, "kl": 0.1} for i in range(1, 31)]
OLD = [{**row, "completion_length": 9.0} for row in OLD]  # without `step_time` and `frac_reward_zero_std`
SOLVED = [{**row, "reward": min(row["step"] / 25, 1), "frac_reward_zero_std": 0.3} for row in rows_of(*range(1, 31))]
CLIPS = {"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 1.0}
EIGHT = rows_of(*range(1, 9))
ENDED = {"step": 12, "reward": 0.9, "step_time": 2.0, "train_runtime": 30.0}

# Log → exit status, verdicts by subject, and what else is printed.
LOGS = {
    "dead groups": (
        rows_of(*range(1, 13), reward=1.0, grad_norm=0.0, frac_reward_zero_std=1.0),
        1,
        {"Zero-variance groups": "wrong", "Gradient norm": "wrong", "Reward went": "look"},
        ["held 100% of completions at the end", "at most 0.75 at the end. If rewards are high", "time for these was"],
    ),
    "clipped": (
        rows_of(*range(1, 25), **{"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 0.3}),
        0,
        {"Clipped ratios": "look", "Reward went": "healthy"},
        ["Healthy: at most 0.01 on average. Use completions for fewer passes", "Off-policy, although"],
    ),
    "clipped whole, as in GSPO": (rows_of(*range(1, 9), **CLIPS), 0, {"Clipped ratios": "healthy"}, ["as in GSPO"]),
    "diverged": (
        changed(rows_of(*range(1, 9)), 3, grad_norm=math.nan),
        1,
        {"Reward went": "healthy"},
        ["Gradient norm was not finite in 3 of 8 entries"],
    ),
    "truncated": (
        rows_of(*range(1, 9), reward=0.1, **{"completions/clipped_ratio": 1.0}),
        1,
        {"Truncated completions": "wrong"},
        [],
    ),
    "never scored": (
        rows_of(*range(1, 9), reward=None, frac_reward_zero_std=0.0),
        1,
        {"Zero-variance groups": None},
        ["The reward was not a number in 8 of 8 entries."],
    ),
    "solved": (changed(SOLVED, 5, frac_reward_zero_std=1.0), 0, {"Zero-variance groups": "look"}, []),
    "crashed": (
        changed(SOLVED, 5, frac_reward_zero_std=1.0, reward=0.0),
        1,
        {"Zero-variance groups": "wrong"},
        [],
    ),
    "lost reward": (noisy(lambda step: 0.2 + 0.5 * step / 200 * (step < 140)), 0, {"Reward went": "look"}, []),
    "reward that stays": (noisy(lambda step: min(step / 40, 0.9)), 0, {"Reward went": "healthy"}, []),
    "gradient of 0 at first": (
        [{**row, "grad_norm": 0.0 if row["step"] < 9 else 0.5} for row in rows_of(*range(1, 61))],
        0,
        {"Gradient norm": "healthy"},
        [],
    ),
    "TRL 0.14, gradient lost": (
        changed(OLD, 10, grad_norm=math.nan),
        1,
        {},
        ["Gradient norm was not finite in 10 of 30 entries"],
    ),
    "TRL 0.14, reward lost": (changed(OLD, 10, reward=math.nan), 1, {}, ["was not a number in 10 of 30 entries"]),
    "rest at the end": ([*rows_of(*range(1, 9), learning_rate=1e-5), ENDED], 0, {"Gradient norm": "healthy"}, []),
    "three entries": (
        [{**row, "grad_norm": 10.0 ** row["step"]} for row in rows_of(1, 3, 5)],
        0,
        {},
        ["Too little in this log for a verdict on `grad_norm`"],
    ),
    "few metrics": (
        rows_of(*range(1, 9), entropy=1.0),
        0,
        {},
        [
            "Without a verdict, because not in this log: `frac_reward_zero_std`, `completions/clipped_ratio`, `clip_",
            "over 84% of a step, which this log does not time",
        ],
    ),
    "calls without steps": (
        [{"_step": row["step"], "reward": 0.5, "grad_norm": 1.0} for row in rows_of(*range(1, 9))],
        0,
        {},
        ["`_step`, which counts calls that log: export `train/global_step`, too."],
    ),
    "entries without a step": (
        changed(EIGHT, 2, step=None),
        0,
        {},
        ["Left out: 2 entries without a whole number in `step`.", "On-policy: every optimizer step has"],
    ),
    "texts": ([{name: str(value) for name, value in row.items()} for row in EIGHT], 0, {"Reward went": "healthy"}, []),
    "huge": ([*changed(EIGHT[:4], 1, reward=1e39, grad_norm=-1e300), *EIGHT[4:]], 0, {"Reward went": "look"}, []),
    "one row": (rows_of(1), 0, {}, []),
}


@pytest.mark.parametrize("name", LOGS)
def test_verdicts_on_a_log(tmp_path, capsys, name):
    rows, status, verdicts, says = LOGS[name]
    found, said, printed = words(capsys, written(tmp_path / "log.jsonl", rows))
    assert (found, {subject: said.get(subject) for subject in verdicts}) == (status, verdicts), printed
    for text in says:
        assert text in printed


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo"])
def test_committed_runs_that_learn_are_within_the_bounds(capsys, method):
    logs = sorted((ROOT / "benchmarks" / "evidence").glob(f"*/{method}/seed-*/log.jsonl.gz"))
    assert len(logs) >= 15
    for log in logs:
        status, said, printed = words(capsys, log)
        assert status == 0
        assert said["Clipped ratios"] == said["Reward went"] == said["Gradient norm"] == "healthy"
        assert "Off-policy: a rollout serves 2 optimizer steps." in printed


def test_run_of_trl_and_its_page(truncated, tmp_path, capsys):
    page = tmp_path / "diagnosis.html"
    before = sorted(truncated[0].rglob("*"))
    status, said, printed = words(capsys, truncated[0], "--output", str(page))
    assert sorted(truncated[0].rglob("*")) == before
    assert (status, said["Truncated completions"]) == (1, "wrong")
    assert said["Zero-variance groups"] == said["Entropy per"] == said["Gradient norm"] == "healthy"
    assert "On-policy: every optimizer step has a rollout of its own" in printed
    assert f"Read: {truncated[0]}/checkpoint-8/trainer_state.json." in printed
    assert printed.endswith(f"{page}\n")
    html = page.read_text()
    text = unescape(re.sub("<.*?>", "", html))
    for line in printed.splitlines()[1:-1]:
        assert line[9:].replace("`", "").partition(" Healthy:")[0] in text
    assert re.search(r'class="poor">\s*wrong', html)
    assert "Plan" not in text
    assert main(["diagnose", str(truncated[0]), "--output", str(tmp_path / "log.jsonl")]) == 2  # not a page
    assert "output=" in capsys.readouterr().err
    with limited_files(1):  # not 1, as if the run were wrong
        assert main(["diagnose", str(truncated[0]), "--output", str(page)]) == 2


def exports(rows: list[dict], folder: Path) -> list[Path]:
    """The rows of trackio, as it exports them and as wandb would, which numbers all calls."""
    (folder / "trackio.json").write_text(json.dumps({"columns": [*rows[0]], "rows": rows}))
    plain = [json.loads(row["metrics"]) for row in rows]
    frame = pd.DataFrame({"_step": i, "_timestamp": 1.7e9 + i, **row} for i, row in enumerate(plain))
    frame = frame.map(lambda value: float(value) if value in ("NaN", "Infinity", "-Infinity") else value)
    frame["gradients/layer"] = [{"_type": "histogram", "bins": [0, 1]}] * len(frame)
    frame.to_csv(folder / "run.csv")
    frame.to_csv(folder / "run.tsv.gz", sep="\t", encoding="utf-8-sig")
    frame.to_json(folder / "columns.json")
    frame.to_json(folder / "records.json", orient="records")
    frame.to_json(folder / "lines.jsonl", orient="records", lines=True)
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_exports_say_what_trl_has_kept(truncated, tmp_path):
    folder, rows = truncated
    kept = entries(folder)
    assert [entry["step"] for entry in kept] == [*range(1, 9)]
    for path in exports(rows, tmp_path):
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


def test_estimate_is_that_of_the_page():
    page = (ROOT / "docs" / "reuse.md").read_text(encoding="utf-8")
    assert f"OPO's, divided by the method's | | 0.91 [0.71, 1.18] | {COMPLETIONS} [0.53, 0.83]" in page
    assert f"OPO here computes {GRADIENTS} gradients for each completion" in page


# The order of rows


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path, capsys):
    rows = [*EIGHT, *changed(rows_of(5, 6, 7), 3, reward=9.0)]
    for name, log in (("oldest", rows), ("newest", rows[::-1])):
        path = written(tmp_path / f"{name}.jsonl", log)
        assert [entry["step"] for entry in entries(path)] == [*range(1, 8)]
        assert [entry["reward"] for entry in entries(path)[3:]] == [0.4, 9.0, 9.0, 9.0]
        assert "Left out: 4 earlier entries" in words(capsys, path)[2]
    steps = [*range(10, 110, 10), *range(57, 121, 7)]  # with another `logging_steps`
    log = entries(written(tmp_path / "log.jsonl", rows_of(*steps)))
    assert [entry["step"] for entry in log] == [*range(10, 60, 10), *range(57, 121, 7)]


@pytest.mark.parametrize("order", ["text", "shuffled", "a last row of step 0"])
def test_rows_in_another_order_are_sorted(tmp_path, order):
    steps = [*range(1, 101), 0]
    if order == "text":
        steps.sort(key=str)
    if order == "shuffled":
        random.Random(0).shuffle(steps)
    found = entries(written(tmp_path / "log.jsonl", rows_of(*steps)))
    assert [(entry["step"], entry["reward"]) for entry in found] == [(step, step / 10) for step in range(101)]


def test_generation_of_evaluations_and_of_samples_is_left_out(tmp_path):
    profile = {"profiling/Time taken: GRPOTrainer.vLLM.generate": 1.0}
    evaluation = {"eval/reward": 1.0, "train/global_step": 1}
    calls = [profile, {"train/global_step": 1, **rows_of(1)[0]}, profile, evaluation, profile, profile]
    rows = [*calls, {"train/global_step": 2, **rows_of(2)[0]}]
    numbered = [{**row, "_step": i} for i, row in enumerate(rows)]
    assert [entry[GENERATION] for entry in entries(written(tmp_path / "all.jsonl", numbered))] == [1, 2]
    sample = [row for row in numbered if row["_step"] != 4]
    assert not any(GENERATION in entry for entry in entries(written(tmp_path / "sample.jsonl", sample)))


def test_further_rows_of_a_step_are_merged_and_evaluations_left_out(tmp_path):
    more = [{"step": row["step"], "step_time": 2.0, "own": 1.0} for row in EIGHT]  # of a callback
    evaluations = [{"step": row["step"], "eval_loss": 0.1, "reward": -1.0} for row in EIGHT]
    mixed = [row for rows in zip(EIGHT, more, evaluations, strict=True) for row in rows]
    assert entries(written(tmp_path / "log.jsonl", mixed)) == [{**row, "own": 1.0} for row in EIGHT]


def test_metrics_may_be_nested_and_columns_empty(tmp_path):
    nested = [{"run_name": "a", "metrics": row if row["step"] % 2 else json.dumps(row)} for row in EIGHT]
    assert entries(written(tmp_path / "log.jsonl", nested)) == EIGHT
    rows = [{"step": 1, "entropy": 1.0, "reward": None, "train/reward": 0.5, "train/entropy": None}]
    assert entries(written(tmp_path / "log.jsonl", rows)) == [{"step": 1, "reward": 0.5, "entropy": 1.0}]


@pytest.mark.parametrize(
    ("served", "clipped", "said"),
    [
        ((1, 1), 0.0, "On-policy: every optimizer step has a rollout of its own"),
        ((1, 1), 0.1, "Off-policy, although every optimizer step has a rollout of its own"),
        ((1, 2), 0.0, "Off-policy: a rollout serves 1.5 optimizer steps on average."),
    ],
)
def test_what_is_off_policy(served, clipped, said):
    firsts = [number == 0 for steps in served * 10 for number in range(steps)]
    log = [{"step": step, "grad_norm": 1.0, "clip_ratio": clipped} for step in range(1, len(firsts) + 1)]
    log = [{**row, "reward": 0.5} if first else row for row, first in zip(log, firsts, strict=True)]
    assert reuse(log)[0].sentence.startswith(said)


def test_groups_are_not_judged_by_a_metric_of_the_whole_batch():
    rows = rows_of(*range(1, 9), frac_reward_zero_std=0.0)
    for settings in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        assert not any("Zero-variance" in verdict.sentence for verdict in judge(rows, settings))


# Files and folders


def test_a_checkpoint_of_ours_is_judged_as_its_run_and_an_export_beside_it_is_not(tmp_path, capsys):
    write_json(tmp_path / "settings.json", {"max_staleness": 8})
    (tmp_path / "checkpoint-8").mkdir()
    log = rows_of(*range(1, 9), **{"opo/ratio/ess": 0.3})
    write_json(tmp_path / "checkpoint-8" / "trainer_state.json", {"log_history": log})
    own = (tmp_path / "checkpoint-8", tmp_path / "checkpoint-8" / "trainer_state.json")
    for path in (*own, written(tmp_path / "log.jsonl", log), tmp_path):
        assert words(capsys, path)[1]["Effective sample"] == "healthy"
    assert words(capsys, written(tmp_path / "other.jsonl", log))[1]["Effective sample"] == "look"


def test_newest_checkpoint_is_read_unless_training_went_further(tmp_path):
    def save(folder: str, step: int, cut: int | None = None) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        state = {"global_step": step, "log_history": rows_of(*range(1, step + 1))}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state)[:cut])

    save("checkpoint-9", 9)
    save("checkpoint-10", 10)
    save("checkpoint-11", 11, cut=-9)
    (tmp_path / "checkpoint-12").mkdir()
    assert [len(entries(path)) for path in (tmp_path, tmp_path / "checkpoint-9")] == [10, 9]
    save(".", 8)
    assert len(entries(tmp_path)) == 10
    save(".", 12)
    assert len(entries(tmp_path)) == 12


@pytest.mark.parametrize("form", ["lines.json", "whole.jsonl", "run.JSONL", "semicolons.csv", "cut.jsonl", "link.csv"])
def test_forms_are_read_whatever_their_name(tmp_path, form):
    frame, path = pd.DataFrame(EIGHT), tmp_path / form
    if form == "whole.jsonl":
        path.write_text(json.dumps(EIGHT))
    elif form.endswith(".csv"):
        frame.rename(columns=" {}".format).to_csv(tmp_path / "blob.csv", sep=";", index=False)
        path.symlink_to("blob.csv")  # as in the cache of the Hub
    else:
        frame.to_json(path, orient="records", lines=True)
    if form == "cut.jsonl":
        path.write_bytes(path.read_bytes()[:-9])
    assert entries(path) == (EIGHT[:-1] if form == "cut.jsonl" else EIGHT)


BAD = {
    "empty.csv": (b"", "found nothing"),
    "empty.jsonl": (b"", "Expecting value"),
    "none.json": (b"[]", "found nothing"),
    "sft.jsonl": (b'{"step": 1, "loss": 2.5, "grad_norm": 1}\n', "found grad_norm, loss, step"),
    "words.csv": (b"step,reward\none,high\n", "`step` is 'one' in a row, not a number"),
    "thousands.csv": (b'step,reward\n999,0.5\n"1,000",0.5\n', "`step` is '1,000' in a row, not a number"),
    "tensors.csv": (b"step,reward,grad_norm\n1,0.5,tensor(0.5)\n", "`grad_norm` is 'tensor(0.5)' in a row, not a"),
    "huge.csv": (b"step,reward\n1,1e999\n2," + b"9" * 5000 + b"\n", "found reward, step"),
    "scalar.json": (b"3", "it holds 3, not rows"),
    "history.json": (b'{"log_history": {"step": 1}}', "not rows with names"),
    "deep.json": (b'{"a":' * 10**5, "recursion"),
    "deep.jsonl": (b'{"step": 1, "metrics": "' + b'{\\"a\\":' * 10**5 + b'"}\n', "recursion"),
    "binary.json": (bytes(range(128, 256)), "can't decode"),
    "pickle.bin": (b"\x80\x04.", "its name ends with '.bin'"),
    "quotes.csv": (b'step,reward\n1,"0.5\n', "unexpected end of data"),
    "long cell.csv": (b"step,reward\n1," + b"x" * 200_000, "`reward` is 'xxx"),
    "escapes.jsonl": (b'{"step": 1, "\\u001b[31mred": 1}\n', r"found \x1b[31mred, step"),
    "table.csv": (b"Name,train/global_step,train/reward\na,8,0.5\nb,8,0.5\n", "2 runs by `Name`, a, b. Export one"),
    "numbered.jsonl": (b'{"run": 1, "step": 1, "reward": 0}\n{"run": 2, "step": 1, "reward": 0}\n', "2 runs by `run`"),
    "cut.json": (b'{"log_history": [{"step": 1, "rew', "not the log"),
    "middle.jsonl": (b'{"step": 1, \n{"step": 1, "reward": 0}\n', "Expecting property name"),
    "bomb.jsonl.gz": (gzip.compress(bytes(2**28 + 2), 1), "more than 268,435,456 bytes"),
    "cut.csv.gz": (gzip.compress(b"step,reward\n")[:-9], "not the log"),
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
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in (".", "absent.json", "pipe.jsonl"):
        assert main(["diagnose", str(tmp_path / name)]) == 2
        assert "has no trainer_state.json, nor has a checkpoint in it, and is no file" in capsys.readouterr().err
