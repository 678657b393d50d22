"""A rollout loop without a server, for the worker's own process."""

import asyncio

from opo_trl.asynchronous.worker import OPORolloutLoop


class LocalLoop(OPORolloutLoop):
    """Every completion has the same many tokens, and no session of aiohttp is needed."""

    async def _run_loops(self, stop_event):
        await asyncio.gather(self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))

    async def _generate_one_turn(self, prompt_ids):
        await asyncio.sleep(0.01)
        return [10] * self.max_tokens + [self.tokenizer.eos_token_id], [-1.0] * (self.max_tokens + 1)
