"""Rewards, tools and environments that run in the training process: an error names the function ([`RewardError`])."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from trl.trainer.utils import is_async_callable

from ..checks.text import quoted
from ..trl import temporarily
from .errors import CountingReward, RewardError, cause_of, is_ctrl_c, naming, numbers, told


if TYPE_CHECKING:
    from trl import GRPOTrainer


def reward_list(reward_funcs: Any) -> list[Any] | None:
    """
    A trainer's `reward_funcs`, one reward or several, in a new list; `None` for `None`, when environments give the
    rewards. Raises a `TypeError` if one is not a function, another callable object, a reward model or the path of one.
    """
    if reward_funcs is None:
        return None
    several = isinstance(reward_funcs, list | tuple)
    given = list(reward_funcs) if several else [reward_funcs]
    for index, reward in enumerate(given):
        if inspect.isclass(reward):
            what, fix = "a class", f"an instance, such as {reward.__name__}()"
        elif not (isinstance(reward, str) or callable(reward)):
            what, fix = f"of type {type(reward).__name__}", "a function, a reward model or its path"
        else:
            continue
        name = f"reward_funcs[{index}]" if several else "reward_funcs"
        raise TypeError(f"{name}={quoted(reward)} is {what}, not a reward. Pass {fix}, or a list of these.")
    return given


def checked(trainer: "GRPOTrainer") -> AbstractContextManager[None]:
    """
    Within this context, failures of a trainer's reward functions raise a [`RewardError`] that names the function.

    The functions are wrapped only while TRL calls them; otherwise the trainer holds the user's own objects. Reward
    models and [`IsolatedReward`] always return numbers and are not wrapped.
    """
    named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    return temporarily(trainer, reward_funcs=[checked_reward(reward, name) for reward, name in named])


def checked_reward(reward: Any, name: str) -> Any:
    """A reward function whose failures raise a [`RewardError`] that names it."""
    if isinstance(reward, Module | CountingReward):
        return reward

    async def call_async(**inputs: Any) -> list[float | None]:
        with naming(name):
            scores = await reward(**inputs)
        return numbers(name, scores, len(inputs["completions"]))

    def call(**inputs: Any) -> list[float | None]:
        with naming(name):
            scores = reward(**inputs)
        return numbers(name, scores, len(inputs["completions"]))

    return call_async if is_async_callable(reward) else call


@contextmanager
def checked_tools(trainer: "GRPOTrainer") -> Iterator[None]:
    """
    Within this context, in which TRL calls the tools of a batch, a tool that raises what is not an `Exception` ends in
    a [`RewardError`] that names it. TRL shows the model exceptions, and waits forever for an asynchronous tool that
    raises anything else.
    """
    failed: list[RewardError] = []
    for tools in (*trainer._sync_tool_dicts, *trainer._async_tool_dicts):  # of this batch only
        tools.update({name: _checked_tool(tool, name, failed) for name, tool in tools.items()})
    yield
    if failed:  # TRL has shown this to the model, too
        raise failed[0]


def _checked_tool(tool: Callable[..., Any], name: str, failed: list[RewardError]) -> Callable[..., Any]:
    @contextmanager
    def keeping() -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            fix = "Return a string, or raise an `Exception`, which is shown to the model."
            failed.append(RewardError(f"The tool {name} has raised {told(error)}. {fix}"))
            raise failed[-1] from error

    def encodable(result: Any) -> Any:
        str(result).encode()  # half a surrogate pair, as in cut JSON, would end the tokenizer, and with it the run
        return result

    async def call_async(**arguments: Any) -> Any:
        with keeping():
            return encodable(await tool(**arguments))

    def call(**arguments: Any) -> Any:
        with keeping():
            return encodable(tool(**arguments))

    return call_async if inspect.iscoroutinefunction(tool) else call


@contextmanager
def checked_environments(factories: Iterable[Any], made: Mapping[Any, list[Any]]) -> Iterator[None]:
    """
    Within this context, an environment that cannot be made, by one of the `factories`, or reset raises a
    [`RewardError`] that names it. `made` holds, by any name, lists to which TRL adds those that it makes.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, RewardError) or is_ctrl_c(error):
            raise
        # TRL calls these in one of its longest functions, so the traceback has to tell.
        kinds = [*filter(inspect.isclass, factories), *(type(one) for pool in made.values() for one in pool)]
        called = [*factories, *(getattr(kind, name, None) for kind in kinds for name in ("__init__", "reset"))]
        names = {function.__code__: function.__qualname__ for function in called if inspect.isfunction(function)}
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if name := names.get(frame.f_code):
                raise RewardError(f"{name} of an environment has raised {told(error)}. Fix it.") from cause_of(error)
        raise
