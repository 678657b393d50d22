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
    return {"trainer": trainer, "skip_inert_rows": False, **fields}


_UNSCALED = {"scale_rewards": "none"}
_WHOLE = {"plan_micro_batches": False}  # groups
_AT_RADIUS = {"chi2_radius": RADIUS}
_CISPO = {"trainer": "grpo", "loss_type": "cispo", "epsilon_high": 5.0}
_M2PO = _opo("M2PO", **_WHOLE)

_FAMILY = "The family"
_ANCHOR = "OPO taken apart: anchor and weight"

CELLS = (
    Cell("passes", _FAMILY, BASELINE, _opo()),
    Cell("passes", _FAMILY, "Kimi k1.5, τ = 0.3", _opo("Kimi", **_UNSCALED)),
    Cell("passes", _FAMILY, "OAPL, β = 0.3", _opo("OAPL", **_UNSCALED)),
    Cell("passes", _FAMILY, "M2PO", _M2PO),
    Cell("passes", _FAMILY, "CISPO", _CISPO),
    Cell("passes", _ANCHOR, UNWEIGHTED, _opo("Unweighted")),
    Cell("passes", _ANCHOR, LATEST, _opo("LatestAnchor")),
    Cell("passes", TARGET, "Algorithm 1, without projection", _opo("WithoutProjection")),
    Cell("passes", TARGET, "χ² radius 3", _opo("Unweighted", **_AT_RADIUS)),
    Cell("passes", TARGET, "χ² radius 3, normalized in the log", _opo("LogNormalized", **_AT_RADIUS)),
    Cell("passes", TARGET, "χ² radius 3, linear weights", _opo("Linear", **_AT_RADIUS, **_UNSCALED)),
    Cell("passes", TARGET, "target − 0.5", _opo("Lowered")),
    Cell("passes", TARGET, "target + 0.5", _opo("Raised")),
    Cell("passes", RATIO, "exact ratio", _opo("Unweighted", ratio_form="exact")),
    Cell("replay", _FAMILY, BASELINE, _opo()),
    Cell("replay", _FAMILY, "Kimi k1.5, τ = 0.3", _opo("Kimi", **_UNSCALED)),
    Cell("replay", _FAMILY, "OAPL, β = 0.3", _opo("OAPL", **_UNSCALED)),
    Cell("replay", _FAMILY, "REBEL, η = 0.3", _opo("REBEL", **_UNSCALED, **_WHOLE)),
    Cell("replay", _FAMILY, "TPO", _opo("TPO", mu=1.0, **_WHOLE)),
    Cell("replay", _FAMILY, "M2PO", _M2PO),
    Cell("replay", _FAMILY, "CISPO", _CISPO),
    Cell("replay", _ANCHOR, UNWEIGHTED, _opo("Unweighted")),
    Cell("replay", _ANCHOR, LATEST, _opo("LatestAnchor")),
    Cell("replay", _ANCHOR, "latest policy, weight 1", _opo("UnweightedLatestAnchor")),
    Cell("replay", DRIVE, "linear weights", _opo("LatestLinear", **_UNSCALED)),
    Cell("replay", DRIVE, "Algorithm 1, without projection", _opo("LatestWithoutProjection")),
)


def runs() -> Iterator[CurveRun]:
    """All runs, seed by seed."""
    for seed in SEEDS:
        for cell in CELLS:
            yield cell.run(seed)
