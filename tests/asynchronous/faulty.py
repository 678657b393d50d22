"""Rollout loops, one of them without a server, and rewards that fail, for the worker's own process."""

import asyncio
import queue
from types import SimpleNamespace

import scripted
from accelerate import PartialState
from transformers import AutoTokenizer

from opo_trl.asynchronous.worker import OPORolloutLoop


class LocalLoop(OPORolloutLoop):
    """Every completion has the same many tokens, and no session of aiohttp is needed."""

    async def _run_loops(self, stop_event):
        await asyncio.gather(self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event))

    async def _generate_one_turn(self, prompt_ids):
        await asyncio.sleep(0.01)
        return [10] * self.max_tokens + [self.tokenizer.eos_token_id], [-1.0] * (self.max_tokens + 1)


def loop_here(kind, model, **named):
    """A rollout loop in this process."""
    PartialState()  # for its messages, as in its own process
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    given = {
        "model_name": "policy-v3",
        "dataset": scripted.DATA,
        "reward_funcs": [fine],
        "processing_class": tokenizer,
        "eos_token_ids": [tokenizer.eos_token_id],
        "rollout_buffer": queue.Queue(),
        "metrics_queue": queue.Queue(),
        "model_version_value": SimpleNamespace(value=1),
        "heartbeat_value": SimpleNamespace(value=0.0),
        "failed_event": None,
        "exception_info_queue": None,
        "num_generations": 2,
        **named,
    }
    return kind(**given)


def fine(completions, **named):
    return [float(i) for i, _ in enumerate(completions)]


def exits(completions, **named):
    raise SystemExit(0)


def scores_nothing(completions, **named):
    return [None] * len(completions)
