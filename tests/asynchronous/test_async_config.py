"""AsyncOPOConfig: nothing is silently ignored, and what is sampled is what is trained."""

import dataclasses
import http.server
import json
import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType, PartialState
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer, OPOConfig
from opo_trl.asynchronous.faults import check_sharding
from opo_trl.config import ObjectiveConfig


@pytest.fixture
def config(tmp_path):
    return lambda **fields: AsyncOPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def test_defaults_are_those_of_opo(config, tmp_path):
    opo = OPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    made, names = config(), [field.name for field in dataclasses.fields(ObjectiveConfig)]
    assert {name: getattr(made, name) for name in names} == {name: getattr(opo, name) for name in names}
    assert (made.mu, made.log_ratio_clamp) == (0.3, 20.0)
    assert config(log_ratio_reduction="mean").log_ratio_clamp == 5.0


def test_objective_travels_to_another_process(config):
    made = config(alpha=0.1, mu=0.7, positivity="clip")
    sent = pickle.loads(pickle.dumps(made.objective_fields))
    assert (sent.alpha, sent.mu, sent.positivity, sent.log_ratio_clamp) == (0.1, 0.7, "clip", 20.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epsilon": 0.3}, r"epsilon=0\.3 has no effect.*`mu`.*Remove `epsilon`"),
        ({"epsilon_high": 0.28}, r"epsilon_high=0\.28 has no effect.*Remove `epsilon_high`"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0\.1 has no effect.*Remove"),
        ({"chi2_radius": 0.1}, r"chi2_radius=0\.1 is not possible in asynchronous.*Set `mu` instead"),
        ({"positivity": "stiffen"}, r"positivity='stiffen' is not possible.*Set `positivity` to 'clip' or 'project'"),
        ({"drive_scaling": "batch"}, r"drive_scaling='batch' is not possible.*Set `drive_scaling` to 'group'"),
        ({"adaptive_temperature": True}, r"adaptive_temperature=True is not possible.*Set `escort_temperature`"),
        ({"temperature_range": [0.5, 1.0]}, r"temperature_range=\[0\.5, 1\.0\] is not possible"),
        ({"anchor_correction": "sequence"}, r"anchor_correction='sequence' is not possible.*Remove"),
        ({"top_p": 0.95}, r"top_p=0\.95 makes completions come from another.*Set `top_p` to 1\.0"),
        ({"top_k": 20}, r"top_k=20 makes completions.*Set `top_k` to 0"),
        ({"min_p": 0.1}, r"min_p=0\.1 makes completions.*Set `min_p` to 0\.0"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1 makes completions.*to 1\.0"),
        ({"enable_jit_checkpoint": True}, r"enable_jit_checkpoint=True saves in the middle.*StopOnSignal"),
        ({"alpha": 1.5}, r"alpha=1\.5 is not allowed\. Set `alpha` to a number in \[0, 1\]"),
        ({"mu": 0.0}, r"mu=0\.0 is not allowed\. Set `mu` to a positive"),
        ({"token_budget": 1}, r"token_budget=1 has no room.*max_completion_length=2048.*Set `token_budget`"),
        ({"num_generations": 1}, r"num_generations=1 is not allowed"),
        ({"temperature": 0.0}, r"temperature=0\.0 is not allowed"),
        ({"log_ratio_reduction": "max"}, r"log_ratio_reduction='max' is not allowed\..*one of sum, mean"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_followed_is_rejected_with_its_fix(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize("min_p", [None, 0.0])
def test_server_is_told_to_leave_min_p_out(config, min_p):
    """TRL sends it only if it is not `None`; the server would take the model's own."""
    assert config(min_p=min_p).min_p == 0.0


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


# What the server says


@pytest.fixture
def server():
    """An HTTP server that answers as vLLM does; its `mode` is that of the log-probabilities."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"vllm_config": {"model_config": {"logprobs_mode": made.mode}}}).encode())

        def log_message(self, *args): ...

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


@pytest.mark.parametrize(
    ("mode", "temperature", "passes"),
    [
        ("raw_logprobs", 1.0, True),
        ("processed_logprobs", 1.0, True),
        ("processed_logprobs", 0.7, True),
        ("raw_logprobs", 0.7, False),
        ("raw_logits", 1.0, False),
    ],
)
def test_log_probabilities_of_another_policy_are_rejected(server, config, monkeypatch, mode, temperature, passes):
    server.mode = mode
    url = f"http://127.0.0.1:{server.server_port}"
    PartialState()  # for messages, as of any trainer
    trainer = object.__new__(AsyncOPOTrainer)  # `train` looks at these only
    trainer.model, trainer.optimizer = torch.nn.Linear(1, 1), None
    trainer.rollout_worker = object.__new__(AsyncRolloutWorker)
    trainer.vllm_client = VLLMClient(url, 10.0)
    trainer.args = SimpleNamespace(temperature=temperature, vllm_server_base_url=url, output_dir="run")
    trainer.rollout_worker._loop_kwargs = {}
    monkeypatch.setattr(AsyncGRPOTrainer, "train", lambda self, checkpoint: "trained")
    if passes:
        assert trainer.train() == "trained"
    else:
        with pytest.raises(ValueError, match=rf"--logprobs-mode {mode}`.*temperature=.*processed_logprobs`"):
            trainer.train()


@pytest.mark.parametrize(
    ("field", "value"),
    [("save_steps", 0.1), ("logging_steps", 0.5), ("warmup_steps", 0.05), ("lr_scheduler_type", "cosine")],
)
def test_share_of_an_unknown_number_of_steps_is_rejected(tmp_path, field, value):
    named = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, field: value}
    with pytest.raises(ValueError, match=rf"{field}={value!r} needs the number of optimizer steps.*Set `max_steps`"):
        AsyncOPOConfig(**named)
    AsyncOPOConfig(**named, max_steps=100)


@pytest.mark.parametrize(("stage", "rejected"), [(2, False), (3, True)])
def test_parameters_that_cannot_be_sent_are_rejected(stage, rejected):
    # Without DeepSpeed's processes, only what the check reads of accelerate.
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    accelerator = SimpleNamespace(state=state, distributed_type=DistributedType.DEEPSPEED, is_fsdp2=False)
    with pytest.raises(ValueError, match=r"ZeRO-3 shards parameters.*Use FSDP2") if rejected else nullcontext():
        check_sharding(accelerator)
