"""Reports of the samples of an optimizer step, gathered over all processes at its end."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ..objective import SEQUENCE_CLAMP, Loss, Objective, Samples
from .opo import ratio_ess, step_metrics, target_fit


@dataclass
class SampleReport:
    """Values of samples in an optimizer step: a float32 tensor `[B]` each, without gradient."""

    # These have the meaning that they have in `Loss` and `Samples`.
    log_ratio: Tensor
    target: Tensor
    mu: Tensor
    weights: Tensor
    clamped: Tensor
    work: Tensor
    dissipation: Tensor
    age: Tensor
    sequence_log_ratio: Tensor  # log-ratio of the complete completion, bounded by `SEQUENCE_CLAMP`
    kl: Tensor  # estimate of the KL divergence to the reference, summed over tokens
    policy_loss: Tensor  # loss without the entropy bonus
    tokens: Tensor  # number of tokens that count
    entropy: Tensor  # sum of the entropies of these tokens in nats
    clipped_low: Tensor  # share of the tokens whose ratio is clipped below
    clipped_high: Tensor  # share of the tokens whose ratio is clipped above
    computed: Tensor  # 0 for samples that are left out because their gradient is zero, and for fillers

    def __post_init__(self):
        for name, value in vars(self).items():
            setattr(self, name, value.detach().float())

    @classmethod
    def of(cls, samples: Samples, loss: Loss, **more: Tensor) -> "SampleReport":
        """
        The report of a micro-batch's samples, which are computed: from what the objective got and returned, and the
        fields in `more`. Fields without a value are 0, such as the clipped shares of a loss that does not clip.
        """
        of_loss = {name: value for name, value in vars(loss).items() if value is not None}
        of_samples = {
            "target": samples.target,
            "mu": samples.mu,
            "age": samples.age,
            "sequence_log_ratio": samples.moved.clamp(-SEQUENCE_CLAMP, SEQUENCE_CLAMP),
            "computed": torch.ones_like(loss.work),
        }
        return cls(**{**cls._zeros_like(loss.work), **of_loss, **of_samples, **more})

    @classmethod
    def of_skipped(cls, counts: Tensor, mu: Tensor, *, on_policy: bool) -> "SampleReport":
        """
        The report of samples that are left out of the step, from whether they count, `[B]`, and their χ² coefficient,
        a scalar. On-policy their log-ratio is 0, and otherwise not known: NaN.
        """
        log_ratio = torch.full_like(counts, 0.0 if on_policy else math.nan, dtype=torch.float32)
        known = {"weights": counts, "mu": mu.expand(len(counts)), "log_ratio": log_ratio}
        return cls(**{**cls._zeros_like(counts), **known})

    @classmethod
    def _zeros_like(cls, values: Tensor) -> dict[str, Tensor]:
        """A tensor of zeros for each field, as long as these values."""
        zeros = torch.zeros_like(values)
        return {field.name: zeros for field in dataclasses.fields(cls)}

    def with_fillers(self, fillers: Tensor, left_out: "SampleReport") -> "SampleReport":
        """
        The same report, but `fillers`, bool `[B]`, are reported as if they had been `left_out`: how many are computed
        depends on the number of processes and micro-batches. Only the entropy is theirs.
        """
        values = {}
        for name, computed in vars(self).items():
            values[name] = torch.where(fillers, getattr(left_out, name), computed)
        values["tokens"] = self.tokens
        values["entropy"] = self.entropy
        return SampleReport(**values)

    def with_left_out(self, batch: Mapping[str, Any]) -> list["SampleReport"]:
        """
        This report, of the samples of a micro-batch, and one of those that its step leaves out and that the
        micro-batch names (`opo_skipped`).
        """
        if "opo_filler" not in batch:  # an evaluation, or a run that leaves no sample out
            return [self]
        on_policy = "old_per_token_logps" not in batch
        left_out = partial(SampleReport.of_skipped, mu=batch["opo_mu"].max(), on_policy=on_policy)
        reports = [self.with_fillers(batch["opo_filler"], left_out(batch["opo_counts"]))]
        if "opo_skipped" in batch:
            reports.append(left_out(batch["opo_skipped"]))
        return reports

    @classmethod
    def gather(cls, reports: Sequence["SampleReport"], accelerator: Accelerator) -> "SampleReport":
        """
        All samples of the step, over all processes, by one collective call and one copy to the host; each process has
        the same number.
        """
        # A row for each sample, and a column for each field in its order
        tables = [torch.stack(list(vars(report).values()), dim=1) for report in reports]
        table = accelerator.gather(torch.cat(tables))
        return cls(*table.cpu().T)


@torch.no_grad()
def metrics_of_samples(samples: SampleReport, objective: Objective, *, kl: bool, bonus: bool) -> dict[str, float]:
    """
    Metrics of an optimizer step, by their names in the log, from all of its samples over all processes.

    `kl` and `bonus`: whether the loss has a KL term and an entropy bonus.
    """
    is_computed = samples.computed.bool()
    # Left out of a step that is not on-policy: nobody has computed their log-ratio, so they count in no metric of it.
    is_unknown = samples.log_ratio.isnan() & ~is_computed
    weights = torch.where(is_unknown, 0.0, samples.weights)
    step = step_metrics(samples.log_ratio, weights, samples.clamped.bool())
    step["frac_masked"] = (samples.weights == 0).float().mean()  # those of unknown log-ratio are not masked
    # Copied first: over a column of the table, a mean would be rounded in another way.
    step["work"] = samples.work.contiguous().mean()
    step["dissipation"] = samples.dissipation.contiguous().mean()
    if objective.is_regression:
        form = objective.ratio_form
        step["target_fit"] = target_fit(samples.log_ratio, samples.target, ratio_form=form, weights=weights)
    step["ratio/ess"] = ratio_ess(samples.sequence_log_ratio, weights != 0)
    step["off_policy_steps"] = samples.age.max()
    step["frac_skipped"] = 1 - samples.computed.mean()
    metrics = {f"opo/{name}": value for name, value in step.items()}
    # NaN if no token counts, which TRL logs as None: an entropy of 0 would look like a collapsed policy.
    tokens = samples.tokens.sum()
    metrics["entropy"] = samples.entropy.sum() / tokens
    has_ratios = is_computed & (samples.tokens > 0)
    if objective.clips and has_ratios.any():
        # A completion counts by its tokens if their ratios are clipped, or as one if its own ratio is.
        shares = samples.tokens if objective.clips == "token" else samples.computed
        metrics |= _clip_ratios(samples.clipped_low[has_ratios], samples.clipped_high[has_ratios], shares[has_ratios])
    if kl:
        metrics["kl"] = samples.kl.sum() / tokens
    if bonus:
        metrics["policy_loss"] = samples.policy_loss.mean()
    return {name: value.item() for name, value in metrics.items()}


def _clip_ratios(low: Tensor, high: Tensor, shares: Tensor) -> dict[str, Tensor]:
    """
    TRL's metrics of clipped ratios, from the part of each sample that is clipped below (`low`) and above (`high`). A
    mean counts samples by their `shares`. `[B]` each.
    """
    total = shares.sum()
    return {
        "clip_ratio/low_mean": (low * shares).sum() / total,
        "clip_ratio/high_mean": (high * shares).sum() / total,
        "clip_ratio/region_mean": ((low + high) * shares).sum() / total,
        "clip_ratio/low_min": low.min(),
        "clip_ratio/high_max": high.max(),
    }
