"""
The files that exact resumption adds to a checkpoint, and which checkpoint a run can be resumed from.

Two files mark a complete checkpoint: `manifest.json`, written when the last process is done, lists all files so far
with their sizes and checksums; `trainer_state.json` is what Transformers writes last, and the manifest then lists it,
too. A checkpoint that a kill cut short lacks one of them, or a file of the manifest. Only complete checkpoints are
resumed, and only if no file has changed: before a resumption the checkpoint is read once for its checksums.

Checkpoints of other trainers, and those saved with `save_only_model`, have no manifest but do have
`trainer_state.json`. Named by their path, they resume as in Transformers; they are never chosen automatically.
"""

import functools
import json
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ..checks.files import free, sync, write_json


logger = get_logger(__name__)

MANIFEST = "manifest.json"

# A complete checkpoint while another of the same step is written. Transformers neither rotates nor pushes it.
REPLACED_PREFIX = f"_{PREFIX_CHECKPOINT_DIR}"

_READERS, _PIECE = 8, 2**22  # files read at the same time for their checksums, and bytes of each at once


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


def finalize(folder: Path) -> None:
    """Write the manifest of a checkpoint, once every process has written its part."""
    _add(_files(folder), folder, {})


def finish(folder: Path, limit: int | None, best: str | None) -> None:
    """
    Once Transformers has written its state, add that to the manifest, which is replaced as a whole; then, when all of
    it is on the disk, delete older checkpoints ([`rotate`]), and what [`make_way`] kept, now or before a kill.
    """
    if (folder / MANIFEST).exists():  # not with `save_only_model`
        _add([folder / TRAINER_STATE_NAME], folder, _read_json(folder / MANIFEST)["files"])
    for written in [*_files(folder), *filter(Path.is_dir, folder.rglob("*")), folder, folder.parent]:
        sync(written)
    rotate(folder.parent, limit, best, newest=folder)
    for path in _sorted(folder.parent, REPLACED_PREFIX):
        shutil.rmtree(path, ignore_errors=True)


def _add(paths: list[Path], folder: Path, listed: dict[str, dict[str, int]]) -> None:
    for path, checksum in zip(paths, _checksums(paths), strict=True):
        listed[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "crc32": checksum}
    write_json(folder / MANIFEST, {"files": listed})


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def make_way(folder: Path) -> None:
    """
    Empty the place of a checkpoint. A finished one of the same step, as of a watch that fires at the end of an epoch,
    is kept next to it until the new one is finished: older ones may be gone, and a kill must not cost the last.

    Those of later steps are of a run that has been resumed from an earlier step, or started anew: they are kept under
    another name, so that none of them is taken for the last checkpoint of this run.
    """
    for path in map(Path, _latest_first(str(folder.parent))):
        if _step(path) > _step(folder) and finished(path):
            aside = free(path.with_name(f"{PREFIX_CHECKPOINT_DIR}-{_step(path)}-replaced"))
            path.rename(aside)
            logger.warning(f"{path} is later than step {_step(folder)}, where the run is now: it is kept as {aside}.")
    if finished(folder):
        kept = replaced(folder)
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
    # Files of an earlier attempt would make a half-written checkpoint look complete.
    shutil.rmtree(folder, ignore_errors=True)


def replaced(folder: Path) -> Path:
    """Where [`make_way`] keeps the previous checkpoint of the same step."""
    return folder.with_name(f"_{folder.name}")


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _checksums(paths: Iterable[Path]) -> Iterable[int]:
    """CRC-32 of files. The time is that of reading them: zlib computes gigabytes per second, outside Python's lock."""
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(_checksum, paths))


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def rotate(run: Path, limit: int | None, best: str | None, newest: Path) -> None:
    """
    Delete the oldest checkpoints until `limit` are left, but neither the newest nor the best one.

    Transformers would also delete copies that somebody keeps, such as `checkpoint-40-copy` or `checkpoint-best`.
    """
    paths = _sorted(run, PREFIX_CHECKPOINT_DIR, use_mtime=True)
    if not limit or limit < 0 or len(paths) <= limit:
        return
    kept = {str(newest), str(Path(best or newest))}
    for path in [path for path in paths if path not in kept][: len(paths) - max(limit, len(kept))]:
        shutil.rmtree(path, ignore_errors=True)


def _sorted(run: str | Path, prefix: str, *, use_mtime: bool = False) -> list[str]:
    """Folders named by `prefix` and a step, from old to new."""
    found = sort_checkpoints(str(run), prefix, use_mtime)
    return [path for path in found if re.fullmatch(rf"{prefix}-\d+", Path(path).name)]


# Completeness


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed exactly, by names and sizes of its files; `None` if it is complete."""
    if not folder.is_dir():
        return "it does not exist"
    if lacks := lacking(folder):
        return (
            f"it holds no {', no '.join(lacks)}, because another trainer or `save_only_model` saved it; to resume "
            "without, pass its path"
        )
    for name in (MANIFEST, TRAINER_STATE_NAME):
        try:
            content = _read_json(folder / name)
            if name == MANIFEST:
                sizes = {listed: int(entry["size"]) for listed, entry in content["files"].items()}
        except FileNotFoundError:
            return f"it has no {name}: writing was cut short"
        except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            return f"its {name} is cut short or damaged ({type(error).__name__})"
    if missing := [name for name in sizes if not (folder / name).is_file()]:
        return f"it lacks {', '.join(missing)}"
    if resized := [name for name, size in sizes.items() if (folder / name).stat().st_size != size]:
        return f"its {', '.join(resized)} is cut short, or not of the size in {MANIFEST}"
    return None


def damage(folder: Path) -> str | None:
    """Which files of a finished checkpoint are damaged: all of them are read, once as long as none changes."""
    stats = [(path, path.stat()) for path in _files(folder)]
    return _damage(folder, tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@functools.lru_cache(maxsize=16)
def _damage(folder: Path, files: tuple[tuple[Path, int, int], ...]) -> str | None:
    try:
        if (folder / MANIFEST).exists():
            listed = _read_json(folder / MANIFEST)["files"]
            found = _checksums(folder / name for name in listed)
            changed = [name for name, own in zip(listed, found, strict=True) if own != listed[name].get("crc32")]
            differs = f"not what {MANIFEST} lists"
        else:
            changed = [str(path.relative_to(folder)) for path, _, _ in files if not _is_readable(path)]
            differs = "not readable"
    except OSError as error:
        return f"it cannot be read ({error})"
    return f"its {', '.join(changed)} is damaged: {differs}" if changed else None


def _is_readable(path: Path) -> bool:
    """Whether a file of another trainer, which has no checksum, is what its name says. Those of torch are archives."""
    try:
        if path.suffix in (".pt", ".pth"):
            with zipfile.ZipFile(path) as archive:
                return archive.testzip() is None
        if path.suffix == ".json":
            _read_json(path)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
    except OSError:
        raise
    except Exception:  # whatever is in it
        return False
    return True


def lacking(folder: Path) -> list[str] | None:
    """
    What a finished checkpoint of another trainer, or one saved with `save_only_model`, does not hold, and so starts
    afresh when it is resumed; `None` for any other folder.

    A checkpoint of this trainer that was cut short is not mistaken for one: every trainer writes `trainer_state.json`
    last, and this one writes its rollout states and the manifest before.
    """
    if (folder / MANIFEST).exists() or any(folder.glob("rollout_state_*")):
        return None
    try:
        _read_json(folder / TRAINER_STATE_NAME)
    except (OSError, ValueError, RecursionError):
        return None
    held = {"optimizer or learning-rate schedule": ("optimizer*", "global_step*"), "random states": ("rng_state*",)}
    return ["rollout", *(name for name, files in held.items() if not any(any(folder.glob(file)) for file in files))]


def finished(folder: Path) -> bool:
    """Whether a checkpoint was written to its end: a complete one, or one without a rollout ([`lacking`])."""
    return fault(folder) is None or lacking(folder) is not None


def last_complete(output_dir: str) -> str | None:
    """Folder of a run's last complete checkpoint, if it has one."""
    return next((path for path in _latest_first(output_dir) if fault(Path(path)) is None), None)


def _latest_first(output_dir: str) -> list[str]:
    """Folders of a run's checkpoints by step; one that is being replaced comes after its replacement."""
    found = [*_sorted(output_dir, REPLACED_PREFIX), *_sorted(output_dir, PREFIX_CHECKPOINT_DIR)]
    return sorted(found, key=lambda path: _step(Path(path)))[::-1]


def resolve(wanted: str | bool | None, output_dir: str) -> str | None:
    """
    Find the checkpoint to resume from; `None` to start from the beginning.

    Args:
        wanted (`str` or `bool`, *optional*):
            Folder of a checkpoint, complete or as [`lacking`] describes; `"last"` or `True`: the last complete one of
            the run in `output_dir`; `"auto"`: the same, but the run starts from the beginning if it has none.

    Raises:
        `ValueError`: the wanted checkpoint is not complete, or there is none. The message names the last complete one.
    """
    if wanted in (None, False, "false", "False"):
        return None
    if wanted not in (True, "true", "True", "last", "auto"):
        return _named(str(wanted), output_dir)
    last, skipped = _last_intact(output_dir)
    for path, why in skipped.items():
        logger.warning(f"{path} is skipped: {why}.")
    if last is None and wanted != "auto":
        newest = next((f" ({path}: {why})" for path, why in skipped.items()), "")
        raise ValueError(
            f"resume_from_checkpoint={wanted!r}, but output_dir={output_dir!r} holds no complete checkpoint{newest}. "
            "Remove `resume_from_checkpoint`, or set it to `auto` to start from the beginning in that case."
        )
    return last


def _last_intact(output_dir: str) -> tuple[str | None, dict[str, str]]:
    """The last checkpoint without a fault or damage, if there is one, and why each later one is skipped."""
    skipped: dict[str, str] = {}
    # The main process's list: on a network file system, another process may not see the same folders yet.
    for path in broadcast_object_list([_latest_first(output_dir)])[0]:
        why = _defect(Path(path), fault(Path(path)))
        if why is None:
            return path, skipped
        skipped[path] = why
    return None, skipped


def _defect(folder: Path, why: str | None) -> str | None:
    """`why` a checkpoint is rejected, or else its damage, as one process of each machine finds it; all agree."""
    if why is None and PartialState().is_local_main_process:
        why = damage(folder)
    return next(filter(None, gather_object([why])), None)


def _named(wanted: str, output_dir: str) -> str:
    folder = Path(wanted)
    if lacks := lacking(folder):
        logger.warning_once(
            f"resume_from_checkpoint={wanted!r} holds no {', no '.join(lacks)}, because another trainer or "
            "`save_only_model` saved it. Training resumes with its weights at its optimizer step, and starts the rest "
            "afresh. To begin at step 0, set the model (`model_name_or_path`) to this folder."
        )
    why = _defect(folder, None if lacks else fault(folder))
    if why is None:
        return wanted
    last, _ = _last_intact(output_dir)
    instead = f"Use {last!r}, the last complete one." if last else "Remove `resume_from_checkpoint`."
    raise ValueError(f"resume_from_checkpoint={wanted!r} cannot be resumed: {why}. {instead}")
