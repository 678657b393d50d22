"""
Which prompt comes next: a function of the seed and of the position in the run.

[`EpochSampler`] orders the prompts of the data loader. Dynamic sampling takes more of them than the data loader
offers, so it draws from a [`PromptStream`].
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset, Value
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from ..config import OPOConfig
from ..data.prompts import is_chat, not_of_chat


# Indices of an epoch's prompts, the same number in every epoch, by the epoch's number.
Order = Callable[[int], Sequence[int]]

# Arguments of rewards that the trainer sets, so that a column of the name would be lost, or be an error in the first
# step; and `self`, of rewards and environments that are objects.
RESERVED = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    *("environments", "self"),
)

_RENAME = "`dataset.rename_column('{old}', '{new}')`"


def check_enough_prompts(available: int, args: OPOConfig, described: str = "") -> None:
    """
    Check that a dataset fills one rollout. TRL's sampler drops an incomplete one, and would train for zero steps.
    `described` says for the message where its prompts are from, and which part is held out.
    """
    needed = args.generation_batch_size // args.num_generations
    if available < needed:
        described = f" ({described})" if described else ""
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} with num_generations={args.num_generations} needs "
            f"{needed} prompts for one rollout, but the dataset has {available}{described}. Provide at least {needed} "
            "or lower `per_device_train_batch_size`, `steps_per_generation` or `gradient_accumulation_steps`."
        )


def check_datasets(train: Any, held_out: Any, factory: Any, *, text: bool = True) -> None:
    """
    Check the columns of the datasets of a trainer, which has an environment factory, several by name, or none. Prompts
    may be `text`, or only conversations.
    """
    for name, data in _by_name(train, held_out).items():
        if isinstance(data, Dataset | IterableDataset):
            check_columns(data, name, needs_prompt=factory is None, text=text)
            if isinstance(factory, dict) and "environment" not in (data.column_names or ["environment"]):
                raise ValueError(
                    f"{name} has no column 'environment', only {data.column_names}. Add one that names an environment "
                    f"of environment_factory for each row: {', '.join(map(str, factory))}."
                )


def _by_name(train: Any, held_out: Any) -> dict[str, Any]:
    parts = {f"eval_dataset[{name!r}]": part for name, part in held_out.items()} if isinstance(held_out, dict) else {}
    return parts | {"train_dataset": train, "eval_dataset": held_out}


def _check_tokens(trainer: GRPOTrainer) -> None:
    """Check that completions end, and begin after at least one token."""
    tokenizer: Any = trainer._tokenizer
    if tokenizer.eos_token_id is None:
        raise ValueError("processing_class has no eos_token, which ends completions. Set `tokenizer.eos_token`.")
    if tokenizer("")["input_ids"]:
        return
    for name, data in _by_name(trainer.train_dataset, trainer.eval_dataset).items():
        is_stored = isinstance(data, Dataset) and data.format["type"] != "custom" and "prompt" in data.column_names
        is_text = is_stored and getattr(data.features["prompt"], "dtype", None) == "string"
        if is_text and "" in (prompts := [*data["prompt"]]):
            raise ValueError(f"{name}: its column 'prompt' is empty in row {prompts.index('')}. Remove that row.")


def check_train_dataset(trainer: GRPOTrainer) -> None:
    """Check that a trainer's datasets fit its configuration and its model."""
    _check_tokens(trainer)
    args, dataset = cast(OPOConfig, trainer.args), trainer.train_dataset
    if isinstance(dataset, Dataset):
        check_enough_prompts(len(dataset), args)
        images = [name for name in ("image", "images") if name in dataset.column_names]
        for field, least, does in (("max_staleness", 0, "replay"), ("max_sampling_rounds", 1, "replace")):
            if images and (value := getattr(args, field)) > least:
                said = f"{field}={value} cannot {does} samples with images, which the dataset has"
                raise ValueError(f"{said}. Set `{field}` to {least}.")
        reads_images = isinstance(trainer.processing_class, ProcessorMixin)
        if images and not reads_images and dataset[0][images[0]]:
            raise ValueError(
                f"train_dataset has a column {images[0]!r}, but the model reads text only. Rename or remove the "
                "column, or train a model that reads images."
            )
    elif args.max_sampling_rounds > 1:
        raise ValueError(
            f"max_sampling_rounds={args.max_sampling_rounds} needs a dataset with random access, not a stream. Load "
            "it without streaming, or set `max_sampling_rounds` to 1."
        )


def check_columns(
    data: Any, named: str, *, rename: str = _RENAME, needs_prompt: bool = True, text: bool = True
) -> None:
    """
    Check the columns of a trainer's dataset, as far as they are known, and the type of its prompts.

    Nothing of a stream is read. An environment may ask without a prompt (`needs_prompt`); prompts may be `text`, or
    only conversations. Errors call the dataset `named`, and say how to `rename` a column.
    """
    names, features = data.column_names, data.features
    if names is None or (isinstance(data, Dataset) and data.format["type"] == "custom"):
        return  # a stream, or a transform that makes the rows when they are read
    for name in RESERVED:
        if name in names:
            raise ValueError(
                f"{named} has a column {name!r}, the name of an argument that the trainer itself passes to rewards or "
                f"environments. Rename it: {rename.format(old=name, new=f'my_{name}')}."
            )
    if "prompt" not in names:
        if not needs_prompt:
            return
        old = next((name for name in ("problem", "question", "query", "instruction") if name in names), "question")
        raise ValueError(
            f"{named} has no column 'prompt', only {names}. Rename one: {rename.format(old=old, new='prompt')}; or "
            "make prompts of problems and answers with `opo_trl.data.to_prompts`."
        )
    feature = (features or {}).get("prompt")
    others = (type(None), int, float, bytes, list, Mapping, *(() if text else (str,)))
    prompts = enumerate(data["prompt"] if isinstance(data, Dataset) else ())
    wrong = ((row, prompt) for row, prompt in prompts if isinstance(prompt, others) and not is_chat(prompt))
    held = next((f"holds {str(not_of_chat(prompt))[:60]!r} in row {row}" for row, prompt in wrong), "")
    if not held and isinstance(feature, Value) and feature.dtype not in ("string", "large_string"):
        held = f"is of type {feature.dtype}"
    if held:
        raise ValueError(
            f"{named}: its column 'prompt' {held}. Set every prompt to {'text, or every one to ' if text else ''}"
            'a list of messages, `[{"role": "user", "content": …}]`.'
        )


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, which would begin with the first epoch's order when a run is resumed in a later one."""

    epoch = 0  # of the next iteration

    @classmethod
    def of(cls, sampler: RepeatSampler) -> "EpochSampler":
        """A sampler of the same prompts."""
        made = cls.__new__(cls)
        vars(made).update(vars(sampler))
        return made

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):  # TRL's order of an epoch depends on the permutations before it
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


class PromptStream:
    """Endless sequence of prompts, epoch after epoch. Each has every prompt once, however many a rollout takes."""

    def __init__(self, order: Order):
        self._order = order
        self.n_prompts = len(order(0))
        self.position = 0  # of the next prompt that was never drawn
        self.returned: list[int] = []  # positions that were given back, in order; they are drawn first

    def draw(self, count: int) -> list[int]:
        """Take the next `count` positions."""
        drawn, self.returned = self.returned[:count], self.returned[count:]
        new = range(self.position, self.position + count - len(drawn))
        self.position += len(new)
        return [*drawn, *new]

    def give_back(self, positions: list[int]) -> None:
        """Put back positions that were drawn but not used."""
        self.returned = sorted([*self.returned, *positions])

    def prompts(self, positions: list[int]) -> list[int]:
        """Indices of the prompts at these positions."""
        orders = {epoch: self._order(epoch) for epoch in {position // self.n_prompts for position in positions}}
        return [int(orders[position // self.n_prompts][position % self.n_prompts]) for position in positions]

    @property
    def epochs_used(self) -> float:
        """Prompts that were drawn and not given back, in epochs."""
        return (self.position - len(self.returned)) / self.n_prompts

    def state_dict(self) -> dict[str, Any]:
        """The current position, for `load_state_dict`."""
        return {"position": self.position, "returned": self.returned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at what `state_dict` returned."""
        self.position, self.returned = state["position"], sorted(state["returned"])


def permutations(n_prompts: int, *, seed: int, shuffle: bool = True) -> Order:
    """A permutation per epoch, a function of seed and epoch; with `shuffle=False` the prompts in their order."""

    def order(epoch: int) -> Any:
        if not shuffle:
            return np.arange(n_prompts)
        return np.random.default_rng((seed, epoch)).permutation(n_prompts)

    return order


def epochs_of_sampler(sampler: Iterable[int], args: OPOConfig) -> Order:
    """
    The order of a custom sampler, from a subclass that overrides `_get_train_sampler`, for all processes together.

    It repeats its indices as [`~trl.trainer.utils.RepeatSampler`] does, and is iterated once per epoch; the epoch of
    an [`EpochSampler`] is set first. A resumed run sees the same prompts if a new sampler yields the same epochs. The
    order raises `ValueError` if an epoch does not fill a rollout.
    """
    rollout, num_generations = args.generation_batch_size, args.num_generations
    orders: list[list[int]] = []

    def order(epoch: int) -> list[int]:
        while len(orders) <= epoch:
            if isinstance(sampler, EpochSampler):
                sampler.epoch = len(orders)
            indices = list(sampler)
            starts = range(0, len(indices) - rollout + 1, rollout * args.micro_steps_per_rollout)
            prompts = [i for start in starts for i in indices[start : start + rollout : num_generations]]
            prompts = broadcast_object_list([prompts])[0]  # a custom sampler may differ between processes
            if not prompts:
                raise ValueError(
                    f"_get_train_sampler returned a sampler of {len(indices)} indices, but a rollout takes {rollout}. "
                    f"Return one that gives each index num_generations={num_generations} times."
                )
            orders.append(prompts)
        return orders[epoch]

    return order
