"""`opo-trl recipes`, the help, and the command alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from trl import GRPOConfig, ModelConfig, ScriptArguments

from opo_trl.command import cli
from opo_trl.command.arguments import OPOScriptArguments
from opo_trl.command.cli import copy_out
from opo_trl.command.recipe import read
from opo_trl.config import OPOConfig
from opo_trl.fields import hints


ROOT = Path(__file__).resolve().parents[2]
WAITS_FOR_A_PORT = r"waits for a port .*: commit 6495d6c5ac08 of opo_trl .* TRL 1\.16; .* AsyncGRPOTrainer"


def test_list_has_every_recipe_with_what_it_does(capsys):
    assert cli.main(["recipes"]) == 0
    printed = capsys.readouterr().out
    descriptions = dict(line.split(maxsplit=1) for line in printed.splitlines())
    folder = ROOT / "recipes"
    recipes = [path for path in folder.rglob("*.yaml") if path.parent.name != "accelerate"]
    assert descriptions.keys() == {str(path.relative_to(folder)) for path in recipes}
    assert descriptions["arithmetic/opo.yaml"].startswith("The embedded default: OPO teaches")


def test_copy_has_what_the_recipe_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "recipes/qwen3-1.7b/reuse/four_gpus.yaml"]) == 0
    written = capsys.readouterr().out.split()
    assert written == ["recipes/qwen3-1.7b/reuse/four_gpus.yaml", "recipes/accelerate/zero2.yaml"]
    path = Path(written[0])
    recipe = read(["--config", str(path)]).as_stored
    launch = path.parent / recipe["accelerate_config"]
    assert launch.is_file()
    # A second copy changes nothing; a change of the user's is kept.
    copy_out("qwen3-1.7b/reuse/four_gpus.yaml", Path("recipes"))
    path.write_text("mu: 1\n")
    assert cli.main(["recipes", "qwen3-1.7b/reuse/four_gpus.yaml"]) == 2
    assert "exists and differs from the package's" in capsys.readouterr().err
    assert path.read_text() == "mu: 1\n"


def help_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as exited:
        cli.main(["train", *words])
    assert exited.value.code in (0, None)
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    return re.findall(r"^  --(\w+)", text, re.MULTILINE)


def test_help_has_our_fields_and_on_request_all(capsys):
    ours = help_of(capsys, "--help")
    listed = options_in(ours)
    listed_on_request = options_in(help_of(capsys, "--help", "all"))
    of_trl = hints(GRPOConfig).keys() | hints(ScriptArguments).keys()
    fields = hints(OPOConfig).keys() | hints(OPOScriptArguments).keys()
    of_models = hints(ModelConfig).keys() - {"_n_gpu"}
    assert set(listed) - {"loss_type"} == fields - of_trl  # a field of TRL's, with another meaning here
    assert set(listed_on_request) >= fields | of_models
    assert listed_on_request[: len(listed)] == listed
    distinct = set(listed_on_request)
    assert len(distinct) == len(listed_on_request)
    assert ours.endswith("opo-trl train --help all\n")


def test_help_has_headings_types_and_defaults_but_no_markup(capsys):
    text = help_of(capsys, "-h")
    assert not re.search(r"[`\\]|\[~|\*\*", text)
    assert "\nThe objective\n\n  --objective text\n      Loss to train with: opo, topr," in text
    assert "\n  --alpha number  (default: 0.4)\n      Escort exponent α, in [0, 1]: " in text
    assert "\n  --positive_bounds number …  (default: 1.0 1.0)\n" in text
    assert "\n  --ratio_form truncated|log|exact  (default: truncated)\n" in text
    assert "\nOptimizer steps\n\n  --max_skipped_steps integer  (default: 10)\n" in text


def test_usage_imports_nothing_slow():
    code = "import sys; from opo_trl.command import cli; print({'datasets', 'numpy', 'torch'} & sys.modules.keys())"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "set()\n"


@pytest.mark.parametrize(
    "statement",
    [
        "from opo_trl import AsyncOPOTrainer",
        "from opo_trl import AsyncOPOConfig",
        "from opo_trl import asynchronous",
        "from opo_trl.asynchronous.trainer import AsyncOPOTrainer",
    ],
)
def test_import_of_asynchronous_training_names_the_commit_that_has_it(statement):
    with pytest.raises(ImportError, match=rf"^(AsyncOPO\w+|opo_trl.asynchronous) {WAITS_FOR_A_PORT}"):
        exec(statement)


def test_recipe_of_asynchronous_training_names_the_commit_that_has_it(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainer: async_opo\nin_process_staleness: 4\n")
    arithmetic = ROOT / "recipes" / "arithmetic" / "opo.yaml"
    for words in ([str(recipe)], [str(arithmetic), "--trainer", "async_opo"]):
        assert cli.main(["train", *words]) == 2
        *_, last_line = capsys.readouterr().err.splitlines()
        assert re.search(rf"trainer='async_opo' {WAITS_FOR_A_PORT}", last_line)


@pytest.mark.pages
def test_every_recipe_and_folder_that_the_quickstart_names_can_be_copied(tmp_path):
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[\w./, `-]+`) \| .* \|$", page, re.MULTILINE)
    names = re.findall(r"`([\w./-]+)`", " ".join(row for row in rows if ".yaml" in row or "/`" in row))
    names = [name for name in names if name.endswith((".yaml", "/")) and name != "recipe.yaml"]
    assert {"arithmetic/opo.yaml", "agent/", "own_data.yaml"} < {*names}
    for name in names:
        copied = copy_out(name, tmp_path / name)
        assert any(path.suffix == ".yaml" for path in copied), name
