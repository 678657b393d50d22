"""Asynchronous training on scripted completions, and its loss and gradient in float64 from the definition."""

import itertools
import math
import queue
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from datasets import Dataset
from helpers import USE_CPU, drive_and_target, in_float64, snapshot
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
from opo_trl.asynchronous.in_process import InProcessWorker
from opo_trl.asynchronous.worker import with_targets
from opo_trl.objective import OPO


G = 4
DATA = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1="}]]})


def conversations(model: str, *, groups: int, seed: int = 0, noise: float = 0.3) -> list[list[SimpleNamespace]]:
    """
    Groups of conversations, with random tokens and rewards. In some a tool has written tokens, and some have two rows.

    The log-probabilities of the behaviour policy are those of the model, with noise.
    """
    draw = random.Random(seed)
    policy = AutoModelForCausalLM.from_pretrained(model).double().eval()
    made = []
    for group in range(groups):
        prompt = [draw.randrange(3, 259) for _ in range(draw.randint(2, 5))]
        made.append([])
        for member in range(G):
            rows = []
            for _ in range(2 if member == 1 and group % 2 else 1):
                ids = prompt + [draw.randrange(3, 259) for _ in range(draw.randint(3, 12))]
                own = [0] * len(prompt) + [int(member != 2 or draw.random() < 0.6) for _ in ids[len(prompt) :]]
                own[-1] = 1
                old = [0.0, *chosen(policy, ids).tolist()]
                old = [(value + draw.gauss(0, noise)) * trained for value, trained in zip(old, own, strict=True)]
                rows.append(SimpleNamespace(ids=ids, own=own, old=np.float32(old)))
            made[-1].append(SimpleNamespace(rows=rows, reward=draw.choice([0.0, 0.0, 0.5, 1.0])))
    return made


def chosen(policy: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token after the first."""
    logps = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


def samples(groups: list[list[SimpleNamespace]], args: AsyncOPOConfig) -> list[RolloutSample]:
    """What a rollout worker would put in its queue."""
    made = []
    for index, group in enumerate(groups):
        reward = [math.nan if each.reward is None else each.reward for each in group]
        rows = [(i, row, reward[i]) for i, each in enumerate(group) for row in each.rows]
        raw = [
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.array(row.ids),
                completion_mask=np.array(row.own),
                old_log_probs=row.old,
                advantage=math.nan,
                model_version=1,
                group_id=index,
                metrics={"reward": score},
            )
            for _, row, score in rows
        ]
        made += with_targets(raw, [i for i, _, _ in rows], OPO(args))
    return made


class Endless(queue.Queue):
    """Repeats its samples."""

    def __init__(self, repeated: list[RolloutSample]):
        super().__init__()
        self.repeated = itertools.cycle(repeated)

    def get(self, block=True, timeout=None):
        one = next(self.repeated)
        copy = {name: getattr(one, name) for name in RolloutSample.__slots__}
        return RolloutSample(**{**copy, "metrics": dict(one.metrics)})


class ScriptedWorker:
    """A rollout worker with scripted samples, and a weight transfer that sends nothing."""

    def __init__(self, repeated: list[RolloutSample]):
        self.rollout_buffer, self.metrics_queue = Endless(repeated), queue.Queue()

    def send_weights(self, iterator):
        for _ in iterator:
            pass

    def nothing(self, *args):
        pass

    start = stop = update_model_version = check_health = init_weight_transfer = pause = resume = destroy = nothing


class Recorder(TrainerCallback):
    """Policy and gradient of each optimizer step."""

    def __init__(self, trainer: AsyncOPOTrainer):
        self.trainer, self.steps = trainer, []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        gradient = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
        self.steps.append(SimpleNamespace(policy=snapshot(model), gradient=gradient))


def config(folder: Path, **more) -> AsyncOPOConfig:
    defaults = {
        "num_generations": G,
        "max_staleness": 1000,
        "token_budget": 0,
        "learning_rate": 0.0,
        "optim": "sgd",  # Adam divides by the gradient's size, which is noise where it is small
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": USE_CPU,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return AsyncOPOConfig(str(folder), **{**defaults, **more})


def train(model: str, args: AsyncOPOConfig, repeated: list[RolloutSample], trainer_class=AsyncOPOTrainer):
    """A trainer that has trained on scripted samples, with its steps in `recorder`."""
    worker = ScriptedWorker(repeated)
    trainer = trainer_class(model, args=args, train_dataset=DATA, rollout_worker=worker, weight_transfer=worker)
    trainer.remove_callback(PrinterCallback)
    trainer.recorder = Recorder(trainer)
    trainer.add_callback(trainer.recorder)
    if isinstance(trainer, AsyncOPOTrainer):
        trainer._skipped.moved_at = 1  # the noise of the log-probabilities stands for steps since the behaviour policy
    trainer.train()
    return trainer


def tokenizer_of(model: str):
    """The model's tokenizer, whose answers are the text that the model writes."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    return tokenizer


def in_process(model: str, args, data: Dataset, reward: Callable, trainer_class=AsyncOPOTrainer, **named):
    """A trainer whose worker generates in this process, and the worker; `named` are `staleness` and `peft_config`."""
    tokenizer, staleness = tokenizer_of(model), named.pop("staleness", 0)
    worker = InProcessWorker(model, args, data, reward, tokenizer, staleness=staleness)
    named |= {"rollout_worker": worker, "weight_transfer": worker, "processing_class": tokenizer}
    trainer = trainer_class(model, args=args, train_dataset=data, **named)
    trainer.remove_callback(PrinterCallback)
    return trainer, worker


def reference(
    model: str,
    policy: dict[str, torch.Tensor],
    groups: list[list[SimpleNamespace]],
    args: AsyncOPOConfig,
    row_weight: Callable[[float], float] = lambda target: 1.0,
) -> SimpleNamespace:
    """
    Loss, gradient, log-ratios, targets and weights of an optimizer step over these groups, in float64. `row_weight` is
    a further weight of a sample, by its target.
    """
    network = AutoModelForCausalLM.from_pretrained(model).double().eval()
    network.load_state_dict(in_float64(policy))
    out = SimpleNamespace(deltas=[], targets=[], weights=[], ratios=[])
    losses, tokens = [], 0
    for group in groups:
        rewards = [each.reward for each in group]
        scored = [reward for reward in rewards if reward is not None]
        mean, deviation = statistics.fmean(scored), statistics.stdev(scored) + 1e-4
        advantages = [0.0 if reward is None else (reward - mean) / deviation for reward in rewards]
        valid = [reward is not None for reward in rewards]
        target = drive_and_target(args, advantages, valid, [0.0] * G, args.escort_temperature, G).target
        for each, v, scored in zip(group, target, valid, strict=True):
            if not scored:
                continue
            for row in each.rows:
                own = torch.tensor(row.own[1:]).bool()
                delta = (chosen(network, row.ids) - torch.tensor(row.old[1:]).double())[own].sum()
                delta = delta / (int(own.sum()) if args.log_ratio_reduction == "mean" else 1)
                ratio = min(math.exp(delta.item()), 2.0)
                weight = row_weight(v) if args.ratio_form == "truncated" else ratio * row_weight(v)
                delta = delta + (delta.clamp(-args.log_ratio_clamp, args.log_ratio_clamp) - delta).detach()
                u = delta if args.ratio_form == "log" else delta.exp() - 1
                loss = -args.mu * v * u + args.mu / 2 * u**2
                if args.ratio_form == "truncated":
                    bounded = min(delta.exp().item(), 2.0)
                    loss = args.mu * bounded * (bounded - 1 - v) * delta
                losses.append(weight * loss)
                out.deltas.append(delta.item())
                out.targets.append(v)
                out.weights.append(weight)
                out.ratios.append(ratio)
                tokens += int(own.sum()) if args.log_ratio_reduction == "sum" else 1
    loss = sum(losses) / tokens
    names, parameters = zip(*network.named_parameters(), strict=True)
    out.gradient = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    out.loss = loss.item()
    return out


STEPS, GROUPS = 2, 6


def cut(model: str, folder: Path, batch_size: int, accumulation: int, **more) -> AsyncOPOTrainer:
    """Two optimizer steps over 24 rows each, cut as told."""
    args = config(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.1,
        max_steps=STEPS,
        **more,
    )
    return train(model, args, samples(conversations(model, groups=GROUPS, noise=0.1), args)[:24])
