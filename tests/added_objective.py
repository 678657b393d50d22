"""An objective as somebody adds one: a class, which `objective: added_objective.Cautious` names."""

import torch

from opo_trl.objective import OPO


class Cautious(OPO):
    """Completions that are to become less likely have half the weight."""

    def weights(self, samples):
        return torch.where(samples.target < 0, 0.5, 1.0) * super().weights(samples)
