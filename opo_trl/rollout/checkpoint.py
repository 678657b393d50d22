"""
The files that exact resumption adds to a checkpoint, and which checkpoint a run can be resumed from.

Two files mark a complete checkpoint. `manifest.json`, which lists all files so far with their sizes, is written once
every process has written its part and all of it is on the disk; `trainer_state.json` is what Transformers writes last.
A checkpoint that a kill cut short lacks one of them. Older checkpoints are deleted only after that.

Checkpoints of other trainers, and those saved with `save_only_model`, have no manifest. Named by their path, they
resume as in Transformers; they are never chosen automatically.
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
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint import CheckpointException
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checks.files import free, sync, write_json
from ..trl import temporarily


logger = get_logger(__name__)

MANIFEST = "manifest.json"
FORMAT = 2  # of what a checkpoint holds

_NO_ROLLOUT = "it holds no rollout, as another trainer or `save_only_model` saved it; to do without, pass its path"


# Writing and reading


def state_file(folder: Path, process: int) -> Path:
    """File of a process's state: tensors, numbers and text."""
    return folder / f"rollout_state_{process}.pt"


def read(path: Path) -> Any:
    """Read one of these files into host memory; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)


def load_state(folder: Path, process: int) -> dict[str, Any]:
    """Read a process's state."""
    path = state_file(folder, process)
    # A run on more processes starts at the end of a rollout, where the first process's state serves them all.
    return read(path if path.exists() else state_file(folder, 0))


@contextmanager
def saving(trainer: Any, trial: Any) -> Iterator[None]:
    """
    Save a checkpoint within this context: at any moment of it, the folder of the run holds a complete one, if it did
    before. An error in it gets a note that names the last one.
    """
    folder = Path(trainer._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    args = trainer.args
    try:
        if args.should_save:
            _make_way(folder)
        trainer.accelerator.wait_for_everyone()
        with temporarily(args, save_total_limit=None):  # older ones are deleted last
            yield
        if args.should_save:
            for path in (folder / TRAINER_STATE_NAME, folder, folder.parent):
                sync(path)
            _rotate(folder, args.save_total_limit, trainer.state.best_model_checkpoint)
    except (Exception, CheckpointException) as error:  # FSDP's is a `BaseException`
        last = last_complete(str(folder.parent))
        error.add_note(f"It came while {folder} was saved. The last complete checkpoint is {last}.")
        raise


def finalize(folder: Path) -> None:
    """Write the manifest of a checkpoint, once every process has written its part."""
    paths = sorted(folder.rglob("*"))
    for path in (*paths, folder):
        sync(path)
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}
    write_json(folder / MANIFEST, {"format": FORMAT, "files": sizes})


def _make_way(folder: Path) -> None:
    """
    Empty the place of a checkpoint. A finished one of the same step, as of a signal that comes at the end of an epoch,
    is kept beside it until the new one is finished: older ones may be gone.

    Those of later steps are of a run that has been resumed from an earlier step, or started anew: they get another
    name, so that none of them is taken for the last checkpoint of this run.
    """
    for path in _latest_first(folder.parent):
        if _step(path) > _step(folder) and fault(path) is None:
            aside = free(path.with_name(f"{PREFIX_CHECKPOINT_DIR}-{_step(path)}-replaced"))
            path.rename(aside)
            logger.warning(f"{path} is later than step {_step(folder)}, where the run is now: it is kept as {aside}.")
    if (folder / TRAINER_STATE_NAME).exists():
        kept = folder.with_name(f"_{folder.name}")
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    shutil.rmtree(folder, ignore_errors=True)  # files of an earlier attempt


def _rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """
    Delete the oldest checkpoints until `limit` are left, but neither the newest nor the best one.

    Transformers would go by the clock, and also delete copies that somebody keeps, such as `checkpoint-40-copy`.
    """
    kept, found = {newest, Path(best or newest)}, _latest_first(newest.parent)[::-1]
    replaced = [path for path in found if path.name.startswith("_")]
    old = [path for path in found if path not in (*kept, *replaced)]
    surplus = len(old) + len(kept) - max(limit, len(kept)) if limit and limit > 0 else 0
    for path in (*old[:surplus], *replaced):
        shutil.rmtree(path, ignore_errors=True)


def _latest_first(run: Path) -> list[Path]:
    """Checkpoints of a run by their steps; one that is being replaced comes after its replacement."""
    name = re.compile(rf"_?{PREFIX_CHECKPOINT_DIR}-\d+")
    found = [path for path in run.glob(f"*{PREFIX_CHECKPOINT_DIR}-*") if name.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (_step(path), not path.name.startswith("_")), reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


# Which checkpoint a run resumes


def is_foreign(folder: Path) -> bool:
    """Whether another trainer, or `save_only_model`, saved a checkpoint, which then holds no rollout."""
    return not (folder / MANIFEST).exists() and not any(folder.glob("rollout_state_*"))


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed exactly; `None` if it is complete."""
    if not folder.is_dir():
        return "it does not exist"
    read = {}
    for name in (TRAINER_STATE_NAME, MANIFEST):
        try:
            read[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if name == MANIFEST and is_foreign(folder):
                return _NO_ROLLOUT
            return f"it has no {name}: writing was cut short"
        except ValueError:
            return f"its {name} is cut short"
    sizes = read[MANIFEST]["files"] if read[MANIFEST].get("format") == FORMAT else {}
    paths = {name: folder / name for name in sizes}
    short = [name for name, path in paths.items() if not path.is_file() or path.stat().st_size != sizes[name]]
    return f"its {', '.join(short)} is missing or cut short" if short else None


def last_complete(output_dir: str) -> str | None:
    """Folder of a run's last complete checkpoint, if it has one."""
    return next((str(path) for path in _latest_first(Path(output_dir)) if fault(path) is None), None)


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from; `None` to start from the beginning.

    Args:
        wanted (`str` or `bool`, *optional*):
            Folder of a checkpoint, complete or of another trainer; `"last"` or `True`: the last complete one of the
            run in `output_dir`; `"auto"`: the same, but the run starts from the beginning if it has none.

    Raises:
        `ValueError`: the wanted checkpoint is not complete, or there is none; or an earlier version saved it.
    """
    if wanted in (None, False, "false", "False"):
        return None
    is_named = wanted not in (True, "true", "True", "last", "auto")
    folders = [Path(str(wanted))] if is_named else _latest_first(Path(output_dir))
    # As the main process sees them: on a network file system, another one may not see the same files yet.
    for folder, why in broadcast_object_list([[(folder, fault(folder)) for folder in folders]])[0]:
        if why is None:
            _check_version(folder)
            return str(wanted) if is_named else str(folder)
        if is_named and why == _NO_ROLLOUT:
            logger.warning(
                f"resume_from_checkpoint={wanted!r} is of another trainer, or of `save_only_model`: it holds no "
                "rollout. Training resumes with what it holds at its optimizer step, and starts the rest afresh. To "
                "begin at step 0, set the model (`model_name_or_path`) to this folder."
            )
            return str(wanted)
        if is_named:
            last = last_complete(output_dir)
            instead = f"Use {last!r}, the last complete one." if last else "Remove `resume_from_checkpoint`."
            raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {instead}")
        logger.warning(f"{folder} is skipped: {why}.")
    if wanted == "auto":
        return None
    raise ValueError(
        f"resume_from_checkpoint={wanted!r}, but output_dir={output_dir!r} holds no complete checkpoint. Remove "
        "`resume_from_checkpoint`, or set it to `auto` to start from the beginning in that case."
    )


def _check_version(folder: Path) -> None:
    if json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("format") != FORMAT:
        raise ValueError(
            f"{str(folder)!r} was saved by another version of opo_trl. Resume it with that version, or set "
            "`model_name_or_path` to it to start from its weights."
        )
