"""The behaviour policy's log-probabilities are bitwise those of the micro-batch that a sample is trained in."""

from itertools import product

import pytest
import torch
from accelerate.utils import send_to_device
from recording_trainers import RecordingOPO, logged, make_trainer, trained
from scripted_rollouts import Script

from opo_trl.objective import token_sum


class RoundsByShape(RecordingOPO):
    """With a model whose log-probabilities depend on the shape of a batch: those of some kernels do, in bfloat16."""

    _any_width = True  # far less than here, so that this is what the check finds

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

        def scale_by_shape(module, inputs, output):
            n_rows, width = output.shape[:2]
            return output * (1 + n_rows / 8 + width / 64)

        self.model.model.norm.register_forward_hook(scale_by_shape)


class SampledByVLLM(RoundsByShape):
    """With a rollout as from vLLM: TRL's pass over it has made the importance sampling ratio."""

    def _generate_once(self, inputs):
        rollout = super()._generate_once(inputs)
        rollout["opo_logps"], _ = self._policy_logps(rollout, batch_size=4)
        rollout["importance_sampling_ratio"] = torch.ones(len(rollout["advantages"]), 1)
        return rollout


CASES = {
    "absorbed": (RoundsByShape, {}),
    "corrected": (RoundsByShape, {"anchor_correction": "length_normalized"}),
    "high-entropy tokens": (RoundsByShape, {"top_entropy_quantile": 0.5}),
    "vLLM": (SampledByVLLM, {}),
}


@pytest.mark.parametrize(("case", "planned"), [*product(CASES, [True]), ("absorbed", False)])
def test_log_ratio_is_exactly_zero_while_the_policy_has_not_moved(tiny_model, tmp_path, case, planned):
    trainer_class, options = CASES[case]
    script = Script(min_length=5, max_length=120, seed=1)
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        trainer_class=trainer_class,
        model_init_kwargs={"dtype": "bfloat16"},
        plan_micro_batches=planned,
        steps_per_generation=4,
        max_steps=4,
        max_completion_length=128,
        learning_rate=0.0,
        **options,
    )
    entries = logged(trainer)
    assert [entry["opo/log_ratio/absmax"] for entry in entries] == [0.0] * 4
    assert entries[1]["opo/off_policy_steps"] == 1
    # Negative control: a pass over the rollout, as wide as unplanned micro-batches, gives planned ones other values.
    second_step = trainer.steps[1]
    part = next(batch for batch in second_step.batches if "old_per_token_logps" in batch)
    rollout = send_to_device(vars(trainer.rollouts[0]), trainer.accelerator.device)
    early, _ = trainer._policy_logps(rollout, batch_size=4)
    width = part["completion_ids"].size(1)
    early_of_part = early.cpu()[part["row"], :width]
    difference = part["old_per_token_logps"] - early_of_part
    log_ratio = token_sum(difference, part["completion_mask"].bool())
    differs = log_ratio.abs().max() > 1e-3
    assert differs == planned


def test_passes_over_a_rollout_stay_within_the_token_budget(tiny_model, tmp_path):
    """Also TRL's own: for the reference model, and for vLLM's importance sampling ratio."""
    shapes = []

    def note_shape(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    trainer = make_trainer(
        tiny_model,
        tmp_path,
        script=Script(min_length=3, max_length=60),
        trainer_class=RecordingOPO,
        max_completion_length=64,
        max_tokens_per_micro_batch=120,
        steps_per_generation=4,
        max_steps=2,
        anchor_correction="sequence",
        beta=0.1,
    )
    for model in (trainer.model, trainer.ref_model):
        model.register_forward_pre_hook(note_shape, with_kwargs=True)
    trainer.train()
    assert len(shapes) > 8
    for rows, columns in shapes:
        assert rows == 1 or rows * columns <= 120
    longest = max(columns for _, columns in shapes)
    assert 4 * longest > 120, "a pass as wide as the rollout would break the budget"
