"""`opo-trl train` as a user runs it: from a recipe to a run folder with a model that has learned something."""

import io
import json
import os
import signal
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from device_fields import DEVICE_FIELDS
from launched_processes import launch, logs
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
    return ["--config", str(recipe), *words_of({**DEVICE_FIELDS, **overrides})]


def words_of(fields: dict) -> list[str]:
    """The fields as words of a command line."""
    words = []
    for name, value in fields.items():
        words += [f"--{name}", str(value)]
    return words


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "arithmetic"
    with redirect_stdout(io.StringIO()) as stdout:
        assert main(arguments(ARITHMETIC, output_dir=folder, alpha=0.3, **SHORT)) == 0
    printed = stdout.getvalue()
    assert printed.count("OPO training plan") == 1
    assert printed.count("Level 4, sampled") == 2
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
    card = (run / "README.md").read_text()
    assert "Level 4, sampled: " in card
    assert "huggingface.co/datasets" not in card  # the embedded task is not there
    report = (run / "report.html").read_text()
    for sentence in ("Finished: 4 optimizer steps", "Escort effective sample size stayed at", "OPO training plan"):
        assert sentence in report
    log = read_lines(run / "log.jsonl")
    steps = [line for line in log if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in log if "validation/accuracy" in line] == [0, 2, 4]
    for line in steps:
        assert "opo/chi2" in line
    completions = read_lines(run / "completions.jsonl")
    assert {line["step"] for line in completions} == {0, 2, 4}
    for line in completions:
        assert line["prompt"].endswith("=")
        assert line["reward"] in (0.0, 1.0)
    described = read_json(run / "environment.json")
    assert described["seed"] == 42
    assert described["packages"]["trl"] == version("trl")
    assert "git_commit" in described
    summary = read_json(run / "summary.json")
    for time in ("before", "after"):
        by_level = summary[time]
        assert by_level.keys() == {"Level 3", "Level 4"}
        for by_decoding in by_level.values():
            assert by_decoding.keys() == {"greedy", "sampled"}
            for cell in by_decoding.values():
                assert cell["scored"] == 24


def test_run_without_a_signal_says_so(tiny_model, tmp_path, capsys, caplog):
    type(logger).warning_once.cache_clear()  # another test may have seen it
    problems = tmp_path / "problems.csv"
    rows = [f"What is {i} + {i}?,{2 * i}\n" for i in range(50)]
    problems.write_text("".join(["problem,solution\n", *rows]))
    fields = {
        "model_name_or_path": tiny_model,
        "dataset_name": problems,
        "output_dir": tmp_path / "run",
        "max_completion_length": 8,
        "max_completions": 64,
        "per_device_train_batch_size": 8,
    }
    recipe = ROOT / "recipes" / "own_data.yaml"
    assert main([str(recipe), *words_of(fields)]) == 0
    assert "'enable_thinking' of `chat_template_kwargs` has no effect" in caplog.text
    assert "no completion has a learning signal in the first rollout" in caplog.text
    printed = capsys.readouterr()
    assert "wrong    Zero-variance groups held 100% of completions" in printed.out
    assert "8/8 [" in printed.err  # of 16,000 steps, those that the completions last for


def test_signal_while_the_report_is_written_does_not_stop_it(tmp_path, monkeypatch):
    """A launcher sends it to the process that writes the report, as soon as another one has ended."""
    write_report = train.write_report

    def write_and_receive_a_signal(folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write_report(folder)

    def end(*_) -> None:
        raise SystemExit("the signal ended the process")

    monkeypatch.setattr(train, "write_report", write_and_receive_a_signal)
    short = {**SHORT, "max_steps": 1, "save_strategy": "no"}
    before = signal.signal(signal.SIGTERM, end)
    try:
        assert main(arguments(ARITHMETIC, output_dir=tmp_path / "run", **short)) == 0
        assert signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Finished: 1 optimizer step" in (tmp_path / "run" / "report.html").read_text()


def test_plan_is_all_that_is_made(tmp_path, capsys):
    folder = tmp_path / "run"
    _, *words = arguments(ARITHMETIC, output_dir=folder, **SHORT)
    assert main([*words, "--plan"]) == 0  # the recipe comes first
    printed = capsys.readouterr().out
    assert "OPO training plan\n  rollout " in printed
    assert "\n  data       2,048 prompts of arithmetic" in printed
    assert not any(folder.rglob("*.*"))
    assert main([*words, "--plan", "--dataset_name", "./absent"]) == 2


def test_recipe_in_the_run_folder_repeats_the_run(run):
    *original, written = parse(arguments(ARITHMETIC, output_dir=run, alpha=0.3, **SHORT))
    *repeated, again = parse(["--config", str(run / "recipe.yaml")])
    assert again == written
    assert again["env"] == {"OMP_NUM_THREADS": "1"}
    for first, second in zip(original, repeated, strict=True):
        differing = {name for name, value in vars(first).items() if value != getattr(second, name)}
        assert differing <= {"distributed_state", "__cached__setup_devices", "logging_dir"}, differing
    assert read_json(run / "settings.json")["alpha"] == 0.3


def test_rejected_run_leaves_the_run_in_its_folder_alone(run, capsys):
    times_before = times_of_changes(run)
    assert main(arguments(ARITHMETIC, output_dir=run, overwrite="true", fraction=0.0001, **SHORT)) == 2
    assert "fraction=0.0001" in capsys.readouterr().err
    assert times_of_changes(run) == times_before


def times_of_changes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


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
        is_sharded = all(hasattr(parameter, "ds_tensor") for parameter in self.model.parameters())
        self.generated.append([self.state.global_step, is_sharded])
        return super()._generate_single_turn(*arguments, **options)


def train_watched(folder: str) -> None:
    """Runs in each process of a sharded run."""
    train.OPOTrainer = Watching
    fields = {
        "use_cpu": "false",
        "output_dir": folder,
        "max_steps": 1,
        "report_size": 4,
        "validation_size": 4,
        "report_levels": "Level 4",
        "per_device_train_batch_size": 6,
        "steps_per_generation": 1,
        "max_completion_length": 4,
        "save_strategy": "no",
        "disable_tqdm": "true",
        "ddp_backend": "gloo",
    }
    assert main(arguments(ARITHMETIC, **fields)) == 0


def test_nothing_is_generated_before_the_model_is_sharded(tmp_path):
    folder = tmp_path / "run"
    status = launch(train_watched, str(folder), config="zero3", processes=2, folder=tmp_path)
    assert status == [0, 0], logs(tmp_path)
    for process in range(2):
        generated = json.loads((folder / f"generated_{process}.json").read_text())
        assert generated == [[0, True]] * 4  # the report, greedy and sampled, a validation and a rollout
    summary = read_json(folder / "summary.json")
    for time in ("before", "after"):
        greedy = summary[time]["Level 4"]["greedy"]
        assert greedy["scored"] == 4


def test_run_resumes_in_another_folder_with_another_learning_rate(run, tmp_path):
    checkpoint = run / "checkpoint-4"
    here = tmp_path / "run"
    fields = {**SHORT, "max_steps": 5, "resume_from_checkpoint": checkpoint, "report_levels": "Level 4"}
    assert main(arguments(ARITHMETIC, output_dir=here, alpha=0.3, learning_rate=1e-30, **fields)) == 0
    summary = read_json(here / "summary.json")
    assert summary["before"] == read_json(run / "summary.json")["before"]  # of the base model
    assert summary["after"].keys() == {"Level 4"}
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(here / "model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])  # the first step has the new rate
    log = read_lines(here / "log.jsonl")
    new_rates = {line["step"]: line["resumed/learning_rate"] for line in log if "resumed/learning_rate" in line}
    assert new_rates == {4: 1e-30}
    rates = [line["learning_rate"] for line in log if "learning_rate" in line]
    assert 0 < min(rates) <= max(rates) <= 1e-30  # the schedule falls
    report = (here / "report.html").read_text()
    assert "5 optimizer steps. Not one trajectory: learning_rate=1e-30 after" in report


def test_completions_are_logged_into_the_folder_of_a_run_that_moves_another_aside(tmp_path):
    """TRL creates a folder for them before the run's folder is claimed."""
    output = tmp_path / "run-1.5b"
    completions = output / "completions"
    completions.mkdir(parents=True)
    (completions / "completions_00009.parquet").touch()
    (output / "settings.json").write_text('{"alpha": 0.9}')
    short = {**SHORT, "max_steps": 1, "save_strategy": "no", "overwrite": "true", "log_completions": "true"}
    recipe = tmp_path / "recipe.yaml"
    text = ARITHMETIC.read_text().replace("../accelerate/", f"{ACCELERATE}/")
    recipe.write_text(text)
    with recipe.open("a") as file:  # Transformers makes an object of this mapping
        file.write("accelerator_config: {split_batches: false}\n")
    assert main(arguments(recipe, output_dir=output, **short)) == 0
    assert [path.name for path in completions.iterdir()] == ["completions_00001.parquet"]
    moved_aside = tmp_path / "run-1.5b-2"
    moved_completions = moved_aside / "completions"
    assert [path.name for path in moved_completions.iterdir()] == ["completions_00009.parquet"]
    assert (moved_aside / "settings.json").read_text() == '{"alpha": 0.9}'
    assert "split_batches: false" in (output / "recipe.yaml").read_text()
