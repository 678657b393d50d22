"""A save that fails, on a disk that is really full: earlier checkpoints stay, and the run stops or continues."""

import errno
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import transformers.trainer
from helpers import DEVICE_FIELDS, RecordingOPO, limited_files, logged, make_trainer
from invariance.canonical import Form
from invariance.canonical import make_trainer as make_canonical_trainer
from invariance.launch import launch, logs
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import opo_trl
from opo_trl import OPOTrainer
from opo_trl.rollout.checkpoint import fault, finished, last_complete
from opo_trl.rollout.disk import SaveError
from opo_trl.train import main


OPTIONS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-4}
ROUNDING = 0.06 * 2**20  # of the sizes in a message


@pytest.fixture(scope="module")
def size(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of a checkpoint."""
    folder = tmp_path_factory.mktemp("measured")
    make_trainer(tiny_model, folder, **{**OPTIONS, "max_steps": 1}).train()
    return bytes_in(folder / "checkpoint-1")


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`disk(bytes)`: folder of a file system of about that size, and of so many files."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: float, inodes: int = 0) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={int(size)},nr_inodes={inodes}", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs the right to mount a small file system: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def test_full_disk_stops_the_run_which_resumes_when_there_is_room(tiny_model: str, disk, size: int):
    folder = disk(1.6 * size)
    trainer = make_trainer(tiny_model, folder, **OPTIONS)
    with pytest.raises(RuntimeError, match="checkpoint-2 cannot be saved") as raised:
        trainer.train()
    assert missing(str(raised.value)) == pytest.approx(size - shutil.disk_usage(folder).free, abs=ROUNDING)
    assert "(no space left on device)" in str(raised.value)
    assert "The last complete checkpoint is" in str(raised.value)
    assert "`save_failure: continue`" in str(raised.value)
    assert_only_the_first_is_left(folder)
    subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(folder)], check=True)
    resumed = make_trainer(tiny_model, folder, **OPTIONS)
    resumed.train(resume_from_checkpoint="last")
    assert len(resumed.steps) == 2
    assert last_complete(str(folder)) == str(folder / "checkpoint-3")


def test_full_disk_does_not_stop_a_run_that_should_continue(tiny_model: str, disk, size: int, caplog):
    folder = disk(1.6 * size)
    trainer = make_trainer(tiny_model, folder, **OPTIONS, save_failure="continue")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert [entry["step"] for entry in logged(trainer)] == [1, 2, 3]
    warnings = [record.message for record in caplog.records if "cannot be saved" in record.message]
    assert [re.search(r"checkpoint-\d", warning)[0] for warning in warnings] == ["checkpoint-2", "checkpoint-3"]
    assert missing(warnings[0]) == pytest.approx(size - shutil.disk_usage(folder).free, abs=ROUNDING)
    assert_only_the_first_is_left(folder)


def test_room_of_old_checkpoints_is_not_relied_on(tiny_model: str, disk, size: int):
    """They are deleted when the new one is complete, and not before."""
    folder = disk(1.6 * size)
    with pytest.raises(RuntimeError, match="checkpoint-2 cannot be saved"):
        make_trainer(tiny_model, folder, **OPTIONS, save_total_limit=1).train()
    assert_only_the_first_is_left(folder)


class Crowded(RecordingOPO):
    """Others fill its disk in the middle of the second save."""

    def _save_optimizer_and_scheduler(self, output_dir: str):
        if self.state.global_step == 2:
            free = shutil.disk_usage(output_dir).free
            (Path(self.args.output_dir) / "others").write_bytes(bytes(free - 2**16))
        super()._save_optimizer_and_scheduler(output_dir)


@pytest.mark.parametrize("after", ["stop", "continue"])
def test_disk_that_fills_up_in_a_save(tiny_model: str, disk, size: int, caplog, after: str):
    folder = disk(4 * size)
    trainer = make_trainer(tiny_model, folder, **OPTIONS, save_failure=after, trainer_class=Crowded)
    if after == "stop":
        with pytest.raises(RuntimeError, match="checkpoint-2 cannot be saved") as raised:
            trainer.train()
        said = str(raised.value)
    else:
        with caplog.at_level(logging.WARNING):
            trainer.train()
        said = next(record.message for record in caplog.records if "cannot be saved" in record.message)
    weights = (folder / "checkpoint-1" / "model.safetensors").stat().st_size
    assert missing(said) == pytest.approx(size - weights - 2**16, abs=ROUNDING + 2**15)
    assert trainer.state.global_step == (2 if after == "stop" else 3)
    assert fault(folder / "checkpoint-1") is None
    assert not (folder / "checkpoint-2").exists()
    # The space of the half-written one is free again: slightly too little for the third.
    assert not (folder / "checkpoint-3").exists()


@pytest.mark.parametrize("limit", [100_000, 250_000], ids=["in the model's file", "in the optimizer's"])
@pytest.mark.parametrize("after", ["stop", "continue"])
def test_file_that_cannot_be_written(tiny_model: str, tmp_path: Path, limit: int, after: str):
    """On every machine: the size of files is limited."""

    class Limited(RecordingOPO):
        def _save_checkpoint(self, *args):
            with limited_files(limit if self.state.global_step == 2 else -1):
                super()._save_checkpoint(*args)

    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, save_failure=after, trainer_class=Limited)
    if after == "stop":
        with pytest.raises(RuntimeError, match="checkpoint-2 cannot be saved"):
            trainer.train()
        assert_only_the_first_is_left(tmp_path)
    else:
        trainer.train()
        assert [fault(tmp_path / f"checkpoint-{step}") for step in (1, 3)] == [None, None]
        assert not (tmp_path / "checkpoint-2").exists()


@pytest.mark.parametrize("files", range(1, 12))
def test_disk_without_room_for_more_files(tiny_model: str, disk, files: int):
    """Each writer reports it in another way."""

    class Crowded(RecordingOPO):
        def _save_checkpoint(self, *args):
            for number in range(os.statvfs(folder).f_ffree - files):
                (folder / f"other-{number}").touch()
            super()._save_checkpoint(*args)

    folder = disk(2**25, inodes=40)
    trainer = make_trainer(tiny_model, folder, **{**OPTIONS, "max_steps": 1}, trainer_class=Crowded)
    with pytest.raises(SaveError, match=r"checkpoint-1 cannot be saved .*No space left .*files \(`df -i`"):
        trainer.train()


@pytest.mark.parametrize("what", ["checkpoint", "rollouts"])
def test_command_says_in_one_line_that_the_disk_is_full(tmp_path: Path, disk, capsys, what: str):
    folder = disk(2**21)
    options = {"output_dir": folder / "run", "max_steps": 1, "save_steps": 1, "validation_size": 4, "report_size": 4}
    if what == "rollouts":
        options |= {"save_rollouts": True, "save_strategy": "no"}
        (folder / "others").write_bytes(bytes(2**21 - 2**17))
    recipe = Path(opo_trl.__file__).parent / "recipes" / "arithmetic" / "opo.yaml"
    words = [str(word) for name, value in {**options, **DEVICE_FIELDS}.items() for word in (f"--{name}", value)]
    assert main(["--config", str(recipe), *words]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    where = "checkpoint-1 cannot be saved" if what == "checkpoint" else "No space left on device: '.*/rollouts/"
    assert re.search(f"opo-trl train: error: .*{where}", error)


# Errors of another kind


class Unreachable(RecordingOPO):
    """It cannot push its checkpoints."""

    def _push_from_checkpoint(self, checkpoint_folder: str):
        raise ConnectionError("the Hub is down")


def busy(*args, **kwargs):
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "checkpoint-1/.nfs0001")


def own_error(kind: type) -> type:
    """A user's trainer whose `save_model` fails in the second save."""

    class Own(RecordingOPO):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)
            if self.state.global_step == 2:
                raise kind("the user's own")

    return Own


@pytest.mark.parametrize("after", ["stop", "continue"])
@pytest.mark.parametrize(
    ("error", "what"), [(ConnectionError, "the Hub is down"), (OSError, "busy")], ids=["push", "deletion of old ones"]
)
def test_complete_checkpoint_outlives_a_later_error(tiny_model, tmp_path, monkeypatch, error, what, after):
    trainer_class = Unreachable if error is ConnectionError else RecordingOPO
    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, save_failure=after, trainer_class=trainer_class)
    if error is ConnectionError:
        trainer.args.push_to_hub = True
    else:
        monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", busy)
    with pytest.raises(error, match=what) as raised:
        trainer.train()
    assert_only_the_first_is_left(tmp_path)
    (note,) = raised.value.__notes__
    assert note.endswith("checkpoint-1 is finished, and can be used: the error came after it was written.")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError, ConnectionError])
@pytest.mark.parametrize("after", ["stop", "continue"])
def test_error_of_a_users_code_is_reported_as_itself(tiny_model: str, tmp_path: Path, kind: type, after: str):
    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, save_failure=after, trainer_class=own_error(kind))
    with pytest.raises(kind) as raised:
        trainer.train()
    assert str(raised.value) == "the user's own"
    assert "checkpoint-1." in raised.value.__notes__[0]
    assert_only_the_first_is_left(tmp_path)


class Unserializable(TrainerCallback, ExportableState):
    """Transformers cannot write its state into `trainer_state.json`, after the manifest."""

    def state(self):
        return {"args": {}, "attributes": {"not json": {1, 2}}}


def test_nothing_is_removed_after_the_manifest(tiny_model: str, tmp_path: Path):
    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, trainer_arguments={"callbacks": [Unserializable()]})
    with pytest.raises(TypeError, match="not JSON serializable"):
        trainer.train()
    assert (tmp_path / "checkpoint-1" / "manifest.json").exists()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    assert fault(tmp_path / "checkpoint-1") == "it has no trainer_state.json: writing was cut short"


def test_model_alone_outlives_a_later_error(tiny_model: str, tmp_path: Path):
    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, save_only_model=True, trainer_class=Unreachable)
    trainer.args.push_to_hub = True
    with pytest.raises(ConnectionError):
        trainer.train()
    assert finished(tmp_path / "checkpoint-1")


def test_file_size_limit_is_not_reported_as_lack_of_space(tiny_model: str, tmp_path: Path):
    class Limited(RecordingOPO):
        def _save_checkpoint(self, *args):
            with limited_files(100_000 if self.state.global_step == 2 else -1):
                super()._save_checkpoint(*args)

    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, trainer_class=Limited)
    with pytest.raises(RuntimeError, match="checkpoint-2 cannot be saved") as raised:
        trainer.train()
    assert "File too large" in str(raised.value)
    assert "are missing" not in str(raised.value)
    assert "Make room" not in str(raised.value)


# Two processes


TWO = Form("2 processes", rows=4, processes=2, config="multi_gpu", options={"save_strategy": "steps", "save_steps": 1})
SECONDS = 240.0


def train(form: Form, model: str, folder: str, trainer_class: type = OPOTrainer) -> None:
    trainer = make_canonical_trainer(form, model, Path(folder), trainer_class)
    trainer.train()
    print("trained to the end")


@pytest.mark.parametrize("after", ["stop", "continue"])
def test_processes_agree_on_a_full_disk(tiny_model: str, tmp_path: Path, disk, size: int, after: str):
    folder = disk(1.6 * size)
    form = replace(TWO, options={**TWO.options, "save_failure": after, "max_steps": 3})
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "limit": SECONDS}
    status = launch(train, form, tiny_model, str(folder), **where)
    if after == "stop":
        assert 1 in status
        assert 0 not in status
        assert "checkpoint-2 cannot be saved (no space left on device)" in logs(tmp_path)
    else:
        assert status == [0, 0], logs(tmp_path)
        assert logs(tmp_path).count("trained to the end") == 2
    assert_only_the_first_is_left(folder)


class Failing(OPOTrainer):
    """Its second process cannot write its part of the second checkpoint."""

    def _save_rng_state(self, output_dir: str):
        cut = self.accelerator.process_index == 1 and self.state.global_step == 2
        with limited_files(1000 if cut else -1):
            super()._save_rng_state(output_dir)


def test_process_that_fails_in_a_save_does_not_leave_the_other_waiting(tiny_model: str, tmp_path: Path):
    form = replace(TWO, options={**TWO.options, "save_failure": "continue", "max_steps": 3})
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "limit": SECONDS}
    status = launch(train, form, tiny_model, str(tmp_path / "run"), Failing, **where)
    assert status[1] == 1
    assert status[0] != 0
    assert "checkpoint-2 cannot be saved" in (tmp_path / "process_1.log").read_text()
    assert last_complete(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-1")


def missing(message: str) -> float:
    """Missing bytes, according to a message."""
    return float(re.search(r"are free: ([\d.]+) MiB are missing", message)[1]) * 2**20


def assert_only_the_first_is_left(folder: Path):
    assert last_complete(str(folder)) == str(folder / "checkpoint-1")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
