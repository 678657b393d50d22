"""An objective as somebody adds one: a class, and a line of registration for each trainer."""

import torch

from opo_trl import methods
from opo_trl.objective import OPO


class Cautious(OPO):
    """Completions that are to become less likely have half the weight."""

    def weights(self, samples):
        return torch.where(samples.target < 0, 0.5, 1.0) * super().weights(samples)


METHOD = methods.Method("cautious", "Cautious OPO", "#123456", objective="added_objective.Cautious")
ASYNC_METHOD = methods.Method(
    "async_cautious", "Cautious, asynchronous", "#654321", *methods.ASYNC, objective="added_objective.Cautious"
)
