"""
Run every equivalence class and print a table: class, member, differences, tolerance.

    PYTHONPATH=tests python -m invariance [--quick]

Ends with status 1 if a member is out of tolerance.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tiny import save_tiny_model

from .classes import CLASSES, compare, train


HEADINGS = ("class", "member", "loss", "gradient norm", "parameters", "tolerance")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m invariance", description="Run the equivalence classes.")
    parser.add_argument("--quick", action="store_true", help="only the members of the default test run")
    quick = parser.parse_args().quick
    out_of_tolerance = 0
    print_row(*HEADINGS)
    print_row(*("---" for _ in HEADINGS))
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "model")
        for each in CLASSES:
            reference = train(each.reference, model, Path(folder) / "reference")
            for index in each.quick if quick else range(len(each.members)):
                member = each.members[index]
                found = compare(train(member, model, Path(folder) / "member"), reference)
                out_of_tolerance += found.largest > each.tolerance
                numbers = (found.loss, found.gradient_norm, found.parameters, each.tolerance)
                print_row(each.name, f"{member.name} against {each.reference.name}", *(f"{n:.1e}" for n in numbers))
    return int(out_of_tolerance > 0)


def print_row(*cells: str):
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
