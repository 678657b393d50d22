"""A run's folder is never reused by accident, and its files say how to repeat the run."""

import errno
import fcntl
import os
import subprocess
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from opo_trl.checks.files import read_json
from opo_trl.launch import output_dir
from opo_trl.launch.output_dir import claim, write_description
from opo_trl.report.run_folder import LOCK, RECIPE, REQUIREMENTS


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def begin(folder):
    """A run that has been started in a folder, and is over."""
    claim(folder, resume=False, overwrite=False).close()
    write_description(folder, recipe={"alpha": 0.4}, settings={"alpha": 0.4}, seed=1)


def test_new_folder_is_created_and_an_empty_one_taken(tmp_path):
    claim(tmp_path / "a" / "b", resume=False, overwrite=False).close()
    (tmp_path / "a" / "b" / "completions").mkdir()  # of the trainer
    claim(tmp_path / "a" / "b", resume=False, overwrite=False).close()


@pytest.mark.parametrize(
    ("file", "overwrite", "message"),
    [
        ("log.jsonl", False, "is not empty.*--resume_from_checkpoint last.*--overwrite"),
        ("thesis/thesis.tex", True, "is not empty, and not a run of opo-trl. Choose another"),
    ],
)
def test_folder_with_content_is_rejected_and_left_alone(tmp_path, file, overwrite, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("precious")
    with pytest.raises(ValueError, match=message):
        claim(tmp_path, resume=False, overwrite=overwrite)
    assert content(tmp_path) == {file: b"precious"}


def test_earlier_run_is_moved_aside_and_loses_nothing(tmp_path, caplog):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    for place in ("run-2", "run-3"):
        begin(tmp_path / "run")
        (tmp_path / "run" / "notes.txt").write_text(place)
        (tmp_path / "run" / "completions").mkdir(exist_ok=True)
        before = content(tmp_path / "run")
        claim(tmp_path / "run", resume=True, overwrite=True).close()
        assert content(tmp_path / "run").keys() == before.keys()
        held = claim(tmp_path / "run", resume=False, overwrite=True)
        assert content(tmp_path / "disk" / place).keys() == before.keys()
        assert (tmp_path / "disk" / place / "notes.txt").read_text() == place
        assert {path.name for path in (tmp_path / "disk" / "run").iterdir()} == {LOCK, "completions"}
        with pytest.raises(ValueError, match="in use by another run"):
            claim(tmp_path / "run", resume=False, overwrite=False)
        held.close()
        assert f"is now in '{tmp_path / 'disk' / place}'." in caplog.text


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
def test_folder_of_a_running_run_is_rejected(tmp_path, options):
    options = {"resume": False, "overwrite": False, **options}
    held = claim(tmp_path, resume=False, overwrite=False)
    if options["overwrite"]:
        write_description(tmp_path, recipe={"alpha": 0.4}, settings={}, seed=1)
    before = content(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"in use by another run, process {os.getpid()} on .*end that run first"):
            claim(tmp_path, **options)
    assert content(tmp_path) == before
    held.close()
    claim(tmp_path, **options).close()


def test_folder_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available.*second run"):
        claim(tmp_path, resume=False, overwrite=False).close()


def test_description_names_versions_seed_and_commit(tmp_path):
    write_description(tmp_path, recipe={"alpha": 0.4, "levels": ["Level 3"]}, settings={"alpha": 0.4}, seed=7)
    environment = read_json(tmp_path / "environment.json")
    assert environment["seed"] == 7
    assert environment["packages"]["trl"]
    assert "git_commit" in environment
    assert "alpha: 0.4" in (tmp_path / RECIPE).read_text()
    lines = (tmp_path / REQUIREMENTS).read_text().splitlines()
    requirements = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    assert len(requirements) == len(lines)
    assert "opo-trl" not in requirements
    needed = [Requirement(line).name for line in metadata.requires("opo_trl") if "extra ==" not in line]
    for name in [*needed, "latex2sympy2-extended"]:  # and what those need
        assert requirements[canonicalize_name(name)] == SpecifierSet(f"=={metadata.version(name)}")


def test_description_is_written_whatever_git_and_a_broken_package_do(tmp_path, monkeypatch):
    def slow(*_, **__):
        raise subprocess.TimeoutExpired("git", 10)

    (tmp_path / "half_installed-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "run", slow)
    found = output_dir.environment()
    assert found["git_commit"] is None
    assert found["packages"]["trl"]
