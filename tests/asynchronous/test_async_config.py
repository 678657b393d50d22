"""AsyncOPOConfig: nothing is silently ignored, and what is sampled is what is trained."""

import dataclasses
import pickle
from contextlib import nullcontext

import pytest
import scripted
from helpers import answering
from trl.experimental.async_grpo import AsyncGRPOConfig, async_rollout_worker

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer, OPOConfig
from opo_trl.asynchronous.worker import OPORolloutWorker
from opo_trl.config import ObjectiveConfig


@pytest.fixture
def config(tmp_path):
    return lambda **fields: AsyncOPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def test_defaults_are_those_of_opo_and_travel_to_another_process(config, tmp_path):
    opo = OPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    made, names = config(), [field.name for field in dataclasses.fields(ObjectiveConfig)]
    sent = pickle.loads(pickle.dumps(made))
    for each in (made, sent):
        assert {name: getattr(each, name) for name in names} == {name: getattr(opo, name) for name in names}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chi2_radius": 0.1}, r"chi2_radius=0\.1 is not allowed.*scores one group at a time"),
        ({"positivity": "stiffen"}, r"positivity='stiffen' is not allowed.* to 'project'"),
        ({"top_p": 0.95}, r"top_p=0\.95 is not allowed.* to 1\.0"),
        ({"lr_scheduler_type": "cosine"}, "Set `max_steps` to a number of optimizer steps: .*cosine"),
    ],
)
def test_what_cannot_be_followed_is_rejected_with_its_fix(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
    assert config(max_steps=100, lr_scheduler_type="cosine").min_p == 0.0  # unset, the server takes the model's own


def test_config_of_trl_is_named(tiny_model, tmp_path):
    with pytest.raises(TypeError, match=r"`AsyncGRPOConfig`: change the class to `AsyncOPOConfig`"):
        AsyncOPOTrainer(tiny_model, args=AsyncGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_new_fields_of_trl_are_looked_at():
    """A field that TRL adds changes the sampling, or the loss, or neither: decide, then add it here."""
    known = """
    model_init_kwargs dtype trust_remote_code router_aux_loss_coef num_generations max_completion_length temperature
    top_p top_k min_p repetition_penalty chat_template_kwargs max_tool_calling_iterations fork_threshold_tokens
    vllm_server_base_url vllm_server_timeout request_timeout weight_sync_timeout epsilon epsilon_high token_budget
    max_inflight_tasks max_staleness queue_maxsize weight_sync_steps heartbeat_stale_after_s log_completions
    num_completions_to_print
    """
    base = {field.name for field in dataclasses.fields(AsyncGRPOConfig.__mro__[1])}
    assert {field.name for field in dataclasses.fields(AsyncGRPOConfig)} - base == {*known.split()}


@pytest.mark.parametrize(
    ("mode", "temperature", "passes"),
    [
        ("raw_logprobs", 1.0, True),
        ("processed_logprobs", 0.7, True),
        ("raw_logprobs", 0.7, False),
        ("raw_logits", 1.0, False),
    ],
)
def test_log_probabilities_of_another_policy_are_rejected(
    tiny_model, tmp_path, monkeypatch, mode, temperature, passes
):
    for name in ("is_vllm_available", "is_aiohttp_available"):
        monkeypatch.setattr(async_rollout_worker, name, lambda: True)
    named = {"train_dataset": scripted.DATA, "weight_transfer": scripted.ScriptedWorker([])}
    said = pytest.raises(ValueError, match=rf"--logprobs-mode {mode}`.*temperature=.*processed_logprobs`")
    says = {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
    with answering(says) as url, nullcontext() if passes else said:
        args = scripted.config(tmp_path, mu=0.7, temperature=temperature, vllm_server_base_url=url)
        worker = AsyncOPOTrainer(tiny_model, len, args, **named).rollout_worker
        assert isinstance(worker, OPORolloutWorker)
        assert worker._loop_kwargs["opo"].args.mu == 0.7
        assert worker._loop_kwargs["vocab_size"] > 0
