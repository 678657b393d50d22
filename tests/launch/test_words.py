"""Mistakes that are reported at once: before TRL is imported, and before a training process starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from opo_trl.launch.words import check_at_once


SEEN = """
import sys
from opo_trl.launch.cli import main
status = main(sys.argv[1:])
print(status, {"torch", "transformers", "trl"} & sys.modules.keys())
"""


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        ("dataset_name: data.txt", [], ["dataset_name='data.txt'", "Convert it"]),
        ("dataset_name: ./absent.jsonl", [], ["dataset_name='./absent.jsonl'", "does not exist"]),
        ("alpha: 0.3\nalpha: 0.4", [], ["lines 1 and 2: duplicate key 'alpha'"]),
        ("alpha: [", [], ["not valid YAML", "line 1"]),
        ("", ["--generation_kwargs", "{top_k"], ["generation_kwargs='{top_k'", "not valid YAML"]),
        ("generation_kwargs: '{top_k: no}'", [], ["generation_kwargs='{top_k: no}'", "ambiguous"]),
        ("accelerate_config: absent", [], ["accelerate_config='absent'", "neither a file nor"]),
        ("output_dir: data.txt/run", [], ["output_dir='data.txt/run'", "not a folder"]),
    ],
)
def test_mistake_is_found_without_the_types_of_fields(tmp_path, monkeypatch, recipe, words, says):
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("4\n")
    Path("recipe.yaml").write_text(recipe or "mu: 1")
    with pytest.raises(ValueError, match=r"\w") as error:
        check_at_once(["--config", "recipe.yaml", *words])
    for part in says:
        assert part in str(error.value)


def test_folder_with_the_name_of_an_embedded_dataset_is_no_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("arithmetic").mkdir()  # as `recipes/` has it
    check_at_once(["--dataset_name", "arithmetic"])


def test_json_indented_with_tabs_is_a_mapping():
    check_at_once(["--deepspeed", '{\n\t"zero_optimization": {\n\t\t"stage": 2\n\t}\n}'])


def test_help_imports_nothing_slow():
    code = "import sys; from opo_trl.launch import cli; print({'datasets', 'numpy', 'torch'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("command", [["train", "--config"], ["report"], ["diagnose"]])
def test_no_library_is_imported_for_it(tmp_path, command):
    argv = [*command, str(tmp_path / "absent.yaml")]
    done = subprocess.run([sys.executable, "-c", SEEN, *argv], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 set()"
    assert "absent.yaml" in done.stderr
