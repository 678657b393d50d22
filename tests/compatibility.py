"""
Before a release: try the oldest, a middle and the newest release of the libraries that the package relies on.

    python tests/compatibility.py [NAME==VERSION …]    # the table of docs/compatibility.md, or one environment
    python tests/compatibility.py neighbours           # → tests/neighbours.json

Each environment is a temporary one on top of this one, which stays as it is. The last command, and the column of vLLM,
need uv. Exits with status 1 if anything fails.
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
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement


ROOT = Path(__file__).resolve().parents[1]
NEIGHBOURS = ROOT / "tests" / "neighbours.json"
ENVIRONMENTS = (
    "trl==1.16.0 transformers==5.17.0 accelerate==1.13.0 datasets==4.8.4 huggingface_hub==1.33.0",
    "trl==1.16.0 transformers==5.20.2 accelerate==1.14.0 datasets==5.1.0 huggingface_hub==2.0.0",
    "trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0 huggingface_hub==2.4.0",
)
SUITES = ("test_trl", "test_parity", "test_trainer", "rollout/test_checkpoint")
PACKAGES = ("vllm==0.30.0", "vllm==0.31.0", "vllm==0.32.0", "vllm==0.33.0", "reasoning-gym", "lm-eval", "deepspeed")
PACKAGES += ("peft", "bitsandbytes", "unsloth>=2026.10", "axolotl>=0.21", "verl>=0.9", "ms-swift>=4.6")


def requirements() -> list[str]:
    """What `setup.cfg` requires."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]["install_requires"].split()


def resolve(*wanted: str) -> dict[str, str] | None:
    """The version of each package that uv would install on Linux with CUDA, for Python 3.12; `None` if none fits."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12", "-"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--index-strategy", "unsafe-best-match"]
    done = subprocess.run(command, input="\n".join([*requirements(), *wanted]), stdout=subprocess.PIPE, text=True)
    found = (line.partition("==") for line in done.stdout.splitlines())
    return {name: version.split()[0] for name, _, version in found if version} if done.returncode == 0 else None


def neighbours() -> None:
    """Record with which releases of other packages the declared ranges can be installed."""
    own = [Requirement(each).name.replace("_", "-") for each in requirements()]
    together = {}
    for package in PACKAGES:
        name = re.split("[=>]", package)[0]
        found = resolve(package)
        together[package] = found and {each: found[each] for each in (name, *own) if each in found}
        print(package, together[package] and together[package]["transformers"], flush=True)
    record = {"date": date.today().isoformat(), "requirements": requirements(), "with": together}
    NEIGHBOURS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run(releases: str) -> str:
    """How the tests ended in an environment with these releases: `pass`, or the last line."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        python = Path(folder) / "bin" / "python"
        show = (python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        packages = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
        (Path(packages) / "above.pth").write_text(sysconfig.get_path("purelib"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *releases.split()], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        suites = (str(ROOT / "tests" / f"{suite}.py") for suite in SUITES)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr, flush=True)
        return "pass" if done.returncode == 0 else done.stdout.splitlines()[-1]


def main() -> int:
    if sys.argv[1:] == ["neighbours"]:
        neighbours()
        return 0
    print("| releases | tests | newest vLLM |", "| --- | --- | --- |", sep="\n", flush=True)
    results = []
    for releases in [" ".join(sys.argv[1:])] if sys.argv[1:] else ENVIRONMENTS:
        results.append(run(releases))
        beside = resolve("vllm>=0.30", *releases.split())
        print(f"| {releases} | {results[-1]} | {beside['vllm'] if beside else '–'} |", flush=True)
    return 0 if {*results} == {"pass"} else 1


if __name__ == "__main__":
    sys.exit(main())
