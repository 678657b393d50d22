"""GRPO with truncated importance sampling: the gradient is that of TRL's own trainer, as if vLLM had sampled."""

from types import SimpleNamespace

import pytest
import torch
from named_tensors import distance, norm
from recording_trainers import RecordingGRPO, RecordingOPO, trained
from scripted_rollouts import Script
from torch.nn.utils.rnn import pad_sequence

from benchmarks.losses.objectives import published
from opo_trl import OPOConfig
from opo_trl.config import ObjectiveConfig
from opo_trl.objective import Samples


OBJECTIVES = {
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


@pytest.mark.parametrize("mode", OBJECTIVES)
def test_gradient_is_that_of_trl(mode, tiny_model, tmp_path):
    correction = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 2.0}
    of_trl = trained(tiny_model, tmp_path / "trl", script=Written(), trainer_class=AsOfVLLM, **correction, **OPTIONS)
    kind = type("Ours", (Recorded,), {"objective_class": OBJECTIVES[mode]})
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
