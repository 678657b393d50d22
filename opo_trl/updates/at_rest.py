"""
Completions at rest: their gradient is 0 until the policy moves, so that an on-policy step need not compute them.

An objective decides it by the target. For OPO, a completion without push is at rest: its pull back to the behaviour
policy begins with a log-ratio of 0.
"""

from collections.abc import Sequence

from torch import Tensor

from ..batch import Batch, completion_tokens
from ..objective import Objective


def mark(steps: Sequence[Batch], objective: Objective) -> None:
    """
    Add `opo_at_rest`, bool `[B]`, to each of some optimizer steps: which completions have no gradient until the policy
    moves.

    It can only be one that the policy itself has sampled (`opo_own`): of others, the log-ratio is not 0. [`left_out`]
    leaves these completions out of an on-policy step. In others, the trainer's loss keeps their gradient at exactly 0
    as long as no step has moved the policy.
    """
    for rows in steps:
        mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
        at_rest = objective.zero_gradient(rows["opo_target"], rows["opo_mu"], mask)
        rows["opo_at_rest"] = at_rest & rows["opo_own"]


def left_out(rows: Batch, objective: Objective, *, on_policy: bool) -> Tensor:
    """
    Completions, bool `[B]`, that a step leaves out, as their objective gives them no gradient: wherever the policy is,
    or in an `on_policy` step, before which the policy does not move.
    """
    # Log-probabilities in the rollout, as of an override, may be those of another policy: then the log-ratio is not 0.
    is_behaviour_policy = on_policy and "old_per_token_logps" not in rows
    mask = completion_tokens(rows) & rows["opo_valid"].unsqueeze(1)
    always = objective.zero_gradient(rows["opo_target"], rows["opo_mu"], mask, moved=True)
    return always | (rows["opo_at_rest"] & is_behaviour_policy)
