"""
SIGTERM and Ctrl-C, which a scheduler or a person sends to end a run that will be resumed.

A run finishes the current optimizer step, saves a checkpoint and ends with the status that shells give the signal, 143
or 130. It cannot stop within an optimizer step: a checkpoint holds no gradients.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import torch
from transformers import TrainerCallback

from ..rollout.checkpoint import last_complete


if TYPE_CHECKING:
    from ..trainer import OPOTrainer


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedBySignal(SystemExit):
    """Training has ended after a signal, with a checkpoint. A script that does not catch it exits with its `code`."""

    code: int


class StopOnSignal(TrainerCallback):
    """
    Within this context, SIGTERM and Ctrl-C end training after the current optimizer step, with a checkpoint.

    Whichever process receives the signal, all of them stop after the same step: they agree once per optimizer step.
    `opo-trl train` trains in this context; so can your own script:

    ```python
    >>> with StopOnSignal(trainer):
    ...     trainer.train(resume_from_checkpoint="auto")
    ```

    Raises:
        [`StoppedBySignal`]: a `SystemExit`, from `trainer.train`, when the checkpoint is written, with 128 plus the
            signal's number.
    """

    def __init__(self, trainer: "OPOTrainer"):
        self.trainer = trainer
        self._received, self._agreed = 0, 0  # number of the signal: in this process, in any process

    def __enter__(self) -> "StopOnSignal":
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        self.trainer.add_callback(self)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.trainer.remove_callback(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._received and error is None:  # it came after the last step
            signal.raise_signal(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._received and self.trainer.args.local_process_index == 0:
            said = "the run saves a checkpoint after this optimizer step and ends. Ctrl-\\ ends it now."
            os.write(2, f"\n{signal.Signals(number).name}: {said}\n".encode())  # the signal may interrupt a `print`
        self._received = self._received or number

    def on_step_end(self, args, state, control, **kwargs):
        accelerator = self.trainer.accelerator
        received = torch.tensor(self._received, device=accelerator.device)
        self._agreed = int(accelerator.reduce(received, reduction="max"))
        control.should_save = control.should_save or self._agreed > 0

    def on_save(self, args, state, control, **kwargs):
        if self._agreed:
            # If a process exited while the first one is still writing, the launcher would end them all.
            self.trainer.accelerator.wait_for_everyone()
            name, last = signal.Signals(self._agreed).name, last_complete(args.output_dir)
            said = f"Ended by {name} after optimizer step {state.global_step}. The last complete checkpoint is {last}"
            self.trainer.accelerator.print(f"{said}: resume with `--resume_from_checkpoint last`.", flush=True)
            self.trainer.end()
            raise StoppedBySignal(128 + self._agreed)


def pass_on_signals() -> None:
    """Pass SIGTERM and Ctrl-C on to the processes that this one starts, and let them end by themselves."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not (started := psutil.Process().children()):
            sys.exit(128 + number)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # PyTorch's launcher would kill them after 30 seconds
    for number in SIGNALS:
        signal.signal(number, pass_on)
