"""`ResumableTrainer`: seed and checkpoint determine the position in a run exactly."""

import json
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.distributed.checkpoint import CheckpointException
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..config import RolloutConfig
from ..fields import DATA, OBJECTIVE, REWARDS, SAMPLING, deciding
from ..metrics.log import Watch
from ..metrics.watches import Watches
from . import checkpoint, disk
from .frozen_base import local_part
from .prompts import EpochSampler, PromptStream, epochs_of_sampler, permutations
from .replay import ReplayBuffer


# Fields that cut a rollout.
CUT = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "max_staleness",
)
# Topics of the fields that decide what a rollout holds.
CONTENT = (DATA, SAMPLING, REWARDS, OBJECTIVE)
# Fields that decide what else a checkpoint holds, in the middle of a rollout or not.
STATE = ("optim", "sync_ref_model")


class ResumableTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] whose resumed run is bitwise identical to an uninterrupted one."""

    args: RolloutConfig
    model: Any  # a PreTrainedModel, or PEFT's wrapper around one
    num_generations: int
    _replay: ReplayBuffer

    # The trainer's own numbers, and dictionaries of numbers, that a checkpoint holds.
    _saved_numbers: tuple[str, ...] = ()

    _sampler: EpochSampler | None = None  # of the data loader, set when training starts; a stream of data has none

    # The order of prompts

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        self._sampler = EpochSampler(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )
        return self._sampler

    @cached_property
    def _prompt_stream(self) -> PromptStream:
        """Prompts of dynamic sampling. Made at first use: a subclass's sampler may need what its `__init__` sets."""
        args, dataset = self.args, cast(Dataset, self.train_dataset)
        if type(self)._get_train_sampler is ResumableTrainer._get_train_sampler:
            return PromptStream(permutations(len(dataset), seed=args.seed, shuffle=self.shuffle_dataset))
        of_data_loader, sampler = self._sampler, self._get_train_sampler(dataset)
        self._sampler = of_data_loader
        order = epochs_of_sampler(
            sampler,
            rollout=args.generation_batch_size,
            repeats=args.micro_steps_per_rollout,
            num_generations=self.num_generations,
        )
        return PromptStream(order)

    def _run_epoch(self, **named):
        # Resumed from the last step's checkpoint, Transformers would train one step more. The checkpoint is read only
        # at the beginning: later, rotation may have deleted it.
        begins_with = named["resume_from_checkpoint"] if named["epoch"] == named["epochs_trained"] else None
        if self.state.global_step >= self.state.max_steps or self._has_spent_budget(begins_with):
            self.control.should_training_stop = True
            return
        if self._sampler is not None:
            self._sampler.epoch = named["epoch"]
        super()._run_epoch(**named)

    def _has_spent_budget(self, folder: str | None) -> bool:
        """Whether a checkpoint ends a run that has generated `max_completions`."""
        limit = self.args.max_completions
        if limit is None or folder is None or checkpoint.lacking(Path(folder)) is not None:
            return False
        state = checkpoint.load_state(Path(folder), self.accelerator.process_index)
        return state["position"] == 0 and json.loads(state["plain"])["numbers"]["_completions_generated"] >= limit

    # The state

    def rollout_state_dict(self) -> dict[str, Any]:
        """
        What this process needs to resume exactly, besides weights, optimizer, schedule and random states.

        Returns:
            `dict[str, Any]`: tensors, numbers and text, which `torch.load` reads with `weights_only=True`.
        """
        rollout, position = divmod(self._step, self.args.micro_steps_per_rollout)
        replays = self.args.max_staleness > 0 or position > 0
        return {
            "rollout": rollout,
            "position": position,
            # Later passes are cut from the samples; this one has been cut.
            "replay": self._replay.state_dict() if self.num_iterations > 1 and replays else {},
            "buffer": self._buffered_inputs if position % self.args.steps_per_generation else None,
            "pending_loss": self._tr_loss,
            # JSON keeps floats exactly. Anything else that a reward function has logged becomes text, because
            # `torch.load` would reject it.
            "plain": json.dumps(
                {
                    "settings": self._settings,
                    "numbers": {name: getattr(self, name) for name in self._saved_numbers},
                    "metrics": self._metrics,
                    "prompts": self._prompt_stream.state_dict() if self.args.max_sampling_rounds > 1 else {},
                    "logs": self._logs if self.log_completions else {},
                    "watches": {watch.text: watch.state() for watch in self._watches},
                },
                default=_plain,
            ),
        }

    def load_rollout_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of [`~ResumableTrainer.rollout_state_dict`]."""
        self._step = state["rollout"] * self.args.micro_steps_per_rollout + state["position"]
        self._buffered_inputs = send_to_device(state["buffer"], self.accelerator.device)
        self._replay.load_state_dict(send_to_device(state["replay"], self.accelerator.device))
        # The steps since the last log entry count in the next entry, but not in this call's mean loss.
        self._tr_loss = state["pending_loss"].to(self.args.device)
        self._total_loss_scalar = -self._tr_loss.item()
        plain = json.loads(state["plain"])
        for name, value in plain["numbers"].items():
            # Without the controller, the coefficient is a field, which may change at the end of a rollout.
            if name != "entropy_coef" or self.args.use_adaptive_entropy:
                setattr(self, name, value)
        if plain["prompts"] and self.args.max_sampling_rounds > 1:
            self._prompt_stream.load_state_dict(plain["prompts"])
        for mode, metrics in plain["metrics"].items():
            self._metrics[mode].update(metrics)
        self._load_logs(plain["logs"])
        for watch in self._watches:
            if watch.text in plain["watches"]:
                watch.restore(plain["watches"][watch.text])

    def _load_logs(self, saved: Mapping[str, Any]) -> None:
        logs: Any = self._logs  # name → values of the latest rollout, or name → column → values
        for name, kept in saved.items():
            if isinstance(kept, dict):
                for column, values in kept.items():
                    logs[name][column].extend(values)
            else:
                logs[name].extend(kept)

    @property
    def _watches(self) -> list[Watch]:
        found = [callback.watches for callback in self.callback_handler.callbacks if isinstance(callback, Watches)]
        return [watch for watches in found for watch in watches]

    @property
    def _settings(self) -> dict[str, Any]:
        """What decides how a rollout is cut, what it holds, and what else a checkpoint holds, as read from JSON."""
        args, data = self.args, self.train_dataset
        kind: Any = type(args)
        content = [name for topic in CONTENT for name in deciding(kind, topic)]
        settings = {
            "processes": self.accelerator.num_processes,
            **{name: getattr(args, name) for name in (*CUT, *STATE, *content, "seed", "use_vllm")},
            "trainer": self._name,
            "reward_funcs": self.reward_func_names,
            "tools": [getattr(tool, "__name__", type(tool).__name__) for tool in self.tools],
            "train_dataset.column_names": sorted(getattr(data, "column_names", None) or ()),
        }
        return json.loads(json.dumps(settings, default=str))

    def check_resumable(self, folder: str) -> None:
        """
        Check that this run can resume a checkpoint: inside a rollout, or with earlier rollouts that it replays, only
        if it would make and cut them in the same way; a moving reference model only in as many shards; and weights
        alone only in a form that this run's sharding can load.

        Raises:
            `ValueError`: names the field that differs, or says how to start from the weights.
        """
        place = Path(folder)
        if checkpoint.lacking(place) is not None:
            self._check_loads(place)
            return
        state = checkpoint.load_state(place, self.accelerator.process_index)
        saved, own = json.loads(state["plain"])["settings"], self._settings
        inside, replays = state["position"] > 0, bool(self.args.max_staleness and state["replay"])
        if replays and not inside:
            self._check_replays(folder, state["replay"], saved["processes"])
        for name in own:
            there, here = (f"{name}={settings.get(name)!r:.200}" for settings in (saved, own))
            if saved.get(name) == own[name]:
                continue
            if name in STATE:
                raise ValueError(
                    f"{folder!r} was saved with {there}, but this run has {here}. Set {there}, or start from its "
                    "weights: set the model (`model_name_or_path`) to this folder."
                )
            if inside:
                raise ValueError(
                    f"{folder!r} was saved in the middle of a rollout with {there}, but this run has {here}. Set "
                    f"{there}, or resume from a checkpoint at the end of a rollout."
                )
            if replays and name not in ("processes", *CUT):
                raise ValueError(
                    f"{folder!r} holds earlier rollouts for max_staleness={self.args.max_staleness}, made with "
                    f"{there}, but this run has {here}. Set {there}, or `max_staleness` to 0."
                )
        if self.args.sync_ref_model:
            self._check_reference(place, saved["processes"])

    def _check_reference(self, folder: Path, saved: int) -> None:
        """Check that a checkpoint of this many processes holds the moving reference model in this run's shards."""
        processes = self.accelerator.num_processes
        same = saved == processes or not self._reference_is_sharded
        if not same or not checkpoint.reference_file(folder, self._reference_shard).exists():
            raise ValueError(
                f"{str(folder)!r} holds the reference model of `sync_ref_model` as saved by {saved} processes, and "
                f"this run, with {processes}, holds it in another form. Resume with the number of processes and the "
                "sharding that it was saved with."
            )

    def _check_replays(self, folder: str, replay: Mapping[str, Any], processes: int) -> None:
        """Check that earlier rollouts in a checkpoint have as many samples per process, and groups, as this run's."""
        args = self.args
        samples, groups = len(replay["rollouts"][-1]["advantages"]), len(replay["useful"][-1])
        saved = {"processes": processes, "samples": samples, "group": samples * processes // groups}
        own = {
            "processes": self.accelerator.num_processes,
            "samples": args.per_device_train_batch_size * args.steps_per_generation,
            "group": self.num_generations,
        }
        if saved != own:
            described = "{samples} samples on each of {processes} processes in groups of {group}"
            raise ValueError(
                f"{folder!r} holds earlier rollouts for max_staleness={args.max_staleness}, of "
                f"{described.format(**saved)}, but this run has {described.format(**own)}. Resume with the processes, "
                "batch sizes and `num_generations` that it was saved with, or set `max_staleness` to 0."
            )

    def _check_loads(self, folder: Path) -> None:
        """Check that a checkpoint without a rollout holds what DeepSpeed or FSDP loads."""
        needed = {"DeepSpeed": ("global_step*", self.is_deepspeed_enabled), "FSDP": ("*fsdp*", self.is_fsdp_enabled)}
        for name, (files, used) in needed.items():
            if used and not any(folder.glob(files)):
                raise ValueError(
                    f"resume_from_checkpoint={str(folder)!r} holds nothing that {name} can resume ({files}). Set the "
                    "model (`model_name_or_path`) to this folder to start from its weights, or launch without "
                    f"{name}."
                )

    # A reference model that follows the policy, which the base model cannot restore

    @property
    def _reference_is_sharded(self) -> bool:
        parameters = self.ref_model.parameters()
        return self.is_fsdp_enabled or any(hasattr(parameter, "ds_tensor") for parameter in parameters)

    @property
    def _reference_shard(self) -> int | None:
        return self.accelerator.process_index if self._reference_is_sharded else None

    # Saving and loading, in the order of Transformers

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        writes = self.args.should_save
        try:
            if writes:
                checkpoint.make_way(folder)
            disk.check_room(self.accelerator, folder.parent, self._expected_bytes(folder.parent) if writes else 0)
            with checkpoint.no_rotation(self.args):
                super()._save_checkpoint(model, trial)
            if writes:
                checkpoint.finish(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        except (Exception, CheckpointException) as error:  # FSDP's is a `BaseException`
            disk.give_up(folder, error, self.args, expected=self._known_bytes)

    def _finalize_training(self, *inputs, **named):
        with checkpoint.no_rotation(self.args):
            return super()._finalize_training(*inputs, **named)

    def _save_rng_state(self, output_dir: str):
        super()._save_rng_state(output_dir)
        folder = Path(output_dir)
        torch.save(self.rollout_state_dict(), checkpoint.state_file(folder, self.accelerator.process_index))
        if self.args.sync_ref_model and (self._reference_is_sharded or self.args.should_save):
            parameters = [local_part(parameter) for parameter in self.ref_model.parameters()]
            torch.save(parameters, checkpoint.reference_file(folder, self._reference_shard))
        self.accelerator.wait_for_everyone()  # the manifest lists the files of all processes
        if self.args.should_save:
            checkpoint.finalize(folder)

    def _load_optimizer_and_scheduler(self, folder: str | None):
        if folder is None or checkpoint.lacking(Path(folder)) is not None:
            return super()._load_optimizer_and_scheduler(folder)
        # TRL reads its entropy controller from a file that it writes after the manifest, so a kill can cut it short.
        # `load_rollout_state_dict` has the same numbers.
        return super(GRPOTrainer, self)._load_optimizer_and_scheduler(folder)

    @torch.no_grad()
    def _load_rng_state(self, folder: str | None):
        super()._load_rng_state(folder)
        if folder is None or checkpoint.lacking(Path(folder)) is not None:
            return
        self.load_rollout_state_dict(checkpoint.load_state(Path(folder), self.accelerator.process_index))
        if self.args.sync_ref_model:
            kept = checkpoint.read(checkpoint.reference_file(Path(folder), self._reference_shard))
            for parameter, saved in zip(self.ref_model.parameters(), kept, strict=True):
                local_part(parameter).copy_(saved)

    def _expected_bytes(self, run: Path) -> int:
        """Size of a checkpoint: that of the run's last one, or what this process will write at least."""
        last = None if self.args.save_only_model else disk.bytes_of_last(run)
        return self._known_bytes() if last is None else last

    def _known_bytes(self) -> int:
        reference = 0
        if self.args.sync_ref_model and not self.args.save_only_model:
            copies = self.accelerator.num_processes if self._reference_is_sharded else 1
            reference = copies * sum(local_part(parameter).nbytes for parameter in self.ref_model.parameters())
        tensors = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Where they are sharded, each process writes its own, which DeepSpeed and FSDP hold elsewhere.
        if not (self.args.save_only_model or self.is_deepspeed_enabled or self.is_fsdp_enabled):
            states = self.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
        return reference + sum(local_part(tensor).nbytes for tensor in tensors)


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    return value.item() if hasattr(value, "item") else str(value)
