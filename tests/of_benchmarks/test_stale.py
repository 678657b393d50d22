"""Completions of a given age: the policy that wrote them, its log-probabilities, and the order of their prompts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.losses.stale import BATCH, GROUP, StaleTrainer, common_fields, of_arithmetic, training_problems
from opo_trl import OPOConfig
from opo_trl.data.arithmetic import base_model_path


AGE = 2
ROLLOUTS = 4


class Watched(StaleTrainer):
    """Records, for each optimizer step, the weights at its beginning, its micro-batch and its samples."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = []

    def _samples(self, inputs, logps):
        samples = super()._samples(inputs, logps)
        weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.steps.append((weights, inputs, samples))
        return samples


@torch.no_grad()
def logps_of(weights, inputs):
    """Log-probabilities of the completions' tokens, `[B, T]`, by Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32).eval()
    model.load_state_dict(weights)
    completion_ids = inputs["completion_ids"]
    ids = torch.cat([inputs["prompt_ids"], completion_ids], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    width = completion_ids.shape[1]
    logps = logits[:, -width - 1 : -1].log_softmax(2)
    return logps.gather(2, completion_ids.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_completions_are_those_of_the_policy_so_many_rollouts_ago(passes, tmp_path):
    fields = common_fields(tmp_path, 1e-3, 1, max_steps=ROLLOUTS * passes)
    args = OPOConfig(**fields, num_iterations=passes, shuffle_dataset=False, plan_micro_batches=False)
    trainer = Watched(args=args, age=AGE, **of_arithmetic(args))
    trainer.train()
    at_rollouts = [weights for weights, _, _ in trainer.steps[::passes]]
    # In optimizer steps. The policy of step 0 wrote the first three rollouts.
    ages = {1: [0, 1, 2, 2], 2: [0, 1, 2, 3, 4, 5, 4, 5]}[passes]
    questions = [turns[0]["content"] for turns in training_problems(1)["prompt"]]
    per_rollout = BATCH // GROUP
    for step, (current, inputs, samples) in enumerate(trainer.steps):
        rollout = step // passes
        assert samples.reused
        assert samples.age.unique().tolist() == [ages[step]]
        mask = inputs["completion_mask"].bool()
        behaviour_policy = at_rollouts[max(rollout - AGE, 0)]
        behaviour_logps = logps_of(behaviour_policy, inputs)
        torch.testing.assert_close(samples.anchor_logps[mask], behaviour_logps[mask], rtol=0, atol=1e-4)
        if step > 0:
            log_ratios = logps_of(current, inputs) - behaviour_logps
            assert log_ratios[mask].abs().max() > 0.1
        prompts = trainer.processing_class.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        first = rollout * per_rollout
        assert set(prompts) == set(questions[first : first + per_rollout])
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["opo/off_policy_steps"] for entry in entries] == ages
