"""
What exact resumption adds to a checkpoint, and which checkpoint a run can be resumed from.

A resumed run is bitwise identical to an uninterrupted one. The `trainer` of these functions is an `OPOTrainer`, which
puts a state together from those of its parts.

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
from accelerate.utils import broadcast_object_list, set_seed
from datasets import Dataset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checks.files import free
from ..config import CONTENT, OPTIMIZER, OPOConfig
from ..data.prompt_ids import PROMPT_IDS
from ..models.frozen_base import local_part
from ..reuse.reading import RECORDED
from .other_processes import CUT, OF_MACHINE, completions_of, converted, divide, fitting


logger = get_logger(__name__)

FORMAT = 7  # number of the format in which states are saved

# Values of `resume_from_checkpoint` that stand for a run's last complete checkpoint
LAST = (True, "true", "True", "last", "auto")

# Entries of a state that hold tensors. All others are numbers and text.
_WITH_TENSORS = ("replay", "micro_batches", "pending_loss")


# Writing and reading


def state_file(folder: Path, process: int) -> Path:
    """File of a process's state: tensors, numbers and text."""
    return folder / f"rollout_state_{process}.pt"


def read(path: Path) -> Any:
    """Read one of these files into host memory; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def save_state(folder: Path, process: int, state: Mapping[str, Any]) -> None:
    """
    Write a process's state, so that `torch.load` reads it with `weights_only=True`: entries that hold tensors as they
    are, all others as JSON.
    """
    tensors = {name: state[name] for name in _WITH_TENSORS}
    others = {name: value for name, value in state.items() if name not in _WITH_TENSORS}
    # State holds what reward functions have logged: numbers and text stay as they are (JSON keeps floats exactly), any
    # other object becomes text, because `torch.load` would reject it.
    text = json.dumps(others, default=_as_json)
    torch.save({"format": FORMAT, "text": text, **tensors}, state_file(folder, process))


def load_state(folder: Path, process: int) -> dict[str, Any]:
    """Read a process's state. A `ValueError` if another version of this package saved it."""
    path = state_file(folder, process)
    stored = read(path if path.exists() else state_file(folder, 0))  # fewer processes have saved it
    if stored.get("format") != FORMAT:
        fix = "Resume it with that version, or set `model_name_or_path` to it to start from its weights"
        raise ValueError(f"{str(folder)!r} was saved by another version of opo_trl. {fix}.")
    tensors = {name: stored[name] for name in _WITH_TENSORS}
    return {**json.loads(stored["text"]), **tensors}


def _as_json(value: Any) -> Any:
    """What JSON writes for an object of another type: a list for a deque or an array, otherwise text."""
    if isinstance(value, deque):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def saving(trainer: Any, run: Path) -> Iterator[None]:
    """
    Within this context a checkpoint is saved in the folder of a `run`; at any moment the run has a complete one, if it
    had one before. Afterwards, those that were kept beside it meanwhile (`_checkpoint-N`) are deleted.
    """
    if trainer.args.should_save:  # of the processes that share this folder, only one
        _make_way(run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    trainer.accelerator.wait_for_everyone()
    yield
    if trainer.args.should_save:
        for path in _latest_first(run):
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
        backup = folder.with_name(f"_{folder.name}")
        shutil.rmtree(backup, ignore_errors=True)
        folder.rename(backup)
    shutil.rmtree(folder, ignore_errors=True)  # files of an earlier attempt


def _latest_first(run: Path) -> list[Path]:
    """
    Checkpoints of a run, from the last step to the first. `_checkpoint-N`, which is being replaced, comes after
    `checkpoint-N`.
    """

    def order(path: Path) -> tuple[int, bool]:
        return -_step(path), path.name.startswith("_")

    name = re.compile(rf"_?{PREFIX_CHECKPOINT_DIR}-\d+")
    checkpoints = [path for path in run.glob(f"*{PREFIX_CHECKPOINT_DIR}-*") if name.fullmatch(path.name)]
    return sorted(checkpoints, key=order)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


# What a state says


def changes_of_cut(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """
    Settings by which a run cuts its rollouts into optimizer steps and micro-batches otherwise than the run that saved
    a checkpoint, as text such as `"processes 2 → 4"`.
    """
    return [f"{name} {saved[name]} → {current[name]}" for name in CUT if saved[name] != current[name]]


def divided_state(folder: Path, current: Mapping[str, Any], process: int) -> dict[str, Any]:
    """The state of a process in a run with the `current` settings, from those of all processes of a checkpoint."""
    n_saved = load_state(folder, 0)["settings"]["processes"]
    return divide([load_state(folder, index) for index in range(n_saved)], current, process)


def draw_random_state(seed: int, step: int, process: int) -> None:
    """Set random states that are a function of these numbers: Transformers restores those of some processes only."""
    seeds = np.random.SeedSequence((seed, step, process))
    set_seed(int(seeds.generate_state(1)[0]))


def has_spent_budget(args: OPOConfig, state: Mapping[str, Any]) -> bool:
    """Whether the state of a checkpoint ends a run that has generated `max_completions`."""
    is_spent = args.max_completions is not None and state["completions_generated"] >= args.max_completions
    return is_spent and needs_rollout(args, state["position"])


def needs_rollout(args: OPOConfig, micro_steps: int) -> bool:
    """
    Whether the optimizer step after so many micro-steps (calls of `training_step`) needs a new rollout: what is left
    of the last one does not fill it.
    """
    return -micro_steps % args.micro_steps_per_rollout < args.gradient_accumulation_steps


# Which run can resume


# Settings that a run keeps at every checkpoint: the order of the prompts, and what the checkpoint's files belong to.
# Others may change at the end of a rollout.
_ORDER = ["seed", "shuffle_dataset", "max_sampling_rounds", "train_dataset.rows"]
LASTING = [*_ORDER, *OPTIMIZER, "optimizer", "peft_config", "sync_ref_model"]

# Entries of an adapter's configuration that do not change what its weights mean.
_OF_LOADING = {"auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"}


def settings_of(trainer: Any, *, name: str, optimizer: type, data: Any) -> dict[str, Any]:
    """
    Settings that determine the rest of a run, as read from JSON: those of the trainer, the `name` of its method, the
    class of its optimizer and the dataset that it was given.
    """
    args = trainer.args
    # The first of `CUT` is no field, but the number of processes.
    fields = [*CUT[1:], "num_iterations", *CONTENT, "seed", "use_vllm", *OPTIMIZER]
    adapter = getattr(trainer.accelerator.unwrap_model(trainer.model), "active_peft_config", None)
    adapter_fields = {}
    if adapter is not None:
        # Without those that do not change what its weights mean, such as its dropout
        adapter_fields = {field: value for field, value in adapter.to_dict().items() if field not in _OF_LOADING}
    settings = {
        "processes": trainer.accelerator.num_processes,
        **{field: getattr(args, field) for field in fields if hasattr(args, field)},
        "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
        "trainer": name,
        "reward_funcs": trainer.reward_func_names,
        "tools": [getattr(tool, "__name__", type(tool).__name__) for tool in trainer.tools],
        **_data_settings(data),
        "peft_config": None if adapter is None else type(adapter).__name__,
        **{f"peft_config.{field}": value for field, value in adapter_fields.items()},
    }
    # In the form in which a checkpoint's are read, to compare them: JSON has lists in place of tuples, for example.
    text = json.dumps(settings, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    return json.loads(text)


def _data_settings(data: Any) -> dict[str, Any]:
    """Columns, number of rows and checksum of a dataset; a stream has only columns."""
    is_stream = not isinstance(data, Dataset)
    return {
        "train_dataset.column_names": sorted(getattr(data, "column_names", None) or ()),
        "train_dataset.rows": None if is_stream else len(data),
        "train_dataset.checksum": None if is_stream else checksum(data),
    }


@functools.lru_cache(maxsize=1)
def checksum(data: Dataset) -> str:
    """
    Checksum of the prompts of a dataset, and of their tokens if it has these; of all its columns if it has recorded
    rollouts, or a transform makes the prompts.
    """
    # Other columns, which reward functions read, may change.
    only_prompts_count = "prompt" in data.column_names and RECORDED not in data.column_names
    names = data.column_names
    if only_prompts_count:
        names = [name for name in ("prompt", PROMPT_IDS) if name in names]
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
    saved, current = state["settings"], trainer.current_settings
    has_shards = trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and trainer.args.sync_ref_model)
    if has_shards and saved["processes"] != current["processes"]:
        raise ValueError(
            f"{folder!r} holds shards of {saved['processes']} processes, but this run has {current['processes']}. "
            f"Set `num_processes` to {saved['processes']}."
        )
    # `fix`: what a user can do if another setting makes other rollouts; `None` if it may
    reason, fix = _why_rollouts_stay_alike(state, trainer.args)
    expected = _expected(saved, current, same_sizes=fix is not None)
    # Compared only if the checkpoint has them: another release of PEFT may have further entries.
    differing = [name for name in current if expected.get(name, current[name]) != current[name]]
    # Settings that a run keeps at every checkpoint, and those that it may change at the end of a rollout
    lasting = [name for name in differing if name in LASTING or name.startswith("peft_config.")]
    resized = [name for name in differing if name in (*CUT, "num_iterations", "num_generations")]
    if current["train_dataset.rows"] is None:
        lasting += resized  # a place in a stream is a number of rollouts
    if lasting:
        differing, reason, fix = lasting, "", "set `model_name_or_path` to it to start from its weights"
    elif resized and fix is None and trainer.args.max_steps <= 0:
        differing, fix = resized, "set `max_steps`, as an epoch has another number of optimizer steps"
    if differing:
        data = "rollouts" if trainer.args.rollouts else "train_dataset"
        there, here = _listed(expected, differing, data), _listed(current, differing, data)
        if fix is not None:
            has_other_data = any(name.startswith("train_dataset.") for name in differing)
            first = "Use the same data" if has_other_data else f"Set {there}"
            raise ValueError(f"{folder!r} {reason}goes on with {there}, but this run has {here}. {first}, or {fix}.")
        message = f"The run goes on with {here} in place of {there}, so it is no longer a single trajectory"
        logger.warning_once(f"{folder!r}: {message}.")
    return {**state, "position": converted(state["position"], saved, current)}


def _why_rollouts_stay_alike(state: Mapping[str, Any], args: OPOConfig) -> tuple[str, str | None]:
    """
    Why a run that resumes a checkpoint has to make rollouts as before, as a part of a sentence, and what the user can
    do instead; `None` if it need not.
    """
    if state["position"] > 0:  # calls of `training_step` that have used the current rollout
        return "was saved in the middle of a rollout, and ", "resume from a checkpoint at the end of a rollout"
    if args.max_staleness and state["replay"]:
        return "was saved with earlier rollouts, and ", "set `max_staleness` to 0"
    return "", None


def _listed(settings: Mapping[str, Any], names: list[str], data: str) -> str:
    """Settings of these names as text; `data` is the name of the field that has brought the dataset."""
    return ", ".join(f"{name.replace('train_dataset', data)}={settings[name]!r:.200}" for name in names)


def _expected(saved: Mapping[str, Any], current: Mapping[str, Any], *, same_sizes: bool) -> dict[str, Any]:
    """
    The settings with which a checkpoint goes on: the saved ones, but with what may be this run's.

    That is the form of its optimizer, and the processes and micro-batches by which it cuts rollouts, if each optimizer
    step and rollout keeps its number of completions. If it does not, `same_sizes` asks for the number of micro-steps
    with which it would; a `ValueError` if there is none. Without `same_sizes`, the saved cut is expected.
    """
    cut = {}
    if completions_of(saved) == completions_of(current):
        cut = {name: current[name] for name in CUT}
    elif same_sizes:
        cut = {name: current[name] for name in OF_MACHINE} | fitting(saved, current)
    # `adamw_torch` and `adamw_torch_fused`, for example, are of the same class.
    form = {"optim": current["optim"]} if saved["optimizer"] == current["optimizer"] else {}
    return {**saved, **cut, **form}


class MovingReference:
    """A reference model that follows the policy (`sync_ref_model`): this process's shard of it, or all of it."""

    def __init__(self, trainer: Any):
        parameters = [*trainer.ref_model.parameters()]
        self.parts = [local_part(parameter) for parameter in parameters]  # what this process holds of each parameter
        # `ds_tensor` is DeepSpeed's shard of a parameter. Without shards, the main process writes all.
        is_sharded = trainer.is_fsdp_enabled or any(hasattr(parameter, "ds_tensor") for parameter in parameters)
        # Whether this process writes a file
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
    """Why a checkpoint cannot be resumed exactly, as part of a sentence; `None` if it is complete."""
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


def resolve(requested: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from; `None` to start from the beginning.

    `requested` is the folder of a checkpoint; `"last"` or `True`: the last complete one of the run in `output_dir`; or
    `"auto"`: the same, but the run starts from the beginning if it has none. A `ValueError` if the requested
    checkpoint is not complete, or there is none.
    """
    if requested in (None, False, "false", "False"):
        return None
    is_named = requested not in LAST  # in place of a word for the last complete one
    folders = [Path(str(requested))] if is_named else _latest_first(Path(output_dir))
    # As the main process sees them: on a network file system, another one may not see the same files yet.
    faults = broadcast_object_list([[(folder, fault(folder)) for folder in folders]])[0]
    for folder, why in faults:
        if why is None:
            return str(folder)
        logger.warning(f"{folder} is skipped: {why}.")
    if requested == "auto":
        return None
    why = faults[0][1] if is_named else f"output_dir={output_dir!r} holds no complete checkpoint"
    raise ValueError(
        f"resume_from_checkpoint={requested!r} cannot be resumed: {why}. Remove `resume_from_checkpoint`, or set it "
        "to `auto` to start from the beginning in that case."
    )
