"""
TRL's losses as objectives: the gradient of every step is that of `GRPOTrainer` with the same options.

An on-policy step and an off-policy one. Both trainers take all samples of a rollout in every
step, so that they see the same ones; scripted completions differ in length, one is truncated, and a tool writes some.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from device_fields import BACKEND
from launched_processes import launch, logs
from named_tensors import distance, norm
from recording_trainers import RecordingGRPO, RecordingOPO, logged, trained
from scripted_rollouts import Script, even_tokens

from opo_trl.batch import completion_tokens
from opo_trl.patching import temporarily


LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
# Learning rates at which some ratios leave the clip range, but not all.
RATES = {"gspo": 0.02, "vespo": 0.02}
ROWS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
ONE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
ON_POLICY = {**ONE, "num_iterations": 1, "max_steps": 2}


class Corrected(RecordingGRPO):
    """As if vLLM had sampled, whose importance weights the loss then has."""

    def _compute_loss(self, model, inputs):
        with temporarily(self, use_vllm="importance_sampling_ratio" in inputs):
            return super()._compute_loss(model, inputs)


def of_sampler(rollout, trainer, columns: int | None = None):
    """Importance weights of tokens, or one for each completion."""
    n, columns = len(rollout["advantages"]), columns or rollout["completion_ids"].size(1)
    drawn = torch.rand((n, columns), generator=torch.Generator().manual_seed(len(trainer.rollouts)))
    drawn = (0.5 + drawn).to(rollout["advantages"].device)
    mask = completion_tokens(rollout)
    rollout["importance_sampling_ratio"] = drawn if columns == 1 else drawn.where(mask, 1.0)  # as TRL has them


def shifted(rollout, trainer):
    """Log-probabilities of the sampler, some far from the policy's."""
    drawn = torch.randn(
        (len(rollout["advantages"]), 1), generator=torch.Generator().manual_seed(len(trainer.rollouts))
    )
    rollout["sampling_per_token_logps"] = rollout["old_per_token_logps"] + drawn.to(rollout["advantages"].device)


OPTIONS = {
    "asymmetric": {"epsilon": 0.05, "epsilon_high": 0.28},
    "one bound": {"epsilon": 0.9, "epsilon_high": None},
    "two-sided": {"epsilon": 0.1, "delta": 1.2},
    "KL corrected": {"beta": 0.2, "use_bias_correction_kl": True},
    "mask of stale completions": {"off_policy_mask_threshold": 1e-4},
    "mask of truncated completions": {"mask_truncated_completions": True},
    "rewards of the batch": {"scale_rewards": "batch"},
    # Micro-batches of one row: TRL's bonus is a mean over the tokens of a micro-batch, ours over completions.
    "entropy bonus": {"entropy_coef": 0.1, **ROWS},
    "micro-batches of one row": ROWS,
    # TRL's threshold is that of a micro-batch in its step, ours that of the rollout.
    "high-entropy tokens, KL": {"top_entropy_quantile": 0.5, "beta": 0.2, **ON_POLICY},
    "sampler's weights of completions": {"inject": partial(of_sampler, columns=1)},
    "sampler's log-probabilities": {"inject": shifted, "off_policy_mask_threshold": 0.3},
    "sampler's weights of tokens, three passes": {"inject": of_sampler, "num_iterations": 3, "max_steps": 6},
}
EVERY = ("micro-batches of one row", "sampler's weights of tokens, three passes")
CASES = [(name, option) for name in LOSSES for option in EVERY]
CASES += [(name, option) for name in ("grpo", "gspo") for option in ("asymmetric", "two-sided")]
CASES += [("cispo", "one bound"), ("vespo", "sampler's weights of completions")]
CASES += [("dapo", option) for option in OPTIONS if option not in (*EVERY, "asymmetric", "two-sided", "one bound")]


def gradients(model, folder, name, **options):
    """Gradient of each step, of TRL's trainer and of ours."""
    options = {"num_iterations": 2, "max_steps": 2, "learning_rate": RATES.get(name, 0.3), **LOSSES[name], **options}
    script = {"truncated": (2,), "tool_tokens": {1: (1,), 6: (0, 2)}}
    return [
        trained(model, folder / kind.__name__, script=Script(**script), trainer_class=kind, **options)
        for kind in (Corrected, RecordingOPO)
    ]


def assert_same(ours, trl) -> None:
    """The gradient of each step."""
    assert len(ours.steps) == len(trl.steps) > 1
    for mine, theirs in zip(ours.steps, trl.steps, strict=True):
        assert norm(theirs.gradient) > 1e-4
        assert distance(mine.gradient, theirs.gradient) < 1e-4 * norm(theirs.gradient)


@pytest.mark.parametrize(("name", "option"), CASES)
def test_gradient_of_every_step_is_that_of_trl(tiny_model, tmp_path, name, option):
    trl, ours = gradients(tiny_model, tmp_path, name, **OPTIONS[option])
    assert_same(ours, trl)


def test_generated_run_has_the_completions_and_gradients_of_trl(tiny_model, tmp_path):
    """Each generates for itself, from the same seed, with the policy that it has trained so far."""
    options = {"trainer_arguments": {"reward_funcs": even_tokens, "rollout_func": None}, "max_completion_length": 16}
    options |= {"loss_type": "grpo", "max_steps": 5, "learning_rate": 0.02}
    trl, ours = (
        trained(tiny_model, tmp_path / kind.__name__, trainer_class=kind, **options)
        for kind in (RecordingGRPO, RecordingOPO)
    )
    for mine, theirs in zip(ours.rollouts, trl.rollouts, strict=True):
        assert torch.equal(mine.completion_ids, theirs.completion_ids)
    assert_same(ours, trl)


def compare_in_two_processes(model: str, folder: str, name: str) -> None:
    """Runs in each process; completions of the two differ in length, so that their numbers of tokens do."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "ddp_backend": BACKEND, "beta": 0.1}
    trl, ours = gradients(model, Path(folder), name, **options)
    accelerator = ours.accelerator
    assert accelerator.num_processes == 2
    tokens = ours.rollouts[0].completion_mask.sum()
    one, other = accelerator.gather(tokens[None].to(accelerator.device)).tolist()
    assert one != other
    assert_same(ours, trl)


@pytest.mark.parametrize("name", ["dapo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_gradient_is_that_of_trl_in_two_processes(tiny_model, tmp_path, name):
    arguments = (tiny_model, str(tmp_path), name)
    status = launch(compare_in_two_processes, *arguments, config="cpu", processes=2, folder=tmp_path / "logs")
    assert status == [0, 0], logs(tmp_path / "logs")


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo", "sapo"])
def test_metrics_are_those_of_trl(tiny_model, tmp_path, name):
    """Of one micro-batch: TRL's are means of those of micro-batches."""
    trl, ours = gradients(tiny_model, tmp_path, name, beta=0.1, **ONE)
    names = {metric for metric in logged(trl)[1] if metric in ("entropy", "kl") or metric.startswith("clip_ratio/")}
    assert len(names) == (2 if name == "sapo" else 7)
    for mine, theirs in zip(logged(ours), logged(trl), strict=True):
        assert {n: mine[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-4, abs=1e-6)
    if name != "sapo":
        assert 0 < logged(ours)[1]["clip_ratio/region_mean"] < 1
