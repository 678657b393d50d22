"""The runs of the benchmark of anchored regressions (see anchored_regressions.py)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .anchored_methods import METHODS
from .anchored_report import BASELINE, DRIVE, LATEST, RATIO, TARGET, UNWEIGHTED
from .learning_curves import CurveRun
from .reuse_design import TASK


RUNS = Path("runs/anchored")
SEEDS = (61, 62, 63, 64, 65)
BUDGET = 1152  # completions: 6 rollouts of 192, or 24 of 48
LEARNING_RATE = 1e-4
RADIUS = 3.0

Fields = Mapping[str, Any]

REGIMES: dict[str, Fields] = {
    "passes": {"steps_per_generation": 4, "num_iterations": 4},
    "replay": {"steps_per_generation": 1, "num_iterations": 4, "max_staleness": 16},
}


@dataclass(frozen=True)
class Cell:
    """
    A row of a table.

    Args:
        regime (`str`): of [`REGIMES`].
        part (`str`): heading of the rows that it belongs to.
        name (`str`): what the page calls it.
        fields (`Mapping[str, Any]`): its fields.
    """

    regime: str
    part: str
    name: str
    fields: Fields

    def run(self, seed: int) -> CurveRun:
        """Its run of a seed."""
        words = "".join(c if c.isalnum() else "_" for c in self.name.replace("−", "less").replace("+", "plus"))
        fields = {**TASK, "learning_rate": LEARNING_RATE, **REGIMES[self.regime], **self.fields, "seed": seed}
        return CurveRun(RUNS / f"{self.regime}_{words}_seed{seed}", fields, BUDGET, points=2, methods=METHODS)


def _opo(trainer: str = "opo", **fields: Any) -> Fields:
    return {"trainer": trainer, "ratio_form": "log", "skip_inert_rows": False, **fields}


_UNSCALED = {"scale_rewards": "none"}
_WHOLE = {"plan_micro_batches": False}  # groups
_AT_RADIUS = {"chi2_radius": RADIUS}

_FAMILY = "The family"
_ANCHOR = "OPO taken apart: anchor and weight"

_BOTH, _PASSES, _REPLAY = ("passes", "replay"), ("passes",), ("replay",)
_ROWS: tuple[tuple[tuple[str, ...], str, str, Fields], ...] = (
    (_BOTH, _FAMILY, BASELINE, _opo()),
    (_BOTH, _FAMILY, "Kimi k1.5, τ = 0.3", _opo("Kimi", **_UNSCALED)),
    (_BOTH, _FAMILY, "OAPL, β = 0.3", _opo("OAPL", **_UNSCALED)),
    (_REPLAY, _FAMILY, "REBEL, η = 0.3", _opo("REBEL", **_UNSCALED, **_WHOLE)),
    (_REPLAY, _FAMILY, "TPO", _opo("TPO", mu=1.0, **_WHOLE)),
    (_BOTH, _FAMILY, "M2PO", _opo("M2PO", **_WHOLE)),
    (_BOTH, _FAMILY, "CISPO", {"trainer": "grpo", "loss_type": "cispo", "epsilon_high": 5.0}),
    (_BOTH, _ANCHOR, UNWEIGHTED, _opo("Unweighted")),
    (_BOTH, _ANCHOR, LATEST, _opo("LatestAnchor")),
    (_REPLAY, _ANCHOR, "latest policy, weight 1", _opo("UnweightedLatestAnchor")),
    (_PASSES, TARGET, "Algorithm 1, without projection", _opo("Algorithm1")),
    (_PASSES, TARGET, "χ² radius 3", _opo("Unweighted", **_AT_RADIUS)),
    (_PASSES, TARGET, "χ² radius 3, normalized in the log", _opo("LogNormalized", **_AT_RADIUS)),
    (_PASSES, TARGET, "χ² radius 3, linear weights", _opo("Kimi", **_AT_RADIUS, **_UNSCALED)),
    (_PASSES, TARGET, "target − 0.5", _opo("Lowered")),
    (_PASSES, TARGET, "target + 0.5", _opo("Raised")),
    (_PASSES, RATIO, "exact ratio", _opo("Unweighted", ratio_form="exact")),
    (_REPLAY, DRIVE, "linear weights", _opo("LatestLinear", **_UNSCALED)),
    (_REPLAY, DRIVE, "Algorithm 1, without projection", _opo("LatestWithoutProjection")),
)
CELLS = tuple(Cell(regime, *row) for regime in REGIMES for regimes, *row in _ROWS if regime in regimes)


def runs() -> Iterator[CurveRun]:
    """All runs, seed by seed."""
    for seed in SEEDS:
        for cell in CELLS:
            yield cell.run(seed)
