"""
Scripted rollouts replace generation by completions and rewards that depend only on the row, so that a test decides
what the objective sees: lengths, truncated completions, rewards, `None`.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor
from trl import GRPOTrainer


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` warns on every trainer otherwise


PROMPTS = ["1+1=", "What is 2 + 2?", "7*6", "Name a prime above ten.", "9-4=", "Half of twelve is", "3", "100/4 ="]


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
