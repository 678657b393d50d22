"""Whether a checkpoint fits on the disk, and what happens when it cannot be written."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from .checkpoint import MANIFEST, finished, last_complete, replaced
from .frozen_base import local_part
from .position import MovingReference


logger = get_logger(__name__)

# Errors of the disk that an `OSError` reports without naming a file.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


class SaveError(RuntimeError):
    """A checkpoint could not be written; its message says all."""


class NoRoom(SaveError):
    """Too little space for a checkpoint; raised on every process before any of them has written."""


def check_room(trainer: Any, run: Path) -> None:
    """Check on all processes together that a checkpoint fits into the folder `run`: otherwise all raise `NoRoom`."""
    run.mkdir(parents=True, exist_ok=True)
    expected = expected_bytes(trainer, run) if trainer.args.should_save else 0
    missing = max(expected - shutil.disk_usage(run).free, 0)
    accelerator = trainer.accelerator
    if accelerator.reduce(torch.tensor(missing, device=accelerator.device), reduction="max"):
        raise NoRoom("no space left on device")


def expected_bytes(trainer: Any, run: Path) -> int:
    """Size of a checkpoint: of the last one less its rollout, which varies, or at least what this process writes."""
    last = None if trainer.args.save_only_model else last_complete(str(run))
    if last is None:
        return _least_bytes(trainer)
    return _bytes(Path(last)) - sum(path.stat().st_size for path in Path(last).glob("rollout_state_*"))


def _least_bytes(trainer: Any) -> int:
    args = trainer.args
    tensors = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    # Where they are sharded, each process writes its own, which DeepSpeed and FSDP hold elsewhere.
    if not (args.save_only_model or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        states = trainer.optimizer.state.values()
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    reference = MovingReference(trainer).nbytes if args.sync_ref_model and not args.save_only_model else 0
    return reference + sum(local_part(tensor).nbytes for tensor in tensors)


def give_up(trainer: Any, folder: Path, error: BaseException) -> None:
    """
    Report why a save failed, and remove the files of an unfinished checkpoint.

    Raises:
        [`SaveError`]: files could not be written, and training should not or cannot continue without them.
        `BaseException`: `error` itself, where it is of another kind, or where the checkpoint is finished: from the
            Hub, the deletion of older checkpoints, or a user's code.
    """
    if finished(folder):
        error.add_note(f"{folder} is finished, and can be used: the error came after it was written.")
        raise error
    args = trainer.args
    written, free = _bytes(folder), shutil.disk_usage(folder.parent).free
    # The other processes of a save that has begun wait for this one, or write into the folder.
    agreed = args.world_size == 1 or isinstance(error, NoRoom)
    if agreed and args.should_save:
        _discard(folder)
    last = last_complete(str(folder.parent))
    if not _is_of_writing(error, folder):
        error.add_note(f"It came while {folder} was saved. The last complete checkpoint is {last}.")
        raise error
    size = _bytes(Path(last)) if last else _least_bytes(trainer)
    missing = f": {_mib(size - written - free)} are missing" if size > written + free else ""
    message = (
        f"{folder} cannot be saved ({error}). A checkpoint takes about {_mib(size)}, {_mib(written)} were written, "
        f"and {_mib(free)} are free{missing}. The last complete checkpoint is {last}."
    )
    if agreed and args.save_failure == "continue":
        logger.warning(f"{message} Training continues (`save_failure: continue`).")
        return
    full = missing or isinstance(error, NoRoom) or any(text in str(error) for text in _FULL)
    room = "Make room for bytes and files (`df -i`; `save_total_limit` keeps fewer checkpoints)"
    fix = room if full else "Look for a quota or limit on files"
    raise SaveError(
        f"{message} {fix}, and resume with `--resume_from_checkpoint last`; or let training continue without this "
        "checkpoint (`save_failure: continue`)."
    ) from error


def _discard(folder: Path) -> None:
    """Remove an unfinished checkpoint, and restore the one of the same step that it was to replace."""
    # With a manifest its weights are complete, and stay even if `trainer_state.json` could not be written after them.
    if (folder / MANIFEST).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    if replaced(folder).exists():
        replaced(folder).rename(folder)


def _is_of_writing(error: BaseException, folder: Path) -> bool:
    """Whether a file could not be written, as opposed to an error of a program or a service."""
    if isinstance(error, CheckpointException):  # FSDP's writer, in all processes
        return any(_is_of_writing(cause, folder) for cause, _ in error.failures.values())
    if isinstance(error, OSError):
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else Path()
        forbidden = error.errno in (errno.EACCES, errno.EPERM) and named.absolute().is_relative_to(folder.absolute())
        return error.errno in _DISK_ERRORS or forbidden
    # The writers of safetensors, torch and tokenizers drop the number of the error.
    return (
        isinstance(error, NoRoom)
        or any(text in str(error) for text in _FULL)
        or (isinstance(error, SafetensorError) and "I/O error" in str(error))
        or (isinstance(error, RuntimeError) and "inline_container" in str(error))
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
