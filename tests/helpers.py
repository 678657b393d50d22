"""
Shared by tests: processes, scripted rollouts, recording trainers, and an independent computation of OPO.

A scripted rollout replaces generation by completions and rewards that depend only on the row, so that a test decides
what the objective sees: lengths, truncated completions, rewards, `None`. The reference computes the loss and gradient
of an optimizer step in float64 from the definition, sample by sample, with the logits of an unpatched model. It shares
no code with the package or TRL.
"""

import functools
import itertools
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
ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
ONE_PROCESS = "cpu.yaml" if USE_CPU else "single_gpu.yaml"
DEVICE_FIELDS = {  # of a recipe
    "use_cpu": USE_CPU,
    "accelerate_config": str(RECIPES / "accelerate" / ONE_PROCESS),
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
    programs = Path(sys.executable).parent
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    modules = [ROOT, *folders, os.environ.get("PYTHONPATH")]
    module_path = os.pathsep.join(map(str, filter(None, modules)))
    return {**os.environ, "PYTHONPATH": module_path, "PATH": path, **more}


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
    rewards = []
    for tokens in completion_ids:
        even = [token for token in tokens if token % 2 == 0]
        rewards.append(len(even) / len(tokens))
    return rewards


def unpadded(ids: Tensor, mask: Tensor) -> list[int]:
    return ids[mask.bool()].tolist()


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
        length = draw.randint(self.min_length, self.max_length)
        tokens = [draw.randrange(3, 259) for _ in range(length)]
        return tokens if row in self.truncated else [*tokens[:-1], eos]

    def reward(self, call: int, row: int, function: int) -> float | None:
        if self.rewards is None:
            draw = random.Random(f"reward {self.seed} {call} {row} {function}")
            return draw.uniform(0, 3)
        rewards = self.rewards[row % len(self.rewards)]
        return rewards[function] if isinstance(rewards, tuple | list) else rewards

    def is_own(self, row: int, length: int) -> list[int]:
        """1 for each token of a completion that the policy wrote, and 0 for one that a tool wrote."""
        of_tools = self.tool_tokens.get(row, ())
        return [int(position not in of_tools) for position in range(length)]

    def entry(self, call: int, row: int, prompt: list[int], eos: int) -> SimpleNamespace:
        """Tokens of a prompt and a completion, which of these the policy wrote, and the rewards by function."""
        completion = self.completion(call, row, eos)
        return SimpleNamespace(
            prompt=prompt,
            completion=completion,
            own=self.is_own(row, len(completion)),
            rewards=[self.reward(call, row, function) for function in range(self.functions)],
            truncated=row in self.truncated,
        )

    def rollout(self, prompts: list, trainer: GRPOTrainer) -> dict:
        """TRL's `rollout_func`."""
        call = len(self.calls)
        n = len(prompts)
        start = trainer.accelerator.process_index * n
        rows = list(range(start, start + n))
        tokenizer = trainer.processing_class
        entries = []
        for row, prompt in zip(rows, prompts, strict=True):
            prompt_ids = tokenizer(prompt)["input_ids"]
            entry = self.entry(call, row, prompt_ids, tokenizer.eos_token_id)
            entries.append(entry)
        self.calls.append(entries)
        rollout = {
            "prompt_ids": [entry.prompt for entry in entries],
            "completion_ids": [entry.completion for entry in entries],
            "logprobs": None,
            "row": rows,
            "call": [call] * n,
        }
        if self.tool_tokens:
            rollout["env_mask"] = [entry.own for entry in entries]
        return rollout

    @staticmethod
    def observed(rollout: SimpleNamespace, rewards: list[list[float | None]]) -> list[SimpleNamespace]:
        """A recorded rollout that the model generated, and its rewards by row and function, as an entry of `calls`."""
        every_token = torch.ones_like(rollout.completion_ids)
        is_own = vars(rollout).get("tool_mask", every_token)
        entries = []
        for i, row_rewards in enumerate(rewards):
            completion = unpadded(rollout.completion_ids[i], rollout.completion_mask[i])
            entry = SimpleNamespace(
                prompt=unpadded(rollout.prompt_ids[i], rollout.prompt_mask[i]),
                completion=completion,
                own=is_own[i, : len(completion)].tolist(),
                rewards=row_rewards,
                truncated=False,
            )
            entries.append(entry)
        return entries

    def reward_functions(self) -> list[Callable]:
        def function(index: int) -> Callable:
            def reward(prompts, completions, row, call, **kwargs):
                indices = zip(call, row, strict=True)
                return [self.reward(call_index, row_index, index) for call_index, row_index in indices]

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
        self.rollouts = []
        self.steps = []
        self._batches = []
        self._losses = []
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
        first_row = n * self.accelerator.process_index
        rollout["row"] = torch.arange(n, device=device) + first_row
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
        gradient = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.to("cpu", copy=True)
        step = Step(snapshot(self.model), self._batches, self._losses, gradient)
        self.steps.append(step)
        self._batches = []
        self._losses = []


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


def centered(values: list[float | None], scale: bool) -> list[float | None]:
    """A group's values less their mean, divided by their deviation if `scale`; `None` where that does not exist."""
    known = [value for value in values if value is not None]
    if not known or (scale and len(known) < 2):
        return [None] * len(values)
    mean = statistics.fmean(known)
    divisor = statistics.stdev(known) + 1e-4 if scale else 1.0
    return [None if value is None else (value - mean) / divisor for value in values]


def weighted_sum(rewards: list[float | None], weights: list[float]) -> float | None:
    """The sum over the functions that could score; `None` if none could."""
    terms = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
    return sum(terms) if terms else None


def advantages(rewards: list[list[float | None]], args: GRPOConfig, G: int) -> list[float]:
    """TRL's documented advantages, from raw rewards: `rewards[row][function]`. 0 where no function could score."""
    weights = args.reward_weights or [1.0] * len(rewards[0])
    scale = args.scale_rewards == "group"
    sums = [weighted_sum(row_rewards, weights) for row_rewards in rewards]
    result = []
    for start in range(0, len(sums), G):
        of_group = sums[start : start + G]
        result += centered(of_group, scale)
    return [0.0 if advantage is None else advantage for advantage in result]


def positive_part(values: list[float], threshold: float) -> list[float]:
    """By how much each value exceeds the threshold; 0 where it does not."""
    return [max(value - threshold, 0.0) for value in values]


def simplex_projection(target: list[float]) -> list[float]:
    """Euclidean projection of 1 + target on {t ≥ 0, mean(t) = 1}, less 1, by bisection on the threshold."""
    ratios = [1 + value for value in target]
    low = min(target) - 1
    high = max(target) + 1
    for _ in range(200):
        middle = (low + high) / 2
        mass = sum(positive_part(ratios, middle))
        if mass > len(target):
            low = middle
        else:
            high = middle
    return [ratio - 1 for ratio in positive_part(ratios, low)]


def valid_groups(valid: list[bool], G: int) -> list[list[int]]:
    """The valid rows of each group that has any."""
    groups = []
    for start in range(0, len(valid), G):
        rows = [row for row in range(start, start + G) if valid[row]]
        if rows:
            groups.append(rows)
    return groups


def escort_weights_of(
    args: OPOConfig, A: list[float], correction: list[float], tau: float, groups: list[list[int]]
) -> list[float]:
    omega = [0.0] * len(A)
    for rows in groups:
        exponents = {}
        for row in rows:
            tilt = A[row] / tau - correction[row]
            exponents[row] = (1 - args.alpha) * tilt
        largest = max(exponents.values())
        factors = {row: math.exp(exponent - largest) for row, exponent in exponents.items()}
        mean = sum(factors.values()) / len(rows)
        for row, factor in factors.items():
            omega[row] = factor / mean
    return omega


def drive_of(args: OPOConfig, omega: list[float], groups: list[list[int]]) -> list[float]:
    drive = [0.0] * len(omega)
    for rows in groups:
        weights = [omega[row] for row in rows]
        mean = statistics.fmean(weights)
        spread = statistics.stdev(weights) if len(rows) > 1 else 0.0
        if spread > 1e-12:
            divisor = spread if args.drive_scaling == "group" else 1.0
            for row in rows:
                drive[row] = (omega[row] - mean) / divisor
    if args.drive_scaling == "batch":
        valid_rows = itertools.chain.from_iterable(groups)
        spread = statistics.stdev(drive[row] for row in valid_rows)
        drive = [force / spread for force in drive]
    return drive


def stiffness_of(args: OPOConfig, drive: list[float], groups: list[list[int]]) -> float:
    mu = args.mu
    if args.chi2_radius is not None:
        valid_rows = itertools.chain.from_iterable(groups)
        mean_square = statistics.fmean(drive[row] ** 2 for row in valid_rows)
        mu = math.sqrt(mean_square / args.chi2_radius)
    if args.positivity == "stiffen":
        mu = max(mu, -min(drive))
    return mu


def target_of(args: OPOConfig, drive: list[float], mu: float, groups: list[list[int]]) -> list[float]:
    target = [force / mu for force in drive]
    if args.positivity == "clip":
        least = -1 + args.positivity_epsilon
        return [max(value, least) for value in target]
    if args.positivity == "project":
        for rows in groups:
            projected = simplex_projection([target[row] for row in rows])
            for row, value in zip(rows, projected, strict=True):
                target[row] = value
    return target


def drive_and_target(
    args: OPOConfig, A: list[float], valid: list[bool], correction: list[float], tau: float, G: int
) -> SimpleNamespace:
    """Escort weights, drive, target and mu, computed on lists."""
    groups = valid_groups(valid, G)
    omega = escort_weights_of(args, A, correction, tau, groups)
    drive = drive_of(args, omega, groups)
    mu = stiffness_of(args, drive, groups)
    target = target_of(args, drive, mu, groups)
    return SimpleNamespace(omega=omega, drive=drive, target=target, mu=mu, temperature=tau)


@functools.cache
def _float64_model(folder: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.double().eval()


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
        self.trainer = trainer
        self.script = script
        self.args = trainer.args
        self.G = trainer.args.num_generations
        if model is None:
            self.model = _float64_model(trainer.model.config._name_or_path)
        else:
            self.model = model.double().eval()
        self._anchors: dict[tuple[int, int], Tensor] = {}

    def logps(self, policy: dict[str, Tensor], row: SimpleNamespace) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token and entropy at its position, from the full logits."""
        tokens = torch.tensor([row.prompt + row.completion])
        attended = vars(row).get("attended", [1] * tokens.numel())
        mask = {"attention_mask": torch.tensor([attended])}
        output = torch.func.functional_call(self.model, policy, args=(tokens,), kwargs=mask)
        of_completion = output.logits[0, len(row.prompt) - 1 : -1]
        all_logps = (of_completion / self.args.temperature).log_softmax(-1)
        token_ids = torch.tensor(row.completion)[:, None]
        chosen = all_logps.gather(1, token_ids).squeeze(1)
        negative_entropies = (all_logps.exp() * all_logps).sum(-1)
        return chosen, -negative_entropies

    @torch.no_grad()
    def anchor(self, rollout: int, row: int) -> Tensor:
        """Log-probability of each completion token under the policy that generated it."""
        if (rollout, row) not in self._anchors:
            policy = in_float64(self.trainer.rollouts[rollout].policy)
            entry = self.script.calls[rollout][row]
            self._anchors[rollout, row], _ = self.logps(policy, entry)
        return self._anchors[rollout, row]

    def valid(self, row: SimpleNamespace) -> bool:
        masked = row.truncated and self.args.mask_truncated_completions
        has_reward = any(reward is not None for reward in row.rewards)
        return not masked and any(row.own) and has_reward

    def mean_length(self, rollout: int) -> float:
        """Mean number of tokens of a rollout's valid completions."""
        lengths = [sum(row.own) for row in self.script.calls[rollout] if self.valid(row)]
        return statistics.fmean(lengths) if lengths else 1.0

    def drive(self, rollout: int) -> SimpleNamespace:
        """Advantages, escort weights, drive and target of a rollout."""
        args = self.args
        rows = self.script.calls[rollout]
        valid = [self.valid(row) for row in rows]
        sums = []
        means = []
        needs_logps = args.anchor_correction != "absorbed" or args.adaptive_temperature
        for i, row in enumerate(rows):
            own = torch.tensor(row.own).bool()
            logps = self.anchor(rollout, i)[own] if needs_logps else torch.zeros(1)
            total = logps.sum().item()
            sums.append(total)
            means.append(total / max(len(logps), 1))
        rewards = [row.rewards for row in rows]
        A = advantages(rewards, args, self.G)
        corrections = {"absorbed": [0.0] * len(rows), "length_normalized": means, "sequence": sums}
        correction = corrections[args.anchor_correction]
        tau = args.escort_temperature
        if args.adaptive_temperature:
            mean_logps = list(itertools.compress(means, valid))
            valid_rewards = list(itertools.compress(rewards, valid))
            tau = self._temperature(mean_logps, valid_rewards)
        result = drive_and_target(args, A, valid, correction, tau, self.G)
        return SimpleNamespace(**vars(result), advantages=A, valid=valid)

    def _temperature(self, mean_logps: list[float], rewards: list[list[float | None]]) -> float:
        """From the valid completions' mean log-probabilities per token, and their rewards by function."""
        args = self.args
        surprise = -statistics.fmean(mean_logps)
        entropy = surprise / math.log(self.model.config.vocab_size)
        H = min(max(entropy, 0.0), 1.0)
        weights = args.reward_weights or [1.0] * len(rewards[0])
        sums = [weighted_sum(row_rewards, weights) for row_rewards in rewards]
        low = min(sums)
        high = max(sums)
        success = 0.0
        if high > low:
            mean = statistics.fmean(sums)
            success = 2 * (mean - low) / (high - low) - 1
        cooling = 0.5 * (1 - H) * success
        tau = args.escort_temperature * (1 + 0.2 * H - cooling)
        least, most = args.temperature_range
        return min(max(tau, least), most)

    def _reduced(self, total: Tensor, length: int) -> Tensor:
        """The sum over a completion's tokens, or with "mean" that sum over their number."""
        return total / length if self.args.log_ratio_reduction == "mean" else total

    def _clamped(self, delta: Tensor) -> Tensor:
        """The log-ratio within its bounds, with the gradient of one that is not bounded."""
        bound = self.args.log_ratio_clamp
        excess = delta.clamp(-bound, bound) - delta
        return delta + excess.detach()

    def _age(self, log_ratio: Tensor) -> float:
        """The bounded weight of a completion for the policy's distance to the one that generated it."""
        if self.args.num_iterations > 1 and self.args.ratio_form != "truncated":
            return min(math.exp(log_ratio.item()), 2.0)
        return 1.0

    def _work_and_dissipation(self, delta: Tensor, weight: float, target: float, mu: float) -> tuple[Tensor, Tensor]:
        stiffness = weight * mu
        if self.args.ratio_form == "truncated":
            ratio = min(delta.exp().item(), 2.0)
            push = stiffness * ratio * delta
            return -target * push, (ratio - 1) * push
        u = delta if self.args.ratio_form == "log" else delta.exp() - 1
        force = stiffness * target
        return -force * u, stiffness / 2 * u**2

    def _kl(self, logps: Tensor, reference_logps: Tensor, log_ratios: Tensor) -> Tensor:
        """TRL's estimate for each token."""
        difference = reference_logps - logps
        kl = difference.exp() - difference - 1
        return kl * log_ratios.exp() if self.args.use_bias_correction_kl else kl

    def step(
        self,
        step: int,
        *,
        row_weight: Callable[[int, int], float] = lambda rollout, row: 1.0,
        steering_tokens: Callable[[int, int], Tensor] | None = None,
        entropy_coef: float = 0.0,
        reference_policy: dict[str, Tensor] | None = None,
    ) -> SimpleNamespace:
        """
        Loss and gradient of one optimizer step, and the completions' log-ratios.

        Args:
            row_weight: of a completion, from its rollout and index.
            steering_tokens: bool mask of a completion's tokens that steer the policy, from its rollout and index.
            entropy_coef: coefficient of the entropy bonus in this step.
            reference_policy: reference of the KL term; the initial policy by default.
        """
        args = self.args
        record = self.trainer.steps[step]
        policy = in_float64(record.policy)
        for tensor in policy.values():
            tensor.requires_grad_()
        reference_policy = in_float64(self.trainer.initial if reference_policy is None else reference_policy)
        members = []
        for batch in record.batches:
            members += zip(map(int, batch["rollout"]), map(int, batch["row"]), strict=True)  # tensors, or lists
        drives = {}
        scales = {}
        for k, _ in members:
            if k not in drives:
                drives[k] = self.drive(k)
                scales[k] = 1.0 if args.log_ratio_reduction == "mean" else 1 / self.mean_length(k)
        out = SimpleNamespace(deltas=[], ratios=[], weights=[], targets=[], mus=[], work=[], dissipation=[], rows=[])
        losses = []
        for k, i in members:
            row = self.script.calls[k][i]
            drive = drives[k]
            own = torch.tensor(row.own).bool()
            if args.mask_truncated_completions and row.truncated:
                own = torch.zeros_like(own)
            length = max(int(own.sum()), 1)
            logps, entropies = self.logps(policy, row)
            log_ratios = logps - self.anchor(k, i)
            log_ratio = log_ratios[own].sum()
            age = self._age(self._reduced(log_ratio, length))
            steering = own if steering_tokens is None else own & steering_tokens(k, i)
            steering_log_ratio = log_ratios[steering].sum()
            delta = self._clamped(self._reduced(steering_log_ratio, length))
            target = drive.target[i]
            weight = age * row_weight(k, i) if drive.valid[i] else 0.0
            work, dissipation = self._work_and_dissipation(delta, weight, target, drive.mu)
            loss = scales[k] * (work + dissipation)
            if args.beta:
                with torch.no_grad():
                    reference_logps, _ = self.logps(reference_policy, row)
                kl = self._kl(logps, reference_logps, log_ratios)
                reduced_kl = self._reduced(kl[own].sum(), length)
                loss = loss + args.beta * scales[k] * reduced_kl
            if entropy_coef:
                mean_entropy = entropies[steering].sum() / max(int(steering.sum()), 1)
                loss = loss - entropy_coef * mean_entropy
            losses.append(loss if drive.valid[i] else 0.0)  # invalid completions have no KL term and no bonus either
            out.rows.append((k, i))
            out.deltas.append(delta.item())
            out.ratios.append(log_ratio.item())
            out.weights.append(weight)
            out.targets.append(target)
            out.mus.append(drive.mu)
            out.work.append(work.item())
            out.dissipation.append(dissipation.item())
        total = sum(losses) / len(losses)
        # Parameters without any effect have a gradient of zero.
        gradients = torch.autograd.grad(total, list(policy.values()), allow_unused=True, materialize_grads=True)
        out.loss = total.item()
        out.gradient = dict(zip(policy, gradients, strict=True))
        return out


# Comparison


def norm(gradient: dict[str, Tensor]) -> float:
    squares = [tensor.double().square().sum() for tensor in gradient.values()]
    return math.sqrt(sum(square.item() for square in squares))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference, over all tensors."""
    assert one.keys() == other.keys()
    differences = {name: tensor.double() - other[name].double() for name, tensor in one.items()}
    return norm(differences)


def relative_error(gradient: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    return distance(gradient, reference) / norm(reference)


def assert_step_equals(record: Step, reference: SimpleNamespace, tolerance: float = EXACT):
    """Loss and gradient of a recorded optimizer step against the reference."""
    assert norm(reference.gradient) > 1e-3, "the reference has no gradient: the comparison would prove nothing"
    assert relative_error(record.gradient, reference.gradient) < tolerance
    # Work and bonus may cancel, so the error of the loss is relative to the size of its terms.
    size_of_work = statistics.fmean(map(abs, reference.work))
    size_of_terms = size_of_work + statistics.fmean(reference.dissipation)
    error = abs(sum(record.losses) - reference.loss)
    assert error < 1e-5 * (1 + abs(reference.loss) + size_of_terms)


def several_processes(folder: Path, sharding: str) -> list[str]:
    """
    Arguments that adapt a configuration of `recipes/accelerate` to small models and the device of these tests.

    With `use_cpu`, DeepSpeed is off, and without a backend accelerate sees a single process.
    """
    shipped = RECIPES / "accelerate" / f"{sharding}.yaml"
    config = yaml.safe_load(shipped.read_text())
    config["mixed_precision"] = "no"
    path = folder / f"{sharding}.yaml"
    path.write_text(yaml.safe_dump(config))
    arguments = ["--accelerate_config", str(path)]
    if USE_CPU and sharding.startswith("zero"):
        return [*arguments, "--ddp_backend", "gloo"]
    return [*arguments, "--use_cpu", str(USE_CPU)]


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Limit the size of files; −1 for no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
