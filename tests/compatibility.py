"""
Run the tests that lean on TRL with releases of the declared range: the oldest, the newest and one between.

    python tests/compatibility.py [RELEASE …]

Each release is installed without its dependencies into a folder of its own, in front of this environment's packages,
which stay as they are. Prints the table of docs/compatibility.md; ends with status 1 if a test fails. To try a release
outside the range, widen it first, in `setup.cfg` and `opo_trl/trl_contract.py`.
"""

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from opo_trl.trl_contract import TESTED_VERSIONS


TESTS = Path(__file__).resolve().parent
SUITES = (
    "test_trl_contract",
    "test_config",
    "test_parity",
    "test_trainer",
    "test_trainer_options",
    "test_baselines",
    "rollout/test_dynamic_sampling",
    "rollout/test_checkpoint",
    "test_lora",
    "test_fitting_in",
)
PIP = (sys.executable, "-m", "pip")


def releases() -> list[str]:
    """The oldest, the middle and the newest release of the declared range that the package index has."""
    listed = subprocess.run([*PIP, "index", "versions", "trl"], capture_output=True, text=True, check=True).stdout
    available = re.search(r"Available versions: (.*)", listed).group(1).split(", ")
    declared = sorted(TESTED_VERSIONS.filter(available), key=Version)
    return list(dict.fromkeys(declared[i] for i in (0, len(declared) // 2, -1)))


def run(release: str) -> tuple[int, str]:
    """Status of the tests with a release of TRL, and what the table says of it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", folder, f"trl=={release}"], check=True)
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
        files = [str(TESTS / f"{name}.py") for name in SUITES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        done = subprocess.run(command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout, file=sys.stderr)
        return done.returncode, done.stdout.splitlines()[-1] if done.returncode else "pass"


def main() -> int:
    others = " | ".join(version(name) for name in ("transformers", "accelerate", "torch"))
    print("| TRL | Transformers | Accelerate | PyTorch | tests |", "| --- | --- | --- | --- | --- |", sep="\n")
    worst = 0
    for release in sys.argv[1:] or releases():
        status, outcome = run(release)
        print(f"| {release} | {others} | {outcome} |", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
