"""
A rollout worker that generates in the training process, with Transformers: for a CPU, and for quick tests.

    worker = InProcessWorker("Qwen/Qwen3-0.6B", args, dataset, reward, tokenizer)
    AsyncOPOTrainer("Qwen/Qwen3-0.6B", args=args, train_dataset=dataset, rollout_worker=worker, weight_transfer=worker)

It is not asynchronous: a rollout is made when the trainer runs out of samples. Everything else is TRL's rollout loop:
chat template, turns, tools, rows and scoring. Nothing depends on time, so a run can be repeated exactly, and its
completions are written by a policy that is a given number of versions old.
"""

import asyncio
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample

from ..fields import require
from .config import AsyncOPOConfig
from .worker import OPORolloutLoop


class InProcessLoop(OPORolloutLoop):
    """A rollout loop of which `rollout` makes a number of complete groups, by a `policy` in the same process."""

    def __init__(self, *, policy: Any, seed: int, **named):
        super().__init__(**named)
        self.policy = policy
        self.asked: list[tuple[list[int], asyncio.Future]] = []
        self.generator = Generator().manual_seed(seed)
        self.work = self._repeat_iterator()

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        turn = asyncio.get_running_loop().create_future()
        self.asked.append((prompt_ids, turn))
        return await turn

    async def rollout(self, groups: int) -> list[RolloutSample]:
        """Generate and score the next groups of the dataset."""
        size, tools = self.num_generations, {tool.__name__: tool for tool in self.tools}
        work = [next(self.work) for _ in range(groups * size)]
        tasks = [
            asyncio.ensure_future(self._generate_one(row["prompt"], tools, self.tools, group)) for group, row in work
        ]
        while live := sum(not task.done() for task in tasks):
            if len(self.asked) < live:  # some have not begun, or wait for a tool
                await asyncio.sleep(0 if not self.tools else 1e-3)
                continue
            asked, self.asked = self.asked, []
            for (_, turn), made in zip(asked, self._sample([ids for ids, _ in asked]), strict=True):
                turn.set_result(made)
            await asyncio.sleep(0)
        samples = []
        for start in range(0, len(work), size):
            (group, row), finished = work[start], tasks[start : start + size]
            columns = {name: [row[name]] * size for name in row.keys() - {"prompt", "completion", "completion_ids"}}
            *parts, rewards = map(list, zip(*(task.result() for task in finished), strict=True))
            values: list[Any] = [[row["prompt"]] * size, columns, *parts, self.model_version, group]
            values += [[None] * size, rewards]
            samples += await self._score_group(RolloutGroup(*values))
        return samples

    def _sample(self, prompts: list[list[int]]) -> Iterator[tuple[list[int], list[float]]]:
        """For each prompt, tokens up to the end of the turn, and their log-probabilities."""
        how: Any = {"max_tokens": self.max_tokens, "temperature": self.temperature, "generator": self.generator}
        tokens, logps = sample(self.policy, prompts, eos=torch.tensor(self.eos_token_ids), **how)
        for ids, values in zip(tokens.tolist(), logps.tolist(), strict=True):
            length = next((place + 1 for place, token in enumerate(ids) if token in self.eos_token_ids), len(ids))
            yield ids[:length], values[:length]


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], *, max_tokens: int, temperature: float, eos: Tensor, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Tokens of a completion of each prompt, and their log-probabilities, `[B, T]`; after `eos` they do not count."""
    width, pad = max(map(len, prompts)), int(eos[0])  # any: padding is masked
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    done, cache = torch.zeros(len(prompts), dtype=torch.bool), None
    tokens: list[Tensor] = []
    logps: list[Tensor] = []
    while len(tokens) < max_tokens and not done.all():
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position, "past_key_values": cache}
        out = model(**inputs, use_cache=True, logits_to_keep=1)
        full = (out.logits[:, -1].float() / temperature).log_softmax(dim=1)
        ids, cache = torch.multinomial(full.exp(), 1, generator=generator), out.past_key_values
        tokens.append(ids)
        logps.append(full.gather(1, ids))
        done = done | torch.isin(ids[:, 0], eos)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        position = position[:, -1:] + 1
    return torch.cat(tokens, dim=1), torch.cat(logps, dim=1)


class InProcessWorker:
    """
    Rollout worker and weight transfer of an [`AsyncOPOTrainer`], without a server and other processes.

    Args:
        model, args, train_dataset, reward_funcs, tools, processing_class:
            As in the trainer. A copy of the model generates on the CPU in float32; the functions are called in this
            process; the default of `args.token_budget` is 0; prompts are lists of messages. The tokenizer has a chat
            template that TRL knows, or a `response_template`.
        staleness (`int`, *optional*, defaults to `0`):
            How many versions older than the current policy the one that generates is, as far as there are as many. TRL
            fetches a micro-batch ahead, so in training a sample is up to one version older.

    Raises:
        `ValueError`: every completion would be dropped as too old.
    """

    def __init__(
        self, model, args: AsyncOPOConfig, train_dataset, reward_funcs, processing_class, *, tools=None, staleness=0
    ):
        wanted = f"at least {staleness}, the staleness of this worker, which would drop every completion"
        require(staleness <= args.max_staleness, "max_staleness", args.max_staleness, wanted)
        if args.token_budget is None:
            args.token_budget = 0
        self.model, self.args, self.staleness = model, args, staleness
        self.rollout_buffer: Any = self  # a queue, too
        self._samples: list[RolloutSample] = []  # that wait
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.policies: dict[int, dict[str, Tensor]] = {}  # by version
        self.version = 0
        rewards = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._loop_kwargs: dict[str, Any] = {"dataset": train_dataset, "reward_funcs": rewards, "tools": tools}
        self._loop_kwargs["processing_class"] = processing_class

    # As a rollout worker

    def start(self) -> None:
        args = self.args
        options: Any = args.model_init_kwargs or {}  # a dict, once parsed
        policy = AutoModelForCausalLM.from_pretrained(self.model, **{**options, "dtype": torch.float32}).eval()
        same = ("num_generations", "temperature", "chat_template_kwargs", "max_tool_calling_iterations")
        self.loop: Any = InProcessLoop(
            **self._loop_kwargs,
            **{name: getattr(args, name) for name in (*same, "fork_threshold_tokens")},
            max_tokens=args.max_completion_length,
            policy=policy,
            seed=args.seed,
            model_name=self.model,
            metrics_queue=self.metrics_queue,
            model_version_value=SimpleNamespace(value=self.version),
            # Nothing beats or fails on its own: what a reward raises is raised in the trainer.
            **dict.fromkeys(("heartbeat_value", "failed_event", "exception_info_queue", "rollout_buffer")),
        )

    def update_model_version(self, model_version: int) -> None:
        self.version = model_version

    def get(self, timeout: float) -> RolloutSample:
        """The next sample; if none waits, a rollout is made."""
        while not self._samples:  # OPO's loop ends the run if no group has any
            self._samples += self._produce()
        return self._samples.pop(0)

    def qsize(self) -> int:
        return len(self._samples)

    def _produce(self) -> list[RolloutSample]:
        """A rollout of as many completions as an optimizer step takes, by the policy `staleness` versions ago."""
        args, loop = self.args, self.loop
        loop._model_version_value.value = version = max(min(self.policies), self.version - self.staleness)
        loop.policy.load_state_dict(self.policies[version], strict=False)  # tied weights are not sent twice
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return loop._loop.run_until_complete(loop.rollout(max(per_step // args.num_generations, 1)))

    # As a weight transfer

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.policies[self.version + 1] = {name: tensor.detach().cpu().clone() for name, tensor in iterator}
        self.policies.pop(self.version - self.staleness, None)

    def _nothing(self, *_: Any) -> None:
        """Nothing runs between two samples, and there is nothing to connect."""

    stop = check_health = init_weight_transfer = pause = resume = destroy = _nothing
