"""A run's folder is never reused by accident, and its files are complete."""

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
from opo_trl.report import run_folder
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
        (["thesis.tex"], {"overwrite": True}, "not a run of opo-trl.*will not be deleted"),
    ],
)
def test_folder_with_content_is_rejected_and_left_alone(tmp_path, files, options, message):
    for file in files:
        (tmp_path / file).write_text("precious")
    before = content(tmp_path)
    with pytest.raises(ValueError, match=message):
        claim(tmp_path, **{"resume": False, "overwrite": False, **options})
    assert content(tmp_path) == before


def begin(folder):
    """A run that has been started in a folder, and is over."""
    claim(folder, resume=False, overwrite=False).close()
    write_description(folder, recipe={"alpha": 0.4}, settings={"alpha": 0.4}, seed=1)


def fill(folder, files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")


# What a run writes, besides its description.
WRITTEN = [
    *(
        "plan.txt",
        "log.jsonl",
        "summary.json",
        "report.html",
        "skipped_step_0.pt",
        "_log.jsonl.part",
    ),
    *("checkpoint-4/model.safetensors", "_checkpoint-8/trainer_state.json", "model-00001-of-00002.safetensors"),
    *("config.json", "tokenizer.json", "merges.txt", "adapter_config.json", "training_args.bin", "README.md"),
    *(
        "runs/Nov23_host/events.out.tfevents.1.host.2.0",
        "figures/training.svg",
        "completions/completions_00001.parquet",
    ),
]
OTHERS = [
    *("notes.txt", "my_rewards.py", "data/train.jsonl", "checkpoint-4-copy/model.safetensors", "checkpoint-best/a"),
    *("figures/mine.png", "runs/notes.txt", "completions/mine.parquet", "log.jsonl.bak", "old_model.safetensors"),
]


def test_overwrite_deletes_what_a_run_has_written_and_names_what_stays(tmp_path, caplog):
    begin(tmp_path)
    description = content(tmp_path).keys()
    fill(tmp_path, [*WRITTEN, *OTHERS])
    before = content(tmp_path)
    claim(tmp_path, resume=True, overwrite=True).close()
    assert content(tmp_path).keys() == before.keys()
    claim(tmp_path, resume=False, overwrite=True).close()
    assert content(tmp_path).keys() == {*description, *OTHERS}
    [line] = caplog.messages
    assert "stays: 'checkpoint-4-copy', 'checkpoint-best', 'completions', 'data', 'figures'" in line
    assert line.endswith("and 2 more.")
    caplog.clear()
    begin(tmp_path / "plain")
    claim(tmp_path / "plain", resume=False, overwrite=True).close()
    assert not caplog.messages


def test_overwrite_follows_no_link_and_runs_in_a_linked_folder(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begin(run)
    fill(elsewhere, ["checkpoint-4/a", "config.json", "x/events.out.tfevents.1"])
    for name, target in {"checkpoint-4": "checkpoint-4", "config.json": "config.json", "runs": "."}.items():
        (run / name).symlink_to(elsewhere / target)
    (tmp_path / "link").symlink_to(run)
    before = content(elsewhere)
    claim(tmp_path / "link", resume=False, overwrite=True).close()
    assert content(elsewhere) == before
    assert not (run / "config.json").is_symlink()
    (run / LOCK).unlink()
    (run / LOCK).symlink_to(elsewhere / "config.json")
    with pytest.raises((OSError, ValueError)):
        claim(run, resume=True, overwrite=True)
    assert content(elsewhere) == before


def test_overwriting_that_is_stopped_can_be_repeated(tmp_path, monkeypatch):
    begin(tmp_path)
    fill(tmp_path, [*WRITTEN, "notes.txt"])
    with monkeypatch.context() as patched:

        def stop(path):
            raise KeyboardInterrupt

        patched.setattr("shutil.rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            claim(tmp_path, resume=False, overwrite=True)
    assert (tmp_path / RECIPE).is_file()
    claim(tmp_path, resume=False, overwrite=True).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {LOCK, RECIPE, "settings.json", "environment.json", REQUIREMENTS, "completions", "notes.txt"}


@pytest.mark.parametrize("lock", [None, "", "held by another program"])
@pytest.mark.parametrize("resume", [False, True])
def test_folder_with_a_recipe_of_ones_own_is_not_a_run(tmp_path, lock, resume):
    fill(tmp_path, [RECIPE, "my_rewards.py", "data/train.jsonl", "config.json"])
    if lock is not None:
        (tmp_path / LOCK).write_text(lock)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="not a run of opo-trl"):
        claim(tmp_path, resume=resume, overwrite=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("begun", [False, True])
def test_folder_of_a_running_run_is_rejected(tmp_path, options, begun):
    options = {"resume": False, "overwrite": False, **options}
    held = claim(tmp_path, resume=False, overwrite=False)
    if begun or options["resume"]:
        write_description(tmp_path, recipe={"alpha": 0.4}, settings={}, seed=1)
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


def test_description_is_written_whatever_git_and_a_broken_package_do(tmp_path, monkeypatch):
    def slow(*_, **__):
        raise subprocess.TimeoutExpired("git", 10)

    (tmp_path / "half_installed-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "run", slow)
    found = run_folder.environment()
    assert found["git_commit"] is None
    assert found["packages"]["trl"]


def test_requirements_are_those_of_the_installed_environment(tmp_path):
    write_description(tmp_path, recipe={}, settings={}, seed=7)
    lines = (tmp_path / REQUIREMENTS).read_text().splitlines()
    requirements = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    assert len(requirements) == len(lines)
    assert "opo-trl" not in requirements
    needed = [Requirement(line).name for line in metadata.requires("opo_trl") if "extra ==" not in line]
    for name in [*needed, "safetensors", "latex2sympy2-extended"]:  # and what those need
        assert requirements[canonicalize_name(name)] == SpecifierSet(f"=={metadata.version(name)}")
