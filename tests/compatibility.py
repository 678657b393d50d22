"""
Before a release: what the contract says of releases of TRL and Transformers, and whether tests or the self-test pass.

    python tests/compatibility.py [NAME==VERSION …]    # the table of docs/compatibility.md, or one environment
    python tests/compatibility.py neighbours           # → tests/neighbours.json

Each environment is a temporary one on top of this one, which stays as it is. The last command, and the column of vLLM,
need uv. Exits with status 1 if a release in the tested ranges does not hold, or fails.
"""

import configparser
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement

from opo_trl.compatibility import TESTED


ROOT = Path(__file__).resolve().parents[1]
TESTED_RANGES = [f"{name}{versions}" for name, versions in TESTED.items()]
NEIGHBOURS = ROOT / "tests" / "neighbours.json"
TRL = ("1.14.2", "1.15.0", "1.16.0")
BELOW = (
    "transformers==5.17.0 accelerate==1.13.0 datasets==4.8.4 huggingface_hub==1.33.0",
    "transformers==5.20.2 accelerate==1.14.0 datasets==5.1.0 huggingface_hub==2.0.0",
    "transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 huggingface_hub==2.4.0",
)
ENVIRONMENTS = [f"trl=={release} {below}" for release in TRL for below in BELOW]
SUITES = ("test_compatibility", "test_parity", "test_trainer", "resume/test_checkpoint")
VERDICT = """
from opo_trl import contract
from opo_trl.compatibility import untested
print(contract.examine().word, not untested())
"""
PACKAGES = ("vllm==0.30.0", "vllm==0.31.0", "vllm==0.32.0", "vllm==0.33.0", "reasoning-gym", "lm-eval", "deepspeed")
PACKAGES += ("peft", "bitsandbytes", "unsloth>=2026.10", "axolotl>=0.21", "verl>=0.9", "ms-swift>=4.6")


def requirements() -> list[str]:
    """What `setup.cfg` requires."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]["install_requires"].split()


def resolve(*packages: str, within: Sequence[str]) -> dict[str, str] | None:
    """The version of each package that uv would install on Linux with CUDA, for Python 3.12; `None` if none fits."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "-"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--index-strategy", "unsafe-best-match"]
    lines = [*requirements(), *within, *packages]
    process = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True)
    if process.returncode != 0:
        return None
    versions = {}
    for line in process.stdout.splitlines():  # such as "torch==2.11.0 ; sys_platform == 'linux'"
        name, _, version = line.partition("==")
        if version:
            versions[name] = version.split()[0]
    return versions


def neighbours() -> None:
    """Record with which releases of other packages the declared ranges can be installed."""
    required = [Requirement(line).name.replace("_", "-") for line in requirements()]
    together = {}
    for package in PACKAGES:
        versions = resolve(package, within=TESTED_RANGES)
        print(package, versions and versions["transformers"], flush=True)
        together[package] = None
        if versions:
            recorded = (re.split("[=>]", package)[0], *required)
            together[package] = {name: versions[name] for name in recorded if name in versions}
    record = {
        "date": date.today().isoformat(),
        "requirements": [*requirements(), *TESTED_RANGES],
        "with": together,
    }
    NEIGHBOURS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run(releases: str) -> tuple[str, str, bool]:
    """
    What the contract says of these releases; how the tests ended, or the self-test if they have not been tested; and
    whether that is what has to be.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        python = Path(folder) / "bin" / "python"
        show = (python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        packages = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
        (Path(packages) / "above.pth").write_text(sysconfig.get_path("purelib"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *releases.split()], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}

        def output(*command: str) -> tuple[int, list[str]]:
            process = subprocess.run([python, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            print(process.stdout, file=sys.stderr, flush=True)
            return process.returncode, process.stdout.splitlines()

        status, lines = output("-W", "ignore", "-c", VERDICT)
        verdict, is_tested = lines[-1].split() if status == 0 else ("breaks", "False")
        if is_tested == "True":
            suites = (str(ROOT / "tests" / f"{suite}.py") for suite in SUITES)
            status, lines = output("-m", "pytest", "-q", "-p", "no:cacheprovider", *suites)
            ended = "tests pass" if status == 0 else lines[-1]
            return verdict, ended, verdict == "holds" and status == 0
        status, lines = output("-m", "opo_trl.selftest")
        wrong = [line.removeprefix("WRONG  ") for line in lines if line.startswith("WRONG")]
        ended = "self-test passes" if status == 0 else f"self-test: {wrong[0].split('.')[0]}"
        return verdict, ended, True


def main() -> int:
    if sys.argv[1:] == ["neighbours"]:
        neighbours()
        return 0
    print("| releases | contract | tests | newest vLLM |", "| --- | --- | --- | --- |", sep="\n", flush=True)
    are_right = []
    environments = [" ".join(sys.argv[1:])] if sys.argv[1:] else ENVIRONMENTS
    for releases in environments:
        verdict, ended, is_right = run(releases)
        versions = resolve("vllm>=0.30", within=releases.split()) if verdict != "breaks" else None
        newest_vllm = versions["vllm"] if versions else "–"
        print(f"| {releases} | {verdict} | {ended} | {newest_vllm} |", flush=True)
        are_right.append(is_right)
    return 0 if all(are_right) else 1


if __name__ == "__main__":
    sys.exit(main())
