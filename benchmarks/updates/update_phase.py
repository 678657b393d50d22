"""
What an update costs: OPOTrainer, with each of its options, and TRL's GRPOTrainer on the same rollout.

    python -m benchmarks.updates.update_phase            → update_phase.{json,md,png}; one core, 20 minutes
    python -m benchmarks.updates.update_phase --check    measure again; status 1 if a ratio exceeds the committed one
    python -m benchmarks.updates.update_phase --write    the table and the figure from update_phase.json
    ... --quick                                  one case only, once; writes nothing; half a minute

Both trainers get a fixed rollout of random tokens instead of generating: `GROUPS` prompts × `GENERATIONS` completions,
with the lengths of MATH's problems and solutions divided by `SHORTER`, so that a phase takes seconds. The fixed costs
of a pass are therefore a larger share than in practice. Time is processor time, which does not depend on other
programs. The trainers alternate, and every ratio is to GRPOTrainer's phase of the same turn. Tokens are counted at the
model's input. Peak memory is what PyTorch's CPU allocator hands out for a phase, besides weights and moments.
Needs the extra `figures`.
"""

import argparse
import itertools
import json
import os
import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread helps little with so small a model

import matplotlib.pyplot as plt

from opo_trl.checks.files import write_json

from ..pages import table
from ..record import origin
from .passes import count_tokens, counted_passes
from .replay import Lengths, allocated_peak, draw_rollout, make_trainer, phase, ratio, take_turns
from .shapes import small_qwen3


RESULTS = Path(__file__).resolve().with_name("update_phase.json")
GROUPS, GENERATIONS, ROWS = 10, 8, 4
SHORTER = 4
REPEATS, QUICK_REPEATS = 3, 1

# OPOTrainer's options, cumulative; "as TRL" cuts and pads micro-batches like TRL.
VARIANTS: dict[str, dict[str, Any]] = {
    "as TRL": {"plan_micro_batches": False},
    "planned": {"skip_inert_rows": False},
    "planned, skipping": {},
    "planned, skipping, budget": {"max_tokens_per_micro_batch": 256},
}
DEFAULT = "planned, skipping"

# Ratios to GRPOTrainer, and by how much a new measurement may exceed the committed one.
TOLERANCES = {"time": 0.15, "work": 0.0, "memory": 0.02}


@dataclass(frozen=True)
class Case:
    """
    A measurement.

    Args:
        lengths: distribution of completion lengths, see [`draw_rollout`].
        dead: fraction of zero-variance groups.
        steps: optimizer steps per rollout.
        width: hidden size of the model.
    """

    lengths: Lengths = "math"
    dead: float = 0.0
    steps: int = 2
    width: int = 128

    def __str__(self) -> str:
        return f"{self.lengths} | {self.dead:.0%} | {self.steps} | {self.width}"


STEPS, DEAD = (1, 2, 4), (0.0, 0.2, 0.4, 0.6)
LENGTHS: tuple[Lengths, ...] = ("math", "uniform", "equal")
QUICK = Case(dead=0.4)
CASES = [Case(dead=dead, steps=steps) for steps in STEPS for dead in DEAD]
CASES += [Case(lengths, dead) for lengths in LENGTHS[1:] for dead in (0.0, 0.4)]
CASES += [Case(dead=dead, width=256) for dead in (0.0, 0.4)]

# Targets: fraction of zero-variance groups → largest ratio of the update phase to GRPOTrainer's.
TARGETS = {0.0: 1 / 2, 0.4: 1 / 3}


# Measurements


def work(tokens: dict[str, int]) -> int:
    """Padded tokens in units of forward passes: a backward pass takes about as long as two."""
    return tokens["forward padded"] + 3 * tokens["gradient padded"]


def make_trainers(case: Case) -> dict[str, Any]:
    """GRPOTrainer and OPOTrainer in each variant, on the rollout of the case."""
    shape = small_qwen3(case.width)
    rollout = draw_rollout(
        case.lengths,
        groups=GROUPS,
        generations=GENERATIONS,
        vocab_size=shape["vocab_size"],
        dead=case.dead,
        shorter=SHORTER,
    )
    options = {"rows": ROWS, "steps": case.steps}
    trainers = {"GRPOTrainer": make_trainer("GRPO", shape, rollout, **options)}
    return trainers | {name: make_trainer("OPO", shape, rollout, **options, **own) for name, own in VARIANTS.items()}


def tokens_of(trainer: Any) -> dict[str, int]:
    """The tokens of a phase after the first, which creates the moments, and looks whether padding changes values."""
    phase(trainer)
    with counted_passes(trainer.model) as passes:
        phase(trainer)
    return count_tokens(passes)


def measure(case: Case, repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens, bytes and seconds of a phase of GRPOTrainer and of each variant, with its ratios to GRPOTrainer."""
    trainers = make_trainers(case)
    result: dict[str, dict[str, Any]] = {
        name: {"tokens": tokens_of(trainer), "bytes": allocated_peak(trainer)} for name, trainer in trainers.items()
    }
    seconds = take_turns(trainers, repeats)
    theirs = result["GRPOTrainer"]
    for name, own in result.items():
        own["seconds"] = round(statistics.median(seconds[name]), 4)
        if own is not theirs:
            own["time"] = ratio(seconds[name], seconds["GRPOTrainer"])
            own["work"] = round(work(own["tokens"]) / work(theirs["tokens"]), 4)
            own["memory"] = round(own["bytes"] / theirs["bytes"], 4)
    return result


def median(value: float | dict[str, float]) -> float:
    return value["median"] if isinstance(value, dict) else value


def failures(committed: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Ratios that exceed the committed ones by more than their tolerance."""
    found = []
    for case, variant in itertools.product(measured, VARIANTS):
        before, after = committed["cases"][case][variant], measured[case][variant]
        for name, tolerance in committed["tolerances"].items():
            was, now = median(before[name]), median(after[name])
            if now > was * (1 + tolerance):
                found.append(f"{case}: {variant}: {name} {now:.3f}, committed {was:.3f} + {tolerance:.0%}")
    return found


# Table and figure


def page(results: dict[str, Any]) -> str:
    """`update_phase.md`."""
    made, cases = results["origin"], results["cases"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    lines = [
        "# What an update costs",
        "",
        f"An update phase of OPOTrainer and one of TRL's GRPOTrainer on the same rollout, by `{made['command']}`",
        f"({made['device']}, {made['date']}, commit {made['git_commit']}; {versions}).",
        f"{GROUPS} prompts × {GENERATIONS} completions, micro-batches of {ROWS} samples, lengths of MATH divided by"
        f" {SHORTER}; random models of two layers; {results['repeats']} phases of each.",
        "How it is measured: [update_phase.py](update_phase.py).",
        "",
        "## Against the targets",
        "",
        f"OPOTrainer with its defaults (`{DEFAULT}`) and the lengths of MATH.",
        "",
        table(["zero-variance groups", "optimizer steps", "width", "target", "time", "memory", ""], verdicts(cases)),
    ]
    head = ["lengths", "zero-variance groups", "optimizer steps", "width"]
    for title, name in (
        ("Time relative to GRPOTrainer: median (range)", "time"),
        ("Work relative to GRPOTrainer: padded tokens, those with gradient counted three times", "work"),
        ("Peak memory besides weights and moments, relative to GRPOTrainer", "memory"),
    ):
        rows = []
        for case, own in cases.items():
            ratios = [cell(own[variant][name]) for variant in VARIANTS]
            rows.append([*case.split(" | "), *ratios])
        lines += ["", f"## {title}", "", table([*head, *VARIANTS], rows)]
    rows = []
    for case, own in cases.items():
        tokens = [tokens_cell(of_trainer["tokens"]) for of_trainer in own.values()]
        rows.append([*case.split(" | "), *tokens])
    lines += ["", "## Thousands of tokens with padding (without): forward only; with gradient", ""]
    lines += [table([*head, "GRPOTrainer", *VARIANTS], rows), "", "![Ratios to GRPOTrainer](update_phase.png)"]
    return "\n".join(lines) + "\n"


def verdicts(cases: dict[str, Any]) -> Iterable[list[str]]:
    for dead, target in TARGETS.items():
        for case in (*(Case(dead=dead, steps=steps) for steps in STEPS), Case(dead=dead, width=256)):
            own = cases[str(case)][DEFAULT]
            reached = own["time"]["median"] <= target and own["memory"] <= 1
            cells = (cell(own["time"]), cell(own["memory"]), "reached" if reached else "**missed**")
            yield [f"{dead:.0%}", f"{case.steps}", f"{case.width}", f"{target:.3f}", *cells]


def cell(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.3f} ({value['low']:.3f}–{value['high']:.3f})"
    return f"{value:.3f}"


def tokens_cell(tokens: dict[str, int]) -> str:
    return "; ".join(
        f"{tokens[f'{kind} padded'] / 1e3:.1f} ({tokens[f'{kind} tokens'] / 1e3:.1f})"
        for kind in ("forward", "gradient")
    )


def draw(cases: dict[str, Any], path: Path) -> None:
    """Time over zero-variance groups; time and memory by option and lengths."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.9), layout="constrained")
    for steps, color in zip(STEPS, ("#009e73", "#d55e00", "#0072b2"), strict=True):
        measured = [cases[str(Case(dead=dead, steps=steps))] for dead in DEAD]
        times = [of_trainers[DEFAULT]["time"] for of_trainers in measured]
        middle = [time["median"] for time in times]
        below = [time["median"] - time["low"] for time in times]
        above = [time["high"] - time["median"] for time in times]
        label = f"{steps} optimizer step{'s' * (steps > 1)}"
        axes[0].errorbar(DEAD, middle, [below, above], marker="o", markersize=4, capsize=3, color=color, label=label)
    axes[0].plot(list(TARGETS), list(TARGETS.values()), "k_", markersize=22, label="target (maximum)")
    axes[0].set(xlabel="fraction of zero-variance groups", ylabel="time ÷ GRPOTrainer's", ylim=(0, 1), xticks=DEAD)
    axes[0].set_title("OPOTrainer with its defaults, lengths of MATH", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    by_lengths = [cases[str(Case(lengths, 0.4))] for lengths in LENGTHS]
    for axis, name in zip(axes[1:], ("time", "memory"), strict=True):
        for i, variant in enumerate(VARIANTS):
            heights = [median(of_trainers[variant][name]) for of_trainers in by_lengths]
            shift = 0.2 * (i - 1.5)  # of the variant's bars from the middle of a group
            axis.bar([place + shift for place in range(len(LENGTHS))], heights, 0.18, label=variant)
        axis.axhline(1, color="#8a8a8a", linewidth=0.8)
        axis.set_xticks(range(len(LENGTHS)), LENGTHS)
        axis.set(xlabel="lengths of completions", ylabel=f"{name} ÷ GRPOTrainer's", ylim=(0, 1.5))
        axis.set_title(f"{name}, 40 % zero-variance groups, 2 steps", fontsize=10)
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
    for axis in axes:
        axis.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=115)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed ratios; write nothing")
    parser.add_argument("--write", action="store_true", help="write from the results, without measuring")
    parser.add_argument("--quick", action="store_true", help="one case only; write nothing")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not args.write:
        cases = {}
        for case in [QUICK] if args.quick else CASES:
            measured = measure(case, QUICK_REPEATS if args.quick else REPEATS)
            cases[str(case)] = measured
            print(case, {name: cell(measured[name]["time"]) for name in VARIANTS}, flush=True)
        if args.check:
            found = failures(json.loads(RESULTS.read_text()), cases)
            print("\n".join(found) or "no ratio is above its tolerance")
            return 1 if found else 0
        if args.quick:
            print(json.dumps(cases, indent=1))
            return 0
        write_json(RESULTS, {"origin": origin(), "repeats": REPEATS, "tolerances": TOLERANCES, "cases": cases})
    results = json.loads(RESULTS.read_text())
    RESULTS.with_suffix(".md").write_text(page(results))
    draw(results["cases"], RESULTS.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
