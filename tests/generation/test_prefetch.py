"""
`prefetch_rollouts`: a vLLM server generates the next rollout while the policy trains on this one.

The server here is one of these tests: it speaks the protocol of TRL's client over HTTP, and samples with PyTorch. Only
the transport of weights over NCCL is replaced, by HTTP. `tests/with_vllm` uses a real vLLM.
"""

import io
import json
import math
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from float64_reference import EXACT, Reference, assert_step_equals
from launched_processes import launch, logs
from named_tensors import in_float64, snapshot
from recording_trainers import RecordingOPO, logged, make_trainer
from scripted_rollouts import PROMPTS, Script, even_tokens
from transformers import AutoModelForCausalLM
from trl.generation import vllm_client, vllm_generation

from opo_trl import OPOConfig
from opo_trl.generation.prefetch import Prefetch
from opo_trl.generation.prompt_order import EpochSampler, Place


STEPS = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 6, "learning_rate": 0.02}


class Server(ThreadingHTTPServer):
    """Serves a model: completions of at most six tokens, and new weights. It records what it was asked for."""

    daemon_threads = True

    def __init__(self, folder: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.prompts: list[list[list[int]]] = []
        self.logprobs: list[list[float]] = []  # of each completion
        self.busy = threading.Lock()
        self.overlapping = 0  # requests that came while another was answered
        self.may_answer = threading.Semaphore(0)  # only if `waits`: once for each request
        self.waits = False
        self.logprobs_mode = "processed_logprobs"
        self.ends_some = False  # whether every other completion ends after six tokens, and is not cut off there
        self.leaves_out = False  # whether each completion has a token without a log-probability


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        mode = {"vllm_config": {"model_config": {"logprobs_mode": self.server.logprobs_mode}}}
        self.answer({"data": [{"id": "policy"}], **mode})

    def do_POST(self):
        if self.server.model is None:  # a status that TRL's client does not try again
            self.send_error(404)
            return
        if not self.server.busy.acquire(blocking=False):
            self.server.overlapping += 1
            self.server.busy.acquire()
        try:
            content = self.content(self.rfile.read(int(self.headers["Content-Length"] or 0)))
        finally:
            self.server.busy.release()
        self.answer(content)

    def content(self, body: bytes) -> dict:
        if self.path == "/weights":
            self.server.model.load_state_dict(torch.load(io.BytesIO(body)))
        return {"choices": self.choices(json.loads(body))} if self.path == "/v1/completions" else {}

    @torch.no_grad()
    def choices(self, request: dict) -> list[dict]:
        server = self.server
        server.prompts.append(request["prompt"])
        if server.waits:
            assert server.may_answer.acquire(timeout=600), "nobody let the server answer"
        draws = torch.Generator().manual_seed(len(server.prompts))
        choices = []
        for prompt in request["prompt"]:
            for _ in range(request["n"]):
                tokens, logps = list(prompt), []
                while len(logps) < 6:
                    logits = server.model(torch.tensor([tokens])).logits[0, -1] / request["temperature"]
                    token = int(torch.multinomial(logits.softmax(dim=-1), 1, generator=draws))
                    if server.ends_some and len(logps) == 5 and len(choices) % 2:
                        token = server.model.config.eos_token_id
                    tokens.append(token)
                    logps.append(float(logits.log_softmax(dim=-1)[token]))
                    if token == server.model.config.eos_token_id:
                        break
                if server.leaves_out:
                    logps[0] = math.nan
                own = tokens[len(prompt) :]
                server.logprobs.append(logps)
                names = [f"token_id:{token}" for token in own]
                logprobs = {"tokens": names, "token_logprobs": logps, "top_logprobs": [None] * len(own)}
                choices.append({"prompt_token_ids": prompt, "token_ids": own, "logprobs": logprobs})
        return choices

    def answer(self, content: dict):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def send_over_http(client, metadata, weights) -> None:
    """In place of NCCL."""
    buffer = io.BytesIO()
    torch.save({name: weight.detach().cpu() for name, weight in weights}, buffer)
    client.session.post(f"{client.base_url}/weights", data=buffer.getvalue()).raise_for_status()


def without_vllm(monkeypatch) -> None:
    """Let TRL's client be used where vLLM is not installed."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", send_over_http)


@pytest.fixture
def server(tiny_model, monkeypatch) -> Iterator[Server]:
    without_vllm(monkeypatch)
    with Server(tiny_model) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def fields(port: int, **options) -> dict:
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}"}
    arguments = {"rollout_func": None, "reward_funcs": even_tokens, **options.pop("trainer_arguments", {})}
    return {**STEPS, **served, "prefetch_rollouts": 1, "trainer_arguments": arguments, **options}


class Lets(RecordingOPO):
    """Lets the server answer the request for a rollout only after the policy has trained on the one before."""

    served: Server

    def training_step(self, *inputs, **named):
        loss = super().training_step(*inputs, **named)
        if self._step % 2 == 0:  # the rollout is used up
            self.served.may_answer.release()
        return loss


def test_the_next_rollout_is_asked_for_before_training_on_this_one(server, tiny_model, tmp_path):
    """Without overlap, the server would wait for the trainer, and the trainer for the server."""
    server.waits = True
    trainer = make_trainer(tiny_model, tmp_path, trainer_class=Lets, **fields(server.server_port))
    trainer.served = server
    server.may_answer.release()  # the first rollout
    trainer.train()
    assert len(server.prompts) == 3  # none after the last rollout
    assert server.overlapping == 0
    assert [entry["opo/age"] for entry in logged(trainer) if "opo/age" in entry] == [0, 2, 2]
    assert max(entry["opo/off_policy_steps"] for entry in logged(trainer)) == 3


class OfOlderPolicies(Reference):
    """The behaviour policy of a rollout is the policy at the start of the rollout before."""

    @torch.no_grad()
    def anchor(self, rollout: int, row: int) -> torch.Tensor:
        policy = in_float64(self.trainer.rollouts[max(rollout - 1, 0)].policy)
        logps, _ = self.logps(policy, self.script.calls[rollout][row])
        return logps


def observed(trainer: RecordingOPO) -> Script:
    """The rollouts that a trainer has got."""
    script = Script()
    for rollout in trainer.rollouts:
        rewards = [[value] for value in rollout.rewards_per_func[:, 0].tolist()]
        script.calls.append(Script.observed(rollout, rewards))
    return script


@pytest.mark.parametrize(
    "options", [{"num_iterations": 2}, {"ratio_form": "log"}, pytest.param({}, marks=pytest.mark.slow)], ids=str
)
def test_gradients_are_those_of_completions_of_the_older_policy(server, tiny_model, tmp_path, options):
    trainer = make_trainer(tiny_model, tmp_path, **fields(server.server_port, **options))
    trainer.train()
    reference = OfOlderPolicies(trainer, observed(trainer))
    compared = [number for number in range(6) if trainer.steps[number].batches]
    for number in compared:
        assert_step_equals(trainer.steps[number], reference.step(number), tolerance=10 * EXACT)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_token_without_a_log_probability_has_no_log_ratio(server, tiny_model, tmp_path, dropout):
    """Of vLLM, NaN. The gradient would be NaN, too, and the step skipped. The policy's own is without dropout."""
    server.leaves_out = True
    options = {"model_init_kwargs": {"attention_dropout": dropout}}
    trainer = make_trainer(tiny_model, tmp_path, **fields(server.server_port, **options))
    trainer.train()
    assert [entry["opo/skipped_steps"] for entry in logged(trainer)] == [0] * 6
    reference = Reference(trainer, observed(trainer))
    for number, rollout in enumerate(trainer.rollouts[1:], 1):
        policy = in_float64(rollout.policy)
        for completion, logps in zip(reference.script.calls[number], rollout.old_per_token_logps, strict=True):
            own, _ = reference.logps(policy, completion)
            assert logps[0].item() == pytest.approx(own[0].item(), abs=1e-5)


@pytest.mark.parametrize("truncated", [False, True])
def test_a_record_has_the_log_probabilities_of_the_server(server, tiny_model, tmp_path, truncated):
    server.ends_some = True  # otherwise, nothing would be trained on
    options = {"save_rollouts": True, "mask_truncated_completions": truncated}
    make_trainer(tiny_model, tmp_path, **fields(server.server_port, **options)).train()
    files = sorted((tmp_path / "rollouts").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    recorded = [row["logprobs"] for row in rows]
    assert recorded == [pytest.approx(logps, abs=1e-6) for logps in server.logprobs[: len(rows)]]


def test_a_resumed_run_asks_again_for_what_was_in_flight(server, tiny_model, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(tiny_model, tmp_path, **fields(server.server_port, **saved)).train()
    asked = list(server.prompts)
    server.prompts.clear()
    rest = make_trainer(tiny_model, tmp_path, **fields(server.server_port, **saved))
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # inside the second rollout
    assert server.prompts == asked[2:]
    assert [entry["opo/age"] for entry in logged(rest)[3:] if "opo/age" in entry] == [0]


def test_an_evaluation_between_two_rollouts_leaves_the_next_one_alone(server, tiny_model, tmp_path):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    arguments = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:2]})}
    trainer = make_trainer(
        tiny_model, tmp_path, **fields(server.server_port, trainer_arguments=arguments, **evaluation)
    )
    trainer.train()
    assert [entry["opo/age"] for entry in logged(trainer) if "opo/age" in entry] == [0, 2, 2]
    of_training = [prompts for prompts in server.prompts if len(prompts) == 2]
    of_evaluations = [prompts for prompts in server.prompts if len(prompts) == 1]
    assert (len(of_training), len(of_evaluations)) == (3, 12)
    assert server.overlapping == 0


def test_a_server_that_fails_meanwhile_ends_the_run(server, tiny_model, tmp_path):
    class Stops(RecordingOPO):
        def training_step(self, *inputs, **named):
            server.model = None
            return super().training_step(*inputs, **named)

    trainer = make_trainer(tiny_model, tmp_path, trainer_class=Stops, **fields(server.server_port))
    with pytest.raises(RuntimeError, match="no longer answers as it should"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": False}, "prefetch_rollouts=1 is not allowed"),
        ({"vllm_mode": "colocate"}, "prefetch_rollouts=1 is not allowed"),
        ({"max_sampling_rounds": 2}, "are not known in advance"),
        ({"prefetch_rollouts": 2}, "0 or 1"),
        ({"top_p": 0.9}, "sample without top_p=0.9"),
        ({"repetition_penalty": 1.1}, "sample without repetition_penalty=1.1"),
        ({"generation_kwargs": {"min_p": 0.1}}, "sample without min_p=0.1"),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, "sample without presence_penalty=0.5"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_in_advance_is_rejected(tmp_path, options, message):
    served = {"use_vllm": True, "vllm_mode": "server", "prefetch_rollouts": 1, "bf16": False, "use_cpu": True}
    with pytest.raises(ValueError, match=message):
        OPOConfig(str(tmp_path), report_to="none", **{**served, **options})


def test_a_server_with_other_log_probabilities_is_rejected(server, tiny_model, tmp_path):
    server.logprobs_mode = "raw_logprobs"
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        make_trainer(tiny_model, tmp_path, **fields(server.server_port))


def test_images_are_rejected(server, tiny_model, tmp_path):
    arguments = {"train_dataset": Dataset.from_dict({"prompt": PROMPTS, "image": PROMPTS})}
    with pytest.raises(ValueError, match="in advance with image"):
        make_trainer(tiny_model, tmp_path, **fields(server.server_port, trainer_arguments=arguments))


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_after_a_place_are_those_that_the_data_loader_takes(shuffle):
    sampler = EpochSampler(range(23), mini_repeat_count=2, batch_size=5, repeat_count=3, shuffle=shuffle, seed=7)
    place = Place()
    for epoch in range(3):
        sampler.begin(Place(epoch), skipped=0)
        samples = list(sampler)
        assert len(samples) == 4 * 30  # of five prompts, each repeated, three times over
        for begin in range(0, len(samples), 30):
            prompts_of_rollout = samples[begin : begin + 10 : 2]
            assert sampler.prompts_after(place) == prompts_of_rollout
            place = place.after_rollout(5, 23)


def train_on_processes(model: str, folder: str, port: int, processes: int) -> None:
    """Train, and write the weights and the log."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_vllm(monkeypatch)
        sizes = {"per_device_train_batch_size": 4 // processes}
        trainer = make_trainer(model, Path(folder) / "run", **fields(port, **sizes))
        trainer.train()
    if os.environ.get("RANK", "0") == "0":
        state = snapshot(trainer.accelerator.unwrap_model(trainer.model))
        ages = [entry.get("opo/age") for entry in logged(trainer)]
        torch.save({"state": state, "ages": ages}, Path(folder) / "result.pt")


def test_two_processes_train_as_one(server, tiny_model, tmp_path):
    results = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        server.prompts.clear()
        server.model.load_state_dict(AutoModelForCausalLM.from_pretrained(tiny_model).state_dict())
        arguments = (train_on_processes, tiny_model, str(folder), server.server_port, processes)
        if processes == 1:
            train_on_processes(*arguments[1:])
        else:
            status = launch(*arguments, config="multi_gpu", processes=2, folder=folder)
            assert status == [0, 0], logs(folder)
        results.append(SimpleNamespace(**torch.load(folder / "result.pt")))
    one, two = results
    assert one.ages == two.ages
    for name, weight in one.state.items():
        assert torch.allclose(two.state[name], weight, rtol=0, atol=1e-4)


def test_a_request_that_failed_in_advance_is_raised_before_weights_are_sent():
    """Otherwise a server that is gone would be tried again with the weights."""
    answers = iter([{"completion_ids": [[1]]}])

    def generate(**request):
        try:
            return next(answers)
        except StopIteration:
            raise ConnectionError("the server is gone") from None

    prefetch = Prefetch(generate, next_prompts=lambda: [[7]], step=lambda: 0)
    prefetch.generate(prompts=[[5]])
    with pytest.raises(ConnectionError, match="the server is gone"):
        prefetch.wait()
    prefetch.drop()
    prefetch.wait()
