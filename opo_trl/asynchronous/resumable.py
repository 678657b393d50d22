"""
Checkpoints of asynchronous training: which prompts have been trained, and whether a kill cut the checkpoint short.

A group's id is the place of its prompt in the stream of the dataset's epochs. TRL saves the first place that has not
been collated. That is wrong in both directions: a micro-batch is collated before it is trained, so that a resumed run
skips its prompts; and groups are finished out of order, or never, so that it trains those behind a gap again.
"""

import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ..rollout import checkpoint, wording
from ..rollout.skipped_steps import SkippedSteps
from .config import AsyncOPOConfig


logger = get_logger(__name__)

TRAINED = "trained_prompts.json"

_ROOM = 32  # for rows and micro-batches smaller than TRL expects


class ResumableAsyncTrainer(AsyncGRPOTrainer):
    """
    [`~trl.experimental.async_grpo.AsyncGRPOTrainer`] that skips, when it resumes, the prompts of which it has trained
    a completion, in all of its passes. Completions that were on the way are generated anew.
    """

    args: AsyncOPOConfig

    def __init__(self, *inputs, **named):
        super().__init__(*inputs, **named)
        self._collated: deque[set[int]] = deque()  # groups of each micro-batch that waits; where batches are collated
        self._skipped = SkippedSteps(self.args, self.accelerator)
        self._batches_of_step: list[Any] = []
        self._groups_of_step: set[int] = set()
        self._passes_left = 0  # over them
        self._has_begun = False
        if self._epoch_stop_groups is not None:
            # TRL's bound on the steps of an epoch, which must never be reached, counts each sample once.
            self.args.max_steps *= self.args.num_iterations * _ROOM

    def train(self, resume_from_checkpoint: str | bool | None = None, *inputs, **named):
        """
        As in TRL, but only complete checkpoints are resumed.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                Folder of a checkpoint; `"last"` or `True`: the last complete one of the run; `"auto"`: the same, but
                the run starts from the beginning if it has none.

        Raises:
            `ValueError`: the wanted checkpoint is not complete, or there is none.
            `RuntimeError`: the trainer has trained before; TRL does not start its worker again.
        """
        if self._has_begun:
            raise RuntimeError(
                "train() was called before, and the rollout worker cannot be started again. Make a new trainer, and "
                "resume from this one's last checkpoint."
            )
        self._has_begun = True
        self._skip(())
        return super().train(checkpoint.resolve(resume_from_checkpoint, self.args.output_dir), *inputs, **named)

    def _skip(self, trained: Collection[int]) -> None:
        """Begin with the prompts that are not among those of the given groups."""
        # TRL counts epochs by this set and by a number that says where it began.
        self._trained_groups = set(trained)
        self._groups_before_resume, self._last_groups_trained = 0, len(trained)
        options = getattr(self.rollout_worker, "_loop_kwargs", None)
        if options is not None:
            options["trained"] = frozenset(trained)
            options |= {"dataset_start_index": 0} if "dataset_start_index" in options else {}
        elif trained and self.rollout_worker is not None:
            logger.warning(
                f"The rollout worker {type(self.rollout_worker).__name__} has no `_loop_kwargs`, so it cannot be told "
                "which prompts have been trained: it begins with the first one."
            )

    # Which prompts are trained

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        inner = loader.base_dataloader
        collate = inner.collate_fn
        collate.groups_trained = set()  # TRL would take for trained what has been collated
        inner.collate_fn = functools.partial(self._collate, collate)
        return loader

    def _collate(self, collate: Callable[[list], dict[str, Any]], examples: list) -> dict[str, Any]:
        self._collated.append({sample["group_id"] for row in examples[0] for sample in row.samples})
        return collate(examples)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if not self._passes_left:
            self._batches_of_step, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._passes_left = self.args.num_iterations
            if self._collated:
                self._groups_of_step = set().union(*(self._collated.popleft() for _ in self._batches_of_step))
        self._passes_left -= 1
        return self._batches_of_step, None

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._passes_left:
            self._trained_groups |= self._groups_of_step
        return loss

    def _run_epoch(self, **named):
        # Resumed from the last step's checkpoint, Transformers would train one step more.
        epochs_are_over = len(self._trained_groups) >= (self._epoch_stop_groups or math.inf)  # on the main process
        over = torch.tensor(int(epochs_are_over), device=self.accelerator.device)
        if self.state.global_step >= self.state.max_steps or self.accelerator.reduce(over, reduction="sum").item():
            self.control.should_training_stop = True
            return
        super()._run_epoch(**named)

    # As in `RolloutTrainer`

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        step = self.state.global_step + 1
        return self._skipped.check(model, norm, step=step, micro_batches=self._batches_of_step)

    def _maybe_log_save_evaluate(self, *inputs, **named):
        with self._skipped.end_of_step(self):
            super()._maybe_log_save_evaluate(*inputs, **named)

    def log(self, logs, start_time=None):
        if "grad_norm" in logs:
            self._metrics["train"]["opo/skipped_steps"].append(self._skipped.total)
        super().log(logs, start_time)

    def create_model_card(self, *inputs, **named):
        super().create_model_card(*inputs, **wording.card_options(named))
        wording.name_model(self)

    def _issue_warnings_after_load(self, load_result):
        wording.leave_out_tied(self.model, load_result)
        super()._issue_warnings_after_load(load_result)

    # Saving and loading, in the order of Transformers

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            checkpoint.make_way(folder)
        self.accelerator.wait_for_everyone()
        with checkpoint.no_rotation(self.args):
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            checkpoint.finish(folder, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _finalize_training(self, *inputs, **named):
        with checkpoint.no_rotation(self.args):
            return super()._finalize_training(*inputs, **named)

    def _save_rng_state(self, output_dir: str):
        super()._save_rng_state(output_dir)
        if self.accelerator.is_main_process:
            (Path(output_dir) / TRAINED).write_text(json.dumps(_ranges(self._trained_groups)))
        self.accelerator.wait_for_everyone()  # the manifest lists the files of all processes
        if self.args.should_save:
            checkpoint.finalize(Path(output_dir))

    def _load_optimizer_and_scheduler(self, folder: str | None):
        super()._load_optimizer_and_scheduler(folder)  # before the worker is started
        if folder is not None and self.accelerator.is_main_process:
            self._skip(_trained(Path(folder)))


def _ranges(places: Iterable[int]) -> list[list[int]]:
    """Sorted numbers as half-open ranges: 0, 1, 2, 5 are `[[0, 3], [5, 6]]`."""
    runs = itertools.groupby(enumerate(sorted(places)), key=lambda pair: pair[1] - pair[0])
    found = [[place for _, place in run] for _, run in runs]
    return [[run[0], run[-1] + 1] for run in found]


def _trained(folder: Path) -> list[int]:
    """Groups that a checkpoint has trained; of a checkpoint by `AsyncGRPOTrainer`, those before the place it saved."""
    if (folder / TRAINED).exists():
        return [place for run in json.loads((folder / TRAINED).read_text()) for place in range(*run)]
    try:
        return list(range(json.loads((folder / "rollout_state.json").read_text())["prompt_index"]))
    except FileNotFoundError:
        return []
