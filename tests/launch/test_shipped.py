"""`opo-trl recipes`, the short help, and the command alone."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

from opo_trl.arguments import OPOScriptArguments
from opo_trl.config import OPOConfig
from opo_trl.launch import cli
from opo_trl.launch.help import _GROUPS, short_help
from opo_trl.launch.recipe import make_parser, read
from opo_trl.launch.shipped import SHIPPED, copy_out


ROOT = Path(__file__).resolve().parents[2]


def test_list_has_every_recipe_with_what_it_does(capsys):
    assert cli.main(["recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    recipes = [path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate"]
    assert {*lines} == {str(path.relative_to(ROOT / "recipes")) for path in recipes}
    assert lines["arithmetic/opo.yaml"].startswith("The embedded default: OPO teaches")


def test_copy_has_what_the_recipe_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recipes", "recipes/qwen3-1.7b/reuse/four_gpus.yaml"]) == 0
    written = capsys.readouterr().out.split()
    assert written == ["recipes/qwen3-1.7b/reuse/four_gpus.yaml", "recipes/accelerate/zero2.yaml"]
    recipe = read(["--config", written[0]]).as_stored
    assert (Path(written[0]).parent / recipe["accelerate_config"]).is_file()
    # A second copy changes nothing; a change of the user's is kept.
    copy_out("qwen3-1.7b/reuse/four_gpus.yaml", Path("recipes"))
    Path(written[0]).write_text("mu: 1\n")
    assert cli.main(["recipes", "qwen3-1.7b/reuse/four_gpus.yaml"]) == 2
    assert "exists and differs from the package's" in capsys.readouterr().err
    assert Path(written[0]).read_text() == "mu: 1\n"


def test_copy_is_not_written_through_a_link(tmp_path):
    target, elsewhere = tmp_path / "own_data.yaml", tmp_path / "elsewhere"
    target.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="exists and differs from the package's"):
        copy_out("own_data.yaml", tmp_path)
    assert not elsewhere.exists()


def test_folder_is_copied_whole(tmp_path):
    written = copy_out("slurm", tmp_path)
    assert {path.name for path in written} == {
        path.name for path in (ROOT / "recipes/slurm").iterdir() if path.is_file()
    }


@pytest.mark.parametrize("name", ["no/such.yaml", "../setup.cfg", "/etc/hostname"])
def test_what_is_not_a_recipe_is_rejected(tmp_path, name):
    with pytest.raises(ValueError, match=r"is not one of the package's\. `opo-trl recipes` lists them"):
        copy_out(name, tmp_path)


def test_command_alone_shows_what_there_is_to_do(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert "opo-trl train --config recipes/arithmetic/opo.yaml" in shown
    assert "recipes" in shown


def test_evaluate_names_the_command_that_is_in_the_documentation(capsys):
    assert cli.main(["evaluate", "runs/x", "--tasks", "gsm8k"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("opo-trl evaluate: error: this command is gone: use lm-eval's own on the folder of the run")
    assert f"\n{said.split('`')[1]}\n" in (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_compare_names_what_is_done_instead(capsys):
    assert cli.main(["compare", "runs/a", "runs/b", "--output", "out"]) == 2
    assert (
        "this command is gone: train a run per recipe and seed with `opo-trl train`, then" in capsys.readouterr().err
    )


def test_short_help_has_every_field_of_the_package(capsys):
    parser = make_parser("opo")
    shown, everything = short_help(parser), parser.format_help()
    listed = {*re.findall(r"^  --(\w+)", shown, re.MULTILINE)}
    for arguments in (OPOScriptArguments, OPOConfig):
        fields = {field.name for field in dataclasses.fields(arguments)}
        own = {
            name
            for kind in arguments.__mro__
            if kind.__module__.startswith("opo_trl")
            for name in inspect.get_annotations(kind)
        }
        assert (own & fields) - listed == set()
    assert {name for _, names in _GROUPS.values() for name in names.split()} <= listed
    assert len(shown.splitlines()) < 200 < 1000 < len(everything.splitlines())
    assert "--torch_empty_cache_steps" in everything
    assert "--torch_empty_cache_steps" not in shown
    # A field of another trainer is left out.
    assert "--mu" in shown
    assert "--mu" not in short_help(make_parser("grpo"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert capsys.readouterr().out == shown


def test_recipes_are_in_the_package():
    assert SHIPPED.is_relative_to(Path(sys.modules["opo_trl"].__file__).parent)
    assert SHIPPED.resolve() == ROOT / "recipes"
