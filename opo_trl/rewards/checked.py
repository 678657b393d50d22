"""Rewards that run in the training process: an error names the reward, and an exit does not end the run silently."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn import Module
from trl.trainer.utils import is_async_callable

from ..trl import temporarily
from .actions import with_tokenizer
from .errors import CountingReward, RewardError, error_text, numbers


def checked(trainer: Any) -> AbstractContextManager[None]:
    """
    Within this context, failures of a trainer's reward functions raise a [`RewardError`] that names the function.

    The functions are wrapped only while TRL calls them; otherwise the trainer holds the user's own objects.
    """
    named_rewards = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    checked_rewards = [checked_reward(with_tokenizer(reward, tokenizer), name) for reward, name in named_rewards]
    return temporarily(trainer, reward_funcs=checked_rewards)


def checked_reward(reward: Any, name: str) -> Any:
    """A reward function whose failures raise a [`RewardError`] that names it; models and isolated rewards are kept."""
    if isinstance(reward, Module | CountingReward):
        return reward

    async def call_async(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = await reward(**inputs)
            return numbers(scores, len(inputs["completions"]))

    def call(**inputs: Any) -> list[float | None]:
        with _naming(name):
            scores = reward(**inputs)
            return numbers(scores, len(inputs["completions"]))

    return call_async if is_async_callable(reward) else call


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Within this context, any error becomes a [`RewardError`] that names the function."""
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = None if isinstance(error, StopIteration) else error  # `contextlib` would raise that one again
        raise RewardError(
            f"The reward function {name} has raised {error_text(error)}. "
            "Return a list with one number, or None, for each completion."
        ) from cause
