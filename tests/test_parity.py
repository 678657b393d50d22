"""
OPO against TRL's own `GRPOTrainer`, in the limit where the two are one method.

With alpha -> 1 the escort weights flatten, omega - 1 -> (1 - alpha)·(A - mean A), and dividing this drive by its
standard deviation in the group leaves the z-scored advantage. On-policy, with the log-ratio's mean over tokens, the
gradient of OPO is then that of `loss_type="grpo"` without clipping, up to O(1 - alpha) and the 1e-4 that TRL adds to
the standard deviation. Both trainers generate for themselves, from the same seed, and end most completions with EOS:
a mean over tokens differs from a sum only if lengths differ.
"""

import pytest
import torch
from helpers import RecordingGRPO, distance, norm, snapshot, trained
from transformers import AutoModelForCausalLM, AutoTokenizer


STEPS = 5

GRPO = {"loss_type": "grpo", "epsilon": 1e6, "trainer_class": RecordingGRPO}


@pytest.fixture(scope="module")
def talkative_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with a larger output weight for EOS, so that completions end at random lengths."""
    folder = str(tmp_path_factory.mktemp("talkative"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 7
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def spread_reward(prompts, completions, completion_ids, **kwargs) -> list[float]:
    """Rewards so far apart that the 1e-4 that TRL adds to their standard deviation is lost in float32."""
    return [1000.0 * (sum(ids) % 50) for ids in completion_ids]


def run(model, folder, **options):
    return trained(
        model,
        folder,
        trainer_arguments={"reward_funcs": spread_reward, "rollout_func": None},
        **{"max_steps": STEPS, "learning_rate": 0.02, "max_completion_length": 16, **options},
    )


def opo(model, folder, alpha, **options):
    return run(model, folder, alpha=alpha, drive_scaling="group", log_ratio_reduction="mean", **options)


def error(one, other) -> float:
    """Distance of the final parameters, relative to their change in training."""
    start, end = other.initial, snapshot(other.model)
    return distance(snapshot(one.model), end) / norm({name: end[name] - start[name] for name in end})


def assert_same_rollouts(one, other):
    assert len(one.rollouts) == len(other.rollouts) == STEPS
    for a, b in zip(one.rollouts, other.rollouts, strict=True):
        assert torch.equal(a.completion_ids, b.completion_ids), "the trainers no longer see the same completions"


@pytest.mark.parametrize("options", [{}, {"beta": 0.2, "use_bias_correction_kl": True}], ids=["plain", "KL corrected"])
def test_alpha_near_one_is_grpo(talkative_model, tmp_path, options):
    grpo = run(talkative_model, tmp_path, **GRPO, **options)
    lengths = torch.cat([rollout.completion_mask.sum(dim=1) for rollout in grpo.rollouts])
    assert lengths.unique().numel() > 5, "without completions of different lengths the reduction would not matter"
    errors = {}
    for alpha in (0.99, 0.999):
        trainer = opo(talkative_model, tmp_path, alpha, **options)
        assert_same_rollouts(trainer, grpo)
        errors[alpha] = error(trainer, grpo)
    # The relative error of the drive is of first order, with a constant below 1; rounding adds 1e-6.
    assert errors[0.999] < 5e-4
    assert errors[0.99] / errors[0.999] == pytest.approx(10, rel=0.1)
    # Negative control: without one of the conditions, there is no parity; 0.07 to 1.1, depending on the completions.
    limit = {"alpha": 0.999, "drive_scaling": "group", "log_ratio_reduction": "mean"}
    for difference in ({"alpha": 0.4}, {"log_ratio_reduction": "sum"}, {"drive_scaling": "none"}):
        if not options:
            assert error(run(talkative_model, tmp_path, **{**limit, **difference}), grpo) > 0.03
