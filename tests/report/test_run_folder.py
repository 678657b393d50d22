"""A run's folder is never reused by accident, and its files are complete."""

import errno
import fcntl
import os
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from opo_trl.checks.files import read_json
from opo_trl.report.run_folder import LOCK, RECIPE, REQUIREMENTS, claim, left_as_found, write_description


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_new_folder_is_created_and_an_empty_one_taken(tmp_path):
    claim(tmp_path / "a" / "b", resume=False, overwrite=False)
    claim(tmp_path / "a" / "b", resume=False, overwrite=False)
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ([RECIPE, "log.jsonl"], {}, "is not empty.*--resume_from_checkpoint last.*--overwrite"),
        (["thesis.tex"], {"overwrite": True}, "not a run of this program.*will not be deleted"),
    ],
)
def test_folder_with_content_is_rejected_and_left_alone(tmp_path, files, options, message):
    for file in files:
        (tmp_path / file).write_text("precious")
    before = content(tmp_path)
    with pytest.raises(ValueError, match=message):
        claim(tmp_path, **{"resume": False, "overwrite": False, **options})
    assert content(tmp_path) == before


def test_overwrite_deletes_an_earlier_run_and_resume_keeps_it(tmp_path):
    (tmp_path / RECIPE).write_text("alpha: 0.4\n")
    claim(tmp_path, resume=True, overwrite=False)
    assert (tmp_path / RECIPE).exists()
    claim(tmp_path, resume=False, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("begun", [False, True])
def test_folder_of_a_running_run_is_rejected(tmp_path, options, begun):
    options = {"resume": False, "overwrite": False, **options}
    held = claim(tmp_path, resume=False, overwrite=False)
    if begun or options["resume"]:
        (tmp_path / RECIPE).write_text("alpha: 0.4\n")
    before = content(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"in use by another run, process {os.getpid()} on .*end that run first"):
            claim(tmp_path, **options)
    assert content(tmp_path) == before
    held.close()
    claim(tmp_path, resume=options["resume"], overwrite=True).close()


def test_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available.*second run"):
        claim(tmp_path, resume=False, overwrite=False).close()


def test_folders_created_before_a_failure_are_removed_and_others_kept(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError), left_as_found(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "b" / "c" / "..").mkdir(parents=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
    with left_as_found(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b").mkdir()
    assert (tmp_path / "a" / "b").is_dir()


def test_description_names_versions_seed_and_commit(tmp_path):
    write_description(tmp_path, recipe={"alpha": 0.4, "levels": ["Level 3"]}, settings={"alpha": 0.4}, seed=7)
    environment = read_json(tmp_path / "environment.json")
    assert environment["seed"] == 7
    assert environment["packages"]["trl"]
    assert environment["packages"]["torch"]
    assert "git_commit" in environment
    assert "alpha: 0.4" in (tmp_path / RECIPE).read_text()


def test_requirements_are_those_of_the_installed_environment(tmp_path):
    write_description(tmp_path, recipe={}, settings={}, seed=7)
    lines = (tmp_path / REQUIREMENTS).read_text().splitlines()
    requirements = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    assert len(requirements) == len(lines)
    assert "opo-trl" not in requirements
    needed = [Requirement(line).name for line in metadata.requires("opo_trl") if "extra ==" not in line]
    for name in [*needed, "safetensors", "latex2sympy2-extended"]:  # and what those need
        assert requirements[canonicalize_name(name)] == SpecifierSet(f"=={metadata.version(name)}")
