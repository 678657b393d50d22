"""
Checks before a model is loaded: templates, and a reward's signature. A `ValueError` names the field and the fix.
"""

import inspect
import logging
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..data.rollouts import RECORDED
from ..rewards.scoring import IsolatedReward
from ..rollout.recorded import as_scored


logger = logging.getLogger(__name__)

# Further arguments that the trainer passes to a reward function.
OF_TRAINER = ("trainer_state", "log_extra", "log_metric")


def check_template(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a dataset has prompts, and that the tokenizer can render them."""
    if "prompt" not in data.column_names:
        said = f"prompt_style='dataset', but the dataset has no column 'prompt', only {data.column_names}"
        raise ValueError(f"{said}. Rename its column, or set `prompt_style` to 'chat' or 'plain'.")
    if tokenizer.chat_template is None and not isinstance(data[0]["prompt"], str):
        said = f"prompt_style='chat', but the tokenizer of {tokenizer.name_or_path!r} has no chat template"
        raise ValueError(f"{said}. Set `prompt_style` to 'plain', or add a chat_template.jinja there.")


def warn_of_template_options(args: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Name those of `chat_template_kwargs` that the chat template ignores, such as a misspelt one."""
    template, known = tokenizer.chat_template, inspect.signature(tokenizer.apply_chat_template).parameters
    for key in args.chat_template_kwargs or () if isinstance(template, str) else ():
        if key not in known and not re.search(rf"\b{re.escape(key)}\b", template):
            logger.warning(f"{key!r} of `chat_template_kwargs` has no effect: this model's chat template ignores it.")


def check_columns(rewards: Sequence[Any], data: Dataset, of_trainer: Sequence[str] = OF_TRAINER) -> None:
    """
    Check that TRL can call the reward functions with the columns of a dataset, or of recorded rollouts.

    `of_trainer` are the further arguments that the trainer passes, except to an [`IsolatedReward`].
    """
    if RECORDED in data.column_names:
        data = as_scored(data)
    columns = sorted({*data.column_names} - {"prompt", "completion"})
    for reward in rewards:
        isolated = isinstance(reward, IsolatedReward)
        function = reward.reward if isolated else reward
        if not callable(function):  # a reward model
            continue
        given = ["prompts", "completions", "completion_ids", *(() if isolated else of_trainer)]
        try:
            inspect.signature(function).bind(**dict.fromkeys([*given, *columns]))
        except (ValueError, TypeError) as error:
            named = f"reward_funcs={getattr(function, '__name__', type(function).__name__)!r}"
            called = f"It is called by keyword, with {', '.join(given)} and the columns {columns}"
            fix = "Map columns (`columns: {solution: …}`), or let the function take `**columns`"
            raise ValueError(f"{named} cannot be called: {error}. {called}. {fix}.") from error
