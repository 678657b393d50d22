"""`opo-trl diagnose`: the logs of TRL's own trainer, as TRL, trackio and wandb keep them."""

import json
import math
import random
import re
import sys
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset
from helpers import PROMPTS, RecordingGRPO, even_tokens, trained

from opo_trl.checks import files
from opo_trl.checks.files import write_json
from opo_trl.command.cli import main
from opo_trl.report import logs as diagnosis
from opo_trl.report.callback import Diagnose
from opo_trl.report.diagnostics import judge
from opo_trl.report.logs import read


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
        options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "max_steps": 12}
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
        [
            "held 100% of completions at the end",
            "at most 0.75 at the end. If rewards are high",
            "Wrong: 2 of 3 diagnostics, `frac_reward_zero_std`, `grad_norm`. Look at 1 of 3 diagnostics: `reward`.",
        ],
    ),
    "clipped": (
        rows_of(*range(1, 25), **{"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 0.3}),
        0,
        {"Clipped ratios": "look", "Reward went": "healthy"},
        ["Healthy: at most 0.01 on average. Use completions for fewer passes"],
    ),
    "clipped whole, as in GSPO": (rows_of(*range(1, 11), **CLIPS), 0, {"Clipped ratios": "healthy"}, []),
    "never scored": (
        rows_of(*range(1, 9), reward=None, frac_reward_zero_std=0.0),
        1,
        {"Zero-variance groups": None},
        ["`reward` was not a number in 8 of 8 entries."],
    ),
    "solved": (changed(SOLVED, 5, frac_reward_zero_std=1.0), 0, {"Zero-variance groups": "look"}, []),
    "crashed": (changed(SOLVED, 5, frac_reward_zero_std=1.0, reward=0.0), 1, {"Zero-variance groups": "wrong"}, []),
    "crashed, resumed": (
        [*EIGHT, *changed(rows_of(*range(9, 17)), 8, reward=0.0), *rows_of(*range(7, 13))],
        0,
        {"Reward went": "healthy"},
        ["Optimizer steps: 12."],
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
        ["`grad_norm` was not a number in 10 of 30 entries"],
    ),
    "rest at the end": ([*rows_of(*range(1, 12), learning_rate=1e-5), ENDED], 0, {"Gradient norm": "healthy"}, []),
    "few metrics": (
        rows_of(*range(1, 9), entropy=1.0),
        0,
        {},
        ["Without a verdict, because not in this log: clip_ratio, "],
    ),
    "huge": (
        [*changed(EIGHT[:4], 1, reward=1e39, grad_norm=-1e300), *EIGHT[4:]],
        0,
        {"Reward went": None},
        ["too early to say, the interval holds 0."],
    ),
    "nine steps": (
        rows_of(*range(1, 10), **{"completions/clipped_ratio": 1.0, "entropy": 1.0}),
        0,
        dict.fromkeys(["Reward went", "Truncated completions", "Entropy per", "Gradient norm"]),
        [
            "Too early to say: none of 4 diagnostics has a verdict yet.",
            "Truncated completions were 100% at the end: too early to say, fewer than 10 steps. Healthy: at most 0.2",
        ],
    ),
    "one step without a signal": (
        rows_of(1, frac_reward_zero_std=1.0, entropy=1.0),
        1,
        {"Zero-variance groups": "wrong"},
        ["Wrong: 1 of 1 diagnostics, `frac_reward_zero_std`. Too early to say: `reward`, `entropy`, `grad_norm`."],
    ),
    "ten steps": (
        rows_of(*range(10), **{"completions/clipped_ratio": 1.0}),
        0,
        {"Reward went": "healthy", "Truncated completions": "look", "Gradient norm": "healthy"},
        ["Look at 1 of 3 diagnostics: `completions/clipped_ratio`."],
    ),
    "ten steps without any gradient": (
        rows_of(*range(10), grad_norm=0.0),
        1,
        {"Reward went": "healthy", "Gradient norm": "wrong"},
        ["Gradient norm was exactly 0 in all 10 entries: nothing was trained."],
    ),
    "ten steps in two entries": (
        rows_of(5, 10, frac_reward_zero_std=0.5),
        0,
        {"Zero-variance groups": "healthy"},
        ["Healthy: 1 of 3 diagnostics. Too early to say: `reward`, `grad_norm`."],
    ),
    "the last ten steps": (
        rows_of(*range(501, 511)),
        0,
        {"Reward went": "healthy"},
        ["All 2 diagnostics are healthy"],
    ),
    "nine steps, mostly unscored": (
        [*rows_of(1, frac_reward_zero_std=0.5), *rows_of(9, frac_reward_zero_std=0.5)],
        0,
        {"Zero-variance groups": None},
        [],
    ),
    "no rise yet": (
        [{**row, "reward": 0.5 + 0.1 * (row["step"] % 2)} for row in rows_of(*range(1, 61))],
        0,
        {"Reward went": None, "Gradient norm": "healthy"},
        ["too early to say, the interval holds 0.", "Healthy: 1 of 2 diagnostics. Too early to say: `reward`."],
    ),
}


def _in_train(rows: list[dict]) -> list[dict]:
    return [{f"train/{name}": value for name, value in row.items()} for row in rows]


def _parts(row: dict) -> list[dict]:
    """Prime-rl's orchestrator and trainer log rows of their own."""
    kinds = (("reward", "is_truncated"), ("entropy",), ("optim",))
    found = [{name: row[name] for name in row if name == "step" or name.startswith(kind)} for kind in kinds]
    return [{**found[0], "effective_batch_size/all": 0.6}, *found[1:]]


_VERL = "training/global_step critic/score/mean response_length/clip_ratio actor/entropy actor/grad_norm actor/lr"
# How other trainers log: step, reward, share of truncated completions, entropy, gradient norm and learning rate.
SHAPES = {
    # `FileLogger` in verl/utils/tracking.py, `compute_data_metrics` in verl/trainer/ppo/metric_utils.py, of verl 0.7
    "verl": (_VERL, lambda rows: [{"step": row["training/global_step"], "data": row} for row in rows]),
    "verl, wandb": (_VERL, lambda rows: [{"_step": 7 * row["training/global_step"], **row} for row in rows]),
    # prime-rl 0.8.0 (559b447)
    "prime-rl": (
        "step agg/effective/agent/reward/mean agg/effective/agent/is_truncated/mean entropy/all/mean optim/grad_norm "
        "optim/lr",
        _in_train,
    ),
    # `MetricsBuilder` in src/prime_rl/orchestrator/metrics.py at 0b9e252
    "prime-rl, earlier": (
        "step reward/all/mean is_truncated/all/mean entropy/all/mean optim/grad_norm optim/lr",
        lambda rows: [part for row in rows for part in _parts(row)],
    ),
    # openrlhf/trainer/ppo_utils/loggers.py at 82c060e, openrlhf/trainer/ray/ppo_actor.py at 012aae8
    "OpenRLHF": ("global_step reward response_clip_ratio entropy_loss ppo_clip_ratio actor_lr", _in_train),
    "TRL, wandb": ("global_step reward completions/clipped_ratio entropy grad_norm learning_rate", _in_train),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solves", [True, False])
def test_healthy_log_of_another_trainer_is_healthy(tmp_path, capsys, shape, solves):
    names, shaped = SHAPES[shape]
    names, rng, rows = names.split(), random.Random(1), []
    for step in range(1, 61):
        reward = 0.3 + (0.65 if solves else 0.1) * step / 60 + rng.gauss(0, 0.02)
        small = 0.005 if "ppo_clip_ratio" in names else 0.5  # which is in the place of the gradient norm
        values = (step, reward, rng.uniform(0, 0.1), 0.5 - 0.3 * step / 60, small * rng.uniform(0.5, 1), 1e-6)
        rows.append(dict(zip(names, values, strict=True)))
    status, verdicts, printed = words(capsys, written(tmp_path / "run.jsonl", shaped(rows)))
    assert status == 0
    assert len(verdicts) >= 4, printed
    assert {*verdicts.values()} == {"healthy"}, printed
    wrong = [dict(row) for row in rows]
    for row in wrong[30:]:
        row[names[2]] = 1.0  # cut off
        row[names[1]] = 0.0
    assert words(capsys, written(tmp_path / "run.jsonl", shaped(wrong)))[0] == 1


def test_callback_prints_verdicts_while_a_trainer_of_trl_trains(tiny_model, tmp_path, capsys):
    arguments = {"callbacks": [Diagnose(steps=4)], "rollout_func": None, "reward_funcs": even_tokens}
    options = {"max_steps": 8, "max_completion_length": 6, "trainer_class": RecordingGRPO}
    trained(tiny_model, tmp_path, trainer_arguments=arguments, **options).train()  # twice
    printed = capsys.readouterr().out
    steps = [line.split(".")[0] for line in printed.splitlines() if line.startswith("Step ")]
    assert steps == ["Step 4", "Step 8"] * 2
    assert "Step 4. Wrong: 1 of 1 diagnostics, `completions/clipped_ratio`. Too early to say: `reward`, " in printed
    assert "wrong    Truncated completions were 100% at the end" in printed


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
        status, said, _ = words(capsys, log)
        assert status == 0
        assert said["Clipped ratios"] == said["Reward went"] == said["Gradient norm"] == "healthy"


def test_run_of_trl_and_its_page(truncated, tmp_path, capsys):
    page = tmp_path / "diagnosis.html"
    before = sorted(truncated[0].rglob("*"))
    status, said, printed = words(capsys, truncated[0], "--output", str(page))
    assert sorted(truncated[0].rglob("*")) == before
    assert (status, said["Truncated completions"]) == (1, "wrong")
    assert said["Zero-variance groups"] == said["Entropy per"] == said["Gradient norm"] == "healthy"
    assert f"Read: {truncated[0]}/checkpoint-12/trainer_state.json." in printed
    text = unescape(re.sub("<.*?>", "", page.read_text()))
    for line in printed.splitlines()[1:-1]:
        assert line[9:].replace("`", "").partition(" Healthy:")[0] in text
    assert re.search(r'class="poor">\s*wrong', page.read_text())


def test_exports_say_what_trl_has_kept(truncated, tmp_path):
    """The rows of trackio, as it exports them and as wandb would, which numbers all calls."""
    folder, rows = truncated
    (tmp_path / "trackio.json").write_text(json.dumps({"columns": [*rows[0]], "rows": rows}))
    plain = [json.loads(row["metrics"]) for row in rows]
    frame = pd.DataFrame({"_step": i, "_timestamp": 1.7e9 + i, **row} for i, row in enumerate(plain))
    frame["gradients/layer"] = [{"_type": "histogram", "bins": [0, 1]}] * len(frame)
    frame.to_csv(tmp_path / "run.csv")
    frame.to_csv(tmp_path / "run.csv.gz", encoding="utf-8-sig")
    frame.to_json(tmp_path / "records.json", orient="records")
    frame.to_json(tmp_path / "lines.jsonl", orient="records", lines=True)
    kept = entries(folder)
    assert [entry["step"] for entry in kept] == [*range(1, 13)]
    for path in sorted(tmp_path.iterdir()):
        log = entries(path)
        assert len(log) == len(kept)
        for entry, own in zip(log, kept, strict=True):
            for name in own.keys() - {"epoch"}:
                assert entry[name] == pytest.approx(own[name], abs=1e-9)
            assert not [name for name in entry if "eval" in name]
        assert [v.sentence for v in judge(log, {})] == [v.sentence for v in judge(kept, {})]


def test_rows_of_a_step_are_merged_and_of_a_step_that_comes_again_the_later_ones_count(tmp_path):
    more = [{"step": row["step"], "step_time": 2.0, "own": 1.0} for row in EIGHT]  # of a callback
    evaluations = [{"step": row["step"], "eval_loss": 0.1, "reward": -1.0} for row in EIGHT]
    rows = [*EIGHT, *more, *evaluations, *changed(rows_of(7, 8, 9), 3, reward=9.0)]
    log = entries(written(tmp_path / "log.jsonl", rows))
    assert [entry["reward"] for entry in log] == [*(row["reward"] for row in EIGHT[:6]), 9.0, 9.0, 9.0]
    assert [entry.get("own") for entry in log] == [1.0] * 8 + [None]
    random.Random(0).shuffle(EIGHT)
    assert [entry["step"] for entry in entries(written(tmp_path / "log.jsonl", EIGHT))] == [*range(1, 9)]


def test_a_checkpoint_of_ours_is_judged_as_its_run_and_an_export_beside_it_is_not(tmp_path, capsys):
    write_json(tmp_path / "settings.json", {"max_staleness": 8})
    (tmp_path / "checkpoint-8").mkdir()
    log = rows_of(*range(1, 13), **{"opo/ratio/ess": 0.3})
    written(tmp_path / "log.jsonl", log)
    for path in (tmp_path / "checkpoint-8", tmp_path):
        assert words(capsys, path)[1]["Effective sample"] == "healthy"
    assert words(capsys, written(tmp_path / "other.jsonl", log))[1]["Effective sample"] == "look"


def test_newest_checkpoint_is_read_unless_training_went_further(tmp_path):
    for folder, step in (("checkpoint-9", 9), ("checkpoint-10", 10), (".", 12)):
        (tmp_path / folder).mkdir(exist_ok=True)
        log = rows_of(*range(1, step + 1))
        write_json(tmp_path / folder / "trainer_state.json", {"global_step": step, "log_history": log})
        assert len(entries(tmp_path)) == step
    assert len(entries(tmp_path / "checkpoint-9")) == 9
    (tmp_path / "checkpoint-10").rename(tmp_path / "replaced-checkpoint-99")  # of an earlier run
    write_json(tmp_path / "replaced-checkpoint-99" / "trainer_state.json", {"global_step": 99, "log_history": log})
    write_json(tmp_path / "trainer_state.json", {"global_step": 3, "log_history": log[:3]})
    assert len(entries(tmp_path)) == 9


def state(folder: Path, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    log = rows_of(*range(1, 13))
    write_json(folder / "trainer_state.json", {"global_step": 12, "log_history": log, **changes})
    return folder


def test_links_of_the_user_are_followed_and_links_in_the_folder_are_not(tmp_path, capsys):
    elsewhere = state(tmp_path / "elsewhere", global_step=99)
    run = state(tmp_path / "run")
    for name, target in (("checkpoint-99", elsewhere), ("checkpoint-up", ".."), ("checkpoint-12", ".")):
        (run / name).symlink_to(target)
    (tmp_path / "latest").symlink_to("run")
    (tmp_path / "log.json").symlink_to(run / "trainer_state.json")
    for path in ("latest", "log.json"):
        assert words(capsys, tmp_path / path)[1]["Reward went"] == "healthy"
    assert read(run)[1] == [f"Read: {run / 'trainer_state.json'}."]
    (run / "trainer_state.json").unlink()
    assert main(["diagnose", str(run)]) == 2
    (run / "trainer_state.json").symlink_to(elsewhere / "trainer_state.json")
    assert main(["diagnose", str(run)]) == 2
    assert "trainer_state.json' is a link" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["12", None, [12], math.nan, 10**50], ids=str)
def test_state_without_a_number_of_steps_is_named(tmp_path, capsys, value):
    state(state(tmp_path / "run") / "checkpoint-3", global_step=value)
    assert main(["diagnose", str(tmp_path / "run")]) == 2
    assert "checkpoint-3/trainer_state.json' cannot be read: its `global_step` is not a" in capsys.readouterr().err


BAD = {
    "empty.csv": (b"", "found nothing"),
    "sft.jsonl": (b'{"step": 1, "loss": 2.5, "grad_norm": 1}\n', "found grad_norm, loss, step"),
    "scalar.json": (b"3", "it holds no rows"),
    "deep.json": (b'{"a":' * 10**5, "recursion"),
    "no_step.jsonl": (b'{"reward": 1, "grad_norm": 1}\n', "no row with a `step` has a metric"),
    "zipped.csv.gz": (b"step,reward", "cannot be unzipped: Not a gzipped file"),
    "metrics.json": (b'[{"metrics": "[1]"}]', "it holds '[1]', not a mapping"),
    "deep_metrics.json": (json.dumps([{"metrics": "[" * 10**5}]).encode(), "recursion"),
    "any_runs.json": (b'[{"run_name": [1]}, {"run_name": {}}]', "2 runs by `run_name`"),
    "pickle.bin": (b"\x80\x04.", "its name ends with '.bin'"),
    "escapes.jsonl": (b'{"step": 1, "\\u001b[31mred": 1}\n', r"found \x1b[31mred, step"),
    "runs.jsonl": (b'{"run_name": "a", "step": 1}\n{"run_name": "b", "step": 1}\n', "2 runs by `run_name`"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_named_with_what_was_found_and_what_is_expected(tmp_path, capsys, name):
    content, says = BAD[name]
    (tmp_path / name).write_bytes(content)
    assert main(["diagnose", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    for part in (name, says, "RUN is a folder of TRL with trainer_state.json, that file or an export"):
        assert part in error, error


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl", "log.json"])
def test_rows_have_a_bound(tmp_path, capsys, monkeypatch, name):
    rows = {"log.csv": "step,reward\n" + "1,1\n" * 50, "log.jsonl": '{"step": 1}\n' * 50, "log.json": "[{},{},{}]"}
    (tmp_path / name).write_text(rows[name])
    for module in (files, diagnosis):
        monkeypatch.setattr(module, "MOST_LINES", 2)
    assert main(["diagnose", str(tmp_path / name)]) == 2
    assert re.search("more than .*2 (rows|lines), the most that are read", capsys.readouterr().err)


def test_path_without_a_log_is_named(tmp_path, capsys):
    for name in (".", "absent.json"):
        assert main(["diagnose", str(tmp_path / name)]) == 2
        assert "has no trainer_state.json, nor has a checkpoint in it, and is no file" in capsys.readouterr().err
