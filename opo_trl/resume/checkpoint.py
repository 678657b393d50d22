"""
What exact resumption adds to a checkpoint, and which checkpoint a run can be resumed from.

A resumed run is bitwise identical to an uninterrupted one. The `trainer` of these functions is an `OPOTrainer`.

A checkpoint is complete once it has `trainer_state.json`, which Transformers writes last, when every process has
written its part. Older checkpoints are deleted only after that.
"""

import functools
import json
import pickle
import re
import shutil
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, send_to_device, set_seed
from datasets import Dataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checks.files import free
from ..config import CONTENT, OPTIMIZER, OPOConfig
from ..models.frozen_base import local_part
from ..reuse.reading import RECORDED
from .other_processes import CUT, completions, divide, fitting, moved


logger = get_logger(__name__)

FORMAT = 5  # of the state

LAST = (True, "true", "True", "last", "auto")  # names of a run's last complete checkpoint


# Writing and reading


def state_file(folder: Path, process: int) -> Path:
    """File of a process's state: tensors, numbers and text."""
    return folder / f"rollout_state_{process}.pt"


def read(path: Path) -> Any:
    """Read one of these files into host memory; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def load_state(folder: Path, process: int) -> dict[str, Any]:
    """Read a process's state. A `ValueError` if another version of this package saved it."""
    path = state_file(folder, process)
    state = read(path if path.exists() else state_file(folder, 0))  # of a run on fewer processes
    if state.get("format") != FORMAT:
        fix = "Resume it with that version, or set `model_name_or_path` to it to start from its weights"
        raise ValueError(f"{str(folder)!r} was saved by another version of opo_trl. {fix}.")
    return state | {"settings": json.loads(state["plain"])["settings"]}


@contextmanager
def saving(trainer: Any, trial: Any) -> Iterator[None]:
    """Within this context a checkpoint is saved; at any moment the run has a complete one, if it had one before."""
    folder = Path(trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    if trainer.args.should_save:
        _make_way(folder)
    trainer.accelerator.wait_for_everyone()
    yield
    if trainer.args.should_save:
        for path in _latest_first(folder.parent):
            if path.name.startswith("_"):
                shutil.rmtree(path, ignore_errors=True)


def _make_way(folder: Path) -> None:
    """
    Empty the place of a checkpoint. A finished one of the same step, as of a signal that comes at the end of an epoch,
    is kept beside it until the new one is finished: older ones may be gone.

    Those of later steps are of a run that has been resumed from an earlier step, or started anew: they get another
    name, so that none of them is taken for the last checkpoint of this run.
    """
    for path in _latest_first(folder.parent):
        if _step(path) > _step(folder):
            aside = free(path.with_name(f"replaced-{PREFIX_CHECKPOINT_DIR}-{_step(path)}"))
            path.rename(aside)
            logger.warning(f"{path} is later than step {_step(folder)}, where the run is now: it is kept as {aside}.")
    if fault(folder) is None:
        kept = folder.with_name(f"_{folder.name}")
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    shutil.rmtree(folder, ignore_errors=True)  # files of an earlier attempt


def _latest_first(run: Path) -> list[Path]:
    """Checkpoints of a run by their steps; one that is being replaced comes after its replacement."""
    name = re.compile(rf"_?{PREFIX_CHECKPOINT_DIR}-\d+")
    found = [path for path in run.glob(f"*{PREFIX_CHECKPOINT_DIR}-*") if name.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_step(path), not path.name.startswith("_")), reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


# The state of a process


def state_of(trainer: Any) -> dict[str, Any]:
    """
    What this process needs to resume exactly, besides weights, optimizer, schedule and random states: tensors, numbers
    and text, which `torch.load` reads with `weights_only=True`.
    """
    args, logs = trainer.args, trainer._logs
    rollout, position = divmod(trainer._step, args.micro_steps_per_rollout)
    replays = args.max_staleness > 0 or position > 0
    return {
        "format": FORMAT,
        "rollout": rollout,
        "position": position,
        # Later passes are cut from the samples; this one has been cut.
        "replay": trainer._replay.state_dict() if args.num_iterations > 1 and replays else {},
        "buffer": trainer._cut_pass if position % args.steps_per_generation else None,
        "pending_loss": trainer._tr_loss,
        # JSON keeps floats exactly. Anything else that a reward function has logged becomes text, because
        # `torch.load` would reject it.
        "plain": json.dumps(
            {
                "settings": trainer._settings,
                "numbers": {name: getattr(*place) for name, place in _numbers(trainer).items()},
                "metrics": trainer._metrics,
                "logs": {n: logs[n] for n in logs if n != "images"} if trainer.log_completions else {},
            },
            default=_plain,
        ),
    }


def restore(trainer: Any, folder: Path) -> None:
    """Resume from the states of [`state_of`] in a checkpoint."""
    args, device, process = trainer.args, trainer.accelerator.device, trainer.accelerator.process_index
    state = load_state(folder, process)
    saved, own = state["settings"], settings(trainer)
    changed = [f"{name} {saved[name]} → {own[name]}" for name in CUT if saved[name] != own[name]]
    if changed:
        trainer.accelerator.print(f"Resuming with {', '.join(changed)}.")
        state = divide([load_state(folder, each) for each in range(saved["processes"])], own, process)
    if saved["processes"] != own["processes"]:  # Transformers restores the states of some processes
        seeds = np.random.SeedSequence((args.seed, trainer.state.global_step, process))
        set_seed(int(seeds.generate_state(1)[0]))
    trainer._step = state["rollout"] * args.micro_steps_per_rollout + state["position"]
    trainer._cut_pass = send_to_device(state["buffer"], device)
    if changed and state["buffer"] is not None:
        trainer._cut_pass = trainer._cut_again(trainer._cut_pass)
    trainer._replay.load_state_dict(send_to_device(state["replay"], device))
    # The steps since the last log entry count in the next entry, but not in this call's mean loss.
    trainer._tr_loss = state["pending_loss"].to(args.device)
    trainer._total_loss_scalar = -trainer._tr_loss.item()
    plain = json.loads(state["plain"])
    for name, (holder, attribute) in _numbers(trainer).items():
        setattr(holder, attribute, plain["numbers"][name])
    for mode, metrics in plain["metrics"].items():
        trainer._metrics[mode].update(metrics)
    logs: Any = trainer._logs  # name → values of the latest rollout, or name → column → values
    for name, kept in plain["logs"].items():
        if isinstance(kept, dict):
            for column, values in kept.items():
                logs[name][column].extend(values)
        else:
            logs[name].extend(kept)


def _numbers(trainer: Any) -> dict[str, tuple[Any, str]]:
    """Name of each number of the state, and of which object it is an attribute."""
    names = [*trainer._saved_numbers, *(["_prompt_stream.position"] if trainer.args.max_sampling_rounds > 1 else [])]
    paths = {name: name.rpartition(".") for name in names}
    return {name: (getattr(trainer, part) if part else trainer, last) for name, (part, _, last) in paths.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def has_spent_budget(args: OPOConfig, state: Mapping[str, Any]) -> bool:
    """Whether the state of a checkpoint ends a run that has generated `max_completions`."""
    generated = json.loads(state["plain"])["numbers"]["completions_generated"]
    spent = args.max_completions is not None and generated >= args.max_completions
    return spent and needs_rollout(args, state["position"])


def place_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Place in the data, an epoch and how many of its prompts have been taken, of a checkpoint with this state."""
    return json.loads(state["plain"])["numbers"]["_place"]


def needs_rollout(args: OPOConfig, micro_steps: int) -> bool:
    """Whether the optimizer step after so many micro-steps needs a new rollout: it may begin inside the last one."""
    return -micro_steps % args.micro_steps_per_rollout < args.gradient_accumulation_steps


# Which run can resume


# Settings that a run keeps at every checkpoint: the order of the prompts, and what the checkpoint's files belong to.
# Others may change at the end of a rollout.
_ORDER = ["seed", "shuffle_dataset", "max_sampling_rounds", "train_dataset.rows"]
LASTING = [*_ORDER, *OPTIMIZER, "optimizer", "peft_config", "sync_ref_model"]

# Entries of an adapter's configuration that do not change what its weights mean.
_OF_LOADING = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"}


def settings(trainer: Any) -> dict[str, Any]:
    """Settings that determine the rest of a run, as read from JSON."""
    args, optimizer = trainer.args, trainer._optimizer_class
    fields = [*CUT[1:], "num_iterations", *CONTENT, "seed", "use_vllm", *OPTIMIZER]
    adapter = getattr(trainer.accelerator.unwrap_model(trainer.model), "active_peft_config", None)
    of_adapter = {} if adapter is None else adapter.to_dict()
    found = {
        "processes": trainer.accelerator.num_processes,
        **{name: getattr(args, name) for name in fields if hasattr(args, name)},
        "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
        "trainer": trainer._name,
        "reward_funcs": trainer.reward_func_names,
        "tools": [getattr(tool, "__name__", type(tool).__name__) for tool in trainer.tools],
        **_data_settings(trainer),
        "peft_config": None if adapter is None else type(adapter).__name__,
        **{f"peft_config.{name}": value for name, value in of_adapter.items() if name not in _OF_LOADING},
    }
    return json.loads(json.dumps(found, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def _data_settings(trainer: Any) -> dict[str, Any]:
    # Recorded rollouts as they were loaded: what is added depends on the number of processes, up to rounding.
    data = trainer.train_dataset if trainer._recorded is None else trainer._recorded.dataset
    is_stream = not isinstance(data, Dataset)
    return {
        "train_dataset.column_names": sorted(getattr(data, "column_names", None) or ()),
        "train_dataset.rows": None if is_stream else len(data),
        "train_dataset.checksum": None if is_stream else checksum(data),
    }


@functools.lru_cache(maxsize=1)
def checksum(data: Dataset) -> str:
    """Checksum of the prompts of a dataset; of recorded rollouts, or of what a transform makes prompts of, of all."""
    has_prompts_only = "prompt" in data.column_names and RECORDED not in data.column_names
    names = ["prompt"] if has_prompts_only else data.column_names
    content = _Checksum()
    pickler = pickle.Pickler(content)
    pickler.fast = True  # it writes no references to earlier objects, so equal rows are equal bytes
    for rows in data.select_columns(names).with_format(None).iter(batch_size=1000):
        pickler.dump(rows)
    return f"{content.value:08x}"


class _Checksum:
    """A file that keeps nothing but the checksum of what is written."""

    value = 0

    def write(self, content: bytes) -> None:
        self.value = zlib.crc32(content, self.value)


def check_resumable(trainer: Any, folder: str) -> dict[str, Any]:
    """
    Check that a trainer's run can resume a checkpoint: that its prompts have the same order, and its files belong to
    the same optimizer and adapter. Inside a rollout, or with earlier rollouts that the run replays, it also has to
    make rollouts in the same way, and to train on them in the same optimizer steps; at the end of one, a warning names
    what has changed. Returns this process's state, with the position in micro-steps of this run.

    Raises:
        `ValueError`: another version or number of shards saved the checkpoint, or a field differs, which is named.
    """
    state = load_state(Path(folder), trainer.accelerator.process_index)
    saved, own = state["settings"], settings(trainer)
    has_shards = trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and trainer.args.sync_ref_model)
    if has_shards and saved["processes"] != own["processes"]:
        said = f"{folder!r} holds shards of {saved['processes']} processes, but this run has {own['processes']}"
        raise ValueError(f"{said}. Set `num_processes` to {saved['processes']}.")
    reason, fix = "", None
    if state["position"] > 0:
        reason, fix = "was saved in the middle of a rollout, and ", "resume from a checkpoint at the end of a rollout"
    elif trainer.args.max_staleness and state["replay"]:
        reason, fix = "was saved with earlier rollouts, and ", "set `max_staleness` to 0"
    expected = _expected(saved, own, same_sizes=fix is not None)
    # Another release of PEFT may have entries that the checkpoint lacks.
    differing = [name for name in own if expected.get(name, own[name]) != own[name]]
    lasting = [name for name in differing if name in LASTING or name.startswith("peft_config.")]
    resized = [name for name in differing if name in (*CUT, "num_iterations", "num_generations")]
    if own["train_dataset.rows"] is None:
        lasting += resized  # a place in a stream is a number of rollouts
    if lasting:
        differing, reason, fix = lasting, "", "set `model_name_or_path` to it to start from its weights"
    elif resized and fix is None and trainer.args.max_steps <= 0:
        differing, fix = resized, "set `max_steps`, as an epoch has another number of optimizer steps"
    if differing:
        data = "rollouts" if trainer.args.rollouts else "train_dataset"
        labels = {name: name.replace("train_dataset", data) for name in differing}
        there, here = (
            ", ".join(f"{label}={values[name]!r:.200}" for name, label in labels.items()) for values in (expected, own)
        )
        if fix is not None:
            first = "Use the same data" if any("train_dataset." in name for name in differing) else f"Set {there}"
            raise ValueError(f"{folder!r} {reason}goes on with {there}, but this run has {here}. {first}, or {fix}.")
        message = f"The run goes on with {here} in place of {there}, so it is no longer a single trajectory"
        logger.warning_once(f"{folder!r}: {message}.")
    return {**state, "position": moved(state["position"], saved, own)}


def _expected(saved: Mapping[str, Any], own: Mapping[str, Any], *, same_sizes: bool) -> dict[str, Any]:
    """
    The settings with which a checkpoint goes on. Its processes, micro-batches and the form of its optimizer may be
    others: they are this run's, where all else stays the same. With `same_sizes`, each optimizer step and rollout has
    to keep its completions; a `ValueError` if it cannot.
    """
    cut = {}
    if completions(saved) == completions(own):
        cut = {name: own[name] for name in CUT}
    elif same_sizes:
        cut = {name: own[name] for name in CUT[:2]} | fitting(saved, own)
    # `adamw_torch` and `adamw_torch_fused`, for example, are of the same class.
    form = {"optim": own["optim"]} if saved["optimizer"] == own["optimizer"] else {}
    return {**saved, **cut, **form}


class MovingReference:
    """A reference model that follows the policy (`sync_ref_model`): this process's shard of it, or all of it."""

    def __init__(self, trainer: Any):
        parameters = [*trainer.ref_model.parameters()]
        self.parts = [local_part(parameter) for parameter in parameters]
        is_sharded = trainer.is_fsdp_enabled or any(hasattr(parameter, "ds_tensor") for parameter in parameters)
        self._writes = is_sharded or trainer.args.should_save
        self._file = f"reference_{trainer.accelerator.process_index}.pt" if is_sharded else "reference.pt"

    def save(self, folder: Path) -> None:
        """Write what this process has to write into a checkpoint."""
        if self._writes:
            torch.save(self.parts, folder / self._file)

    def load(self, folder: Path) -> None:
        """Restore the model from a checkpoint."""
        for part, saved in zip(self.parts, read(folder / self._file), strict=True):
            part.copy_(saved)


# Which checkpoint a run resumes


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed exactly; `None` if it is complete."""
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"it has no complete {TRAINER_STATE_NAME}, which is written last"
    if not any(folder.glob("rollout_state_*")):
        return "it holds no rollout, as another trainer or `save_only_model` saved it: `model_name_or_path` takes it"
    return None


def last_complete(output_dir: str) -> str | None:
    """Folder of a run's last complete checkpoint, if it has one."""
    return next((str(path) for path in _latest_first(Path(output_dir)) if fault(path) is None), None)


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from; `None` to start from the beginning.

    `wanted` is the folder of a checkpoint; `"last"` or `True`: the last complete one of the run in `output_dir`; or
    `"auto"`: the same, but the run starts from the beginning if it has none. A `ValueError` if the wanted checkpoint
    is not complete, or there is none.
    """
    if wanted in (None, False, "false", "False"):
        return None
    is_named = wanted not in LAST
    folders = [Path(str(wanted))] if is_named else _latest_first(Path(output_dir))
    # As the main process sees them: on a network file system, another one may not see the same files yet.
    found = broadcast_object_list([[(folder, fault(folder)) for folder in folders]])[0]
    for folder, why in found:
        if why is None:
            return str(folder)
        logger.warning(f"{folder} is skipped: {why}.")
    if wanted == "auto":
        return None
    why = found[0][1] if is_named else f"output_dir={output_dir!r} holds no complete checkpoint"
    fix = "Remove `resume_from_checkpoint`, or set it to `auto` to start from the beginning in that case"
    raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {fix}.")
