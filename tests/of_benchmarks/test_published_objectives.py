"""
Published losses as objectives: those that the package has as there, the others by their formulas, and GRPO with
truncated importance sampling by the gradient of TRL's own trainer, as if vLLM had sampled.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from named_tensors import distance, norm
from recording_trainers import RecordingGRPO, RecordingOPO, trained
from scripted_rollouts import Script
from torch.nn.utils.rnn import pad_sequence

from benchmarks.losses.objectives import published
from benchmarks.losses.objectives.neighbours import small_second_moment
from opo_trl import OPOConfig
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Groups, Samples
from opo_trl.objectives import OBJECTIVES


WORDS = {"GRPO": "grpo", "GSPO": "gspo", "CISPO": "cispo", "SAPO": "sapo", "VESPO": "vespo", "DrGRPO": "dapo"}
FIELDS = {"GSPO": {"epsilon": 3e-4, "epsilon_high": 4e-4}, "CISPO": {"epsilon_high": 5.0}}


def total_loss(objective, **samples):
    """The loss, summed over the completions, for the parts of `Samples` that differ between the tests."""
    loss = objective.loss(Samples(**samples, reused=True))
    completions = loss.work + loss.dissipation
    return completions.sum()


@pytest.mark.parametrize("name", WORDS)
def test_gradients_are_those_of_the_package(name):
    """Which other tests hold against TRL's."""
    reduction = "sum" if name in ("CISPO", "VESPO", "DrGRPO") else "mean"
    fields = {"use_cpu": True, "bf16": False, "objective": WORDS[name], **FIELDS.get(name, {})}
    published_class = getattr(published, name)
    package_class = OBJECTIVES[WORDS[name]]
    objectives = [
        published_class(ObjectiveConfig(log_ratio_clamp=20.0, log_ratio_reduction=reduction)),
        package_class(OPOConfig("unused", **fields)),
    ]
    random = torch.Generator().manual_seed(0)
    log_ratios = 0.3 * torch.randn(4, 6, generator=random, dtype=torch.float64)
    one = torch.ones(4, dtype=torch.float64)
    samples = {
        "anchor_logps": torch.full_like(log_ratios, -1),
        "mask": torch.arange(6) < torch.tensor([[6], [2], [4], [3]]),
        "target": torch.tensor([1.2, -0.4, 0.5, -1.3], dtype=torch.float64),
        "mu": one,
        "weights": one,
        "age": torch.zeros_like(one),
    }
    gradients = []
    for objective in objectives:
        logps = (log_ratios - 1).requires_grad_()
        loss = total_loss(objective, logps=logps, **samples)
        gradients += torch.autograd.grad(loss, logps)
    of_published, of_package = gradients
    assert of_package.norm() > 0.1
    torch.testing.assert_close(of_published, of_package, rtol=1e-9, atol=1e-12)


def test_advantages_of_dr_grpo_are_not_divided():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
    valid = torch.ones(8, dtype=torch.bool)
    groups = Groups(advantages=2 * rewards, rewards=rewards, valid=valid, num_generations=4)
    objective = published.DrGRPO(ObjectiveConfig())
    targets = objective.targets(groups)
    assert targets.target.tolist() == [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]


def force(objective_class, *, log_ratio: float, target: float, mu: float = 0.3) -> float:
    """Minus the derivative of the loss of a completion of two tokens by its log-ratio, at a log-ratio."""
    logps = torch.full((1, 2), log_ratio / 2, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    samples = {
        "logps": logps,
        "anchor_logps": torch.zeros_like(logps),
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "target": target * one,
        "mu": mu * one,
        "weights": one,
        "age": torch.zeros_like(one),
    }
    objective = objective_class(ObjectiveConfig(log_ratio_clamp=20.0, mu=mu))
    loss = total_loss(objective, **samples)
    (gradient,) = torch.autograd.grad(loss, logps, allow_unused=True)
    if gradient is None:
        return 0.0
    first_token = gradient[0, 0]
    return -first_token.item()


def with_quadratic_pull_back(ratio: float, target: float) -> float:
    """The force by the log-ratio whose loss pulls the ratio back to 1 with a quadratic."""
    pull_back = abs(target) * (ratio - 1) / 0.2
    return ratio * (target - pull_back)


@pytest.mark.parametrize("moved", [-1.0, 0.0, 0.3, 1.5])
@pytest.mark.parametrize("target", [-2.0, 0.0, 1.5])
def test_force_on_the_log_ratio_is_that_of_the_formula(moved, target):
    ratio = math.exp(moved)
    token_ratio = math.exp(moved / 2)
    taper = 1.0 if target >= 0 else min(ratio, 1.0)
    forces = {
        published.TOPR: target * taper,
        published.AReaL: min(token_ratio, 2.0) * target,
        published.SPO: with_quadratic_pull_back(token_ratio, target),
        published.DRPO: with_quadratic_pull_back(token_ratio, target),  # π_behaviour is 1
    }
    for objective_class, expected in forces.items():
        computed = force(objective_class, log_ratio=moved, target=target)
        assert computed == pytest.approx(expected, abs=1e-12), objective_class


def test_m2po_keeps_most_tokens_whose_mean_square_is_small():
    log_ratios = torch.tensor([[0.1, -0.3, 0.2], [9.0, 0.25, -0.5]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    # Mean squares, the smallest first: 0.01, 0.025, 0.0375, 0.0506 and 0.0905.
    in_the_loss = small_second_moment(log_ratios, mask, 0.04)
    assert in_the_loss.tolist() == [[True, False, True], [False, True, False]]


# Truncated importance sampling


TRUNCATED = {
    "token_truncate": published.TruncatedSampling,
    "sequence_truncate": published.TruncatedSamplingOfCompletions,
}
OPTIONS = {"loss_type": "grpo", "num_iterations": 1, "max_steps": 2, "learning_rate": 0.3}


class Written(Script):
    """A script whose rollouts have log-probabilities of a policy that wrote them: drawn anew on each call."""

    def rollout(self, prompts, trainer):
        rollout = super().rollout(prompts, trainer)
        lengths = [len(ids) for ids in rollout["completion_ids"]]
        drawn = torch.Generator().manual_seed(len(self.calls))
        self.logps = [-5.8 + torch.randn(length, generator=drawn) for length in lengths]
        return {**rollout, "logprobs": [logps.tolist() for logps in self.logps]}


class AsOfVLLM(RecordingGRPO):
    """Corrects as if vLLM had sampled, whose weights need no update: TRL recomputes the policy and takes the ratio."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_vllm = True
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        self._last_loaded_step = -1


class Recorded(RecordingOPO):
    """Completions of another policy, with its log-probabilities, as from a file."""

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        script = self.rollout_func.__self__
        rollout["old_per_token_logps"] = pad_sequence(script.logps, batch_first=True)
        return rollout


@pytest.mark.parametrize("mode", TRUNCATED)
def test_gradient_is_that_of_trl(mode, tiny_model, tmp_path):
    correction = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 2.0}
    of_trl = trained(tiny_model, tmp_path / "trl", script=Written(), trainer_class=AsOfVLLM, **correction, **OPTIONS)
    kind = type("Ours", (Recorded,), {"objective_class": TRUNCATED[mode]})
    ours = trained(tiny_model, tmp_path / "ours", script=Written(), trainer_class=kind, **OPTIONS)
    ratios = torch.cat([rollout.importance_sampling_ratio.flatten() for rollout in of_trl.rollouts])
    assert 0 < (ratios == 2).float().mean() < 1
    assert len(ours.steps) == len(of_trl.steps) == 2
    for mine, its in zip(ours.steps, of_trl.steps, strict=True):
        assert norm(its.gradient) > 1e-4
        assert distance(mine.gradient, its.gradient) < 1e-4 * norm(its.gradient)


def test_loss_of_areal_is_the_one_of_tokens():
    drawn = torch.Generator().manual_seed(0)
    anchor_logps = torch.randn(4, 6, generator=drawn, dtype=torch.float64) - 2
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [3]])
    target = torch.tensor([1.2, -0.4, 0.5, -1.3], dtype=torch.float64)
    objectives = [
        published.AReaL(ObjectiveConfig(log_ratio_clamp=20.0, log_ratio_reduction="mean")),
        published.TruncatedSampling(OPOConfig("unused", use_cpu=True, bf16=False, objective="grpo")),
    ]
    gradients = []
    for objective in objectives:
        logps = torch.full_like(anchor_logps, -2.0, requires_grad=True)
        loss = objective.loss(Samples.of(logps, anchor_logps, mask, target, torch.ones(())))
        gradients += torch.autograd.grad(loss.work.sum(), logps)
    of_areal, of_tokens = gradients
    assert of_areal.norm() > 0.1
    torch.testing.assert_close(of_areal, of_tokens, rtol=1e-9, atol=1e-12)
