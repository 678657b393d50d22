"""Training that never waits for generation: OPO on TRL's experimental `AsyncGRPOTrainer`."""

from .. import trl_contract


# Apart from that of the other trainers, so that a TRL whose experimental modules have changed leaves those usable.
trl_contract.check(trl_contract.ASYNC_CONTRACT)
