"""What users get who install the package without a checkout: the wheel, in a separate environment."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import opo_trl
from opo_trl.compatibility import TESTED


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy, because setuptools would include what an earlier build left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "opo_trl", source / "opo_trl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(*command, cwd: Path | None = None) -> str:
    arguments = list(map(str, command))
    process = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


def paths_below(source: Path, folder: str) -> set[str]:
    """Of all files in a folder of the source, relative to the source."""
    paths = (source / folder).rglob("*")
    return {path.relative_to(source).as_posix() for path in paths if path.is_file()}


def is_metadata(name: str) -> bool:
    folder, _, _ = name.partition("/")
    return folder.endswith(".dist-info")


def test_wheel_holds_the_package_with_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        constraints = archive.read("opo_trl/constraints.txt")
    assert constraints == (ROOT / "constraints.txt").read_bytes()
    metadata = set(filter(is_metadata, names))
    package = paths_below(wheel.parent / "source", "opo_trl")
    assert names - metadata == package
    assert {"opo_trl/py.typed", "opo_trl/contract.json", "opo_trl/data/arithmetic/base/model.safetensors"} <= package
    assert any(name.endswith("licenses/LICENSE") for name in names)


def required_by(wheel: Path) -> list[Requirement]:
    """The requirements of the package and of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"opo_trl-{opo_trl.__version__}.dist-info/METADATA")
    metadata = Parser().parsestr(content.decode())
    return [Requirement(line) for line in metadata.get_all("Requires-Dist")]


def combinations_of_page() -> list[list[tuple[str, str]]]:
    """Name and release of the packages in each tested combination of the page of compatibility."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"\| (trl==.*) \| holds \| tests pass \|", page)
    return [re.findall(r"(\w+)==(\S+)", row) for row in rows]


def test_version_and_range_are_the_same_wherever_they_are_written(wheel):
    ranges = {required.name: required.specifier for required in required_by(wheel) if not required.marker}
    combinations = combinations_of_page()
    assert len(combinations) == 3
    for combination in combinations:
        for name, release in combination:
            assert release in ranges[name]
    for name, lowest in min(combinations):
        minor_release, _, _ = lowest.rpartition(".")
        bounds = str(ranges[name]).split(",")
        assert f">={minor_release}" in bounds
    for name, declared in TESTED.items():
        lower_bound, _, _ = declared.partition(",")
        assert str(ranges[name]) == lower_bound
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == opo_trl.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {opo_trl.__version__}\n" in changelog


# TRL, and what it brings: a later release of TRL may need later ones of these.
WITHOUT_UPPER_BOUND = {"accelerate", "datasets", "huggingface_hub", "safetensors", "torch", "transformers", "trl"}


def pinned_releases() -> dict[str, SpecifierSet]:
    """Those of `constraints.txt`."""
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            pinned[requirement.name] = requirement.specifier
    return pinned


def test_every_requirement_has_its_bounds_and_a_tested_release(wheel):
    """Those of TRL's own extras are TRL's."""
    pinned = pinned_releases()
    for required in required_by(wheel):
        if required.name in ("trl", "opo_trl") and required.marker:
            continue
        expected = {">="} if required.name in WITHOUT_UPPER_BOUND else {">=", "<"}
        bounds = {part.operator for part in required.specifier}
        assert bounds == expected, f"{required} does not have {expected}. Change it, after testing the lower bound."
        if required.name != "reasoning-gym":  # which `test` leaves out
            assert required.name in pinned
    for name, specifier in pinned.items():
        with contextlib.suppress(PackageNotFoundError):
            assert version(name) in specifier


def test_wheel_trains_in_a_separate_environment(wheel, tmp_path):
    """Dependencies are those of this environment, the package is the wheel's."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    printed = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    packages = Path(printed.strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    without_checkout = ("env", "-u", "PYTHONPATH")
    command = packages.parents[2] / "bin" / "opo-trl"
    recipe = "arithmetic/opo.yaml"
    printed = run(*without_checkout, command, "--version")
    assert printed.strip() == opo_trl.__version__
    run(*without_checkout, command, "recipes", recipe, cwd=tmp_path)
    small = ("--output_dir", "run", "--max_steps", 1, "--report_size", 4, "--validation_size", 4)
    run(*without_checkout, python, "-m", "opo_trl.command.train", f"recipes/{recipe}", *small, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["optimizer_steps"] == 1
