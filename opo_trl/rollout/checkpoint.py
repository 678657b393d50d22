"""
What a checkpoint holds beside weights, optimizer and random states, and which one a run can be resumed from.

Held for each process is its part of the rollout in use, the place in it, and what the next log entry will report: the
rest of a resumed run is then bit by bit that of an uninterrupted one.

Only a checkpoint that was written to its end will do. It is whole when two files say so: `manifest.json`, written
when the last process is done, lists what they have written with its size, and `trainer_state.json` is what
Transformers writes last. What a process that is killed leaves behind lacks one of them, or a file that the manifest
names.

Other trainers' checkpoints, and those saved with `save_only_model`, have no manifest but do have `trainer_state.json`.
They go on as they do in Transformers when they are named by their path, and are never chosen otherwise.
"""

import errno
import json
import os
import re
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ..metrics.watches import Watch, Watches
from .frozen_base import local_part


logger = get_logger(__name__)

MANIFEST = "manifest.json"

# A whole checkpoint while another of the same step is written. Neither Transformers' rotation nor a push looks at it.
REPLACED_PREFIX = f"_{PREFIX_CHECKPOINT_DIR}"

# What an `OSError` without a file's name says of the disk.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


def save_state(trainer: Any, folder: Path) -> None:
    """Write this process's `rollout_state_*.pt`, and its part of a reference model that follows the policy."""
    rollout, position = divmod(trainer._step, trainer.args.micro_steps_per_rollout)
    state = {
        "rollout": rollout,
        "position": position,
        "split": _split(trainer),
        "buffer": trainer._buffered_inputs if position else None,
        "pending_loss": trainer._tr_loss,
        # As JSON, which keeps floats exactly, and as text whatever else a reward function may have logged:
        # `torch.load` would refuse it.
        "plain": json.dumps(
            {
                "numbers": {name: getattr(trainer, name) for name in trainer._saved_numbers},
                "metrics": trainer._metrics,
                "prompts": _prompts(trainer),
                "logs": trainer._logs if trainer.log_completions else {},
                "watches": {watch.text: watch.state() for watch in _watches(trainer)},
            },
            default=_plain,
        ),
    }
    torch.save(state, _state_file(folder, trainer.accelerator.process_index))
    # Where it is not sharded, every process has the same one.
    if trainer.args.sync_ref_model and (_reference_is_sharded(trainer) or trainer.args.should_save):
        torch.save([local_part(each) for each in trainer.ref_model.parameters()], _reference_file(trainer, folder))


def load_state(trainer: Any, folder: str) -> dict[str, Any]:
    """Read this process's `rollout_state_*.pt`, into host memory."""
    path = _state_file(Path(folder), trainer.accelerator.process_index)
    # Where there are more processes than before, the first one's will do for them, as far as `check_split` lets it.
    path = path if path.exists() else _state_file(Path(folder), 0)
    return torch.load(path, map_location="cpu", weights_only=True)


@torch.no_grad()
def restore_state(trainer: Any, state: Mapping[str, Any]) -> None:
    """Go on from a state of `load_state`."""
    trainer._step = state["rollout"] * trainer.args.micro_steps_per_rollout + state["position"]
    trainer._buffered_inputs = send_to_device(state["buffer"], trainer.accelerator.device)
    # Optimizer steps since the last log entry count in the next one, but not in this call's mean loss.
    trainer._tr_loss = state["pending_loss"].to(trainer.args.device)
    trainer._total_loss_scalar = -trainer._tr_loss.item()
    plain = json.loads(state["plain"])
    for name, value in plain["numbers"].items():
        setattr(trainer, name, value)
    for name, value in plain["prompts"].items():
        setattr(trainer._prompt_stream, name, value)
    for mode, metrics in plain["metrics"].items():
        trainer._metrics[mode].update(metrics)
    logs: Any = trainer._logs  # name → the latest rollout's values, or name → column → values
    for name, kept in plain["logs"].items():
        if isinstance(kept, dict):
            for column, values in kept.items():
                logs[name][column].extend(values)
        else:
            logs[name].extend(kept)
    states = plain.get("watches", {})  # earlier versions saved none
    for watch in _watches(trainer):
        if watch.text in states:
            watch.restore(states[watch.text])


@torch.no_grad()
def restore_reference(trainer: Any, folder: str) -> None:
    """Go on with the reference model of a checkpoint, if it follows the policy."""
    if trainer.args.sync_ref_model:
        kept = torch.load(_reference_file(trainer, Path(folder)), map_location="cpu", weights_only=True)
        for parameter, saved in zip(trainer.ref_model.parameters(), kept, strict=True):
            local_part(parameter).copy_(saved)


def check_split(trainer: Any, folder: str) -> None:
    """
    Check that a checkpoint inside a rollout is resumed with the rollout cut as it was, that a reference model which
    follows the policy is there in as many parts, and that a model alone can be resumed as this run is sharded.

    Raises:
        `ValueError`: names the field that differs, or says how to start from the weights.
    """
    if lacking(Path(folder)) is not None:
        _check_loads(trainer, Path(folder))
        return
    state = load_state(trainer, folder)
    saved, split = state["split"], _split(trainer)
    if trainer.args.sync_ref_model:
        parts = saved["processes"] if _reference_is_sharded(trainer) else split["processes"]
        if parts != split["processes"] or not _reference_file(trainer, Path(folder)).exists():
            raise ValueError(
                f"{folder!r} holds the reference model of `sync_ref_model` as {saved['processes']} processes kept it, "
                f"which is not how these {split['processes']} do. Resume with as many processes and the sharding "
                "that it was saved with."
            )
    if state["position"] == 0 or saved == split:
        return
    name = next(name for name in split if split[name] != saved[name])
    raise ValueError(
        f"{folder!r} was saved in the middle of a rollout with {name}={saved[name]}, but this run has "
        f"{name}={split[name]}. Set {name}={saved[name]}, or resume from a checkpoint at the end of a rollout."
    )


def _split(trainer: Any) -> dict[str, int]:
    """How a rollout is cut: into processes, micro-batches and passes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    return {"processes": trainer.accelerator.num_processes, **{name: getattr(trainer.args, name) for name in names}}


def _prompts(trainer: Any) -> dict[str, Any]:
    """Where dynamic sampling's stream of prompts stands."""
    if trainer.args.max_sampling_rounds == 1:
        return {}
    return {name: getattr(trainer._prompt_stream, name) for name in ("position", "returned")}


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    return value.item() if hasattr(value, "item") else str(value)


def _check_loads(trainer: Any, folder: Path) -> None:
    """Check that a checkpoint of another trainer, or of a model alone, holds what DeepSpeed or FSDP loads from."""
    needed = {"DeepSpeed": ("global_step*", trainer.is_deepspeed_enabled), "FSDP": ("*fsdp*", trainer.is_fsdp_enabled)}
    for name, (files, used) in needed.items():
        if used and not any(folder.glob(files)):
            raise ValueError(
                f"resume_from_checkpoint={str(folder)!r} holds nothing that {name} can resume ({files}). Set the "
                "model (`model_name_or_path`) to this folder to start from its weights, or launch without "
                f"{name}."
            )


def _watches(trainer: Any) -> list[Watch]:
    found = [callback.watches for callback in trainer.callback_handler.callbacks if isinstance(callback, Watches)]
    return [watch for watches in found for watch in watches]


def _reference_is_sharded(trainer: Any) -> bool:
    parameters = trainer.ref_model.parameters()
    return trainer.is_fsdp_enabled or any(hasattr(parameter, "ds_tensor") for parameter in parameters)


def _reference_file(trainer: Any, folder: Path) -> Path:
    """Where the reference model is: the base model does not give back one that follows the policy."""
    part = f"_{trainer.accelerator.process_index}" if _reference_is_sharded(trainer) else ""
    return folder / f"reference{part}.pt"


def _state_file(folder: Path, process: int) -> Path:
    return folder / f"rollout_state_{process}.pt"


def seal(folder: Path) -> None:
    """Write the manifest of a checkpoint, once every process has written its part."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2))


class NoRoom(RuntimeError):
    """There is too little space for a checkpoint, and every process knows it before any has written."""


def check_room(trainer: Any, folder: Path) -> None:
    """
    Let all processes agree that there is room for a checkpoint, and wait for each other.

    Raises:
        `NoRoom`: in every process, if there is not.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    missing = 0
    if trainer.args.should_save:
        missing = max(_least_bytes(trainer, folder.parent) - shutil.disk_usage(folder.parent).free, 0)
    agreed = trainer.accelerator.reduce(torch.tensor(missing, device=trainer.accelerator.device), reduction="max")
    if agreed:
        raise NoRoom("no space left on device")


def make_way(folder: Path) -> None:
    """
    Empty the place of a checkpoint. A finished one of the same step stays beside it until the new one is finished.

    The same step is saved twice where something else than the schedule asks for it, such as a watch at the end of an
    epoch. Older checkpoints may be gone by then, so a kill in the second save must not cost the first.
    """
    if finished(folder):
        replaced = _replaced(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    # What an earlier attempt left here would make a half-written checkpoint look whole.
    shutil.rmtree(folder, ignore_errors=True)


def forget_replaced(run: Path) -> None:
    """Delete what [`make_way`] kept, of this save and of earlier ones that were killed."""
    for replaced in sort_checkpoints(str(run), REPLACED_PREFIX):
        shutil.rmtree(replaced, ignore_errors=True)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"_{folder.name}")


def give_up(trainer: Any, folder: Path, error: BaseException) -> None:
    """
    Say why a save failed, and remove what was written of a checkpoint that is not finished.

    Raises:
        `RuntimeError`: files could not be written, and training is not to go on without them, or cannot.
        `BaseException`: `error` itself, where it is of another kind, or where the checkpoint is finished: of the Hub,
            of the deletion of older checkpoints, or of a user's code.
    """
    if finished(folder):
        error.add_note(f"{folder} is finished, and can be used: the error came after it was written.")
        raise error
    written, free = _bytes(folder), shutil.disk_usage(folder.parent).free
    # The other processes of a save that has begun wait for this one, or write into the folder.
    agreed = isinstance(error, NoRoom) or trainer.accelerator.num_processes == 1
    # Once sealed, its weights are complete, and stay even if `trainer_state.json` could not be written behind them.
    if agreed and trainer.args.should_save and not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)
        if _replaced(folder).exists():
            _replaced(folder).rename(folder)
    last = last_whole(str(folder.parent))
    if not _of_writing(error, folder):
        error.add_note(f"It came while {folder} was saved. The last whole checkpoint is {last}.")
        raise error
    size = _bytes(Path(last)) if last else _least_bytes(trainer, folder.parent)
    missing = f": {_mib(size - written - free)} are missing" if size > written + free else ""
    message = (
        f"{folder} cannot be saved ({error}). A checkpoint takes about {_mib(size)}, {_mib(written)} were written, "
        f"and {_mib(free)} are free{missing}. The last whole checkpoint is {last}."
    )
    if trainer.args.save_failure == "stop" or not agreed:
        full = missing or isinstance(error, NoRoom) or any(text in str(error) for text in _FULL)
        raise RuntimeError(
            f"{message} "
            + ("Make room" if full else "That is room enough: look for a quota, or a limit on the size of files,")
            + " and continue with `--resume_from_checkpoint last`; "
            + ("keep fewer checkpoints (`save_total_limit`); " if full else "")
            + "or let training go on without this one (`save_failure: continue`)."
        ) from error
    logger.warning(f"{message} Training goes on, as `save_failure` says.")


def _of_writing(error: BaseException, folder: Path) -> bool:
    """Whether it is the error of a file that cannot be written, and not of a program or a service."""
    if isinstance(error, CheckpointException):  # FSDP's writer, in all processes
        return any(_of_writing(cause, folder) for cause, _ in error.failures.values())
    if isinstance(error, OSError):
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
        forbidden = error.errno in (errno.EACCES, errno.EPERM) and named.absolute().is_relative_to(folder.absolute())
        return error.errno in _DISK_ERRORS or forbidden
    # The writers of safetensors and of torch, which keep no number of the error.
    return (
        isinstance(error, NoRoom)
        or (isinstance(error, SafetensorError) and "I/O error" in str(error))
        or (isinstance(error, RuntimeError) and "inline_container" in str(error))
    )


def _least_bytes(trainer: Any, run: Path) -> int:
    """What a checkpoint takes: as much as the last one without its rollout, or what this process knows to write."""
    last = None if trainer.args.save_only_model else last_whole(str(run))
    if last is not None:
        return _bytes(Path(last)) - sum(path.stat().st_size for path in Path(last).glob("rollout_state_*"))
    reference = 0
    if trainer.args.sync_ref_model and not trainer.args.save_only_model:
        copies = trainer.accelerator.num_processes if _reference_is_sharded(trainer) else 1
        reference = copies * sum(local_part(parameter).nbytes for parameter in trainer.ref_model.parameters())
    tensors = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    # Where they are sharded, each process writes some of them, somewhere else in memory.
    if not (trainer.args.save_only_model or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        states = trainer.optimizer.state.values()
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    return reference + sum(local_part(tensor).nbytes for tensor in tensors)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def fault(folder: Path) -> str | None:
    """What keeps a checkpoint from being resumed exactly; `None` if it is whole."""
    if not folder.is_dir():
        return "it does not exist"
    if lacks := lacking(folder):
        return (
            f"it holds no {', no '.join(lacks)}, as another trainer, or `save_only_model`, saves it; named by its "
            "path it goes on without"
        )
    for name in (MANIFEST, TRAINER_STATE_NAME):
        try:
            content = json.loads((folder / name).read_text())
        except FileNotFoundError:
            return f"it has no {name}: its writing was cut short"
        except json.JSONDecodeError:
            return f"its {name} is cut short"
        missing = [file for file in content.get("files", {}) if not (folder / file).exists()]
        if missing:
            return f"of its files, {', '.join(missing)} is missing"
        short = [file for file, size in content.get("files", {}).items() if (folder / file).stat().st_size != size]
        if short:
            return f"of its files, {', '.join(short)} is cut short"
    return None


def lacking(folder: Path) -> list[str] | None:
    """
    What a finished checkpoint of another trainer, or one saved with `save_only_model`, does not hold.

    One of this trainer's that was cut short is none of these: every trainer writes `trainer_state.json` last, and this
    one writes its parts of the rollout and the manifest before.

    Returns:
        `list[str]` or `None`: what begins anew when it is resumed; `None` for any other folder.
    """
    if (folder / MANIFEST).exists() or any(folder.glob("rollout_state_*")):
        return None
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    held = {
        "optimizer or learning-rate schedule": ("optimizer*", "global_step*"),
        "random states": ("rng_state*",),
    }
    return ["rollout", *(name for name, files in held.items() if not any(any(folder.glob(file)) for file in files))]


def finished(folder: Path) -> bool:
    """Whether a checkpoint was written to its end, as a whole one, or as what `save_only_model` saves."""
    return fault(folder) is None or lacking(folder) is not None


def last_whole(output_dir: str) -> str | None:
    """Folder of a run's last whole checkpoint, if it has one."""
    return next((path for path in reversed(_checkpoints(output_dir)) if fault(Path(path)) is None), None)


def _checkpoints(output_dir: str) -> list[str]:
    """Folders of a run's checkpoints by step; before one that was being replaced, the one that it should replace."""

    def step(path: str) -> int:
        found = re.match(rf"_?{PREFIX_CHECKPOINT_DIR}-(\d+)", Path(path).name)
        return int(found[1]) if found else 0

    return sorted([*sort_checkpoints(output_dir, REPLACED_PREFIX), *sort_checkpoints(output_dir)], key=step)


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from.

    Args:
        wanted (`str` or `bool`, *optional*):
            Folder of a checkpoint, or of one that [`lacking`] describes; `"last"` or `True`: the last whole one of the
            run; `"auto"`: the same, but the run starts at the beginning if it has none.
        output_dir (`str`):
            Folder of the run.

    Returns:
        `str` or `None`: folder of a checkpoint; `None` to start at the beginning.

    Raises:
        `ValueError`: the wanted checkpoint is not whole, or there is none. The message names the last whole one.
    """
    if wanted in (None, False, "false", "False"):
        return None
    last = last_whole(output_dir)
    if wanted not in (True, "true", "True", "last", "auto"):
        why, lacks = fault(Path(str(wanted))), lacking(Path(str(wanted)))
        if lacks:
            logger.warning_once(
                f"resume_from_checkpoint={wanted!r} holds no {', no '.join(lacks)}, as another trainer, or "
                "`save_only_model`, saves it. Training goes on with its weights at its optimizer step, as in "
                "Transformers, and begins anew what it does not hold: not exactly the run that was. To begin at step "
                "0 with its weights, set the model (`model_name_or_path`) to this folder."
            )
        if why is None or lacks:
            return str(wanted)
        instead = f"Use {last!r}, the last whole one." if last else "Remove `resume_from_checkpoint`."
        raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {instead}")
    checkpoints = _checkpoints(output_dir)
    for path in checkpoints[checkpoints.index(last) + 1 if last else 0 :]:
        logger.warning(f"{path} is passed over: {fault(Path(path))}.")
    if last is None and wanted != "auto":
        raise ValueError(
            f"resume_from_checkpoint={wanted!r}, but output_dir={output_dir!r} holds no whole checkpoint. Remove "
            "`resume_from_checkpoint`, or set it to `auto` to start at the beginning then."
        )
    return last
