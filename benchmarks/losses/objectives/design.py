"""Which runs the ablation consists of, and how one leads to the next (see plan.md, which was written first)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opo_trl.objective import OPO, Objective

from ...staged import Stages, extended
from . import neighbours, published
from .grid import CELLS
from .training import REGIMES, GatedSteps, Run, ScaledRate, train


TUNING_SEEDS = (311, 312, 313)
SEEDS = tuple(range(301, 311))  # that no choice was based on
FRESH_SEEDS = tuple(range(91, 101))  # of OPO with either μ, TOPR and truncated REINFORCE

# Eight trials of each objective, in one region of learning rates.
RATES = (2.5e-5, 5e-5, 1e-4, 2e-4)  # × two values of the objective's own field
FINE_RATES = tuple(float(f"{2.5e-5 * 8 ** (i / 7):.3g}") for i in range(8))  # where it has none

Setting = tuple[float, float]  # learning rate, own field
Results = Mapping[Run, Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """
    An objective of the table.

    Args:
        objective (`type[Objective]`): it.
        own (`str`): its own field, of the configuration or the objective; several names for equal ones.
        values (`tuple[float, float]`): that are tried.
        options (`Mapping[str, Any]`): other fields of the configuration.
        loss (`str`): of a completion, for the page.
        callback (`Callable`, *optional*): of the run, made from the trainer.
    """

    objective: type[Objective]
    own: str = ""
    values: tuple[float, ...] = (0.0,)
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = ""
    callback: Callable[[Any], Any] | None = None

    @property
    def settings(self) -> list[Setting]:
        """Its trials."""
        return [(rate, own) for rate in (RATES if self.own else FINE_RATES) for own in self.values]


def _cell(name: str) -> Entry:
    push_weight, pull_back = name.rsplit("-", 1)
    if push_weight.endswith("clipped"):
        return Entry(CELLS[name], "clip", (0.02, 0.2))
    return Entry(CELLS[name]) if pull_back == "none" else Entry(CELLS[name], "mu", (0.3, 0.1))


class LogNormalizedReward(neighbours.LogNormalized, CELLS["reward-one-log"]):  # type: ignore[misc]
    """OAPL: (r − r̄)/β less its log-mean-exp."""


_MEAN = {"log_ratio_reduction": "mean"}
_CLIPPED = "−min(ρA, clip(ρ)A) of each token"
ENTRIES = {
    **{name: _cell(name) for name in CELLS},
    "GRPO": Entry(published.GRPO, "low high", (0.2, 0.4), _MEAN, f"{_CLIPPED} (arXiv 2402.03300)"),
}
# Published objectives of the table, which no comparison confirms; GSPO is a cell.
LITERATURE = {
    "Dr. GRPO": Entry(published.DrGRPO, "low high", (0.2, 0.4), {}, "GRPO's, with A = r − r̄, summed (2503.20783)"),
    "DAPO": Entry(published.GRPO, "high", (0.28, 0.5), {}, "GRPO's, summed (2503.14476)"),
    "CISPO": Entry(published.CISPO, "high", (2.0, 4.0), {}, "−min(ρ, 1 + ε)·A·log π of each token (2506.13585)"),
    "SAPO": Entry(published.SAPO, "negative", (1.05, 2.0), _MEAN, "−4/τ·σ(τ(ρ − 1))·A of each token (2511.20347)"),
    "VESPO": Entry(published.VESPO, loss="−t^k·exp(λ(1 − t))·A·log π (2602.10693)"),
    "AReaL": Entry(published.AReaL, "low high", (0.2, 0.4), _MEAN, "min(ρ, 2) times GRPO's (2505.24298)"),
    "SPO": Entry(published.SPO, "radius", (0.2, 0.4), _MEAN, "−ρA + \\|A\\|/(2ε)·(ρ − 1)² of each token (2401.16025)"),
    "DRPO": Entry(
        published.DRPO,
        "radius",
        (0.2, 0.4),
        _MEAN,
        "−ρA + \\|A\\|/(2ε)·(π − π_k)²/π_k of each token (2606.09821)",
    ),
    "TOPR": Entry(published.TOPR, loss="−A·log π, times min(t, 1) where A < 0 (2503.14286)"),
    "M2PO": Entry(neighbours.M2PO, "threshold", (0.04, 0.01), _MEAN, "−ρA of tokens with small (log ρ)² (2510.01161)"),
    "Kimi k1.5": Entry(CELLS["reward-one-log"], "mu", (0.3, 0.1), {}, "−(r − r̄)·Δ + μ/2·Δ² (2501.12599)"),
    "OAPL": Entry(LogNormalizedReward, "mu", (0.3, 0.1), {}, "μ/2·(Δ − r/μ + log mean exp(r/μ))² (2602.19362)"),
}
# The default with a published signal, tried on the tuning seeds.
_DEFAULT = {"ratio_form": "truncated"}
SIGNALS = {
    "rate × ESS": Entry(OPO, "power", (0.5, 1.0), _DEFAULT, callback=ScaledRate),
    "gated steps": Entry(OPO, "ceiling", (1.5, 3.0), _DEFAULT, callback=GatedSteps),
}
ENTRIES |= LITERATURE | SIGNALS
# GRPO once more, in a region that grows until no edge of it is chosen, at most so many times.
WIDER, EXTENSIONS = "GRPO, wider clip", 5
ENTRIES[WIDER] = Entry(published.GRPO, "low high", (0.2, 0.4, 0.8), _MEAN)

TODAY = "escort-bounded-log"  # the default when the plan was made
PAPER = "escort-bounded-chi2"  # the default since, by the plan's second rule
GSPO = "advantage-clipped-none"
TR = "reward-bounded-none"  # truncated REINFORCE
# From simple to complex, as the plan's second rule goes through them.
FORMS = ("reward-bounded-none", "advantage-bounded-none", "escort-bounded-none", PAPER, TODAY)
# What today's form is compared with, in every regime.
RIVALS = (
    PAPER,
    "escort-bounded-none",
    "reward-bounded-none",
    "advantage-bounded-none",
    "escort-one-log",
    "reward-tapered-none",
    GSPO,
    "GRPO",
)
CONFIRMED = (TODAY, *RIVALS)
REPORTED = (
    *CONFIRMED,
    *(f"{push}-bounded-{pull}" for push in ("reward", "advantage") for pull in ("log", "chi2")),
)
WHOLE = "lag64"  # the regime in which every cell is tuned, and all of `REPORTED` report
TABLE = ("lag64", "replay")  # regimes of the table


def cells() -> Iterator[tuple[str, str]]:
    """Objectives and regimes, in order: those that report, the table, and the rest of the grid."""
    for regime in REGIMES:
        yield from ((name, regime) for name in reporting(regime))
    for regime in TABLE:
        yield from ((name, regime) for name in LITERATURE)
    yield from ((name, WHOLE) for name in CELLS if name not in REPORTED)
    yield from ((name, regime) for name in SIGNALS for regime in REGIMES if regime != "fresh")
    yield from ((WIDER, regime) for regime in REGIMES)


def reporting(regime: str) -> tuple[str, ...]:
    """The objectives of the ablation that report in a regime."""
    return REPORTED if regime == WHOLE else CONFIRMED


def stages(name: str, regime: str, found: Results) -> Stages:
    """The runs of an objective in a regime; those that report only of the objectives that do."""
    trials = Stages(
        lambda setting, seed, tuning: Run(name, regime, *setting, seed, tuning),
        ENTRIES[name].settings,
        TUNING_SEEDS,
        seeds=(),
    )
    if name == WIDER:
        trials = extended(trials, found, EXTENSIONS)
        if trials.next_runs(found):
            return trials
    return replace(trials, seeds=SEEDS) if name in (*REPORTED, *LITERATURE, WIDER) else trials


def of_fresh_seeds(found: Results) -> list[Run]:
    """The runs with fresh seeds, with the settings that were chosen for `lag64`, but OPO's with either μ."""
    settings = [(name, stages(name, WHOLE, found).chosen(found)) for name in ("TOPR", TR)]
    rate = stages(PAPER, WHOLE, found).chosen(found)[0]
    settings += [(PAPER, (rate, mu)) for mu in ENTRIES[PAPER].values]
    return [Run(name, WHOLE, *setting, seed, False) for seed in FRESH_SEEDS for name, setting in settings]


def make(job: tuple[Run, Entry]) -> dict[str, Any]:
    """Make a run, in a process of its own."""
    run, entry = job
    return train(run, entry.objective, entry.own, dict(entry.options), entry.callback)
