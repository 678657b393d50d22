"""
Overlap of generation and training (`prefetch_rollouts`): while the policy trains on a rollout, the vLLM server already
generates the next one.

The order of prompts is a function of seed and epoch, so the main process knows what TRL will ask for next. Completions
are then written by the policy from before the current rollout's updates, and a step takes as long as the slower of
generation and training instead of both.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from accelerate.logging import get_logger
from transformers.trainer_utils import has_length


logger = get_logger(__name__)


class Prefetch:
    """
    The `generate` of TRL's vLLM client, which after each request makes the next one in a thread.

    `next_prompts` returns the tokens of the next rollout's prompts, or `None` if there is none to ask for; `step` the
    number of optimizer steps so far. `asked_at` is that number when the latest completions were asked for: the age of
    the policy that has written them.
    """

    def __init__(
        self,
        generate: Callable[..., dict[str, Any]],
        next_prompts: Callable[[], list[list[int]] | None],
        step: Callable[[], int],
    ):
        self._generate = generate
        self._next_prompts = next_prompts
        self._step = step
        self._answer: Future[dict[str, Any]] | None = None  # to the request made in advance; `None`: there is none
        self._request: dict[str, Any] = {}  # that request
        self._next_asked_at = 0  # number of optimizer steps when it was made
        self.asked_at = 0

    def generate(self, **request: Any) -> dict[str, Any]:
        """
        Answer a request of TRL's: with the answer to the request made in advance if that is the same. Then make that
        of the next rollout in advance, if there is one. Another request, such as an evaluation's, keeps the answer
        that waits.
        """
        self.wait()  # a server of TRL's would mix up the answers of two requests at a time
        if self._answer is not None and request == self._request:
            answer = self._answer.result()
            self.asked_at = self._next_asked_at
            self._answer = None
        else:
            answer = self._generate(**request)
            self.asked_at = self._step()
        prompts = self._next_prompts()
        if prompts is not None:
            if self._answer is not None:
                logger.warning("Completions of other prompts than the next ones were generated in advance: dropped.")
            self._ask({**request, "prompts": prompts})
        return answer

    def wait(self) -> None:
        """
        Wait until no completion is being written, so that new weights do not change the policy inside one. Raises what
        the request has raised: TRL's client has tried for a minute, and need not try again with weights.
        """
        if self._answer is not None:  # to the request that was made in advance
            self._answer.result()

    def drop(self) -> None:
        """Forget what was asked for in advance."""
        if self._answer is not None:
            wait([self._answer])
        self._answer = None

    def _ask(self, request: dict[str, Any]) -> None:
        """Make a request in a thread; `_answer` gets what the server returns."""
        answer: Future[dict[str, Any]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self._generate(**request))
            except BaseException as error:  # `generate` raises it in the main thread
                answer.set_exception(error)

        self._request = request  # to be compared with what TRL asks for
        self._answer = answer
        self._next_asked_at = self._step()
        threading.Thread(target=ask, name="prefetch", daemon=True).start()  # not waited for when the run ends


def check_prompts_are_known(dataset: Any, options: Mapping[str, Any]) -> None:
    """
    Check that nothing but the dataset decides what a rollout asks the server for, as that has to be known in advance;
    a `ValueError` otherwise. `options` are those with which the trainer is made.
    """
    columns = getattr(dataset, "column_names", None) or ()
    obstacles = [name for name in ("rollout_func", "tools", "environment_factory") if options.get(name)]
    obstacles += [name for name in ("image", "images") if name in columns]
    if not has_length(dataset):
        obstacles.append("a stream of data")
    if obstacles:
        raise ValueError(
            f"prefetch_rollouts=1 cannot ask for completions in advance with {obstacles[0]}. Set it to 0."
        )


def of_engine(engine: Any, next_prompts: Callable[[], list[list[int]] | None], step: Callable[[], int]) -> Prefetch:
    """
    Put a [`Prefetch`] into TRL's vLLM engine, which then waits for what has been asked for before it sends weights.

    Raises:
        `ValueError`: the server would not return log-probabilities at the temperature of sampling.
    """
    mode = engine.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise ValueError(
            f"prefetch_rollouts=1: the vLLM server has --logprobs-mode {mode}. Restart it with "
            "`--logprobs-mode processed_logprobs`."
        )
    prefetch = Prefetch(engine.vllm_client.generate, next_prompts, step)
    engine.vllm_client.generate = prefetch.generate
    sync_weights = engine.sync_weights

    def sync_after_request() -> None:  # new weights inside a completion would mix two policies
        prefetch.wait()
        sync_weights()

    engine.sync_weights = sync_after_request
    return prefetch
