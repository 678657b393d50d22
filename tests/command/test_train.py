"""`opo-trl train` as a user runs it: from a recipe to a run folder with a model that has learned something."""

import io
import json
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from helpers import DEVICE_FIELDS
from invariance.launch import launch, logs
from safetensors.torch import load_file

from opo_trl import OPOTrainer
from opo_trl.checks.files import read_json, read_lines
from opo_trl.command import train
from opo_trl.command.recipe import parse
from opo_trl.command.train import main
from opo_trl.trainer import logger


ROOT = Path(__file__).resolve().parents[2]
ARITHMETIC = ROOT / "recipes" / "arithmetic" / "opo.yaml"
ACCELERATE = ROOT / "recipes" / "accelerate"
SHORT = {"max_steps": 4, "save_steps": 2, "validation_steps": 2, "validation_size": 20, "report_size": 24}


def arguments(recipe: Path, **overrides) -> list[str]:
    fields = {**DEVICE_FIELDS, **overrides}
    return ["--config", str(recipe), *(part for key, value in fields.items() for part in (f"--{key}", str(value)))]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "arithmetic"
    with redirect_stdout(io.StringIO()) as said:
        assert main(arguments(ARITHMETIC, output_dir=folder, alpha=0.3, **SHORT)) == 0
    assert said.getvalue().count("OPO training plan") == 1
    assert said.getvalue().count("Level 4, sampled") == 2
    return folder


def test_run_folder_holds_the_recipe_the_log_and_the_results(run):
    assert {path.name for path in run.iterdir()} >= {
        "recipe.yaml",
        "settings.json",
        "environment.json",
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
    assert "Level 4, sampled: " in (run / "README.md").read_text()
    report = (run / "report.html").read_text()
    for said in ("Finished: 4 optimizer steps", "Escort effective sample size stayed at", "OPO training plan"):
        assert said in report
    log = read_lines(run / "log.jsonl")
    assert [line["step"] for line in log if "grad_norm" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 2, 4]
    assert all("opo/chi2" in line for line in log if "grad_norm" in line)
    completions = read_lines(run / "completions.jsonl")
    assert {line["step"] for line in completions} == {0, 2, 4}
    assert all(line["prompt"].endswith("=") for line in completions)
    assert {line["reward"] for line in completions} <= {0.0, 1.0}
    described = read_json(run / "environment.json")
    assert described["seed"] == 42
    assert described["packages"]["trl"] == version("trl")
    assert "git_commit" in described
    summary = read_json(run / "summary.json")
    for time in ("before", "after"):
        assert {(level, decoding) for level in summary[time] for decoding in summary[time][level]} == {
            (level, decoding) for level in ("Level 3", "Level 4") for decoding in ("greedy", "sampled")
        }
        assert all(cell["scored"] == 24 for level in summary[time].values() for cell in level.values())


def test_run_without_a_signal_says_so(tiny_model, tmp_path, capsys, caplog):
    type(logger).warning_once.cache_clear()  # another test may have seen it
    problems = tmp_path / "problems.csv"
    rows = [f"What is {i} + {i}?,{2 * i}\n" for i in range(50)]
    problems.write_text("".join(["problem,solution\n", *rows]))
    fields = {"model_name_or_path": tiny_model, "dataset_name": problems, "output_dir": tmp_path / "run"}
    fields |= {"max_completion_length": 8, "max_completions": 64, "per_device_train_batch_size": 8}
    words = [part for key, value in fields.items() for part in (f"--{key}", str(value))]
    assert main([str(ROOT / "recipes" / "own_data.yaml"), *words]) == 0
    assert "'enable_thinking' of `chat_template_kwargs` has no effect" in caplog.text
    assert "no completion has a learning signal in the first rollout" in caplog.text
    said = capsys.readouterr()
    assert "wrong    Zero-variance groups held 100% of completions" in said.out
    assert "8/8 [" in said.err  # of 16,000 steps, those that the completions last for


def test_plan_is_all_that_is_made(tmp_path, capsys):
    folder = tmp_path / "run"
    _, *words = arguments(ARITHMETIC, output_dir=folder, **SHORT)
    assert main([*words, "--plan"]) == 0  # the recipe comes first
    said = capsys.readouterr().out
    assert "OPO training plan\n  rollout " in said
    assert "\n  data       2,048 prompts of arithmetic" in said
    assert not any(folder.rglob("*.*"))
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


def test_rejected_run_leaves_the_run_in_its_folder_alone(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(arguments(ARITHMETIC, output_dir=run, overwrite="true", fraction=0.0001, **SHORT)) == 2
    assert "fraction=0.0001" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


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
        sharded = all(hasattr(parameter, "ds_tensor") for parameter in self.model.parameters())
        self.generated.append([self.state.global_step, sharded])
        return super()._generate_single_turn(*arguments, **options)


def train_watched(folder: str) -> None:
    """Runs in each process of a sharded run."""
    train.OPOTrainer = Watching
    here = {"use_cpu": "false", "output_dir": folder, "max_steps": 1, "report_size": 4, "validation_size": 4}
    here["report_levels"] = "Level 4"
    rollout = {"per_device_train_batch_size": 6, "steps_per_generation": 1, "max_completion_length": 4}
    rest = {"save_strategy": "no", "disable_tqdm": "true", "ddp_backend": "gloo"}
    assert main(arguments(ARITHMETIC, **here, **rollout, **rest)) == 0


def test_nothing_is_generated_before_the_model_is_sharded(tmp_path):
    folder = tmp_path / "run"
    status = launch(train_watched, str(folder), config="zero3", processes=2, folder=tmp_path)
    assert status == [0, 0], logs(tmp_path)
    for process in range(2):
        generated = json.loads((folder / f"generated_{process}.json").read_text())
        assert len(generated) == 4  # the report, greedy and sampled, a validation and a rollout
        assert all(entry == [0, True] for entry in generated), generated
    summary = read_json(folder / "summary.json")
    for time in ("before", "after"):
        assert summary[time]["Level 4"]["greedy"]["scored"] == 4


def test_run_resumes_in_another_folder_with_another_learning_rate(run, tmp_path):
    done, checkpoint, here = 4, run / "checkpoint-4", tmp_path / "run"
    fields = {**SHORT, "max_steps": done + 1, "resume_from_checkpoint": checkpoint, "report_levels": "Level 4"}
    assert main(arguments(ARITHMETIC, output_dir=here, alpha=0.3, learning_rate=1e-30, **fields)) == 0
    summary = read_json(here / "summary.json")
    assert summary["before"] == read_json(run / "summary.json")["before"]  # of the base model
    assert summary["after"].keys() == {"Level 4"}
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, here))
    assert all(torch.equal(before[name], after[name]) for name in before)  # the first step has the new rate
    log = read_lines(here / "log.jsonl")
    assert {line["step"]: line["resumed/learning_rate"] for line in log if "resumed/learning_rate" in line} == {
        done: 1e-30
    }
    assert all(0 < line["learning_rate"] <= 1e-30 for line in log if "learning_rate" in line)  # the schedule falls
    assert "5 optimizer steps. Not one trajectory: learning_rate=1e-30 after" in (here / "report.html").read_text()


def test_completions_are_logged_into_the_folder_of_a_run_that_moves_another_aside(tmp_path):
    """TRL creates a folder for them before the run's folder is claimed."""
    output = tmp_path / "run-1.5b"
    (output / "completions").mkdir(parents=True)
    (output / "completions" / "completions_00009.parquet").touch()
    (output / "settings.json").write_text('{"alpha": 0.9}')
    short = {**SHORT, "max_steps": 1, "save_strategy": "no", "overwrite": "true", "log_completions": "true"}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ARITHMETIC.read_text().replace("../accelerate/", f"{ACCELERATE}/"))
    with recipe.open("a") as file:  # Transformers makes an object of this mapping
        file.write("accelerator_config: {split_batches: false}\n")
    assert main(arguments(recipe, output_dir=output, **short)) == 0
    assert [path.name for path in (output / "completions").iterdir()] == ["completions_00001.parquet"]
    assert [path.name for path in (tmp_path / "run-1.5b-2" / "completions").iterdir()] == ["completions_00009.parquet"]
    assert (tmp_path / "run-1.5b-2" / "settings.json").read_text() == '{"alpha": 0.9}'
    assert "split_batches: false" in (output / "recipe.yaml").read_text()
