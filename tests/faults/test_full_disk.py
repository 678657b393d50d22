"""A save that fails: earlier checkpoints stay, and the run resumes from the last. The size of files is limited."""

from pathlib import Path

import pytest
from canonical_run import Form
from canonical_run import make_trainer as make_canonical_trainer
from launched_processes import launch
from recording_trainers import RecordingOPO, make_trainer
from safetensors import SafetensorError
from started_programs import limited_files

from opo_trl import OPOTrainer
from opo_trl.resume.checkpoint import fault, last_complete


OPTIONS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-4}


@pytest.mark.parametrize("limit", [100_000, 250_000], ids=["in the model's file", "in the optimizer's"])
def test_file_that_cannot_be_written(tiny_model: str, tmp_path: Path, limit: int):
    class Limited(RecordingOPO):
        def _save_checkpoint(self, *args):
            with limited_files(limit if self.state.global_step == 2 else -1):
                super()._save_checkpoint(*args)

    with pytest.raises((OSError, RuntimeError, SafetensorError)):
        make_trainer(tiny_model, tmp_path, **OPTIONS, trainer_class=Limited).train()
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-1")
    resumed = make_trainer(tiny_model, tmp_path, **OPTIONS)
    resumed.train(resume_from_checkpoint="last")
    assert len(resumed.steps) == 2
    assert last_complete(str(tmp_path)) == str(tmp_path / "checkpoint-3")


# Errors of another kind


class Unreachable(RecordingOPO):
    """It cannot push its checkpoints."""

    def _push_from_checkpoint(self, checkpoint_folder: str):
        raise ConnectionError("the Hub is down")


def test_complete_checkpoint_outlives_a_later_error(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, tmp_path, **OPTIONS, trainer_class=Unreachable)
    trainer.args.push_to_hub = True
    with pytest.raises(ConnectionError, match="the Hub is down"):
        trainer.train()
    assert fault(tmp_path / "checkpoint-1") is None


# Two processes


def train(form: Form, model: str, folder: str) -> None:
    make_canonical_trainer(form, model, Path(folder), Failing).train()


class Failing(OPOTrainer):
    """Its second process cannot write its part of the second checkpoint."""

    def _save_rng_state(self, output_dir: str):
        cut = self.accelerator.process_index == 1 and self.state.global_step == 2
        with limited_files(1000 if cut else -1):
            super()._save_rng_state(output_dir)


def test_process_that_fails_in_a_save_does_not_leave_the_other_waiting(tiny_model: str, tmp_path: Path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    form = Form("2 processes", rows=4, processes=2, config="multi_gpu", options=options)
    where = {"config": "multi_gpu", "processes": 2, "folder": tmp_path, "limit": 240.0}
    status = launch(train, form, tiny_model, str(tmp_path / "run"), **where)
    assert status[1] == 1
    assert status[0] != 0
    assert last_complete(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-1")
