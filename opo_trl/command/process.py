"""A process of `opo-trl train`: it imports the libraries, and says so if an installed release cannot train."""

import sys

from ..checks.text import report_error


def main() -> int:
    """Entry point; returns the exit status of [`command.train.main`], or 2 if its libraries cannot be imported."""
    try:
        from .train import main as train
    except ImportError as error:
        return report_error("opo-trl train", error, debug="--debug" in sys.argv)
    return train()


if __name__ == "__main__":
    sys.exit(main())
