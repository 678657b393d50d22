"""
Try other releases of the libraries that the package relies on.

    python tests/compatibility.py [NAME==VERSION …]

Without arguments: the oldest and the newest release of TRL, Transformers, Accelerate and Datasets that `setup.cfg`
declares and the package index has. Each release is installed without its dependencies into a temporary folder in front
of this environment's packages, which stay as they are. `python tests/contract.py` lists what does not fit; if it lists
nothing, the tests that rely most on these libraries run. Prints the table of docs/compatibility.md, and exits
with status 1 if anything fails. For a TRL outside the range, widen it first, in `setup.cfg` and
`opo_trl/trl_contract.py`.
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
SUITES = ("test_trl_contract", "test_parity", "test_trainer", "rollout/test_checkpoint")
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


def run(release: str) -> tuple[bool, str, str]:
    """Whether a release fits and passes the tests, what does not fit, and how the tests ended."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", folder, release], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}

        def python(*command: str) -> tuple[bool, list[str]]:
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
            )
            print(done.stdout, file=sys.stderr, flush=True)
            return done.returncode == 0, done.stdout.splitlines()

        fits, lines = python("contract")
        if not fits:
            return False, "; ".join(lines), "not run"
        passed, output = python(
            "pytest", "-q", "-p", "no:cacheprovider", *(str(ROOT / "tests" / f"{s}.py") for s in SUITES)
        )
        return passed, "fits", "pass" if passed else output[-1]


def main() -> int:
    print("| release | contract | tests |", "| --- | --- | --- |", sep="\n", flush=True)
    results = []
    for release in sys.argv[1:] or declared():
        good, fits, tests = run(release)
        print(f"| {release} | {fits} | {tests} |", flush=True)
        results.append(good)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
