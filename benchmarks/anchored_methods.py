"""The methods of the benchmark of anchored regressions: objectives of `objectives.neighbours`, and another anchor."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from opo_trl import OPOTrainer
from opo_trl.methods import Method
from opo_trl.objective import Samples


@dataclass(frozen=True, kw_only=True)
class Reanchored(Samples):
    """Samples whose anchor is not the policy that sampled them. They have moved from that one as far as the anchor."""

    sampling_logps: Tensor  # of each token, under the policy that sampled

    @property
    def moved(self) -> Tensor:  # type: ignore[override]
        return self.sum(self.anchor_logps - self.sampling_logps)


class LatestAnchor(OPOTrainer):
    """
    The policy that begins a pass is the anchor of the completions that it takes up; their weight is
    min(π_anchor/π_behaviour, 2).
    """

    def _rows_of_pass(self, index, passed):
        rows = dict(super()._rows_of_pass(index, passed))
        if passed:
            # TRL's name for the policy that sampled: parts are cut from it, too. Only vLLM would need it for itself.
            rows["sampling_per_token_logps"] = rows.pop("old_per_token_logps")
        return rows

    def _samples(self, inputs: Any, logps: Tensor) -> Samples:
        made = super()._samples(inputs, logps)
        return Reanchored(**vars(made), sampling_logps=inputs.get("sampling_per_token_logps", made.anchor_logps))


_OBJECTIVES = "benchmarks.objectives.neighbours"
_SAME = "Unweighted LogNormalized Lowered Raised Kimi OAPL REBEL TPO M2PO Algorithm1"
_LATEST = {
    "LatestAnchor": f"{_OBJECTIVES}.Surrogate",
    "UnweightedLatestAnchor": f"{_OBJECTIVES}.Unweighted",
    "LatestLinear": f"{_OBJECTIVES}.Linear",
    "LatestWithoutProjection": f"{_OBJECTIVES}.WithoutProjection",
}

METHODS = (
    *(Method(name, name, "#000000", objective=f"{_OBJECTIVES}.{name}") for name in _SAME.split()),
    *(
        Method(name, name, "#000000", f"{__name__}.LatestAnchor", objective=objective)
        for name, objective in _LATEST.items()
    ),
)
