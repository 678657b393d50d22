"""
Try other releases of the libraries that the package relies on.

    python tests/compatibility.py [NAME==VERSION …]

Without arguments: the oldest and the newest release of TRL, Transformers, Accelerate and Datasets that `setup.cfg`
declares and the package index has. Each release is installed without its dependencies into a temporary folder in front
of this environment's packages, which stay as they are, and the tests that rely most on these libraries run. Prints the
table of docs/compatibility.md, and exits with status 1 if anything fails. For a TRL outside the range, widen it first,
in `setup.cfg` and `opo_trl/trl.py`.
"""

import configparser
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("trl", "transformers", "accelerate", "datasets")
SUITES = ("test_trl", "test_parity", "test_trainer", "rollout/test_checkpoint")
PIP = (sys.executable, "-m", "pip")


def declared() -> list[str]:
    """The oldest and the newest release of each library within its range."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    ranges = {r.name: r.specifier for r in map(Requirement, setup["options"]["install_requires"].split())}
    found = []
    for name in LIBRARIES:
        listed = subprocess.run([*PIP, "index", "versions", name], capture_output=True, text=True, check=True).stdout
        available = re.search(r"Available versions: (.*)", listed).group(1).split(", ")
        inside = sorted(ranges[name].filter(available), key=Version)
        found += dict.fromkeys(f"{name}=={version}" for version in (inside[0], inside[-1]))
    return found


def run(release: str) -> str:
    """How the tests of a release ended: `pass`, or the last line."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", folder, release], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}

        suites = (str(ROOT / "tests" / f"{suite}.py") for suite in SUITES)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr, flush=True)
        return "pass" if done.returncode == 0 else done.stdout.splitlines()[-1]


def main() -> int:
    print("| release | tests |", "| --- | --- |", sep="\n", flush=True)
    results = []
    for release in sys.argv[1:] or declared():
        results.append(run(release))
        print(f"| {release} | {results[-1]} |", flush=True)
    return 0 if {*results} == {"pass"} else 1


if __name__ == "__main__":
    sys.exit(main())
