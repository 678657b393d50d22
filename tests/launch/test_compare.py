"""`opo-trl compare` as users run it: from recipes and finished runs to a report, or a message that says why not."""

import gzip
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import DEVICE_FIELDS, environment, wait_until

from opo_trl.checks.files import append_lines, read_json, read_lines, write_json
from opo_trl.launch import cli
from opo_trl.launch.jobs import Job, check
from opo_trl.launch.recipe import parse
from opo_trl.launch.words import overrides
from opo_trl.report import curves
from opo_trl.report.run_folder import write_description


ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "max_steps": 12,
    "save_steps": 2,
    "per_device_train_batch_size": 24,
    "validation_size": 8,
    "validation_steps": 4,
    "report_size": 8,
    **DEVICE_FIELDS,
}


# From recipes, with real runs


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """
    A comparison that is ended during its run and called again, with a second recipe that cannot be run.

    Returns the files when it was ended, and the output of the second call.
    """
    folder = tmp_path_factory.mktemp("story")
    recipe = yaml.safe_load((ROOT / "recipes" / "arithmetic" / "opo.yaml").read_text())
    (folder / "opo.yaml").write_text(yaml.safe_dump({**recipe, **SHORT}))
    (folder / "broken.yaml").write_text(yaml.safe_dump({**recipe, **SHORT, "model_name_or_path": "./absent"}))
    run = folder / "out" / "runs" / "opo" / "seed-1"
    first = start(folder, "opo.yaml", "--seeds", "1", "--output", "out", "--alpha", "0.3")
    wait_until(lambda: any(run.glob("checkpoint-*/trainer_state.json")) or first.poll() is not None)
    first.send_signal(signal.SIGTERM)
    interrupted = first.communicate(timeout=60)[1], first.returncode
    left = {"summary": read_json(run / "summary.json"), "log": read_lines(run / "log.jsonl")}
    left["checkpoint"] = max(int(path.name.partition("-")[2]) for path in run.glob("checkpoint-*"))
    options = ["--seeds", "1", "--output", "out", "--jobs", "2", "--alpha", "0.3"]
    second = start(folder, "opo.yaml", "broken.yaml", *options)
    return folder, run, interrupted, left, (second.communicate(timeout=300)[1], second.returncode)


def main(argv: list[str]) -> int:
    return cli.main(["compare", *argv])


def start(folder: Path, *argv: str) -> subprocess.Popen:
    process = [sys.executable, "-m", "opo_trl.launch.cli", "compare", *argv]
    return subprocess.Popen(process, cwd=folder, env=environment(), text=True, stderr=subprocess.PIPE)


def test_ended_call_ends_its_runs_and_says_how_to_resume(story):
    _, _, (stderr, status), left, _ = story
    assert status == 130
    assert "interrupted. To resume, repeat the command." in stderr
    assert "before" in left["summary"]
    assert "after" not in left["summary"]


def test_next_call_resumes_from_the_checkpoint(story):
    _, run, _, left, _ = story
    log = read_lines(run / "log.jsonl")
    assert "after" in read_json(run / "summary.json")
    assert [row["step"] for row in log if "grad_norm" in row] == list(range(1, 13))
    kept = [row for row in left["log"] if row["step"] <= left["checkpoint"]]
    assert len(kept) >= 2
    assert log[: len(kept)] == kept  # including the times of the steps: they were not repeated
    assert read_json(run / "settings.json")["alpha"] == 0.3


def test_failing_run_is_named_with_its_log_and_does_not_stop_the_others(story):
    folder, _, _, _, (stderr, status) = story
    assert status == 1
    assert "broken, seed 1 failed. The end of out/runs/broken/seed-1.txt:" in stderr
    assert "model_name_or_path='./absent'" in stderr.partition("broken, seed 1 failed")[2]
    assert "1 of 2 runs failed. To resume them, repeat the command." in stderr
    assert not (folder / "out" / "report.html").exists()


def test_finished_runs_are_not_repeated_and_the_report_is_the_same(story, monkeypatch):
    folder, run, *_ = story
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    argv = ["opo.yaml", "--seeds", "1", "--alpha", "0.3"]
    assert main([*argv, "--output", "out"]) == 0
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    first = contents(folder / "out")
    assert main([*argv, "--output", "out"]) == 0
    assert contents(folder / "out") == first


def contents(output: Path) -> dict[str, bytes]:
    """Every file of a report."""
    files = [output / "report.html", output / "report.md", *(output / "figures").iterdir()]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--alpha", "0.4"], "alpha: 0.3 there, 0.4 requested"),
        ([], "alpha: 0.3 there, 0.4 requested"),
        (["--alpha", "0.3", "--max_steps", "6"], "max_steps: 12 there, 6 requested"),
        (["--alpha", "0.3", "--top_p", "0.9"], "top_p: not set there, 0.9 requested"),
    ],
)
def test_finished_run_with_other_settings_is_rejected_and_left_alone(story, monkeypatch, capsys, fields, message):
    folder, run, *_ = story
    monkeypatch.chdir(folder)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["opo.yaml", "--seeds", "1", "--output", "out", *fields]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Choose another --output, or delete that run." in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_run_that_is_still_running_is_not_started_a_second_time(story, monkeypatch, capsys):
    folder, *_ = story
    monkeypatch.chdir(folder)
    output = folder / "out" / "runs" / "opo" / "seed-2.txt"
    holder = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holder, str(output)], **pipes) as other:
        other.stdout.readline()
        assert main(["opo.yaml", "--seeds", "2", "--output", "out", "--alpha", "0.3"]) == 2
        other.communicate(b"\n")
    assert "opo, seed 2 is still running" in capsys.readouterr().err


# From finished runs


@pytest.fixture
def runs(story, tmp_path):
    """Copies of the real run as three seeds of two methods; the second has 0.1, 0.2 and 0.3 more reward."""
    _, run, *_ = story
    for label in ("grpo", "opo"):
        for seed in (1, 2, 3):
            better = {"reward": seed / 10, "settings": {"learning_rate": 1e-4}} if label == "opo" else {}
            copy_run(run, tmp_path / "runs" / label / f"seed-{seed}", seed=seed, **better)
    return tmp_path / "runs"


@pytest.fixture
def one_figure(monkeypatch):
    """Drawing takes most of a report's time; tests that read its tables need only one figure."""
    monkeypatch.setattr(curves, "CURVES", curves.CURVES[:1])


def copy_run(run: Path, folder: Path, *, seed: int, reward: float = 0.0, settings: dict | None = None) -> Path:
    """Copy a run without its model, adding `reward` to every reward."""
    folder.mkdir(parents=True)
    for name in ("recipe.yaml", "environment.json", "summary.json"):
        shutil.copy(run / name, folder)
    write_json(folder / "settings.json", {**read_json(run / "settings.json"), **(settings or {}), "seed": seed})
    key = "rewards/arithmetic_reward/mean"
    rows = [row | ({key: row[key] + reward} if key in row else {}) for row in read_lines(run / "log.jsonl")]
    append_lines(folder / "log.jsonl", rows)
    return folder


def edit(folder: Path, file: str = "settings.json", **values):
    write_json(folder / file, {**read_json(folder / file), **values})


def report_of(tmp_path: Path, *inputs: Path, options: tuple[str, ...] = ()) -> str:
    output = tmp_path / "report"
    assert main([*map(str, inputs), "--output", str(output), *options]) == 0
    return (output / "report.md").read_text()


def rows_of(report: str, title: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    table = re.search(rf"^#+ {re.escape(title)}$.*?(^\|.*?)\n\n", report, re.M | re.S).group(1)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "---" not in line]


def test_report_has_means_differences_and_verdicts(one_figure, runs, tmp_path):
    report = report_of(tmp_path, runs)
    log = read_lines(runs / "grpo" / "seed-1" / "log.jsonl")
    base = np.mean([row["rewards/arithmetic_reward/mean"] for row in log if "reward" in row])
    assert report.startswith("# Comparison: grpo, opo\n")
    # Differences 0.1, 0.2, 0.3: t = 4.3027 with 2 degrees of freedom, standard error 0.1/√3.
    mean, half = base + 0.2, 4.302653 * 0.1 / 3**0.5
    assert f"opo (3 seeds): final reward {mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]; " in report
    assert "differs from grpo by +0.200 [−0.048, +0.448]: undecided; " in report
    head, grpo, opo = rows_of(report, "Reward")
    assert head[:2] == ["method", "final reward"]
    assert grpo[:2] == ["grpo", f"{base:.3f} ± 0.000"]
    assert opo[:2] == ["opo", f"{base + 0.2:.3f} ± 0.248"]
    difference = rows_of(report.partition("## Differences from grpo")[2], "Reward")[1]
    assert difference == ["final reward", "opo", "+0.200", "[−0.048, +0.448]", "[+0.100, +0.300]", "3", "undecided"]
    assert rows_of(report, "What differs")[1:] == [["learning_rate", "0.0002", "0.0001"]]
    assert len(rows_of(report, "Every run")) == 7


def test_shaping_rewards_are_not_counted(one_figure, runs, tmp_path):
    """`reward` is the sum of all reward functions; the first one, which defines what is correct, is compared."""
    before = report_of(tmp_path, runs)
    for log in runs.rglob("log.jsonl"):
        rows = [row | ({"reward": 100.0} if "reward" in row else {}) for row in read_lines(log)]
        log.unlink()
        append_lines(log, rows)
    assert report_of(tmp_path, runs) == before


def test_html_is_self_contained_and_agrees_with_the_markdown(runs, tmp_path):
    report = report_of(tmp_path, runs)
    html = (tmp_path / "report" / "report.html").read_text()
    figures = re.findall(r'src="data:image/png;base64,[A-Za-z0-9+/=]+"', html)
    assert len(figures) == 8 == len(list((tmp_path / "report" / "figures").iterdir()))
    text = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", html)
    assert not re.search(r"https?:|file:|<link|<script|@import|url\(|src=\"[^\"]", text)
    assert str(tmp_path) not in html + report
    for row in (row for title in ("Reward", "Cost", "Every run", "What differs") for row in rows_of(report, title)):
        assert all(f">{cell}<" in html for cell in row), row


def test_names_are_escaped(one_figure, runs, tmp_path):
    (runs / "opo").rename(runs / "<b>|opo")
    report = report_of(tmp_path, runs)
    html = (tmp_path / "report" / "report.html").read_text()
    assert "&lt;b&gt;|opo" in html
    assert "<b>" not in html
    assert r"| &lt;b>\|opo | 1 |" in report
    assert "<b>" not in report


def test_report_does_not_depend_on_folders_order_or_the_form_of_the_log(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--output", "first"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.copytree(runs, "runs")
    for log in Path("runs").rglob("log.jsonl"):
        Path(f"{log}.gz").write_bytes(gzip.compress(log.read_bytes()))
        log.unlink()
    assert main(["runs/", "--output", "deeper/second"]) == 0
    assert contents(Path("deeper/second")) == contents(tmp_path / "first")


def test_two_single_runs_are_compared_without_intervals(one_figure, runs, tmp_path):
    (runs / "grpo" / "seed-1").rename(tmp_path / "mine")
    (runs / "opo" / "seed-1").rename(tmp_path / "other")
    report = report_of(tmp_path, tmp_path / "other", tmp_path / "mine")
    assert report.startswith("# Comparison: other, mine\n")
    difference = rows_of(report.partition("## Differences from other")[2], "Reward")[1]
    assert difference == ["final reward", "mine", "−0.100", "–", "–", "1", "undecided"]
    assert "±" not in "".join(cell for row in rows_of(report, "Reward") for cell in row)
    assert "none for a single seed" in report


def test_only_common_seeds_are_paired(one_figure, runs, tmp_path):
    (runs / "opo" / "seed-3").rename(tmp_path / "moved")
    shutil.rmtree(runs / "grpo" / "seed-1")
    report = report_of(tmp_path, runs)
    difference = rows_of(report.partition("## Differences from grpo")[2], "Reward")[1]
    assert difference == ["final reward", "opo", "+0.200", "–", "–", "1", "undecided"]
    shutil.rmtree(runs / "opo" / "seed-2")
    report = report_of(tmp_path, runs)
    assert "opo has no seed in common with grpo, so there is no difference." in report
    assert rows_of(report.partition("## Differences from grpo")[2], "Reward")[1][2:] == ["–"] * 5


def test_baseline_can_be_chosen(one_figure, runs, tmp_path, capsys):
    report = report_of(tmp_path, runs, options=("--baseline", "opo"))
    assert "## Differences from opo" in report
    assert main([str(runs), "--output", str(tmp_path / "x"), "--baseline", "ppo"]) == 2
    assert "--baseline ppo is none of the methods. Use one of grpo, opo." in capsys.readouterr().err


def test_pass_at_k_is_shown_if_it_was_measured(one_figure, runs, tmp_path):
    for folder in runs.glob("*/seed-*"):
        after = read_json(folder / "summary.json")["after"]
        after["Level 4"]["sampled"]["pass_at"] = {"1": 0.5, "8": 0.9}
        edit(folder, "summary.json", after=after)
    head, *rows = rows_of(report_of(tmp_path, runs), "Accuracy after training")
    assert [row[head.index("Level 4, pass@8")] for row in rows] == ["90.0 % ± 0.0 %"] * 2
    assert "Level 4, pass@1" not in head  # it is the sampled accuracy


# What is not comparable


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset_name", "other/data"),
        ("levels", ["Level 2"]),
        ("fraction", 0.5),
        ("validation_levels", ["Level 3"]),
        ("report_size", 9),
        ("max_steps", 13),
        ("num_generations", 12),
        ("max_completion_length", 64),
        ("temperature", 0.7),
        ("dtype", "bfloat16"),
        ("lora_r", 8),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_run_of_another_task_is_rejected_with_the_field_named(runs, tmp_path, capsys, field, value):
    earlier = read_json(runs / "opo" / "seed-2" / "settings.json")[field]
    for seed in (1, 2, 3):
        edit(runs / "opo" / f"seed-{seed}", **{field: value})
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "not comparable" in said
    expected = f"  {field}: {earlier!r} in grpo, seed 1 and 2 more; {value!r} in opo, seed 1 and 2 more\n"
    assert expected in said
    assert said.count(" in grpo, ") == 1  # nothing else is blamed
    assert not (tmp_path / "report").exists()


def test_runs_of_as_many_completions_may_differ_in_passes_and_steps(runs, tmp_path, capsys):
    others = [runs / label / f"seed-{seed}" for label in ("grpo", "dapo") for seed in (1, 2, 3)]
    for folder in [path for path in others if path.exists()]:
        edit(folder, max_completions=96)
    for seed in (1, 2, 3):
        changes = {"max_completions": 96, "max_steps": 99, "num_train_epochs": 7.0, "num_iterations": 2}
        edit(runs / "opo" / f"seed-{seed}", **changes)
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Completions to 80 %: " in text
    assert "completions." in text
    assert "optimizer steps" not in text.split("## What differs")[0]
    assert "reward_over_completions" not in text
    edit(runs / "opo" / "seed-1", max_completions=144)
    edit(runs / "opo" / "seed-2", max_completions=144)
    edit(runs / "opo" / "seed-3", max_completions=144)
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    assert "  max_completions: 96 in grpo, seed 1 and 2 more; 144 in opo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"generation_batch_size": 96},
            "completions per optimizer step: 24.0 in grpo, seed 1 and 2 more; 48",
        ),
        ({"num_iterations": 2}, "optimizer steps per rollout: 2.0 in grpo, seed 1 and 2 more; 4.0 in opo"),
        ({"reward_funcs": ["accuracy_reward"]}, "reward_funcs[0]: 'arithmetic_reward' in grpo"),
    ],
)
def test_budget_and_reward_are_compared_by_their_effect(runs, tmp_path, capsys, changes, message):
    for seed in (1, 2, 3):
        edit(runs / "opo" / f"seed-{seed}", **changes)
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    assert message in capsys.readouterr().err


def test_same_budget_in_other_batches_and_further_rewards_are_comparable(one_figure, runs, tmp_path):
    for seed in (1, 2, 3):
        cut = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
        edit(runs / "opo" / f"seed-{seed}", **cut, reward_funcs=["arithmetic_reward", "my.overlong"])
    names = [row[0] for row in rows_of(report_of(tmp_path, runs), "What differs")]
    assert "reward_funcs" in names
    assert "steps_per_generation" in names


def test_fields_that_opo_does_not_use_show_a_dash(one_figure, runs, tmp_path):
    for seed in (1, 2, 3):
        edit(runs / "grpo" / f"seed-{seed}", trainer="grpo", loss_type="grpo", epsilon_high=0.28)
    rows = {row[0]: row[1:] for row in rows_of(report_of(tmp_path, runs), "What differs")}
    assert rows["trainer"] == ["grpo", "opo"]
    assert rows["loss_type"] == ["grpo", "–"]
    assert rows["epsilon_high"] == ["0.28", "–"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda runs: edit(runs / "opo" / "seed-2", mu=3.0), "Runs of 'opo' differ in more than the seed:\n  mu: 0.3"),
        (lambda runs: edit(runs / "opo" / "seed-2", seed=1), "'opo' has several runs of one seed: [1, 1, 3]"),
        (lambda runs: write_json(runs / "opo/seed-2/summary.json", {"before": {}}), "seed-2' is not finished"),
        (lambda runs: (runs / "opo/seed-2/log.jsonl").unlink(), "lacks log.jsonl"),
        (lambda runs: (runs / "opo/seed-2/settings.json").unlink(), "lacks settings.json"),
        (lambda runs: (runs / "opo/seed-2/log.jsonl").write_text('{"step": 1}\n'), "has no 'rewards/arithmetic_rew"),
    ],
)
def test_unusable_run_is_named(runs, tmp_path, capsys, spoil, message):
    spoil(runs)
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no_such.yaml", "--seeds", "1"], "'no_such.yaml' does not exist"),
        (["a.yaml"], "--seeds is not set"),
        (["a.yaml", "b/a.yaml", "--seeds", "1"], "Several recipes are named 'a'"),
        (["a.yaml", "--seeds", "1", "--jobs", "0"], "--jobs 0 is not allowed"),
        (["a.yaml", "--seeds", "1", "--seed", "3"], "--seed is set by this command"),
        (["a.yaml", "--seeds", "1", "--output-dir", "x"], "--output_dir is set by this command"),
        (["a.yaml", "--seeds", "1", "--baseline", "b"], "--baseline b is none of the methods. Use one of a."),
        (["b", "--seeds", "1"], "'b' contains no run"),
        (["runs", "--seeds", "1"], "--seeds 1 has no effect"),
        (["runs", "--alpha", "0.1"], "--alpha 0.1 has no effect"),
        (["a.yaml", "--seeds", "1", "--alpah", "0.1"], "Did you mean `alpha`"),
        (["a.yaml", "b/bad.yaml", "--seeds", "1"], "alpah"),
        (["a.yaml", "--seeds", "1", "99999999999"], "seed"),
    ],
)
def test_contradictory_arguments_are_rejected(runs, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(runs.parent)
    Path("b").mkdir()
    for path in ("a.yaml", "b/a.yaml"):
        Path(path).write_text("alpha: 0.4\n")
    Path("b/bad.yaml").write_text("alpah: 0.4\n")
    if argv[0] == "b":  # a folder without a run, and a recipe, so that the seeds have an effect
        argv = ["a.yaml", *argv]
    assert main([*argv, "--output", "out"]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_report_of_something_else_is_not_replaced(runs, tmp_path, capsys, name):
    run = runs / "opo" / "seed-1"
    (run / name).write_text("<title>My thesis</title>")
    assert main([str(runs), "--output", str(run)]) == 2
    assert f"{name}' is not the report of a comparison" in capsys.readouterr().err
    assert (run / name).read_text() == "<title>My thesis</title>"


def test_figures_of_something_else_are_not_replaced(runs, tmp_path, capsys):
    output = tmp_path / "paper"
    (output / "figures").mkdir(parents=True)
    (output / "figures" / "entropy.png").write_text("mine")
    assert main([str(runs), "--output", str(output)]) == 2
    assert "entropy.png' is of no earlier comparison" in capsys.readouterr().err
    assert [path.name for path in output.rglob("*.*")] == ["entropy.png"]


def test_paths_begin_at_home_and_are_not_empty(runs, tmp_path, monkeypatch, capsys, one_figure):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main([str(runs), "--output=~/report"]) == 0
    assert (tmp_path / "home" / "report" / "report.md").is_file()
    for empty in ([str(runs), "--output", ""], ["", "--output", "out"]):
        with pytest.raises(SystemExit, match="2"):
            main(empty)
        assert "is empty. Pass a path" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "runs"]


def test_missing_matplotlib_is_reported_before_anything_runs(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    for name in ("comparison_report", "curves"):
        monkeypatch.delitem(sys.modules, f"opo_trl.report.{name}", raising=False)
    assert main([str(runs), "--output", str(tmp_path / "report")]) == 2
    assert "pip install 'opo_trl[figures]'" in capsys.readouterr().err


# Recipes


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("learning_rate: 1e-4", "--learning_rate 2e-4"),
        ("run_name: 1:30", "--run_name 90"),
        ("model_revision: 010", "--model_revision 8"),
        ("levels: [no, Level 3]", "--levels Level 3"),
        ("levels: [Level 3]", "--levels 'Level\u20283'"),
        ("chat_template_kwargs: {style: '1e-4'}", "--chat_template_kwargs '{style: 1e-4}'"),
        ("reward_weights: [1, .5]", "--reward_weights 1 0.25"),
        ("scale_rewards: no", "--scale_rewards group"),
        ("dataset_settings: '{\"size\": 3}'", "--dataset_settings '{size: 4}'"),
        ("accelerate_config: single_gpu", "--accelerate_config multi_gpu"),
    ],
)
def test_run_is_recognized_by_its_recipe_and_told_from_another(tmp_path, text, other):
    (recipe := tmp_path / "opo.yaml").write_text(
        f"{text}\nmodel_name_or_path: m\noutput_dir: run\nuse_cpu: true\nbf16: false\n"
    )
    (folder := tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    *_, stored = parse(["--config", str(recipe)])
    gone = {name: f"/gone/{Path(stored[name]).name}" for name in stored if name == "accelerate_config"}
    write_description(folder.parent, recipe=stored | gone, settings={}, seed=1)
    check(Job(recipe, 1, folder.parent, ()))
    field = text.split(":")[0]
    with pytest.raises(ValueError, match=rf"{field}: .* there, .* requested"):
        check(Job(recipe, 1, folder.parent, tuple(shlex.split(other))))


def test_overrides_are_read_as_on_the_command_line():
    fields = ["--learning-rate", "1e-4", "--levels", "Level 1", "Level 2", "--alpha=0.3", "--bf16", "--beta", "-1"]
    expected = {"learning_rate": "1e-4", "levels": ["Level 1", "Level 2"], "alpha": "0.3", "bf16": True, "beta": "-1"}
    assert overrides(fields) == expected
    with pytest.raises(ValueError, match=r"'0\.3' is neither a field nor the value of one"):
        overrides(["0.3"])


def test_importing_the_command_imports_no_trainer():
    heavy = {"trl", "transformers", "matplotlib", "jinja2"}
    script = f"import sys, opo_trl.launch.compare; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"
