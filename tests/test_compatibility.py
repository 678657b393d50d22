"""
What the package needs of TRL, Transformers and Accelerate (`opo_trl.contract`), and what it says of other releases.

A name that the package newly relies on goes into `contract.NEEDS`: tests here say which is missing there.
"""

import ast
import configparser
import dataclasses
import dis
import functools
import gc
import inspect
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import trl
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from recording_trainers import make_trainer
from simulated_releases import LATER, SHIFTED, simulate
from started_programs import environment
from trl import GRPOConfig, GRPOTrainer

from benchmarks.paper.recorded_runs import unpack
from opo_trl import contract
from opo_trl.compatibility import TESTED, check
from opo_trl.contract import ROLLOUT_KEYS, examine


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "opo_trl"


# The contract is complete


def test_installed_release_holds_within_a_second():
    examine()  # imports what nothing has imported yet
    gc.collect()
    seconds = []
    for _ in range(3):
        began = time.process_time()
        verdict = examine()
        seconds.append(time.process_time() - began)
    assert min(seconds) < 1
    assert (verdict.word, verdict.differences, verdict.breaks) == ("holds", [], [])


def test_returned_entries_are_those_that_the_package_reads():
    assert {*ROLLOUT_KEYS} <= contract.rollout_entries()


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every module of the package, with the name of its file."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.name, node


def test_imports_from_inside_the_libraries_are_listed():
    inside = ("trl.", "transformers.", "accelerate.")
    imported = set()
    for _, node in nodes():
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(inside):
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
    from_the_top = {name for name in imported if name.count(".") == 1}
    public = {name for name in from_the_top if not name.startswith("trl.")}
    modules = {name for name in imported if inspect.ismodule(resolve_name(name))}
    owners = {need.owner for need in contract.needs()}
    listed = {need.path for need in contract.needs()}
    assert imported - public - modules - owners - listed == set()


def set_or_defined(owner: type) -> set[str]:
    """Names in the body of a class and of those above it, and attributes that their methods assign."""
    names: set[str] = set()
    for base in inspect.getmro(owner):
        names.update(() if base is object else vars(base))
    for code in contract._codes_of_methods(owner):
        names.update(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    return names


@pytest.mark.parametrize(
    ("owner", "files", "holders"),
    [
        (
            GRPOTrainer,
            {"trainer.py", "rollouts.py"},
            {"trainer", "twin", "self.trainer", "super()", "super(GRPOTrainer, self)"},
        ),
        (GRPOConfig, {"config.py"}, {"args", "self.args", "trainer.args", "self.trainer.args"}),
    ],
)
def test_attributes_of_trainer_and_configuration_are_listed(owner, files, holders):
    """Of those that the package uses or overrides, all that TRL and Transformers define."""
    used = set()
    for name, node in nodes():
        is_own = name in files
        if isinstance(node, ast.Attribute):
            holder = ast.unparse(node.value)
            if holder in holders or (is_own and holder == "self"):
                used.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and is_own:
            used.add(node.name)
    listed = {need.name for need in contract.needs()}
    missing = used & set_or_defined(owner) - listed
    assert [name for name in missing if not name.startswith("__")] == []


def test_record_is_of_the_declared_ranges():
    """The oldest, the newest, and all minor releases of Transformers between them."""
    releases = json.loads(contract.RECORD.read_text(encoding="utf-8"))["releases"]
    minors = []
    for release in releases:  # such as "trl 1.16.0, transformers 5.17.0, accelerate 1.13.0"
        versions = dict(part.split(" ") for part in release.split(", "))
        for name in ("trl", "transformers", "accelerate"):
            assert versions[name] in SpecifierSet(TESTED[name])
        minors.append(Version(versions["transformers"]).minor)
    every_minor = range(minors[0], minors[-1] + 1)
    assert minors == [*every_minor]
    tested = SpecifierSet(TESTED["transformers"])
    assert f"5.{minors[0] - 1}.9" not in tested
    assert f"5.{minors[-1] + 1}.0" not in tested


# Verdicts


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    owner, _, attribute = name.rpartition(".")
    return lambda patch: patch.delattr(resolve_name(owner), attribute)


def replaced(path: str, function: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(path, function)


def has_new_field(patch: pytest.MonkeyPatch) -> None:
    field = dataclasses.field(default=0.5)
    field.name = "novelty"
    patch.setitem(GRPOConfig.__dataclass_fields__, "novelty", field)
    field._field_type = GRPOConfig.__dataclass_fields__["beta"]._field_type


_TRAINER = "trl.trainer.grpo_trainer.GRPOTrainer"

BREAKS = {
    "a name is gone": (without("trl.trainer.utils.use_adapter"), "trl.trainer.utils.use_adapter is missing"),
    "an attribute has another name": (
        lambda patch: patch.setattr(contract, "NEEDS", {"the log": {"trl.GRPOTrainer": "_own_logs"}}),
        "trl.GRPOTrainer._own_logs is missing (for the log)",
    ),
    "a parameter is gone": (replaced(f"{_TRAINER}._generate", lambda self: 1), "has no parameter 'prompts'"),
    "a parameter is new and required": (
        replaced(f"{_TRAINER}._generate", lambda self, prompts, seed: (prompts, seed)),
        "_generate has a new parameter 'seed' without a default (for rollouts)",
    ),
    "a parameter is ignored": (
        replaced(f"{_TRAINER}.get_high_entropy_mask", lambda self, entropies, mask, threshold: entropies > threshold),
        "get_high_entropy_mask ignores its parameter 'mask' (for the loss)",
    ),
    "a parameter comes by keyword": (
        replaced(f"{_TRAINER}._generate", lambda self, *, prompts: prompts),
        "_generate takes 'prompts' only by keyword",
    ),
    "parameters change their order": (
        replaced(f"{_TRAINER}.compute_loss", lambda self, inputs, model, **named: (inputs, model)),
        "compute_loss has another order of its parameters, inputs, model, named",
    ),
    "an overridden method is called no more": (
        replaced(
            f"{_TRAINER}.compute_loss",
            lambda self, model, inputs, return_outputs=False, num_items_in_batch=None: (model, inputs),
        ),
        "trl.GRPOTrainer._compute_loss is called no more (for the loss)",
    ),
    "a function is none": (replaced("trl.trainer.utils.add_fused_lm_head", 1), "add_fused_lm_head is not a function"),
    "an entry has another name": (
        lambda patch: patch.setattr(contract, "ROLLOUT_KEYS", ("advantages", "masks")),
        "rollouts have no entry 'masks'",
    ),
}
DIFFERS = {
    "a parameter is new": (
        replaced(f"{_TRAINER}._generate", lambda self, prompts, seed=3: (self._tokenize_prompts(prompts), seed)),
        ["trl.GRPOTrainer._generate has a new parameter 'seed' = 3"],
    ),
    "a default is another one": (
        replaced(f"{_TRAINER}._get_train_sampler", lambda self, dataset=0: dataset),
        ["trl.GRPOTrainer._get_train_sampler: 'dataset' = None → = 0"],
    ),
    "a default of the configuration is another one": (
        lambda patch: patch.setattr(GRPOConfig.__dataclass_fields__["beta"], "default", 0.04),
        ["trl.GRPOConfig: default of 'beta' 0.0 → 0.04"],
    ),
    "a field is new": (
        has_new_field,
        ["trl.GRPOConfig has a new field 'novelty' (default 0.5), which opo_trl does not know"],
    ),
    "a private name that is not used is gone": (without(f"{_TRAINER}._generate_single_turn"), []),
    "a decorator is new": (
        replaced(f"{_TRAINER}._generate", functools.wraps(GRPOTrainer._generate)(lambda *args, **named: None)),
        [],
    ),
}


@pytest.mark.parametrize(("change", "text"), BREAKS.values(), ids=BREAKS)
def test_change_that_breaks_ends_the_import(change, text, monkeypatch):
    change(monkeypatch)
    assert examine().word == "breaks"
    with pytest.raises(ImportError) as error:
        check()
    assert text in str(error.value)
    assert "Run `pip install 'trl>=1.16,<1.17'" in str(error.value)


@pytest.mark.parametrize(("change", "lines"), DIFFERS.values(), ids=DIFFERS)
def test_change_with_which_it_works_is_a_line_of_a_note(change, lines, monkeypatch):
    change(monkeypatch)
    assert examine() == contract.Verdict(lines, [])
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        check()
    assert [str(note.message).splitlines() for note in notes] == ([lines] if lines else [])


INSTALLED = {"trl": "1.16.0", "transformers": "5.23.0", "accelerate": "1.15.0", "torch": "2.13.0"}


@pytest.mark.parametrize("release", ["trl 1.15.2", "transformers 5.25.0", "accelerate 1.16.0", "torch 3.0"])
def test_release_outside_the_tested_range_is_noted_and_checked(release, monkeypatch, tiny_model, tmp_path):
    library, number = release.split()
    monkeypatch.setattr("opo_trl.compatibility.version", {**INSTALLED, library: number}.get)
    with pytest.warns(UserWarning, match=f"{library}{TESTED[library]}, not with {number}. It checks a run's first"):
        check()
    assert make_trainer(tiny_model, tmp_path)._first_step is not None


def test_tested_release_is_neither_noted_nor_checked(monkeypatch, tiny_model, tmp_path):
    installed = {**INSTALLED, "trl": "1.16.2.dev0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr("opo_trl.compatibility.version", installed.get)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()
    assert make_trainer(tiny_model, tmp_path)._first_step is None


def test_only_the_first_process_notes(monkeypatch):
    monkeypatch.setattr("opo_trl.compatibility.version", {**dict.fromkeys(TESTED, "9.0")}.get)
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check()


# Whole releases


def run(release: Path, *command: object) -> tuple[int, str]:
    """Status and output of Python with a simulated release of TRL."""
    env = environment(Path(__file__).parent)
    env["PYTHONPATH"] = os.pathsep.join([str(release), env["PYTHONPATH"]])
    python = [sys.executable, *map(str, command)]
    process = subprocess.run(python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=ROOT)
    return process.returncode, process.stdout


def test_simulated_later_release_trains_with_notes(tmp_path):
    """By the command, which starts a process that trains: only that one notes what differs."""
    command = ["-m", "opo_trl.command.cli", "train", "recipes/arithmetic/opo.yaml", "--output_dir", tmp_path / "run"]
    small = ["--max_steps", 2, "--report_size", 4, "--validation_size", 4]
    release = simulate(tmp_path / "simulated", edits=LATER)
    status, output = run(release, *command, *small)
    assert status == 0, output
    for note in (
        "opo_trl is tested with trl>=1.16,<1.17, not with 1.17.0. It checks a run's first rollout and optimizer step.",
        "rollouts have a new entry 'sampling_mask', which opo_trl does not read\n",
        "trl.GRPOTrainer._generate has a new parameter 'priority' = None\n",
        "trl.GRPOConfig: default of 'beta' 0.0 → 0.001\n",
        "A rollout has an entry 'sampling_mask' that opo_trl does not read. It travels with its samples.",
    ):
        assert output.count(note) == 1, output
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(summary)["optimizer_steps"] == 2


SCRIPT = """
import sys
from recording_trainers import make_trainer

make_trainer(sys.argv[1], sys.argv[2]).train()
"""


@pytest.mark.slow
def test_simulated_release_that_breaks_ends_in_the_first_rollout(tiny_model, tmp_path):
    release = simulate(tmp_path / "simulated", edits=SHIFTED)
    status, output = run(release, "-c", SCRIPT, tiny_model, tmp_path / "run")
    assert status == 1
    message = "With trl 1.17.0, OPO would train something else: tokens and masks: the mask of completion 0"
    assert f"RuntimeError: {message}" in output


OLD = """
import importlib

for module in ("config", "trainer", "evaluate", "command.train"):
    try:
        importlib.import_module("opo_trl." + module)
    except ImportError as error:
        print(error)
from opo_trl.command.cli import main
assert main(["train", "recipes/arithmetic/opo.yaml"]) == 2
"""


def test_release_that_breaks_is_named_before_its_names_are_missed(tmp_path):
    gone = {"trainer/grpo_trainer.py": [("    def get_off_policy_mask(", "    def off_policy_mask(")]}
    release = simulate(tmp_path / "simulated", number="1.14.9", edits=gone)
    status, output = run(release, "-c", OLD)
    named = [line for line in output.splitlines() if "trl.GRPOTrainer.get_off_policy_mask is missing" in line]
    assert (status, len(named)) == (0, 5), output
    assert all("Run `pip install 'trl>=1.16,<1.17'`." in line for line in named)


def test_a_trainer_that_unsloth_has_replaced_is_not_made(tiny_model, tmp_path, monkeypatch):
    theirs = type("UnslothGRPOTrainer", (), {"__module__": "UnslothGRPOTrainer"})
    monkeypatch.setattr(trl, "GRPOTrainer", theirs)
    with pytest.raises(ImportError, match=r"trl\.GRPOTrainer has been replaced by UnslothGRPOTrainer"):
        make_trainer(tiny_model, tmp_path)


WITHOUT = """
import sys

sys.modules["trl"] = sys.modules["transformers"] = None
import opo_trl, opo_trl.objective, opo_trl.report.run_report
from opo_trl.command.cli import main

assert main(["recipes"]) == main(["report", "{run}"]) == 0
assert main(["diagnose", "{run}"]) in (0, 1)
"""


def test_what_reads_runs_needs_no_trl(tmp_path):
    run = unpack("experiment1", tmp_path) / "grpo" / "seed-1"
    subprocess.run([sys.executable, "-c", WITHOUT.format(run=run)], check=True, cwd=ROOT)


def test_neighbours_were_resolved_with_the_declared_ranges():
    """After a change of ranges: `python tests/compatibility.py neighbours`."""
    record = json.loads((ROOT / "tests" / "neighbours.json").read_text(encoding="utf-8"))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    tested = [f"{name}{versions}" for name, versions in TESTED.items()]
    assert record["requirements"] == [*setup["options"]["install_requires"].split(), *tested]
    requirements = [*map(Requirement, record["requirements"])]
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for package, versions in record["with"].items():
        for required in requirements:
            installed = (versions or {}).get(required.name.replace("_", "-"))
            assert installed is None or installed in required.specifier
        fits = versions["transformers"] if versions else "–"
        assert f"| {package} | {fits} |" in page
