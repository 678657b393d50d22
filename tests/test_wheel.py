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

import opo_trl
from opo_trl.trl import TESTED


ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy, because setuptools would include what an earlier build left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "opo_trl", folder / "source" / "opo_trl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(*command, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_wheel_holds_the_package_with_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("opo_trl/constraints.txt") == (ROOT / "constraints.txt").read_bytes()
    source = wheel.parent / "source"
    package = {str(path.relative_to(source)) for path in (source / "opo_trl").rglob("*") if path.is_file()}
    assert {name for name in names if not name.split("/")[0].endswith(".dist-info")} == package
    assert {"opo_trl/py.typed", "opo_trl/contract.json", "opo_trl/data/arithmetic/base/model.safetensors"} <= package
    assert any(name.endswith("licenses/LICENSE") for name in names)


def required_by(wheel: Path) -> list[Requirement]:
    """The requirements of the package and of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"opo_trl-{opo_trl.__version__}.dist-info/METADATA").decode())
    return [*map(Requirement, metadata.get_all("Requires-Dist"))]


def test_version_and_range_are_the_same_wherever_they_are_written(wheel):
    ranges = {required.name: required.specifier for required in required_by(wheel) if not required.marker}
    rows = re.findall(r"\| (trl==.*) \| holds \| tests pass \|", (ROOT / "docs" / "compatibility.md").read_text())
    tested = [re.findall(r"(\w+)==(\S+)", row) for row in rows]
    assert len(tested) == 3
    for name, lowest in min(tested):
        assert all(release in ranges[each] for row in tested for each, release in row)
        assert f">={lowest.rpartition('.')[0]}" in str(ranges[name]).split(",")
    for name, declared in TESTED.items():  # the requirement is the lower bound of what was tested
        assert declared.partition(",")[0] == str(ranges[name])
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == opo_trl.__version__
    assert f"\n## {opo_trl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


# TRL, and what it brings: a later release of TRL may need later ones of these.
WITHOUT_UPPER_BOUND = {"accelerate", "datasets", "huggingface_hub", "safetensors", "torch", "transformers", "trl"}


def test_every_requirement_has_its_bounds_and_a_tested_release(wheel):
    """Those of TRL's own extras are TRL's."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {line.name: line.specifier for line in map(Requirement, lines)}
    for required in required_by(wheel):
        if required.name in ("trl", "opo_trl") and required.marker:
            continue
        wanted = {">="} if required.name in WITHOUT_UPPER_BOUND else {">=", "<"}
        bounds = {part.operator for part in required.specifier}
        assert bounds == wanted, f"{required} does not have {wanted}. Change it, after testing the lower bound."
        if required.name != "reasoning-gym":  # which `test` leaves out
            assert required.name in pinned
    for name, specifier in pinned.items():
        with contextlib.suppress(PackageNotFoundError):
            assert version(name) in specifier


def test_wheel_trains_in_a_separate_environment(wheel, tmp_path):
    """Dependencies are those of this environment, the package is the wheel's."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    own = ("env", "-u", "PYTHONPATH")
    command, recipe = packages.parents[2] / "bin" / "opo-trl", "arithmetic/opo.yaml"
    assert run(*own, command, "--version").strip() == opo_trl.__version__
    run(*own, command, "recipes", recipe, cwd=tmp_path)
    small = ("--output_dir", "run", "--max_steps", 1, "--report_size", 4, "--validation_size", 4)
    run(*own, python, "-m", "opo_trl.command.train", f"recipes/{recipe}", *small, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["optimizer_steps"] == 1
