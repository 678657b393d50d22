"""
The files that exact resumption adds to a checkpoint, and which checkpoint a run can be resumed from.

For each process a checkpoint holds the rest of its rollout, the position in it, and what the next log entry will
report. A resumed run is thus bitwise identical to an uninterrupted one.

Two files mark a complete checkpoint: `manifest.json`, written when the last process is done, lists all files so far
and their sizes; `trainer_state.json` is what Transformers writes last. A checkpoint that a kill cut short lacks one of
them, or a file of the manifest. Only complete checkpoints are resumed.

Checkpoints of other trainers, and those saved with `save_only_model`, have no manifest but do have
`trainer_state.json`. Named by their path, they resume as in Transformers; they are never chosen automatically.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints


logger = get_logger(__name__)

MANIFEST = "manifest.json"

# A complete checkpoint while another of the same step is written. Transformers neither rotates nor pushes it.
REPLACED_PREFIX = f"_{PREFIX_CHECKPOINT_DIR}"


# Writing and reading


def state_file(folder: Path, process: int) -> Path:
    """File of a process's state: tensors, numbers and text."""
    return folder / f"rollout_state_{process}.pt"


def reference_file(folder: Path, process: int | None) -> Path:
    """File of a reference model that follows the policy, or of a process's shard of it."""
    return folder / ("reference.pt" if process is None else f"reference_{process}.pt")


def read(path: Path) -> Any:
    """Read one of these files into host memory; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def load_state(folder: Path, process: int) -> dict[str, Any]:
    """Read a process's state."""
    path = state_file(folder, process)
    # A run on more processes starts at the end of a rollout, where the first process's state serves them all.
    return read(path if path.exists() else state_file(folder, 0))


def finalize(folder: Path) -> None:
    """Write the manifest of a checkpoint, once every process has written its part."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2))


def make_way(folder: Path) -> None:
    """
    Empty the place of a checkpoint. A finished one of the same step is kept next to it until the new one is finished.

    A step is saved twice if something other than the schedule also asks for it, such as a watch at the end of an
    epoch. Older checkpoints may be gone by then, so a kill during the second save must not cost the first.
    """
    if finished(folder):
        kept = replaced(folder)
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    # Files of an earlier attempt would make a half-written checkpoint look complete.
    shutil.rmtree(folder, ignore_errors=True)


def replaced(folder: Path) -> Path:
    """Where [`make_way`] keeps the previous checkpoint of the same step."""
    return folder.with_name(f"_{folder.name}")


def forget_replaced(run: Path) -> None:
    """Delete what [`make_way`] kept, in this save and in earlier ones that were killed."""
    for path in _sorted(run, REPLACED_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def no_rotation(args: TrainingArguments) -> Iterator[None]:
    """Keep Transformers from deleting checkpoints, which [`rotate`] does."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit


def rotate(run: Path, limit: int | None, best: str | None) -> None:
    """
    Delete the oldest checkpoints until `limit` are left, but neither the latest nor the best one.

    Transformers would also delete copies that somebody keeps, such as `checkpoint-40-copy` or `checkpoint-best`.
    """
    paths = _sorted(run, PREFIX_CHECKPOINT_DIR, use_mtime=True)
    if not limit or limit < 0 or len(paths) <= limit:
        return
    kept = {paths[-1], str(Path(best or paths[-1]))}
    for path in [path for path in paths if path not in kept][: len(paths) - max(limit, len(kept))]:
        shutil.rmtree(path, ignore_errors=True)


def _sorted(run: str | Path, prefix: str, *, use_mtime: bool = False) -> list[str]:
    """Folders named `prefix`, a hyphen and a step, from old to new."""
    found = sort_checkpoints(str(run), prefix, use_mtime)
    return [path for path in found if re.fullmatch(rf"{prefix}-\d+", Path(path).name)]


# Completeness


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed exactly; `None` if it is complete."""
    if not folder.is_dir():
        return "it does not exist"
    if lacks := lacking(folder):
        return (
            f"it holds no {', no '.join(lacks)}, because another trainer or `save_only_model` saved it; to resume "
            "without, pass its path"
        )
    for name in (MANIFEST, TRAINER_STATE_NAME):
        try:
            content = json.loads((folder / name).read_text())
        except FileNotFoundError:
            return f"it has no {name}: writing was cut short"
        except json.JSONDecodeError:
            return f"its {name} is cut short"
        missing = [file for file in content.get("files", {}) if not (folder / file).exists()]
        if missing:
            return f"it lacks {', '.join(missing)}"
        short = [file for file, size in content.get("files", {}).items() if (folder / file).stat().st_size != size]
        if short:
            return f"its {', '.join(short)} is cut short"
    return None


def lacking(folder: Path) -> list[str] | None:
    """
    What a finished checkpoint of another trainer, or one saved with `save_only_model`, does not hold.

    A checkpoint of this trainer that was cut short is not mistaken for one: every trainer writes `trainer_state.json`
    last, and this one writes its rollout states and the manifest before.

    Returns:
        `list[str]` or `None`: what starts afresh when it is resumed; `None` for any other folder.
    """
    if (folder / MANIFEST).exists() or any(folder.glob("rollout_state_*")):
        return None
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    held = {"optimizer or learning-rate schedule": ("optimizer*", "global_step*"), "random states": ("rng_state*",)}
    return ["rollout", *(name for name, files in held.items() if not any(any(folder.glob(file)) for file in files))]


def finished(folder: Path) -> bool:
    """Whether a checkpoint was written to its end: a complete one, or one without a rollout ([`lacking`])."""
    return fault(folder) is None or lacking(folder) is not None


def last_complete(output_dir: str) -> str | None:
    """Folder of a run's last complete checkpoint, if it has one."""
    return next((path for path in reversed(_checkpoints(output_dir)) if fault(Path(path)) is None), None)


def _checkpoints(output_dir: str) -> list[str]:
    """Folders of a run's checkpoints by step; one that is being replaced stands before its replacement."""

    def step(path: str) -> int:
        return int(path.rpartition("-")[2])

    return sorted([*_sorted(output_dir, REPLACED_PREFIX), *_sorted(output_dir, PREFIX_CHECKPOINT_DIR)], key=step)


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from.

    Args:
        wanted (`str` or `bool`, *optional*):
            Folder of a checkpoint, complete or as [`lacking`] describes; `"last"` or `True`: the last complete one of
            the run; `"auto"`: the same, but the run starts from the beginning if it has none.
        output_dir (`str`):
            Folder of the run.

    Returns:
        `str` or `None`: folder of a checkpoint; `None` to start from the beginning.

    Raises:
        `ValueError`: the wanted checkpoint is not complete, or there is none. The message names the last complete one.
    """
    if wanted in (None, False, "false", "False"):
        return None
    last = last_complete(output_dir)
    if wanted not in (True, "true", "True", "last", "auto"):
        return _named(str(wanted), last)
    checkpoints = _checkpoints(output_dir)
    for path in checkpoints[checkpoints.index(last) + 1 if last else 0 :]:
        logger.warning(f"{path} is skipped: {fault(Path(path))}.")
    if last is None and wanted != "auto":
        raise ValueError(
            f"resume_from_checkpoint={wanted!r}, but output_dir={output_dir!r} holds no complete checkpoint. Remove "
            "`resume_from_checkpoint`, or set it to `auto` to start from the beginning in that case."
        )
    return last


def _named(wanted: str, last: str | None) -> str:
    why, lacks = fault(Path(wanted)), lacking(Path(wanted))
    if lacks:
        logger.warning_once(
            f"resume_from_checkpoint={wanted!r} holds no {', no '.join(lacks)}, because another trainer or "
            "`save_only_model` saved it. As in Transformers, training resumes with its weights at its optimizer step "
            "and starts the rest afresh, so the run will differ from an uninterrupted one. To begin at step 0 with "
            "its weights, set the model (`model_name_or_path`) to this folder."
        )
    if why is None or lacks:
        return wanted
    instead = f"Use {last!r}, the last complete one." if last else "Remove `resume_from_checkpoint`."
    raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {instead}")
