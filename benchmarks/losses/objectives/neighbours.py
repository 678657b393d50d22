"""Variants of OPO, and M2PO."""

import torch
from torch import Tensor

from opo_trl.objective import OPO, Objective, grouped


M2_THRESHOLD = 0.04  # of M2PO's paper


class Surrogate(OPO):
    """OPO with its paper's surrogate, unless `ratio_form` is `exact`."""

    @property
    def ratio_form(self):
        return "log" if self.args.ratio_form == "truncated" else self.args.ratio_form


class LogNormalized(Surrogate):
    """The target less its log-mean-exp, so that the mean of exp(Δ*) is 1 in each group. Completions have weight 1."""

    def weights(self, samples):
        return samples.weights

    def target(self, drive, mu, groups):
        target, mu = super().target(drive, mu, groups)
        keep = grouped(groups.valid, groups.num_generations)
        of_groups = target.view_as(keep).masked_fill(~keep, -torch.inf)
        count = keep.sum(dim=1, keepdim=True).clamp(min=1)
        excess = of_groups.logsumexp(dim=1, keepdim=True) - count.log()
        return torch.where(keep, of_groups - excess, 0.0).flatten(), mu


class M2PO(Objective):
    """
    M2PO: the policy gradient of tokens weighted by π/π_behaviour, without the tokens whose log-ratios are largest.

    As many are left out as it takes for the mean square of the others to be at most `threshold`. A micro-batch must
    hold an optimizer step.
    """

    threshold = M2_THRESHOLD

    def terms(self, log_ratio, weights, samples):
        kept = small_second_moment(samples.log_ratios.detach(), samples.mask, self.threshold)
        tokens = torch.where(kept, -samples.log_ratios.exp() * samples.spread(samples.target), 0.0)
        return weights * self.reduce(samples.sum(tokens), samples), torch.zeros_like(weights)


def small_second_moment(log_ratio: Tensor, mask: Tensor, threshold: float = M2_THRESHOLD) -> Tensor:
    """Most tokens whose mean square of log-ratios is at most `threshold`, the smallest first: bool `[B, T]`."""
    squares = log_ratio.square().masked_fill(~mask, torch.inf).flatten()
    ascending, order = squares.sort()
    means = ascending.cumsum(dim=0) / torch.arange(1, len(order) + 1, device=order.device)
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[means <= threshold]] = True
    return kept.view_as(mask)
