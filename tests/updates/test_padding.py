"""Models whose log-probabilities depend on padding: how that is noticed, and what follows from it."""

import pytest
import torch
from peft import PrefixTuningConfig
from recording_trainers import RecordingOPO, logged, trained
from scripted_rollouts import Script
from tiny import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from opo_trl.batch import model_inputs


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LONG_CONTEXT = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 24}
MODELS = {
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "longrope": (
        "llama",
        SHAPE
        | {
            "original_max_position_embeddings": 24,
            "rope_parameters": LONG_CONTEXT | {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 5.0]},
        },
    ),
    "recurrent": (
        "recurrent_gemma",
        SHAPE | {"head_dim": 8, "lru_width": 32, "attention_window_size": 6, "num_hidden_layers": 3},
    ),
    "llama": ("llama", SHAPE),
}
STEPS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_steps": 4,
    "learning_rate": 1e-12,
    "max_completion_length": 16,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a small random model of each kind."""

    def save(name: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        kind, fields = MODELS[name]
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), tie_word_embeddings=False, **fields, **ends)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3 if name == "recurrent" else 5)  # at 5, its dependence is plain
            # As of a trained model; Transformers makes a 0 of it, over which a recurrent state passes unchanged.
            model.get_input_embeddings().weight[tokenizer.pad_token_id].normal_()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return {name: save(name) for name in MODELS}


def run(model: str, folder, trainer_class=RecordingOPO, trainer_arguments=None, **options):
    script = Script(seed=1, max_length=12)
    arguments = {"trainer_class": trainer_class, "trainer_arguments": trainer_arguments}
    return trained(model, folder, script=script, **arguments, **{**STEPS, **options})


def largest_log_ratio(trainer: RecordingOPO) -> float:
    return max(entry["opo/log_ratio/absmax"] for entry in logged(trainer))


@pytest.mark.parametrize(("name", "any_width"), [("gpt2", True), ("longrope", False), ("recurrent", False)])
def test_policy_that_has_not_moved_has_a_log_ratio_of_0(saved, tmp_path, caplog, name, any_width):
    trainer = run(saved[name], tmp_path)
    assert trainer._any_width == any_width
    assert largest_log_ratio(trainer) < 1e-5
    assert ("`plan_micro_batches` has no effect" in caplog.text) is not any_width


def test_left_padding_counts_as_no_position(saved, tmp_path):
    """The reference has log-probabilities of completions without padding."""
    options = {"num_iterations": 1, "max_steps": 1, "learning_rate": 0.1}
    trainer = run(saved["gpt2"], tmp_path, RecordingOPO, **options)
    ids, mask, width = model_inputs(trainer.steps[0].batches[0])
    assert (mask[:, 0] == 0).any()
    policy = AutoModelForCausalLM.from_pretrained(saved["gpt2"])
    with torch.no_grad():
        trainer.model.load_state_dict(policy.state_dict())
        padded_logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)
        for row, is_token, logps in zip(ids, mask.bool(), padded_logps, strict=True):
            tokens = row[is_token]
            logits = policy(tokens.unsqueeze(0)).logits[0, :-1]
            expected = logits.log_softmax(dim=-1).gather(1, tokens[1:, None]).squeeze(1)
            length = int(is_token[-width:].sum())
            assert torch.allclose(logps[:length], expected[-length:], atol=1e-4)


def test_virtual_tokens_before_the_padding_are_noticed(saved, tmp_path):
    class Started(RecordingOPO):
        def train(self, *args, **kwargs):  # a virtual token that says nothing depends on nothing
            torch.manual_seed(0)
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter)
            return super().train(*args, **kwargs)

    adapter = {"peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}
    trainer = run(saved["llama"], tmp_path, Started, adapter)
    assert largest_log_ratio(trainer) < 1e-5


@pytest.mark.parametrize(
    "field", [{"max_staleness": 2}, {"max_tokens_per_micro_batch": 100}], ids=["max_staleness", "tokens"]
)
def test_fields_that_need_batches_of_several_widths_are_rejected(saved, tmp_path, field):
    (name,) = field
    with pytest.raises(ValueError, match=rf"{name}=.*do not depend on padding.*Remove `{name}`"):
        run(saved["longrope"], tmp_path, **field)
