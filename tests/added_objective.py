"""An objective as somebody adds one: a class, which `objective: added_objective.Cautious` names."""

from typing import Annotated

import torch

from opo_trl.fields import POSITIVE
from opo_trl.objective import OPO


class Cautious(OPO):
    """Completions that are to become less likely have `factor` times the weight."""

    factor: Annotated[float, POSITIVE] = 0.5

    def weights(self, samples):
        return torch.where(samples.target < 0, self.factor, 1.0) * super().weights(samples)
