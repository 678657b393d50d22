"""Training that never waits for generation: OPO on TRL's experimental `AsyncGRPOTrainer`."""

from .. import trl  # noqa: F401  checks versions, before anything here imports a private name
