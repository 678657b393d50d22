"""
What a checkpoint holds beside weights, optimizer and random states, and which one a run can be resumed from.

Held for each process is its part of the rollout in use, the place in it, and what the next log entry will report: the
rest of a resumed run is then bit by bit that of an uninterrupted one.

Only a checkpoint that was written to its end will do. It is whole when two files say so: `manifest.json`, written
when the last process is done, lists what they have written with its size, and `trainer_state.json` is what
Transformers writes last. What a process that is killed leaves behind lacks one of them, or a file that the manifest
names.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from .run_folder import SETTINGS, read_json
from .settings import KEPT_ON_RESUME, MODEL_PREFIX
from .weights import local_part


if TYPE_CHECKING:
    from .rollout_trainer import RolloutTrainer


logger = get_logger(__name__)

MANIFEST = "manifest.json"


def save_state(trainer: "RolloutTrainer", folder: Path) -> None:
    """Write this process's `rollout_state_*.pt`."""
    rollout, position = divmod(trainer._step, trainer.args.micro_steps_per_rollout)
    state = {
        "rollout": rollout,
        "position": position,
        "split": _split(trainer),
        "buffer": trainer._buffered_inputs if position else None,
        "reference": [local_part(parameter) for parameter in _moving_reference(trainer)],
        "pending_loss": trainer._tr_loss,
        # As JSON, which keeps floats exactly, and as text whatever else a reward function may have logged:
        # `torch.load` would refuse it.
        "plain": json.dumps(
            {
                "numbers": {name: getattr(trainer, name) for name in trainer._saved_numbers},
                "metrics": trainer._metrics,
                "prompts": _prompts(trainer),
                "logs": trainer._logs if trainer.log_completions else {},
            },
            default=_plain,
        ),
    }
    torch.save(state, _state_file(folder, trainer.accelerator.process_index))


def load_state(trainer: "RolloutTrainer", folder: str) -> dict[str, Any]:
    """Read this process's `rollout_state_*.pt`, into host memory."""
    path = _state_file(Path(folder), trainer.accelerator.process_index)
    # Where there are more processes than before, the first one's will do for them, as far as `check_split` lets it.
    path = path if path.exists() else _state_file(Path(folder), 0)
    return torch.load(path, map_location="cpu", weights_only=True)


@torch.no_grad()
def restore_state(trainer: "RolloutTrainer", state: Mapping[str, Any]) -> None:
    """Go on from a state of `load_state`."""
    trainer._step = state["rollout"] * trainer.args.micro_steps_per_rollout + state["position"]
    trainer._buffered_inputs = send_to_device(state["buffer"], trainer.accelerator.device)
    for parameter, saved in zip(_moving_reference(trainer), state["reference"], strict=True):
        local_part(parameter).copy_(saved)
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


def check_split(trainer: "RolloutTrainer", folder: str) -> None:
    """
    Check that a checkpoint inside a rollout is resumed with the rollout cut as it was.

    Raises:
        `ValueError`: names the field that differs.
    """
    state = load_state(trainer, folder)
    saved, split = state["split"], _split(trainer)
    if state["position"] == 0 or saved == split:
        return
    name = next(name for name in split if split[name] != saved[name])
    raise ValueError(
        f"{folder!r} was saved in the middle of a rollout with {name}={saved[name]}, but this run has "
        f"{name}={split[name]}. Set {name}={saved[name]}, or resume from a checkpoint at the end of a rollout."
    )


def check_same_run(folder: str, settings: Mapping[str, Any], model: str) -> None:
    """
    Check that a checkpoint is resumed with the model, data and method that it was trained with.

    Args:
        folder (`str`):
            Folder of the checkpoint. What it was trained with is read from the run's folder, in which it lies; of one
            that lies elsewhere, only the base model of an adapter is known.
        settings (`Mapping[str, Any]`):
            Resolved settings of the run that is to go on.
        model (`str`):
            Its base model: folder, or id on the Hub.

    Raises:
        `ValueError`: names the fields that differ.
    """
    saved = read_json(Path(folder).resolve().parent / SETTINGS)
    asked = json.loads(json.dumps(settings, default=str))
    names = (*KEPT_ON_RESUME, *(name for name in asked if name.startswith(MODEL_PREFIX)))
    differing = [name for name in names if saved and saved.get(name) != asked.get(name)]
    if differing:
        lines = "\n".join(f"  {name}={saved.get(name)!r} there, {name}={asked.get(name)!r} here" for name in differing)
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is of a run with other settings:\n{lines}\n"
            "Set them as they are there, or choose another `output_dir` and start at the beginning."
        )
    base = read_json(Path(folder) / "adapter_config.json").get("base_model_name_or_path", model)
    if not saved and os.path.realpath(base) != os.path.realpath(model):
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is an adapter for {base!r}, but model_name_or_path={model!r}. Set "
            "`model_name_or_path` to that one."
        )


def _split(trainer: "RolloutTrainer") -> dict[str, int]:
    """How a rollout is cut: into processes, micro-batches and passes."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    return {"processes": trainer.accelerator.num_processes, **{name: getattr(trainer.args, name) for name in names}}


def _prompts(trainer: "RolloutTrainer") -> dict[str, Any]:
    """Where dynamic sampling's stream of prompts stands."""
    if trainer.args.max_sampling_rounds == 1:
        return {}
    return {name: getattr(trainer._prompt_stream, name) for name in ("position", "returned")}


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    return value.item() if hasattr(value, "item") else str(value)


def _moving_reference(trainer: "RolloutTrainer") -> list:
    """Parameters of a reference model that follows the policy: the base model does not give them back."""
    return list(trainer.ref_model.parameters()) if trainer.args.sync_ref_model else []


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


def check_room(trainer: "RolloutTrainer", folder: Path) -> None:
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


def give_up(trainer: "RolloutTrainer", folder: Path, error: Exception) -> None:
    """
    Remove a checkpoint that cannot be written, and say why.

    Raises:
        `RuntimeError`: unless training is to go on without it, and can.
    """
    written, free = _bytes(folder), shutil.disk_usage(folder.parent).free
    last = last_whole(str(folder.parent))
    size = _bytes(Path(last)) if last else _least_bytes(trainer, folder.parent)
    missing = f": {_mib(size - written - free)} are missing" if size > written + free else ""
    shutil.rmtree(folder, ignore_errors=True)
    message = (
        f"{folder} cannot be saved ({error}). A checkpoint takes about {_mib(size)}, {_mib(written)} were written, "
        f"and {_mib(free)} are free{missing}. The last whole checkpoint is {last}."
    )
    # The other processes of a save that has begun wait for this one.
    agreed = isinstance(error, NoRoom) or trainer.accelerator.num_processes == 1
    if trainer.args.save_failure == "stop" or not agreed:
        raise RuntimeError(
            f"{message} Make room and continue with `--resume_from_checkpoint last`; keep fewer checkpoints "
            "(`save_total_limit`); or let training go on without this one (`save_failure: continue`)."
        ) from error
    logger.warning(f"{message} Training goes on, as `save_failure` says.")


def _least_bytes(trainer: "RolloutTrainer", run: Path) -> int:
    """What a checkpoint takes: as much as the last one without its rollout, or what this process knows to write."""
    last = None if trainer.args.save_only_model else last_whole(str(run))
    if last is not None:
        return _bytes(Path(last)) - sum(path.stat().st_size for path in Path(last).glob("rollout_state_*"))
    tensors = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    # Where they are sharded, each process writes some of them, somewhere else in memory.
    if not (trainer.args.save_only_model or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):
        states = trainer.optimizer.state.values()
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    return sum(local_part(tensor).nbytes for tensor in tensors)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def fault(folder: Path) -> str | None:
    """What keeps a checkpoint from being resumed; `None` if it is whole."""
    if not folder.is_dir():
        return "it does not exist"
    for name in (MANIFEST, TRAINER_STATE_NAME):
        try:
            content = json.loads((folder / name).read_text())
        except FileNotFoundError:
            return f"it has no {name}: its writing was cut short, or it holds a model only (`save_only_model`)"
        except json.JSONDecodeError:
            return f"its {name} is cut short"
        missing = [file for file in content.get("files", {}) if not (folder / file).exists()]
        if missing:
            return f"of its files, {', '.join(missing)} is missing"
        short = [file for file, size in content.get("files", {}).items() if (folder / file).stat().st_size != size]
        if short:
            return f"of its files, {', '.join(short)} is cut short"
    return None


def last_whole(output_dir: str) -> str | None:
    """Folder of a run's last whole checkpoint, if it has one."""
    return next((path for path in reversed(sort_checkpoints(output_dir)) if fault(Path(path)) is None), None)


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from.

    Args:
        wanted (`str` or `bool`, *optional*):
            Folder of a checkpoint; `"last"` or `True`: the last whole one of the run; `"auto"`: the same, but the run
            starts at the beginning if it has none.
        output_dir (`str`):
            Folder of the run.

    Returns:
        `str` or `None`: folder of a whole checkpoint; `None` to start at the beginning.

    Raises:
        `ValueError`: the wanted checkpoint is not whole, or there is none. The message names the last whole one.
    """
    if wanted in (None, False, "false", "False"):
        return None
    last = last_whole(output_dir)
    if wanted not in (True, "true", "True", "last", "auto"):
        why = fault(Path(str(wanted)))
        if why is None:
            return str(wanted)
        instead = f"Use {last!r}, the last whole one." if last else "Remove `resume_from_checkpoint`."
        raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {instead}")
    checkpoints = sort_checkpoints(output_dir)
    for path in checkpoints[checkpoints.index(last) + 1 if last else 0 :]:
        logger.warning(f"{path} is passed over: {fault(Path(path))}.")
    if last is None and wanted != "auto":
        raise ValueError(
            f"resume_from_checkpoint={wanted!r}, but output_dir={output_dir!r} holds no whole checkpoint. Remove "
            "`resume_from_checkpoint`, or set it to `auto` to start at the beginning then."
        )
    return last
