"""A method is a file and an entry of the registry. This is such a file: a trainer, its configuration, its `Method`."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from helpers import DEVICE_FIELDS, PRETEND

from opo_trl import AsyncOPOTrainer, RolloutConfig, RolloutTrainer, methods
from opo_trl.checks.files import read_json, read_lines
from opo_trl.checks.ranges import require
from opo_trl.fields import OBJECTIVE
from opo_trl.launch import cli
from opo_trl.launch.recipe import make_parser, parse, read
from opo_trl.launch.resume import check_same_run
from opo_trl.methods import METHODS, Method, by_trainer, method_of, register
from opo_trl.train import main


ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
GRPO = RECIPES / "arithmetic" / "experiment1" / "grpo.yaml"
EVIDENCE = ROOT / "benchmarks" / "evidence"


@dataclass
class LouderConfig(RolloutConfig):
    """GRPO with larger advantages."""

    volume: Annotated[float, OBJECTIVE] = field(default=1.0, metadata={"help": "Factor of the advantages."})
    heard: Literal["by all", "by few"] = field(default="by all", metadata={"help": "Has no effect."})

    def __post_init__(self):
        super().__post_init__()
        require(self.volume > 0, "volume", self.volume, "a positive number")


class LouderTrainer(RolloutTrainer):
    """Trainer for [`LouderConfig`]."""

    config_class = LouderConfig

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        rollout["advantages"] = rollout["advantages"] * self.args.volume
        return rollout


METHOD = Method(
    "louder", "Louder GRPO", "#123456", trainer="test_methods.LouderTrainer", config="test_methods.LouderConfig"
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    before = list(METHODS)
    register(METHOD)
    yield
    METHODS[:] = before


def write(folder: Path, **changes) -> Path:
    """GRPO's recipe for the embedded task with other fields, for two optimizer steps."""
    short = {"max_steps": 2, "validation_steps": 2, "validation_size": 2, "report_size": 2, "report_samples": 1}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(GRPO.read_text()), **short, **DEVICE_FIELDS, **changes}))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of the method, and one of GRPO with the same seed."""
    folder = tmp_path_factory.mktemp("runs")
    for trainer, own in (("louder", {"volume": 3}), ("grpo", {})):
        recipe = write(folder, trainer=trainer, output_dir=str(folder / trainer), **own)
        assert main(["--config", str(recipe)]) == 0
    return folder


def gradient_norms(folder: Path) -> list[float]:
    return [line["grad_norm"] for line in read_lines(folder / "log.jsonl") if "grad_norm" in line]


def test_method_trains_from_a_recipe_with_its_own_field(runs):
    assert read_json(runs / "louder" / "settings.json")["volume"] == 3.0
    assert yaml.safe_load((runs / "louder" / "recipe.yaml").read_text())["trainer"] == "louder"
    louder, plain = gradient_norms(runs / "louder"), gradient_norms(runs / "grpo")
    assert louder[0] == pytest.approx(3 * plain[0], rel=1e-3)
    assert plain[0] > 0


def test_report_of_a_run_names_the_method(runs):
    for name, label in (("louder", "Louder GRPO"), ("grpo", "GRPO")):
        assert f">{label}, model arithmetic" in (runs / name / "report.html").read_text().replace("\n", "")


def test_table_of_several_runs_shows_what_differs(runs, capsys):
    assert cli.main(["report", str(runs / "louder"), str(runs / "grpo")]) == 0
    report = capsys.readouterr().out
    assert "| trainer | louder | grpo |" in report
    assert "| volume | 3.0 | – |" in report


def test_checkpoint_is_not_resumed_with_another_value_of_its_field(runs):
    settings = read_json(runs / "louder" / "settings.json")
    checkpoint = str(runs / "louder" / "checkpoint-2")
    check_same_run(checkpoint, {**settings, "heard": "by few"})
    with pytest.raises(ValueError, match=r"volume=3\.0 there, volume=4\.0 here"):
        check_same_run(checkpoint, {**settings, "volume": 4.0})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"volum": 3}, ["volum=3", "Did you mean `volume`?"]),
        ({"volume": -1}, ["volume=-1.0 is not allowed", "Set `volume` to a positive number"]),
        ({"volume": "high"}, ["volume: invalid float value: 'high'"]),
        ({"heard": "by none"}, ["heard", "'by none'", "'by few'"]),
        ({"alpha": 0.4}, ["alpha=0.4", "It belongs to `trainer: opo`, which docs/methods/opo.md describes; this"]),
        (
            {"trainer": "opo", "volume": 3},
            ["volume=3", "It belongs to `trainer: louder`; this recipe is for `trainer: opo`"],
        ),
        (
            {"trainer": "gspo"},
            ["trainer='gspo' does not exist", "one of opo, grpo, async_opo, louder"],
        ),
    ],
)
def test_wrong_field_is_named_with_what_to_do(tmp_path, capsys, fields, says):
    recipe = write(tmp_path, **{"trainer": "louder", "output_dir": str(tmp_path / "run"), **fields})
    assert main(["--config", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert all(text in said for text in says), said


def test_choices_are_checked_in_python_as_well(tmp_path):
    with pytest.raises(ValueError, match=r"heard='by none' is not allowed. Set `heard` to one of by all, by few\."):
        LouderConfig(str(tmp_path), use_cpu=True, bf16=False, heard="by none")


def test_help_lists_its_field():
    assert "Factor of the advantages." in make_parser("louder").format_help()


# The methods of the package


@pytest.mark.skipif(PRETEND, reason="the pretend device imports torch into every process")
def test_registry_imports_no_trainer():
    script = "import sys, opo_trl.methods; print({'trl', 'transformers', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("method", [method for method in METHODS if method != METHOD], ids=lambda method: method.name)
def test_method_has_its_classes_a_colour_and_a_page(method):
    assert issubclass(method.trainer_class, RolloutTrainer | AsyncOPOTrainer)
    assert method.trainer_class.config_class is method.config_class
    assert [other.color for other in METHODS].count(method.color) == 1
    title = "Asynchronous training" if method.name == "async_opo" else method.label
    headings = re.findall(r"^#+ (.*)$", (ROOT / method.page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert title in ", ".join(headings).replace(":", ",").split(", ")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/experiment*/*.yaml")), ids=lambda path: path.parent.name)
def test_method_of_a_recipe_is_recognized(path):
    script, args, *_ = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    assert method_of({**args.to_dict(), "trainer": script.trainer}).name == path.stem
    assert script.trainer == read(["--config", str(path)]).trainer


@pytest.mark.parametrize("folder", sorted(EVIDENCE.glob("*/*/seed-1")), ids=lambda folder: folder.parent.name)
def test_method_of_a_committed_run_is_recognized(folder):
    assert method_of(read_json(folder / "settings.json")).name == folder.parent.name.partition("_")[0]


def test_other_losses_are_of_no_method(tmp_path):
    """As TRL's default, which is DAPO's loss without the rest of DAPO."""
    for fields in ({}, {"loss_type": "cispo"}):
        args = RolloutConfig(str(tmp_path), use_cpu=True, bf16=False, **fields)
        assert method_of({**args.to_dict(), "trainer": "grpo"}) is None
    assert method_of({}) is None
    assert methods.DEFAULT in by_trainer()
    assert methods.BASELINE in by_trainer()
