"""`opo-trl train` as a user runs it: from a recipe to a run folder with a model that has learned something."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from helpers import DEVICE_FIELDS, USE_CPU, environment
from invariance.canonical import fsdp_on_cpu
from invariance.launch import launch, logs
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOTrainer, methods
from opo_trl.checks.files import read_json, read_lines, write_json
from opo_trl.data.arithmetic import base_model_path
from opo_trl.launch.recipe import parse
from opo_trl.launch.resume import known_accuracies
from opo_trl.rewards.errors import RewardError
from opo_trl.train import main


ROOT = Path(__file__).resolve().parents[2]
ARITHMETIC = ROOT / "recipes" / "arithmetic" / "opo.yaml"
ACCELERATE = ROOT / "recipes" / "accelerate"
SHORT = {"max_steps": 4, "save_steps": 2, "validation_steps": 2, "validation_size": 20, "report_size": 24}


def arguments(recipe: Path, **overrides) -> list[str]:
    fields = {**DEVICE_FIELDS, **overrides}
    return ["--config", str(recipe), *(part for key, value in fields.items() for part in (f"--{key}", str(value)))]


def opo_trl_train(*argv: str) -> subprocess.CompletedProcess:
    """`opo-trl train` in a separate process, in the root of the checkout."""
    command = [sys.executable, "-m", "opo_trl.launch.cli", "train", *argv]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "arithmetic"
    done = opo_trl_train(*arguments(ARITHMETIC, output_dir=folder, alpha=0.3, **SHORT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("OPO training plan") == 1
    assert done.stdout.count("Level 4, sampled") == 2
    return folder


def test_run_folder_holds_the_recipe_the_log_and_the_results(run):
    assert {path.name for path in run.iterdir()} >= {
        "recipe.yaml",
        "settings.json",
        "environment.json",
        "requirements.txt",
        "log.jsonl",
        "completions.jsonl",
        "summary.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
        "checkpoint-4",
        "report.html",
    }
    assert (run / "plan.txt").read_text().startswith("OPO training plan\n  rollout ")
    report = (run / "report.html").read_text()
    for said in ("Finished: 4 optimizer steps", "Escort effective sample size stayed at", "OPO training plan"):
        assert said in report
    log = read_lines(run / "log.jsonl")
    assert [line["step"] for line in log if "grad_norm" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 2, 4]
    assert all("opo/chi2" in line for line in log if "grad_norm" in line)
    completions = read_lines(run / "completions.jsonl")
    assert {line["step"] for line in completions} == {0, 2, 4}
    assert all(line["prompt"].endswith("=") and line["reward"] in (0.0, 1.0) for line in completions)
    summary = read_json(run / "summary.json")
    for time in ("before", "after"):
        assert {(level, decoding) for level in summary[time] for decoding in summary[time][level]} == {
            (level, decoding) for level in ("Level 3", "Level 4") for decoding in ("greedy", "sampled")
        }
        assert all(cell["scored"] == 24 for level in summary[time].values() for cell in level.values())


def test_plan_is_all_that_is_made(tmp_path, capsys):
    folder = tmp_path / "run"
    _, *words = arguments(ARITHMETIC, output_dir=folder, **SHORT)
    assert main([*words, "--plan"]) == 0  # the recipe comes first
    said = capsys.readouterr().out
    assert "OPO training plan\n  rollout " in said
    assert "\n  data       2,048 prompts of arithmetic" in said
    assert not folder.exists()
    assert main([*words, "--plan", "--dataset_name", "./absent"]) == 2


def test_recipe_in_the_run_folder_repeats_the_run(run):
    *original, written = parse(arguments(ARITHMETIC, output_dir=run, alpha=0.3, **SHORT))
    *repeated, again = parse(["--config", str(run / "recipe.yaml")])
    assert again == written
    assert again["env"] == {"OMP_NUM_THREADS": "1"}
    for first, second in zip(original, repeated, strict=True):
        differing = {k for k in vars(first) if vars(first)[k] != vars(second)[k]}
        assert differing <= {"distributed_state", "__cached__setup_devices", "logging_dir"}, differing
    assert read_json(run / "settings.json")["alpha"] == 0.3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"overwrite": "false"}, "is not empty"),
        ({"fraction": 0.0001}, "fraction=0.0001"),
    ],
)
def test_rejected_run_leaves_the_run_in_its_folder_alone(run, capsys, overrides, message):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(arguments(ARITHMETIC, output_dir=run, **{"overwrite": "true", **SHORT, **overrides})) == 2
    assert message in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_run_resumes_where_it_was_saved(run):
    longer = {**SHORT, "max_steps": 6, "resume_from_checkpoint": "last"}
    before = read_json(run / "summary.json")["before"]
    assert main(arguments(ARITHMETIC, output_dir=run, alpha=0.3, **longer)) == 0
    assert [line["step"] for line in read_lines(run / "log.jsonl") if "grad_norm" in line] == [1, 2, 3, 4, 5, 6]
    summary = read_json(run / "summary.json")
    assert summary["before"] == before  # the base model's accuracy, not that of the checkpoint
    assert summary["optimizer_steps"] == 6


# The report before training


class Watching(OPOTrainer):
    """Records whether its model is sharded when it generates."""

    def train(self, *arguments, **options):
        self.generated = []
        result = super().train(*arguments, **options)
        path = Path(self.args.output_dir, f"generated_{self.accelerator.process_index}.json")
        path.write_text(json.dumps(self.generated))
        return result

    def _generate_single_turn(self, *arguments, **options):
        # FSDP2 gathers the outermost module's parameters in its first pass, and keeps them gathered.
        sharded = sum(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in self.model.parameters()) > 10
        self.generated.append([self.state.global_step, sharded, self.deepspeed is not None])
        return super()._generate_single_turn(*arguments, **options)


def train_watched(config: str, folder: str) -> None:
    """Runs in each process of a sharded run."""
    if config == "fsdp2":
        fsdp_on_cpu()
    methods._TRAINERS = tuple(replace(each, trainer="test_train.Watching") for each in methods._TRAINERS[:1])
    here = {"use_cpu": "false", "output_dir": folder, "max_steps": 1, "report_size": 4, "validation_size": 4}
    rollout = {"per_device_train_batch_size": 6, "steps_per_generation": 1, "max_completion_length": 4}
    rest = {"save_strategy": "no", "disable_tqdm": "true", "ddp_backend": "gloo"}
    assert main(arguments(ARITHMETIC, **here, **rollout, **rest)) == 0


@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_nothing_is_generated_before_the_model_is_sharded(tmp_path, config):
    folder = tmp_path / "run"
    status = launch(train_watched, config, str(folder), config=config, processes=2, folder=tmp_path)
    assert status == [0, 0], logs(tmp_path)
    for process in range(2):
        generated = json.loads((folder / f"generated_{process}.json").read_text())
        assert len(generated) == 6  # the report, greedy and sampled at two levels, a validation and a rollout
        assert all(entry == [0, True, config == "zero3"] for entry in generated), generated
    summary = read_json(folder / "summary.json")
    for time in ("before", "after"):
        assert all(summary[time][level]["greedy"]["scored"] == 4 for level in ("Level 3", "Level 4"))


def broken_reward(completions, **columns):
    """Fails in the first rollout: the report and the validation before it have fewer completions."""
    if len(completions) == 96:
        raise ArithmeticError("no score")
    return [0.0] * len(completions)


def unscored_reward(**columns):
    raise ArithmeticError("no score")


BRIEF = {"report_size": 2, "validation_size": 2, "max_steps": 1, "max_completion_length": 4, "steps_per_generation": 1}


def test_accuracies_before_training_are_measured_again_only_if_settings_changed(tmp_path, capsys):
    """In a run that fails repeatedly before its first checkpoint."""
    options = {**BRIEF, "output_dir": tmp_path / "run", "reward_funcs": "test_train.broken_reward"}
    summary = tmp_path / "run" / "summary.json"
    for change, repeated in (({}, False), ({"report_size": 3}, True), ({"seed": 7}, False)):
        assert main(arguments(ARITHMETIC, **options)) == 1
        before = read_json(summary)
        assert before.keys() == {"before"}
        before["before"]["Level 4"]["greedy"]["accuracy"] = 0.123  # which no run would measure
        write_json(summary, before)
        options |= {"resume_from_checkpoint": "auto", **change}
        capsys.readouterr()
        assert main(arguments(ARITHMETIC, **options)) == 1
        assert ("Level 4, greedy            12.3% " in capsys.readouterr().out) is not repeated
        assert (read_json(summary) == before) is not repeated


def test_model_is_saved_before_the_report(tmp_path, monkeypatch):
    def fails(*_):
        raise RewardError("too late")

    monkeypatch.setattr("opo_trl.train.measure", fails)
    assert main(arguments(ARITHMETIC, **BRIEF, output_dir=tmp_path / "run", save_strategy="no")) == 1
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_run_that_goes_on_after_its_end_is_not_finished_until_it_ends_again(tmp_path):
    write_json(tmp_path / "summary.json", {"before": {"Level 3": {}}, "after": {"Level 3": {}}, "optimizer_steps": 4})
    assert known_accuracies(tmp_path, str(tmp_path / "checkpoint-4")) == {"before": {"Level 3": {}}}


def test_run_that_resumes_in_another_folder_keeps_the_accuracies_of_its_base_model(run, tmp_path):
    [checkpoint] = run.glob("checkpoint-*")  # its step depends on the previous tests
    steps = int(checkpoint.name.rpartition("-")[2]) + 1
    here = {**SHORT, "max_steps": steps, "resume_from_checkpoint": checkpoint, "report_levels": "Level 4"}
    assert main(arguments(ARITHMETIC, output_dir=tmp_path / "run", alpha=0.3, **here)) == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["before"] == read_json(run / "summary.json")["before"]
    assert summary["after"].keys() == {"Level 4"}


def test_checkpoint_of_another_trainer_can_be_resumed(tmp_path):
    folder = tmp_path / "grpo"
    options = {"use_cpu": USE_CPU, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    options |= {"max_steps": 1, "save_steps": 1, "logging_steps": 1, "max_completion_length": 4}
    args = GRPOConfig(str(folder), num_generations=2, per_device_train_batch_size=2, **options)
    data = Dataset.from_dict({"prompt": ["1+1=", "2+2="]})
    theirs = GRPOTrainer(base_model_path(), lambda completions, **_: [1.0] * len(completions), args, data)
    theirs.train()
    theirs.save_model()
    output = tmp_path / "opo"
    short = {"max_steps": 2, "validation_steps": 2, "validation_size": 4, "report_size": 4, "save_strategy": "no"}
    resume = {"resume_from_checkpoint": folder / "checkpoint-1", "output_dir": output, "overwrite": "false"}
    assert main(arguments(ARITHMETIC, **short, **resume)) == 0
    assert [row["step"] for row in read_lines(output / "log.jsonl") if "grad_norm" in row] == [2]
    assert (folder / "checkpoint-1" / "model.safetensors").is_file()


def test_completions_are_logged_into_the_folder_of_a_run_that_moves_another_aside(tmp_path):
    """TRL creates a folder for them before the run's folder is claimed."""
    output = tmp_path / "run"
    (output / "completions").mkdir(parents=True)
    (output / "completions" / "completions_00009.parquet").touch()
    (output / "settings.json").write_text("{}")
    short = {**SHORT, "max_steps": 1, "save_strategy": "no", "overwrite": "true", "log_completions": "true"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ARITHMETIC.read_text().replace("../accelerate/", f"{ACCELERATE}/"))
    with recipe.open("a") as file:  # Transformers makes an object of this mapping
        file.write("accelerator_config: {split_batches: false}\n")
    assert main(arguments(recipe, output_dir=output, **short)) == 0
    assert [path.name for path in (output / "completions").iterdir()] == ["completions_00001.parquet"]
    assert [path.name for path in (tmp_path / "run-2" / "completions").iterdir()] == ["completions_00009.parquet"]
    assert "split_batches: false" in (output / "recipe.yaml").read_text()


def test_base_model_learns_to_carry_on_the_trained_level_and_a_harder_one(tmp_path):
    """The README's first command, with a quarter of its steps."""
    short = {"max_steps": 56, "report_size": 200, "validation_steps": 56, "validation_size": 10}
    assert main(arguments(ARITHMETIC, output_dir=tmp_path / "run", **short)) == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    for level in ("Level 3", "Level 4"):
        for decoding in ("greedy", "sampled"):
            before, after = (summary[time][level][decoding] for time in ("before", "after"))
            assert after["low"] > before["high"], (level, decoding, before, after)
    assert summary["after"]["Level 3"]["greedy"]["accuracy"] > 0.85
    rewards = [line["reward"] for line in read_lines(tmp_path / "run" / "log.jsonl") if "reward" in line]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_baseline_runs_from_its_recipe_and_logs_what_opo_logs(run, tmp_path):
    recipe = ROOT / "recipes" / "arithmetic" / "experiment1" / "dapo.yaml"
    short = {"max_steps": 4, "report_size": 8, "validation_size": 8, "validation_steps": 2}
    assert main(arguments(recipe, output_dir=tmp_path / "run", **short)) == 0
    steps = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert len(steps) == 4
    assert steps[0]["dynamic_sampling/rounds"] > 1
    assert steps[0]["rewards/soft_overlong_punishment_reward/mean"] <= 0
    assert steps[1]["clip_ratio/region_mean"] > 0
    assert "opo/target_fit" not in steps[1]
    opo = [line for line in read_lines(run / "log.jsonl") if "grad_norm" in line]
    read_by_comparisons = {"rewards/arithmetic_reward/mean", "grad_norm", "entropy", "completions/generated"}
    for lines in (steps, opo):  # OPO logs no entropy in steps that skip completions
        assert read_by_comparisons <= set().union(*lines)
    after = read_json(tmp_path / "run" / "summary.json")["after"]["Level 4"]["sampled"]
    assert after["pass_at"].keys() == {"1", "2", "4", "8"}
    assert after["pass_at"]["1"] <= after["pass_at"]["8"]
    report = (tmp_path / "run" / "report.html").read_text()
    for said in ("Level 4, sampled, pass@8", "Zero-variance groups"):
        assert said in report
    assert "Escort" not in report


def test_run_that_ends_with_an_error_leaves_its_report(tmp_path):
    options = {"output_dir": tmp_path / "run", "reward_funcs": "test_train.unscored_reward", "report_size": 1}
    assert main(arguments(ARITHMETIC, **options)) == 1
    assert "Nothing has been logged yet." in (tmp_path / "run" / "report.html").read_text()


def spoiling_reward(completions, **_):
    """The log cannot be written any more."""
    log = Path(os.environ["SPOILED"])
    if log.is_file():
        log.unlink()
        log.mkdir()
    return [1.0] * len(completions)


def test_log_that_cannot_be_written_ends_a_run_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPOILED", str(tmp_path / "run" / "log.jsonl"))
    options = {"output_dir": tmp_path / "run", "reward_funcs": "test_train.spoiling_reward", "report_size": 1}
    assert main(arguments(ARITHMETIC, **options, validation_size=2)) == 1
    said = f"opo-trl train: error: [Errno 21] Is a directory: '{tmp_path / 'run' / 'log.jsonl'}'"
    assert said in capsys.readouterr().err


def test_with_alpha_1_nothing_is_learned(tmp_path):
    """It gives every completion of a group the same weight: the control of the test above."""
    assert main(arguments(ARITHMETIC, output_dir=tmp_path / "run", alpha=1.0, weight_decay=0.0, **SHORT)) == 0
    trained = load_file(tmp_path / "run" / "model.safetensors")
    base = load_file(Path(base_model_path()) / "model.safetensors")
    assert all((trained[name].to(base[name].dtype) == base[name]).all() for name in base)


def ascii_reward(completions, **kwargs):
    """The fraction of ASCII text: a random model can improve it."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character.isascii() for character in text) / max(len(text), 1) for text in texts]


# What a recipe for a large GPU has otherwise.
HERE = {
    "bf16": "false",
    "dtype": "float32",
    "use_vllm": "false",
}
SMALL = {
    "max_steps": 4,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 8,
    "steps_per_generation": 2,
    "validation_size": 2,
    "validation_steps": 4,
    "report_size": 2,
}


def test_qwen3_recipe_trains_on_the_real_math_rows(small_qwen3, shared_data, tmp_path):
    recipe = ROOT / "recipes" / "qwen3-1.7b" / "experiment1/opo.yaml"
    fields = {"model_name_or_path": small_qwen3, "dataset_name": shared_data / "math", "learning_rate": 1e-3}
    rewards = ("--reward_funcs", "accuracy_reward", "test_train.ascii_reward")
    assert main([*arguments(recipe, **HERE, **SMALL, **fields, output_dir=tmp_path / "run"), *rewards]) == 0
    log = [line for line in read_lines(tmp_path / "run" / "log.jsonl") if "grad_norm" in line]
    assert len(log) == 4
    assert all(line["grad_norm"] > 0 for line in log)
    assert all(0.2 <= line["opo/temperature"] <= 1.5 for line in log)
    assert [line["opo/off_policy_steps"] for line in log] == [0, 1, 0, 1]
    assert log[1]["opo/chi2"] > log[0]["opo/chi2"]
    prompts = [json.dumps(line["prompt"]) for line in read_lines(tmp_path / "run" / "completions.jsonl")]
    assert all("boxed" in prompt for prompt in prompts)
