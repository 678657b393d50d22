"""Notebooks run from top to bottom, show what they claim, and are stored as they ran."""

import importlib.util
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from notebooks.run import execute


FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(notebook) -> str:
    """All text output of the cells."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(o.get("text") or o.get("data", {}).get("text/markdown", "") for o in outputs)


def pictures(notebook) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


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
    required = {Requirement(each).name for each in dependencies[7:]}
    assert {"trl", "transformers", "matplotlib"} <= required
    assert any(each.startswith("trl[peft]") for each in dependencies[7:])
    assert "torch" not in required
    written = (tmp_path / "constraints.txt").read_text().splitlines()
    tested = (FOLDER.parent / "constraints.txt").read_text().splitlines()
    assert written[0] == f"torch=={version('torch')}"
    assert written[1:] == [line for line in tested if not line.startswith("torch==")]


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


def test_geometry_runs():
    notebook = execute(FOLDER / "geometry_of_opo.ipynb", seconds=60)  # in its folder: `benchmarks` is in ".."
    assert pictures(notebook) == 6
    assert "needed is 1 − min ω = 0.90" in text_of(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_is_one_run_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
    assert pictures(notebook)
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/|[Ww]arning", text_of(notebook))
    assert notebook.metadata.keys() == {"kernelspec", "language_info"}
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}
