"""Training that never waits for generation: OPO on TRL's experimental `AsyncGRPOTrainer`."""

from ..trl import check


check()
