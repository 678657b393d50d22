"""
SIGTERM and Ctrl-C, which a scheduler or a person sends to end a run that will be resumed.

A run finishes the current optimizer step, saves a checkpoint and ends with the status that shells give the signal, 143
or 130.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ..resume.interrupts import SaveOnInterrupt


SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def ignored() -> Iterator[None]:
    """Within this context, SIGTERM and Ctrl-C do nothing. A launcher kills what still runs 30 seconds later."""
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class StoppedBySignal(SystemExit):
    """Training has ended after a signal, with a checkpoint. A script that does not catch it exits with its `code`."""

    code: int


class StopOnSignal(SaveOnInterrupt):
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

    way_out, way_back = "Ctrl-\\", "--resume_from_checkpoint last"

    def _handled(self) -> Sequence[int]:
        return SIGNALS

    def _receive_again(self, number: int, frame: FrameType | None) -> None:
        """Wait for the checkpoint: a scheduler may repeat its signal."""

    def _end(self) -> None:
        self.trainer.accelerator.end_training()
        raise StoppedBySignal(128 + self._agreed)
