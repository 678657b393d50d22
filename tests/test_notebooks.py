"""Notebooks run from top to bottom, show what they claim, and are stored as they ran."""

import importlib.util
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from device.device_processes import with_devices
from packaging.requirements import Requirement
from tiny import save_short_problems

from notebooks.run import execute


FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook) -> list:
    outputs = []
    for cell in code_cells(notebook):
        outputs += cell.outputs
    return outputs


def text_of(notebook) -> str:
    """All text output of the cells."""
    texts = []
    for output in outputs_of(notebook):
        formats = output.get("data", {})
        texts.append(output.get("text") or formats.get("text/markdown", ""))
    return "\n".join(texts)


def pictures(notebook) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs_of(notebook))


def test_fine_tuning_teaches_and_its_merged_model_answers(tmp_path):
    text = (FOLDER / "opo_finetune_colab.ipynb").read_text(encoding="utf-8")
    for whole, part in (('"max_steps\\": 32', '"max_steps\\": 8'), ('"problems\\": 500', '"problems\\": 200')):
        assert whole in text
        text = text.replace(whole, part)
    (tmp_path / "shorter.ipynb").write_text(text, encoding="utf-8")
    notebook = execute(tmp_path / "shorter.ipynb", tmp_path, seconds=120, SETTING="cpu")
    text = text_of(notebook)
    assert "setting: cpu" in text
    [row] = re.findall(r"^\| accuracy, .*$", text, re.MULTILINE)
    (_, before_high), (after_low, _) = re.findall(r"\[([\d.]+)%, ([\d.]+)%\]", row)
    assert float(after_low) > float(before_high) + 10
    assert pictures(notebook) == 1  # the curves, redrawn in place
    assert "reward [1.0]" in text
    assert (tmp_path / "runs/opo_finetune_cpu/merged/model.safetensors").is_file()


@pytest.mark.slow
def test_setting_for_colab_runs_to_its_end_on_a_device(library, shared_data, tiny_model, tmp_path, monkeypatch):
    """Folders stand in for what Colab loads from the Hub, and a pretend GPU for a T4; few steps of few tokens."""
    shutil.copytree(tiny_model, tmp_path / "Qwen" / "Qwen3-0.6B")
    data = tmp_path / "DigitalLearningGmbH" / "MATH-lighteval"
    data.parent.mkdir()
    save_short_problems(shared_data / "math", data, count=400)
    text = (FOLDER / "opo_finetune_colab.ipynb").read_text(encoding="utf-8")
    for whole, part in (
        ('"max_steps\\": 40', '"max_steps\\": 4'),
        ('"problems\\": 96', '"problems\\": 8'),
        ('"max_completion_length\\": 512', '"max_completion_length\\": 16'),
    ):
        assert whole in text
        text = text.replace(whole, part)
    (tmp_path / "shorter.ipynb").write_text(text, encoding="utf-8")
    for name, value in with_devices(1, library).items():
        monkeypatch.setenv(name, value)
    notebook = execute(tmp_path / "shorter.ipynb", tmp_path, SETTING="colab")
    text = text_of(notebook)
    assert "setting: colab" in text
    assert "4 optimizer steps in" in text
    assert pictures(notebook) == 1
    assert (tmp_path / "runs/opo_finetune_colab/merged/model.safetensors").is_file()


def test_install_cell_installs_tested_releases_beside_the_torch_that_is_there(tmp_path, monkeypatch):
    """The cell itself, but for pip: in Colab, where the package is missing."""
    notebook = nbformat.read(FOLDER / "opo_finetune_colab.ipynb", as_version=4)
    [cell] = [cell for cell in code_cells(notebook) if "def pip_install" in cell.source]
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: commands.append(command))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(compile(cell.source, "cell", "exec"), {"SOURCE": "..", "SETTING": "cpu"})
    package, dependencies = commands
    assert package[-2:] == ["--no-deps", ".."]
    assert dependencies[5:7] == ["--constraint", "constraints.txt"]
    requirements = dependencies[7:]
    names = {Requirement(text).name for text in requirements}
    assert {"trl", "transformers", "matplotlib"} <= names
    assert any(text.startswith("trl[peft]") for text in requirements)
    assert "torch" not in names
    torch_constraint, *constraints = (tmp_path / "constraints.txt").read_text().splitlines()
    tested = (FOLDER.parent / "constraints.txt").read_text().splitlines()
    assert torch_constraint == f"torch=={version('torch')}"
    assert constraints == [line for line in tested if not line.startswith("torch==")]


@pytest.mark.slow
def test_comparison_reports_on_both_methods(tmp_path):
    recipe = str(FOLDER.parent / "recipes/arithmetic/reuse.yaml")
    small = {"SEEDS": [1], "COMPLETIONS": 192, "PROBLEMS": 8, "OUTPUT": "out"}
    notebook = execute(FOLDER / "opo_vs_grpo.ipynb", tmp_path, RECIPE=recipe, **small)
    text = text_of(notebook)
    for name in ("num_iterations", "max_staleness"):
        assert f"| `{name}` |" in text
    assert "|  | out/grpo/seed-1 | out/opo/seed-1 |" in text
    assert re.search(r"^\| Level 3, sampled, less out/grpo/seed-1 \|.*points \(one seed\)", text, re.MULTILINE)
    assert pictures(notebook) == 1


@pytest.mark.slow
def test_notebook_of_geometry_runs():
    notebook = execute(FOLDER / "geometry_of_opo.ipynb", seconds=60)  # in its folder: `benchmarks` is in ".."
    assert pictures(notebook) == 6
    assert "needed is 1 − min ω = 0.90" in text_of(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_is_one_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for number, cell in enumerate(code_cells(notebook), 1):
        assert cell.execution_count == number
    for output in outputs_of(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
    assert pictures(notebook)
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/|[Ww]arning", text_of(notebook))
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"tags"}
