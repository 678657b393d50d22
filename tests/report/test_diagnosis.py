"""`opo-trl diagnose`: the logs of TRL's own trainer, as TRL, trackio and wandb keep them."""

import json
import math
import random
import re
import shutil
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset
from recording_trainers import RecordingGRPO, trained
from scripted_rollouts import PROMPTS, even_tokens

from benchmarks.paper.recorded_runs import EXPERIMENTS, unpack
from opo_trl.checks import files
from opo_trl.checks.files import write_json
from opo_trl.command.cli import main
from opo_trl.report import logs
from opo_trl.report.callback import Diagnose
from opo_trl.report.diagnostics import judge
from opo_trl.report.logs import read


@pytest.fixture(scope="module")
def truncated(tiny_model, tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run of TRL whose completions end at the limit, evaluated between; with the rows that trackio has kept."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path_factory.mktemp("runs") / "truncated"
    options = {
        "trainer_class": RecordingGRPO,
        "max_completion_length": 6,
        "max_steps": 12,
        "save_strategy": "steps",
        "save_steps": 4,
        "save_only_model": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "report_to": "trackio",
        "project": "tested",
    }
    eval_dataset = Dataset.from_dict({"prompt": PROMPTS})
    arguments = {"rollout_func": None, "reward_funcs": even_tokens, "eval_dataset": eval_dataset}
    with pytest.MonkeyPatch.context() as patch:
        set_trackio_folder(patch, folder.parent / "trackio")
        trained(tiny_model, folder, trainer_arguments=arguments, **options)
        metrics = SQLiteStorage.query_project("tested", "SELECT * FROM metrics ORDER BY id")
    return folder, metrics["rows"]


def set_trackio_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("trackio") and hasattr(module, "TRACKIO_DIR"):
            patch.setattr(module, "TRACKIO_DIR", folder)


def entries(path: Path) -> list[dict]:
    log, _ = read(path)
    return log


def diagnose(capsys, run: Path, *options: str) -> tuple[int, dict[str, str], str]:
    """Exit status of the command, the verdict on each subject, and all that is printed."""
    status = main(["diagnose", str(run), *options])
    printed = capsys.readouterr().out
    verdicts = {}
    for line in printed.splitlines()[1:]:
        verdict, *words = line.split()
        if verdict != "–":
            subject = " ".join(words[:2])
            verdicts[subject] = verdict
    return status, verdicts, printed


def verdicts_of(capsys, run: Path) -> dict[str, str]:
    _, verdicts, _ = diagnose(capsys, run)
    return verdicts


def rows_at(*steps: int, **more: float) -> list[dict]:
    return [{"step": step, "reward": step / 10, "grad_norm": 1.0, "step_time": 2.0, **more} for step in steps]


def rows_from(first: int, last: int, **more: float) -> list[dict]:
    """A row for each step, `last` included."""
    return rows_at(*range(first, last + 1), **more)


def write_lines(path: Path, rows: list) -> Path:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def write_state(folder: Path, global_step: object, log: list[dict]) -> None:
    write_json(folder / "trainer_state.json", {"global_step": global_step, "log_history": log})


def with_last(rows: list[dict], count: int, **values) -> list[dict]:
    """The rows, with other values in the last `count` of them."""
    last = [{**row, **values} for row in rows[-count:]]
    return rows[:-count] + last


def column(log: list[dict], name: str) -> list:
    return [entry.get(name) for entry in log]


def noisy(reward: Callable[[int], float]) -> list[dict]:
    """200 steps with a reward by step, and noise on it."""
    rng = random.Random(0)
    rows = rows_from(1, 200)
    for row in rows:
        row["reward"] = reward(row["step"]) + rng.gauss(0, 0.05)
    return rows


def reward_lost_after_140_steps(step: int) -> float:
    if step < 140:
        return 0.2 + 0.5 * step / 200
    return 0.2


def reward_that_stays_at_its_height(step: int) -> float:
    return min(step / 40, 0.9)


def old_rows() -> list[dict]:
    """The log of an old release of TRL, without `step_time` and `frac_reward_zero_std`."""
    constant = {"learning_rate": 1e-5, "grad_norm": 1.0, "kl": 0.1, "completion_length": 9.0}
    return [{"step": step, "reward": step / 10, **constant} for step in range(1, 31)]


def solved_rows() -> list[dict]:
    rows = rows_from(1, 30, frac_reward_zero_std=0.3)
    for row in rows:
        row["reward"] = min(row["step"] / 25, 1)
    return rows


def alternating_rewards() -> list[dict]:
    rows = rows_from(1, 60)
    for row in rows:
        row["reward"] = 0.5 + 0.1 * (row["step"] % 2)
    return rows


def one_group_per_step() -> list[dict]:
    """Two of three steps have no gradient, also the last four."""
    rows = alternating_rewards()
    for row in rows:
        is_equal = row["step"] % 3 > 0 or row["step"] > 56
        row |= {"frac_reward_zero_std": float(is_equal), "grad_norm": 0.0 if is_equal else 0.8}
    return rows


def with_falling_accuracy(rows: list[dict]) -> list[dict]:
    """Beside a format that stays, both with noise."""
    for row in rows:
        noise = 0.2 * (row["step"] % 2)
        row |= {"rewards/accuracy/mean": 0.7 + noise - row["step"] / 100, "rewards/format/mean": 0.5 + noise}
    return rows


OLD = old_rows()
SOLVED = solved_rows()
EIGHT = rows_from(1, 8)
NO_GRADIENT_AT_FIRST = rows_from(1, 8, grad_norm=0.0) + rows_from(9, 60, grad_norm=0.5)
# The first run crashed after step 16; its successor resumed from step 6.
CRASHED = EIGHT + rows_from(9, 16, reward=0.0)
RESUMED = rows_from(7, 12)
HUGE = with_last(EIGHT[:4], 1, reward=1e39, grad_norm=-1e300) + EIGHT[4:]
CLIPS = {"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 0.3}
CLIPS_OF_GSPO = {"clip_ratio/region_mean": 0.2, "clip_ratio/high_max": 1.0}
ENDED = {"step": 12, "reward": 0.9, "step_time": 2.0, "train_runtime": 30.0}

# Log → exit status, verdicts by subject, and what else is printed.
LOGS = {
    "dead groups": (
        rows_from(1, 12, reward=1.0, grad_norm=0.0, frac_reward_zero_std=1.0),
        1,
        {"Zero-variance groups": "wrong", "Gradient norm": "wrong", "Reward went": "look"},
        [
            "held 100% of completions at the end",
            "at most 0.75 at the end. If rewards are high",
            "Wrong: 2 of 3 diagnostics, `frac_reward_zero_std`, `grad_norm`. Also look at `reward`.",
        ],
    ),
    "clipped": (
        rows_from(1, 24, **CLIPS),
        0,
        {"Clipped ratios": "look", "Reward went": "healthy"},
        ["Healthy: at most 0.01 on average. Use completions for fewer passes"],
    ),
    "clipped whole, as in GSPO": (rows_from(1, 10, **CLIPS_OF_GSPO), 0, {"Clipped ratios": "healthy"}, []),
    "never scored": (
        rows_from(1, 8, reward=None, frac_reward_zero_std=0.0),
        1,
        {"Zero-variance groups": None},
        ["`reward` was not a number in 8 of 8 entries."],
    ),
    "solved": (with_last(SOLVED, 5, frac_reward_zero_std=1.0), 0, {"Zero-variance groups": "look"}, []),
    "crashed": (with_last(SOLVED, 5, frac_reward_zero_std=1.0, reward=0.0), 1, {"Zero-variance groups": "wrong"}, []),
    "crashed, resumed": (
        CRASHED + RESUMED,
        0,
        {"Reward went": "healthy"},
        ["Optimizer steps: 12."],
    ),
    "lost reward": (noisy(reward_lost_after_140_steps), 0, {"Reward went": "look"}, []),
    "reward that stays": (noisy(reward_that_stays_at_its_height), 0, {"Reward went": "healthy"}, []),
    "one group for each step": (
        one_group_per_step(),
        0,
        {"Zero-variance groups": "look", "Gradient norm": "healthy"},
        ["held 80% of completions at the end", "Gradient norm went from 0.8 to 0.8."],
    ),
    "gradient only at the end": (
        rows_from(1, 19, grad_norm=0.0) + rows_from(20, 20, grad_norm=13.0),
        0,
        {"Gradient norm": "healthy"},
        [],
    ),
    "accuracy falls": (
        with_falling_accuracy(rows_from(1, 40)),
        0,
        {"`rewards/accuracy/mean` went": "look", "`rewards/format/mean` went": None, "Reward went": "healthy"},
        ["`rewards/accuracy/mean` went from 0.775 to 0.415 while the reward rose.", "something other than correct"],
    ),
    "accuracy falls in eight steps": (
        with_falling_accuracy(rows_from(1, 8)),
        0,
        {"`rewards/accuracy/mean` went": None},
        [],
    ),
    "accuracy falls, no reward rises": (
        with_falling_accuracy(alternating_rewards()),
        0,
        {"`rewards/accuracy/mean` went": None},
        [],
    ),
    "gradient of 0 at first": (
        NO_GRADIENT_AT_FIRST,
        0,
        {"Gradient norm": "healthy"},
        [],
    ),
    "TRL 0.14, gradient lost": (
        with_last(OLD, 10, grad_norm=math.nan),
        1,
        {},
        ["`grad_norm` was not a number in 10 of 30 entries"],
    ),
    "rest at the end": ([*rows_from(1, 11, learning_rate=1e-5), ENDED], 0, {"Gradient norm": "healthy"}, []),
    "few metrics": (
        rows_from(1, 8, entropy=1.0),
        0,
        {},
        ["Without a verdict, because not in this log: clip_ratio, "],
    ),
    "huge": (
        HUGE,
        0,
        {"Reward went": None},
        ["too early to say, the interval holds 0."],
    ),
    "nine steps": (
        rows_from(1, 9, **{"completions/clipped_ratio": 1.0, "entropy": 1.0}),
        0,
        dict.fromkeys(["Reward went", "Truncated completions", "Entropy per", "Gradient norm"]),
        [
            "Too early to say: none of 4 diagnostics has a verdict yet.",
            "Truncated completions were 100% at the end: too early to say, fewer than 10 steps. Healthy: at most 0.2",
        ],
    ),
    "one step without a signal": (
        rows_at(1, frac_reward_zero_std=1.0, entropy=1.0),
        1,
        {"Zero-variance groups": "wrong"},
        ["Wrong: 1 of 1 diagnostics, `frac_reward_zero_std`. Too early to say: `reward`, `entropy`, `grad_norm`."],
    ),
    "ten steps": (
        rows_from(0, 9, **{"completions/clipped_ratio": 1.0}),
        0,
        {"Reward went": "healthy", "Truncated completions": "look", "Gradient norm": "healthy"},
        ["Look at 1 of 3 diagnostics: `completions/clipped_ratio`."],
    ),
    "ten steps without any gradient": (
        rows_from(0, 9, grad_norm=0.0),
        1,
        {"Reward went": "healthy", "Gradient norm": "wrong"},
        ["Gradient norm was exactly 0 in all 10 entries: nothing was trained."],
    ),
    "ten steps in two entries": (
        rows_at(5, 10, frac_reward_zero_std=0.5),
        0,
        {"Zero-variance groups": "healthy"},
        ["Healthy: 1 of 3 diagnostics. Too early to say: `reward`, `grad_norm`."],
    ),
    "the last ten steps": (
        rows_from(501, 510),
        0,
        {"Reward went": "healthy"},
        ["All 2 diagnostics are healthy"],
    ),
    "nine steps, mostly unscored": (
        rows_at(1, 9, frac_reward_zero_std=0.5),
        0,
        {"Zero-variance groups": None},
        [],
    ),
    "no rise yet": (
        alternating_rewards(),
        0,
        {"Reward went": None, "Gradient norm": "healthy"},
        ["too early to say, the interval holds 0.", "Healthy: 1 of 2 diagnostics. Too early to say: `reward`."],
    ),
}


def _in_train(rows: list[dict]) -> list[dict]:
    return [{f"train/{name}": value for name, value in row.items()} for row in rows]


def _verl_file(rows: list[dict]) -> list[dict]:
    return [{"step": row["training/global_step"], "data": row} for row in rows]


def _verl_wandb(rows: list[dict]) -> list[dict]:
    """With `_step`, the number of a call of wandb, which verl calls several times a step."""
    return [{"_step": 7 * row["training/global_step"], **row} for row in rows]


def _with_prefix(row: dict, *prefixes: str) -> dict:
    return {name: value for name, value in row.items() if name.startswith(prefixes)}


def _prime_rl_parts(rows: list[dict]) -> list[dict]:
    """Prime-rl's orchestrator and trainer log rows of their own."""
    parts = []
    for row in rows:
        orchestrated = _with_prefix(row, "step", "reward", "is_truncated")
        parts.append({**orchestrated, "effective_batch_size/all": 0.6})
        parts.append(_with_prefix(row, "step", "entropy"))
        parts.append(_with_prefix(row, "step", "optim"))
    return parts


_VERL = "training/global_step critic/score/mean response_length/clip_ratio actor/entropy actor/grad_norm actor/lr"
# How other trainers log: step, reward, share of truncated completions, entropy, gradient norm and learning rate.
SHAPES = {
    # `FileLogger` in verl/utils/tracking.py, `compute_data_metrics` in verl/trainer/ppo/metric_utils.py, of verl 0.7
    "verl": (_VERL, _verl_file),
    "verl, wandb": (_VERL, _verl_wandb),
    # prime-rl 0.8.0 (559b447)
    "prime-rl": (
        "step agg/effective/agent/reward/mean agg/effective/agent/is_truncated/mean entropy/all/mean optim/grad_norm "
        "optim/lr",
        _in_train,
    ),
    # `MetricsBuilder` in src/prime_rl/orchestrator/metrics.py at 0b9e252
    "prime-rl, earlier": (
        "step reward/all/mean is_truncated/all/mean entropy/all/mean optim/grad_norm optim/lr",
        _prime_rl_parts,
    ),
    # openrlhf/trainer/ppo_utils/loggers.py at 82c060e, openrlhf/trainer/ray/ppo_actor.py at 012aae8
    "OpenRLHF": ("global_step reward response_clip_ratio entropy_loss ppo_clip_ratio actor_lr", _in_train),
    "TRL, wandb": ("global_step reward completions/clipped_ratio entropy grad_norm learning_rate", _in_train),
}


def healthy_rows(names: list[str], solves: bool) -> list[dict]:
    """60 steps of a run whose reward rises, to 0.95 if it `solves` the task, under the names of `SHAPES`."""
    rng = random.Random(1)
    rise = 0.65 if solves else 0.1
    # OpenRLHF logs no gradient norm. In its place is the share of clipped ratios, of which only little is healthy.
    scale = 0.005 if "ppo_clip_ratio" in names else 0.5
    rows = []
    for step in range(1, 61):
        reward = 0.3 + rise * step / 60 + rng.gauss(0, 0.02)
        truncated = rng.uniform(0, 0.1)
        entropy = 0.5 - 0.3 * step / 60
        gradient_norm = scale * rng.uniform(0.5, 1)
        values = (step, reward, truncated, entropy, gradient_norm, 1e-6)
        row = zip(names, values, strict=True)
        rows.append(dict(row))
    return rows


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solves", [True, False])
def test_healthy_log_of_another_trainer_is_healthy(tmp_path, capsys, shape, solves):
    spaced_names, in_shape = SHAPES[shape]
    names = spaced_names.split()
    rows = healthy_rows(names, solves)
    status, verdicts, printed = diagnose(capsys, write_lines(tmp_path / "run.jsonl", in_shape(rows)))
    assert status == 0
    assert len(verdicts) >= 4, printed
    assert set(verdicts.values()) == {"healthy"}, printed
    _, reward, truncated, *_ = names
    wrong = with_last(rows, 30, **{truncated: 1.0, reward: 0.0})
    status, _, _ = diagnose(capsys, write_lines(tmp_path / "run.jsonl", in_shape(wrong)))
    assert status == 1


def test_callback_prints_verdicts_while_a_trainer_of_trl_trains(tiny_model, tmp_path, capsys):
    arguments = {"callbacks": [Diagnose(steps=4)], "rollout_func": None, "reward_funcs": even_tokens}
    options = {"max_steps": 8, "max_completion_length": 6, "trainer_class": RecordingGRPO}
    trainer = trained(tiny_model, tmp_path, trainer_arguments=arguments, **options)
    trainer.train()  # a second time
    printed = capsys.readouterr().out
    steps = re.findall(r"^(Step .*?)\.", printed, re.MULTILINE)
    assert steps == ["Step 4", "Step 8"] * 2
    assert "Step 4. Wrong: 1 of 1 diagnostics, `completions/clipped_ratio`. Too early to say: `reward`, " in printed
    assert "wrong    Truncated completions were 100% at the end" in printed


@pytest.mark.parametrize("name", LOGS)
def test_verdicts_on_a_log(tmp_path, capsys, name):
    rows, expected_status, expected_verdicts, texts = LOGS[name]
    status, verdicts, printed = diagnose(capsys, write_lines(tmp_path / "log.jsonl", rows))
    assert status == expected_status, printed
    for subject, expected in expected_verdicts.items():
        assert verdicts.get(subject) == expected, printed
    for text in texts:
        assert text in printed


def test_the_log_in_a_run_is_judged_as_the_run_is(tmp_path, capsys):
    """With replay, the weights of old completions may be as uneven as this."""
    checkpoint = tmp_path / "checkpoint-20"
    checkpoint.mkdir()
    rows = rows_from(1, 20, **{"opo/ratio/ess": 0.3})
    write_lines(tmp_path / "log.jsonl", rows)
    write_state(checkpoint, 20, rows)
    both = (tmp_path / "log.jsonl", checkpoint / "trainer_state.json")
    for log in both:
        assert verdicts_of(capsys, log)["Effective sample"] == "look"
    write_json(tmp_path / "settings.json", {"max_staleness": 8})
    for path in (tmp_path, *both):
        assert verdicts_of(capsys, path)["Effective sample"] == "healthy"


@pytest.fixture(scope="module")
def committed_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    for experiment in EXPERIMENTS:
        unpack(experiment, folder)
    return folder


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo"])
def test_committed_runs_that_learn_are_within_the_bounds(committed_runs, tmp_path, capsys, method):
    """Their logs alone, without their settings."""
    committed = sorted(committed_runs.glob(f"*/{method}/seed-*/log.jsonl"))
    assert len(committed) >= 15
    for log in committed:
        alone = shutil.copy(log, tmp_path / "run.jsonl")
        status, verdicts, _ = diagnose(capsys, alone)
        assert status == 0
        for subject in ("Clipped ratios", "Reward went", "Gradient norm"):
            assert verdicts[subject] == "healthy"


def test_run_of_trl_and_its_page(truncated, tmp_path, capsys):
    run, _ = truncated
    page = tmp_path / "diagnosis.html"
    files_before = sorted(run.rglob("*"))
    status, verdicts, printed = diagnose(capsys, run, "--output", str(page))
    assert sorted(run.rglob("*")) == files_before
    assert status == 1
    assert verdicts["Truncated completions"] == "wrong"
    for subject in ("Zero-variance groups", "Entropy per", "Gradient norm"):
        assert verdicts[subject] == "healthy"
    assert f"Read: {run}/checkpoint-12/trainer_state.json." in printed
    html = page.read_text()
    text = unescape(re.sub("<.*?>", "", html))
    for line in printed.splitlines()[1:-1]:
        after_verdict = line[9:].replace("`", "")
        sentence, _, _ = after_verdict.partition(" Healthy:")
        assert sentence in text
    assert re.search(r'class="poor">\s*wrong', html)


def write_exports(folder: Path, rows: list[dict]) -> None:
    """The rows of trackio, as it exports them and as wandb would, which numbers all calls."""
    export = json.dumps({"columns": list(rows[0]), "rows": rows})
    (folder / "trackio.json").write_text(export)
    calls = []
    for i, row in enumerate(rows):
        metrics = json.loads(row["metrics"])
        calls.append({"_step": i, "_timestamp": 1.7e9 + i, **metrics})
    frame = pd.DataFrame(calls)
    histogram = {"_type": "histogram", "bins": [0, 1]}
    frame["gradients/layer"] = [histogram] * len(frame)
    frame.to_csv(folder / "run.csv")
    frame.to_csv(folder / "run.csv.gz", encoding="utf-8-sig")
    frame.to_json(folder / "records.json", orient="records")
    frame.to_json(folder / "lines.jsonl", orient="records", lines=True)


def sentences(log: list[dict]) -> list[str]:
    return [verdict.sentence for verdict in judge(log, {})]


def test_exports_say_what_trl_has_kept(truncated, tmp_path):
    folder, rows = truncated
    write_exports(tmp_path, rows)
    log_of_trl = entries(folder)
    assert column(log_of_trl, "step") == list(range(1, 13))
    for path in sorted(tmp_path.iterdir()):
        log = entries(path)
        assert len(log) == len(log_of_trl)
        for entry, entry_of_trl in zip(log, log_of_trl, strict=True):
            for name in entry_of_trl.keys() - {"epoch"}:
                assert entry[name] == pytest.approx(entry_of_trl[name], abs=1e-9)
            assert not [name for name in entry if "eval" in name]
        assert sentences(log) == sentences(log_of_trl)


def test_rows_of_a_step_are_merged_and_of_a_step_that_comes_again_the_later_ones_count(tmp_path):
    steps = list(range(1, 9))
    of_callback = [{"step": step, "step_time": 2.0, "own": 1.0} for step in steps]
    evaluations = [{"step": step, "eval_loss": 0.1, "reward": -1.0} for step in steps]
    rows = EIGHT + of_callback + evaluations + rows_at(7, 8, 9, reward=9.0)
    log = entries(write_lines(tmp_path / "log.jsonl", rows))
    assert column(log, "reward") == [*column(EIGHT[:6], "reward"), 9.0, 9.0, 9.0]
    assert column(log, "own") == [1.0] * 8 + [None]
    random.Random(0).shuffle(EIGHT)
    log = entries(write_lines(tmp_path / "log.jsonl", EIGHT))
    assert column(log, "step") == steps


def test_the_share_of_groups_with_a_signal_is_that_of_those_without_one(tmp_path):
    """prime-rl 0.8.0 logs the former; TRL the latter, which is judged."""
    rows = rows_at(1, **{"effective_batch_size/all": 0.75})
    (entry,) = entries(write_lines(tmp_path / "log.jsonl", rows))
    assert entry["frac_reward_zero_std"] == 0.25


def test_a_checkpoint_of_ours_is_judged_as_its_run_and_an_export_beside_it_is_not(tmp_path, capsys):
    write_json(tmp_path / "settings.json", {"max_staleness": 8})
    checkpoint = tmp_path / "checkpoint-8"
    checkpoint.mkdir()
    log = rows_from(1, 12, **{"opo/ratio/ess": 0.3})
    write_lines(tmp_path / "log.jsonl", log)
    for path in (checkpoint, tmp_path):
        assert verdicts_of(capsys, path)["Effective sample"] == "healthy"
    export = write_lines(tmp_path / "other.jsonl", log)
    assert verdicts_of(capsys, export)["Effective sample"] == "look"


def test_newest_checkpoint_is_read_unless_training_went_further(tmp_path):
    for folder, step in (("checkpoint-9", 9), ("checkpoint-10", 10), (".", 12)):
        (tmp_path / folder).mkdir(exist_ok=True)
        log = rows_from(1, step)
        write_state(tmp_path / folder, step, log)
        assert len(entries(tmp_path)) == step
    assert len(entries(tmp_path / "checkpoint-9")) == 9
    of_an_earlier_run = tmp_path / "replaced-checkpoint-99"
    (tmp_path / "checkpoint-10").rename(of_an_earlier_run)
    write_state(of_an_earlier_run, 99, log)
    write_state(tmp_path, 3, log[:3])
    assert len(entries(tmp_path)) == 9


def make_run(folder: Path, global_step: object = 12) -> Path:
    """A folder with a state of 12 rows."""
    folder.mkdir(exist_ok=True)
    write_state(folder, global_step, rows_from(1, 12))
    return folder


def test_links_of_the_user_are_followed_and_links_in_the_folder_are_not(tmp_path, capsys):
    elsewhere = make_run(tmp_path / "elsewhere", global_step=99)
    run = make_run(tmp_path / "run")
    state = run / "trainer_state.json"
    for name, target in (("checkpoint-99", elsewhere), ("checkpoint-up", ".."), ("checkpoint-12", ".")):
        (run / name).symlink_to(target)
    link_to_run = tmp_path / "latest"
    link_to_state = tmp_path / "log.json"
    link_to_run.symlink_to("run")
    link_to_state.symlink_to(state)
    for path in (link_to_run, link_to_state):
        assert verdicts_of(capsys, path)["Reward went"] == "healthy"
    _, notes = read(run)
    assert notes == [f"Read: {state}."]
    state.unlink()
    assert main(["diagnose", str(run)]) == 2
    state.symlink_to(elsewhere / "trainer_state.json")
    assert main(["diagnose", str(run)]) == 2
    assert "trainer_state.json' is a link" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["12", None, [12], math.nan, 10**50], ids=str)
def test_state_without_a_number_of_steps_is_named(tmp_path, capsys, value):
    run = make_run(tmp_path / "run")
    make_run(run / "checkpoint-3", global_step=value)
    assert main(["diagnose", str(run)]) == 2
    assert "checkpoint-3/trainer_state.json' cannot be read: its `global_step` is not a" in capsys.readouterr().err


DEEP_METRICS = json.dumps([{"metrics": "[" * 10**5}])

BAD = {
    "empty.csv": (b"", "found nothing"),
    "sft.jsonl": (b'{"step": 1, "loss": 2.5, "grad_norm": 1}\n', "found grad_norm, loss, step"),
    "scalar.json": (b"3", "it holds no rows"),
    "deep.json": (b'{"a":' * 10**5, "recursion"),
    "no_step.jsonl": (b'{"reward": 1, "grad_norm": 1}\n', "no row with a `step` has a metric"),
    "zipped.csv.gz": (b"step,reward", "cannot be unzipped: Not a gzipped file"),
    "metrics.json": (b'[{"metrics": "[1]"}]', "it holds '[1]', not a mapping"),
    "deep_metrics.json": (DEEP_METRICS.encode(), "recursion"),
    "any_runs.json": (b'[{"run_name": [1]}, {"run_name": {}}]', "2 runs by `run_name`"),
    "pickle.bin": (b"\x80\x04.", "its name ends with '.bin'"),
    "escapes.jsonl": (b'{"step": 1, "\\u001b[31mred": 1}\n', r"found \x1b[31mred, step"),
    "runs.jsonl": (b'{"run_name": "a", "step": 1}\n{"run_name": "b", "step": 1}\n', "2 runs by `run_name`"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_named_with_what_was_found_and_what_is_expected(tmp_path, capsys, name):
    content, finding = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    for part in (name, finding, "RUN is a folder of TRL with trainer_state.json, that file or an export"):
        assert part in error, error


LONG = {"log.csv": "step,reward\n" + "1,1\n" * 50, "log.jsonl": '{"step": 1}\n' * 50, "log.json": "[{},{},{}]"}


@pytest.mark.parametrize("name", LONG)
def test_rows_have_a_bound(tmp_path, capsys, monkeypatch, name):
    path = tmp_path / name
    path.write_text(LONG[name])
    for module in (files, logs):
        monkeypatch.setattr(module, "MOST_LINES", 2)
    assert main(["diagnose", str(path)]) == 2
    assert re.search("more than .*2 (rows|lines), the most that are read", capsys.readouterr().err)


def test_path_without_a_log_is_named(tmp_path, capsys):
    for name in (".", "absent.json"):
        assert main(["diagnose", str(tmp_path / name)]) == 2
        assert "has no trainer_state.json, nor has a checkpoint in it, and is no file" in capsys.readouterr().err
