"""
Whether the package can work with the installed releases: they have what `contract` lists, and nothing has replaced
their classes.

Importing this module checks both, so modules that import private names import it first.
"""

import inspect
import os
import warnings
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

from . import contract


TESTED = {"trl": ">=1.16,<1.17", "transformers": ">=5.17,<5.25", "accelerate": ">=1.13,<1.16", "torch": ">=2.11,<2.16"}


def untested() -> dict[str, str]:
    """The installed release of each library that is outside the tested range."""
    outside = {}
    for name, tested in TESTED.items():
        release = version(name)
        if not SpecifierSet(tested).contains(release, prereleases=True):
            outside[name] = release
    return outside


def check() -> None:
    """
    Check that TRL, Transformers and Accelerate are what the trainer overrides and calls ([`contract.examine`]), and
    that nothing has replaced their classes. One warning says what differs, and which releases have not been tested.

    Raises:
        `ImportError`: a release lacks something, which would fail hours into a run, or train something else; or as
            [`check_replaced`].
    """
    check_replaced()
    verdict = contract.examine()  # how the installed releases differ from the tested ones
    outside = untested()
    if verdict.breaks:
        installed = ", ".join(f"{name} {version(name)}" for name in TESTED)
        tested = " ".join(f"'{name}{TESTED[name]}'" for name in outside or TESTED)
        faults = "; ".join(verdict.breaks)
        raise ImportError(f"opo_trl cannot train with {installed}: {faults}. Run `pip install {tested}`.")
    notes = [*verdict.differences]  # with which the package works
    if outside:
        releases = ", ".join(f"{name}{TESTED[name]}, not with {release}" for name, release in outside.items())
        notes.insert(0, f"opo_trl is tested with {releases}. It checks a run's first rollout and optimizer step.")
        notes.append("`opo-trl selftest` checks more, in minutes.")
    if notes and os.environ.get("RANK", "0") == "0":
        warnings.warn("\n  ".join(notes), stacklevel=2)


def check_replaced() -> None:
    """
    Check that TRL's and Transformers' trainers are their own. Unsloth puts classes made of rewritten source in their
    place when it is imported, which may be after our import: so a trainer checks again when it is made.

    Raises:
        `ImportError`: names the class, and what is in its place.
    """
    from transformers import Trainer
    from trl import GRPOTrainer

    for path, owner in (("trl.GRPOTrainer", GRPOTrainer), ("transformers.Trainer", Trainer)):
        # One of ours may stand there: that is how TRL's own scripts train with OPO.
        allowed_packages = (path.partition(".")[0], __package__)
        package = owner.__module__.partition(".")[0]
        # What is no class, such as a function that makes a trainer, replaces no methods.
        if inspect.isclass(owner) and package not in allowed_packages:
            raise ImportError(
                f"{path} has been replaced by {owner.__module__}.{owner.__qualname__}, as Unsloth does when it is "
                "imported. Its methods are rewritten, so OPO would train something else. Train in a process that does "
                "not import that package: see docs/migrating.md for alternatives."
            )


check()
