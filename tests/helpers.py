"""
Shared by tests: processes, scripted rollouts, recording trainers, and an independent computation of OPO.

A scripted rollout replaces generation by completions and rewards that depend only on the row, so that a test decides
what the objective sees: lengths, truncated completions, rewards, `None`. The reference computes the loss and gradient
of an optimizer step in float64 from the definition, sample by sample, with the logits of an unpatched model. It shares
no code with the package or TRL.
"""

import functools
import json
import math
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from opo_trl import OPOConfig, OPOTrainer


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` warns on every trainer otherwise

PROMPTS = ["1+1=", "What is 2 + 2?", "7*6", "Name a prime above ten.", "9-4=", "Half of twelve is", "3", "100/4 ="]

# With `pytest --on-device`, the names of the GPUs or pretend ones; none on the CPU. A process sees the first, except
# where several are launched.
DEVICES = [name for name in os.environ.get("OPO_TRL_ON_DEVICE", "").split(",") if name]
USE_CPU = not DEVICES
PRETEND = "FAKE_CUDA_DEVICES" in os.environ
BACKEND = "gloo" if USE_CPU else None
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
DEVICE_FIELDS = {  # of a recipe
    "use_cpu": USE_CPU,
    "accelerate_config": str(RECIPES / "accelerate" / ("cpu.yaml" if USE_CPU else "single_gpu.yaml")),
}

SMALL = {  # fields of a short run in float32, which writes nothing but its log
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": USE_CPU,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}

# By default, continuous batching takes half of the memory.
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
}

EXACT = 1e-4  # relative error of a float32 gradient of the tiny model against float64 (4e-7 to 1.1e-5 were measured)


# Processes


def environment(*folders: Path, **more: str) -> dict[str, str]:
    """Environment of a process: this checkout's package, modules in `folders`, this interpreter's programs."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    modules = [Path(__file__).resolve().parents[1], *folders, os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(each) for each in modules if each), "PATH": path, **more}


def run_to_its_end(command: Sequence[str | Path], env: dict[str, str], *, limit: float) -> tuple[int, str]:
    """Exit status of a command, and what it has printed. Whatever it has started ends with it, at the latest then."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        log.seek(0)
        return status, log.read()


def devices_for(processes: int) -> dict[str, str]:
    """Environment in which each process of a launch has a device, with `pytest --on-device`."""
    if USE_CPU:
        return {}
    if processes > len(DEVICES):
        pytest.skip(f"needs {processes} devices")
    return {"CUDA_VISIBLE_DEVICES": ",".join(DEVICES[:processes])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def answering(body: dict | None = None) -> Iterator[str]:
    """Address of a server that answers every request with status 200 and some JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def wait_until(condition: Callable[[], object], limit: float = 240.0) -> None:
    """Wait for a condition, for at most `limit` seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"The condition was not met within {limit} seconds.")
        time.sleep(0.01)


class Bomb:
    """Loading its pickle creates a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


# Rollouts


def even_tokens(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """A reward that depends on the sampled tokens: the fraction of even ones."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


@dataclass
class Script:
    """
    Completions and rewards by row. Row i of call c does not depend on the number of processes or micro-batches.

    Args:
        rewards: per row, or per row and reward function; `None` where a function cannot score. Random by default.
        truncated: rows whose completion does not end with EOS.
        tool_tokens: row -> positions of its completion that a tool wrote.
        seed: of lengths, tokens and random rewards.
    """

    rewards: Sequence | None = None
    truncated: Sequence[int] = ()
    tool_tokens: dict[int, Sequence[int]] = field(default_factory=dict)
    seed: int = 0
    min_length: int = 3
    max_length: int = 9
    functions: int = 1
    calls: list = field(default_factory=list)

    def completion(self, call: int, row: int, eos: int) -> list[int]:
        draw = random.Random(f"{self.seed} {call} {row}")
        tokens = [draw.randrange(3, 259) for _ in range(draw.randint(self.min_length, self.max_length))]
        return tokens if row in self.truncated else [*tokens[:-1], eos]

    def reward(self, call: int, row: int, function: int) -> float | None:
        if self.rewards is None:
            return random.Random(f"reward {self.seed} {call} {row} {function}").uniform(0, 3)
        value = self.rewards[row % len(self.rewards)]
        return value[function] if isinstance(value, tuple | list) else value

    def rollout(self, prompts: list, trainer: GRPOTrainer) -> dict:
        """TRL's `rollout_func`."""
        call = len(self.calls)
        start = trainer.accelerator.process_index * len(prompts)
        rows = list(range(start, start + len(prompts)))
        tokenizer = trainer.processing_class
        completions = [self.completion(call, row, tokenizer.eos_token_id) for row in rows]
        prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        own = [
            [int(position not in self.tool_tokens.get(row, ())) for position in range(len(tokens))]
            for row, tokens in zip(rows, completions, strict=True)
        ]
        self.calls.append(
            [
                SimpleNamespace(
                    prompt=prompt,
                    completion=completion,
                    own=mask,
                    rewards=[self.reward(call, row, f) for f in range(self.functions)],
                    truncated=row in self.truncated,
                )
                for row, prompt, completion, mask in zip(rows, prompt_ids, completions, own, strict=True)
            ]
        )
        masks = {"env_mask": own} if self.tool_tokens else {}
        extra = {"row": rows, "call": [call] * len(rows)}
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, **extra, **masks}

    @staticmethod
    def observed(rollout: SimpleNamespace, rewards: list[list[float | None]]) -> list[SimpleNamespace]:
        """A recorded rollout that the model generated, and its rewards by row and function, as an entry of `calls`."""

        def unpadded(name: str, i: int) -> list[int]:
            return vars(rollout)[f"{name}_ids"][i][vars(rollout)[f"{name}_mask"][i].bool()].tolist()

        own = vars(rollout).get("tool_mask", torch.ones_like(rollout.completion_ids)).tolist()
        return [
            SimpleNamespace(
                prompt=unpadded("prompt", i),
                completion=unpadded("completion", i),
                own=own[i][: len(unpadded("completion", i))],
                rewards=row_rewards,
                truncated=False,
            )
            for i, row_rewards in enumerate(rewards)
        ]

    def reward_functions(self) -> list[Callable]:
        def function(index: int) -> Callable:
            def reward(prompts, completions, row, call, **kwargs):
                return [self.reward(c, r, index) for r, c in zip(row, call, strict=True)]

            reward.__name__ = f"reward_{index}"
            return reward

        return [function(index) for index in range(self.functions)]


# Trainers that record


@dataclass
class Step:
    """A recorded optimizer step: the policy before it, micro-batches and their losses, the gradient."""

    policy: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    losses: list[float]
    gradient: dict[str, Tensor]


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the model's state, on the host."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def on_host(batch: dict) -> dict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}


class Recording:
    """Mixin that records, on the host, a trainer's rollouts (before they are divided) and optimizer steps."""

    def record(self, inject: Callable[[dict, GRPOTrainer], None] | None = None):
        self.inject = inject
        self.rollouts, self.steps, self._batches, self._losses = [], [], [], []
        self.initial = snapshot(self.model)
        self.add_callback(_PreOptimizerStep(self))
        return self

    def _generate_and_score_completions(self, inputs):
        self._policy = snapshot(self.model)
        rollout = super()._generate_and_score_completions(inputs)
        return rollout if isinstance(self, OPOTrainer) else self._finish_rollout(rollout)

    def _finish_rollout(self, rollout):
        if isinstance(self, OPOTrainer):
            rollout = super()._finish_rollout(rollout)
        n = len(rollout["advantages"])
        # These columns travel with the samples, and identify them afterwards.
        device = self.accelerator.device
        rollout["row"] = torch.arange(n, device=device) + n * self.accelerator.process_index
        rollout["rollout"] = torch.full((n,), len(self.rollouts), device=device)
        if self.inject is not None:
            self.inject(rollout, self)
        self.rollouts.append(SimpleNamespace(policy=self._policy, **on_host(rollout)))
        return rollout

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._batches.append(on_host(inputs))
        return inputs

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._losses.append(loss.item())
        return loss

    def end_of_step(self):
        gradient = {
            name: p.grad.to("cpu", copy=True) for name, p in self.model.named_parameters() if p.grad is not None
        }
        self.steps.append(Step(snapshot(self.model), self._batches, self._losses, gradient))
        self._batches, self._losses = [], []


class _PreOptimizerStep(TrainerCallback):
    def __init__(self, trainer: Recording):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.end_of_step()


class RecordingOPO(Recording, OPOTrainer):
    pass


class RecordingGRPO(Recording, GRPOTrainer):
    pass


def make_trainer(
    model: str | torch.nn.Module,
    folder: Path,
    *,
    script: Script | None = None,
    inject: Callable[[dict, GRPOTrainer], None] | None = None,
    trainer_class: type[Recording] = RecordingOPO,
    trainer_arguments: dict | None = None,
    **overrides,
) -> Recording:
    """
    A recording trainer in float32: 2 groups of 4 per rollout, one optimizer step of 2 micro-batches, SGD.

    SGD without clipping keeps the size of the gradient, which AdamW's division would hide.
    """
    script = Script() if script is None else script
    arguments = {
        "train_dataset": Dataset.from_dict({"prompt": PROMPTS}),
        "reward_funcs": script.reward_functions(),
        "rollout_func": script.rollout,
        **(trainer_arguments or {}),
    }
    options = {
        **SMALL,
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        **overrides,
    }
    if issubclass(trainer_class, OPOTrainer):
        options = {"skip_inert_rows": False, **options}  # the reference needs every sample
    config_class = OPOConfig if issubclass(trainer_class, OPOTrainer) else GRPOConfig
    return trainer_class(model=model, args=config_class(**options), **arguments).record(inject)


def trained(*args, **kwargs) -> Recording:
    """[`make_trainer`], trained."""
    trainer = make_trainer(*args, **kwargs)
    trainer.train()
    return trainer


def logged(trainer: Recording) -> list[dict]:
    """Log entries of the optimizer steps."""
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]


def metric(trainer: Recording, name: str) -> list:
    """The values of a metric at the optimizer steps."""
    return [entry[name] for entry in logged(trainer)]


def changed_weights(trainer: Recording) -> set[str]:
    """Names of the weights that training has changed."""
    weights = snapshot(trainer.accelerator.unwrap_model(trainer.model))
    return {name for name, weight in weights.items() if not torch.equal(weight, trainer.initial[name])}


def all_finite(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether no weight is infinite or NaN."""
    return all(weight.isfinite().all() for weight in weights.values())


def same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two models have the same weights, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(entry: dict) -> dict:
    """A log entry without times, and without `train_loss`, the mean over the latest call's steps."""
    times = re.compile(r"step_time|train_runtime|train_loss|opo/time/.*|.*per_second.*")
    return {name: value for name, value in entry.items() if not times.fullmatch(name)}


# The reference


def advantages(rewards: list[list[float | None]], args: GRPOConfig, G: int) -> list[float]:
    """TRL's documented advantages, from raw rewards: `rewards[row][function]`. 0 where no function could score."""
    weights, scale = args.reward_weights or [1.0] * len(rewards[0]), args.scale_rewards == "group"

    def centred(values: list[float | None]) -> list[float | None]:
        known = [v for v in values if v is not None]
        if not known or (scale and len(known) < 2):
            return [None] * len(values)
        divisor = statistics.stdev(known) + 1e-4 if scale else 1.0
        return [None if v is None else (v - statistics.fmean(known)) / divisor for v in values]

    known = [[(w, r) for w, r in zip(weights, row, strict=True) if r is not None] for row in rewards]
    summed = [sum(w * r for w, r in row) if row else None for row in known]
    result = [v for i in range(0, len(summed), G) for v in centred(summed[i : i + G])]
    return [0.0 if v is None else v for v in result]


def simplex_projection(target: list[float]) -> list[float]:
    """Euclidean projection of 1 + target on {t ≥ 0, mean(t) = 1}, less 1, by bisection on the threshold."""
    low, high = min(target) - 1, max(target) + 1
    for _ in range(200):
        middle = (low + high) / 2
        mass = sum(max(1 + v - middle, 0.0) for v in target)
        low, high = (middle, high) if mass > len(target) else (low, middle)
    return [max(1 + v - low, 0.0) - 1 for v in target]


def drive_and_target(
    args: OPOConfig, A: list[float], valid: list[bool], correction: list[float], tau: float, G: int
) -> SimpleNamespace:
    """Escort weights, drive, target and mu, computed on lists."""
    N = len(A)
    omega, drive = [0.0] * N, [0.0] * N
    for start in range(0, N, G):
        rows = [i for i in range(start, start + G) if valid[i]]
        if not rows:
            continue
        exponent = {i: (1 - args.alpha) * (A[i] / tau - correction[i]) for i in rows}
        top = max(exponent.values())
        normalizer = sum(math.exp(e - top) for e in exponent.values()) / len(rows)
        for i in rows:
            omega[i] = math.exp(exponent[i] - top) / normalizer
        mean = statistics.fmean(omega[i] for i in rows)
        spread = statistics.stdev(omega[i] for i in rows) if len(rows) > 1 else 0.0
        if spread > 1e-12:
            for i in rows:
                drive[i] = (omega[i] - mean) / (spread if args.drive_scaling == "group" else 1.0)
    kept = [i for i in range(N) if valid[i]]
    if args.drive_scaling == "batch":
        spread = statistics.stdev(drive[i] for i in kept)
        drive = [g / spread for g in drive]
    mu = args.mu
    if args.chi2_radius is not None:
        mu = math.sqrt(statistics.fmean(drive[i] ** 2 for i in kept) / args.chi2_radius)
    if args.positivity == "stiffen":
        mu = max(mu, -min(drive))
    target = [g / mu for g in drive]
    if args.positivity == "clip":
        target = [max(v, -1 + args.positivity_epsilon) for v in target]
    elif args.positivity == "project":
        for start in range(0, N, G):
            rows = [i for i in range(start, start + G) if valid[i]]
            if rows:
                for i, v in zip(rows, simplex_projection([target[i] for i in rows]), strict=True):
                    target[i] = v
    return SimpleNamespace(omega=omega, drive=drive, target=target, mu=mu, temperature=tau)


@functools.cache
def _float64_model(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder).double().eval()


def in_float64(policy: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float64, copy=True) for name, tensor in policy.items()}


class Reference:
    """
    OPO in float64 for a recorded trainer.

    Args:
        trainer: after training.
        script: its script.
        model: the same architecture, in float64 and without TRL's patches; loaded from the trainer's model by default.
    """

    def __init__(self, trainer: Recording, script: Script, model: torch.nn.Module | None = None):
        self.trainer, self.script, self.args = trainer, script, trainer.args
        self.G = trainer.args.num_generations
        self.model = _float64_model(trainer.model.config._name_or_path) if model is None else model.double().eval()
        self._anchors: dict[tuple[int, int], Tensor] = {}

    def logps(self, policy: dict[str, Tensor], row: SimpleNamespace) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token and entropy at its position, from the full logits."""
        tokens = torch.tensor([row.prompt + row.completion])
        attended = {"attention_mask": torch.tensor([vars(row).get("attended", [1] * tokens.numel())])}
        logits = torch.func.functional_call(self.model, policy, args=(tokens,), kwargs=attended).logits[0]
        logits = logits[len(row.prompt) - 1 : -1] / self.args.temperature
        full = logits.log_softmax(-1)
        chosen = full.gather(1, torch.tensor(row.completion)[:, None]).squeeze(1)
        return chosen, -(full.exp() * full).sum(-1)

    @torch.no_grad()
    def anchor(self, rollout: int, row: int) -> Tensor:
        """Log-probability of each completion token under the policy that generated it."""
        if (rollout, row) not in self._anchors:
            policy = in_float64(self.trainer.rollouts[rollout].policy)
            self._anchors[rollout, row], _ = self.logps(policy, self.script.calls[rollout][row])
        return self._anchors[rollout, row]

    def valid(self, row: SimpleNamespace) -> bool:
        masked = row.truncated and self.args.mask_truncated_completions
        return not masked and any(row.own) and any(r is not None for r in row.rewards)

    def mean_length(self, rollout: int) -> float:
        """Mean number of tokens of a rollout's valid completions."""
        lengths = [sum(row.own) for row in self.script.calls[rollout] if self.valid(row)]
        return statistics.fmean(lengths) if lengths else 1.0

    def drive(self, rollout: int) -> SimpleNamespace:
        """Advantages, escort weights, drive and target of a rollout."""
        args, rows = self.args, self.script.calls[rollout]
        valid = [self.valid(row) for row in rows]
        sums, means = [], []
        needed = args.anchor_correction != "absorbed" or args.adaptive_temperature
        for i, row in enumerate(rows):
            own = torch.tensor(row.own).bool()
            logps = self.anchor(rollout, i)[own] if needed else torch.zeros(1)
            sums.append(logps.sum().item())
            means.append(logps.mean().item() if len(logps) else 0.0)
        A = advantages([row.rewards for row in rows], args, self.G)
        correction = {"absorbed": [0.0] * len(rows), "length_normalized": means, "sequence": sums}
        tau = args.escort_temperature
        if args.adaptive_temperature:
            tau = self._temperature([m for m, v in zip(means, valid, strict=True) if v], rows, valid)
        result = drive_and_target(args, A, valid, correction[args.anchor_correction], tau, self.G)
        return SimpleNamespace(**vars(result), advantages=A, valid=valid)

    def _temperature(self, anchor_means: list[float], rows: list, valid: list[bool]) -> float:
        args = self.args
        H = min(max(-statistics.fmean(anchor_means) / math.log(self.model.config.vocab_size), 0.0), 1.0)
        weights = args.reward_weights or [1.0] * len(rows[0].rewards)
        rewards = [
            sum(w * r for w, r in zip(weights, row.rewards, strict=True) if r is not None)
            for row, kept in zip(rows, valid, strict=True)
            if kept
        ]
        low, high = min(rewards), max(rewards)
        success = 2 * (statistics.fmean(rewards) - low) / (high - low) - 1 if high > low else 0.0
        tau = args.escort_temperature * (1 + 0.2 * H - 0.5 * (1 - H) * success)
        return min(max(tau, args.temperature_range[0]), args.temperature_range[1])

    def step(
        self,
        step: int,
        *,
        row_weight: Callable[[int, int], float] = lambda rollout, row: 1.0,
        kept_tokens: Callable[[int, int, Tensor], Tensor] | None = None,
        entropy_coef: float = 0.0,
        reference_policy: dict[str, Tensor] | None = None,
    ) -> SimpleNamespace:
        """
        Loss and gradient of one optimizer step, and the samples' log-ratios.

        Args:
            row_weight: of a sample, from its rollout and index.
            kept_tokens: bool mask of a sample's tokens that steer the policy, from rollout, index and entropies.
            entropy_coef: coefficient of the entropy bonus in this step.
            reference_policy: reference of the KL term; the initial policy by default.
        """
        args, record = self.args, self.trainer.steps[step]
        policy = {name: tensor.requires_grad_() for name, tensor in in_float64(record.policy).items()}
        reference_policy = in_float64(self.trainer.initial if reference_policy is None else reference_policy)
        batches = record.batches
        members = [(int(k), int(i)) for b in batches for k, i in zip(b["rollout"], b["row"], strict=True)]
        drives = {k: self.drive(k) for k, _ in members}
        scales = {k: 1.0 if args.log_ratio_reduction == "mean" else 1 / self.mean_length(k) for k in drives}
        out = SimpleNamespace(deltas=[], ratios=[], weights=[], targets=[], mus=[], work=[], dissipation=[], rows=[])
        losses = []
        for k, i in members:
            row, drive = self.script.calls[k][i], drives[k]
            own = torch.tensor(row.own).bool()
            if args.mask_truncated_completions and row.truncated:
                own = torch.zeros_like(own)
            length = max(int(own.sum()), 1)
            logps, entropies = self.logps(policy, row)
            anchor, age = self.anchor(k, i), 1.0
            if args.num_iterations > 1 and args.ratio_form != "truncated":
                moved = (logps - anchor)[own].sum().item()
                age = min(math.exp(moved / length if args.log_ratio_reduction == "mean" else moved), 2.0)
            steered = own if kept_tokens is None else own & kept_tokens(k, i, entropies.detach())
            ratio = (logps - anchor)[steered].sum()
            delta = ratio / length if args.log_ratio_reduction == "mean" else ratio
            delta = delta + (delta.clamp(-args.log_ratio_clamp, args.log_ratio_clamp) - delta).detach()
            u = delta if args.ratio_form == "log" else delta.exp() - 1
            weight = age * row_weight(k, i) if drive.valid[i] else 0.0
            work, dissipation = -weight * drive.mu * drive.target[i] * u, weight * drive.mu / 2 * u**2
            if args.ratio_form == "truncated":
                u = min(u.item(), 1.0)
                weighted = weight * (1 + u) * drive.mu * delta
                work, dissipation = -weighted * drive.target[i], weighted * u
            loss = scales[k] * (work + dissipation)
            if args.beta:
                with torch.no_grad():
                    ref, _ = self.logps(reference_policy, row)
                kl = (ref - logps).exp() - (ref - logps) - 1
                if args.use_bias_correction_kl:
                    kl = kl * (logps - anchor).exp()
                kl = kl[own].sum()
                loss = loss + args.beta * scales[k] * (kl / length if args.log_ratio_reduction == "mean" else kl)
            if entropy_coef:
                loss = loss - entropy_coef * entropies[steered].sum() / max(int(steered.sum()), 1)
            losses.append(loss if drive.valid[i] else 0.0)  # invalid samples have no KL term and no bonus either
            out.rows.append((k, i))
            out.deltas.append(delta.item())
            out.ratios.append((logps - anchor)[own].sum().item())
            out.weights.append(weight)
            out.targets.append(drive.target[i])
            out.mus.append(drive.mu)
            out.work.append(float(work.detach()))
            out.dissipation.append(float(dissipation.detach()))
        total = sum(losses) / len(losses)
        # Parameters without any effect have a gradient of zero.
        gradients = torch.autograd.grad(total, list(policy.values()), allow_unused=True, materialize_grads=True)
        out.loss, out.gradient = total.item(), dict(zip(policy, gradients, strict=True))
        return out


# Comparison


def norm(gradient: dict[str, Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradient.values()))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference, over all tensors."""
    assert one.keys() == other.keys()
    return norm({name: one[name].double() - other[name].double() for name in one})


def relative_error(gradient: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return distance(gradient, reference) / norm(reference)


def assert_step_equals(record: Step, reference: SimpleNamespace, tolerance: float = EXACT):
    """Loss and gradient of a recorded optimizer step against the reference."""
    assert norm(reference.gradient) > 1e-3, "the reference has no gradient: the comparison would prove nothing"
    assert relative_error(record.gradient, reference.gradient) < tolerance
    # Work and bonus may cancel, so the error of the loss is relative to the size of its terms.
    size = statistics.fmean(abs(w) + d for w, d in zip(reference.work, reference.dissipation, strict=True))
    assert abs(sum(record.losses) - reference.loss) < 1e-5 * (1 + abs(reference.loss) + size)


def several_processes(folder: Path, sharding: str) -> list[str]:
    """
    Arguments that adapt a configuration of `recipes/accelerate` to small models and the device of these tests.

    With `use_cpu`, DeepSpeed is off, and without a backend accelerate sees a single process.
    """
    config = yaml.safe_load((RECIPES / "accelerate" / f"{sharding}.yaml").read_text())
    path = folder / f"{sharding}.yaml"
    path.write_text(yaml.safe_dump({**config, "mixed_precision": "no"}))
    device = ["--ddp_backend", "gloo"] if USE_CPU and sharding.startswith("zero") else ["--use_cpu", str(USE_CPU)]
    return ["--accelerate_config", str(path), *device]


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit the size of files; −1 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
