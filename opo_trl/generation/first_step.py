"""
Checks of the first rollout and optimizer step of a run, on releases of TRL that have not been tested.

Each compares a quantity of TRL or Transformers with what rewards, tokens and configuration say. Every process checks
its own samples, and all of them raise the same error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import Module
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import is_async_callable

from ..batch import carried, completion_tokens
from ..checks.text import one_line
from ..contract import KNOWN_KEYS, MULTIMODAL_KEYS, ROLLOUT_KEYS
from ..reuse.conversations import tokenizer_of
from ..trl import temporarily, untested
from ..updates import padding


logger = get_logger(__name__)

Tokens = list[int]

_LONGEST = 24  # tokens of a prompt and of a completion whose logits are computed


class FirstStep:
    """What TRL has been asked, and what it has answered, in the first rollout and optimizer step."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.prompts: Sequence[Any] = ()  # as TRL tokenizes them
        self.generated: Any = None  # by TRL's `_generate`
        overridden = _overridden(trainer)
        self.is_of_trl = "_generate" not in overridden  # otherwise, a subclass may change what TRL returns
        self.is_of_model = not overridden & {"_generate", "_generate_single_turn", "_tokenize_prompts"}
        self.written: list[tuple[Tokens, Tokens]] = []  # prompt and completion, as the model itself writes them
        self.returned: dict[int, tuple[Any, list[Any]]] = {}  # reward function → its completions, and their rewards
        self.losses: list[list[float]] = []  # of each micro-batch: its gradient
        self._checked: set[str] = set()

    def _report(self, quantity: str, problems: Iterator[str]) -> None:
        """
        Raise the same `RuntimeError` on all processes if any has found a problem with a quantity; only once for each.
        """
        if quantity in self._checked:
            return
        self._checked.add(quantity)
        found = gather_object([*problems])
        if found:
            releases = " and ".join(f"{name} {release}" for name, release in untested().items()) or "this release"
            fix = "Install tested releases (docs/compatibility.md)"
            problem = one_line(found[0])
            raise RuntimeError(f"With {releases}, OPO would train something else: {quantity}: {problem}. {fix}.")

    # What is noted

    @contextmanager
    def generating(self, prompts: Sequence[Any]) -> Iterator[None]:
        """Note the prompts, and what the model writes if TRL generates with the model itself, in one turn."""
        trainer, self.prompts = self.trainer, prompts
        self.is_of_model &= trainer.rollout_func is None
        policy = trainer.accelerator.unwrap_model(trainer.model)
        generate = policy.generate

        def noted(*args: Any, **named: Any) -> Any:
            sequences = generate(*args, **named)
            ids, mask = named.get("input_ids"), named.get("attention_mask")
            if isinstance(sequences, Tensor) and ids is not None and mask is not None:
                prompt_tokens = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
                completions = sequences[:, ids.size(1) :].tolist()
                self.written.extend(zip(prompt_tokens, completions, strict=True))
            return sequences

        with temporarily(policy, generate=noted):
            yield

    def scoring(self) -> AbstractContextManager[None]:
        """Note what each reward function gets and returns."""
        functions = [self._noting(index, each) for index, each in enumerate(self.trainer.reward_funcs)]
        return temporarily(self.trainer, reward_funcs=functions)

    def _noting(self, index: int, function: Any) -> Any:
        if isinstance(function, Module):
            return function

        async def call_async(**inputs: Any) -> list[Any]:
            values = [*await function(**inputs)]
            self.returned.setdefault(index, (inputs, values))
            return values

        def call(**inputs: Any) -> list[Any]:
            values = [*function(**inputs)]
            self.returned.setdefault(index, (inputs, values))
            return values

        return call_async if is_async_callable(function) else call

    def note_generated(self, generated: Any) -> None:
        """Note what TRL's `_generate` returns: first of all tokens of prompts and completions, and masks of tools."""
        self.generated = generated

    def note_backward(self, loss: Tensor) -> None:
        """Note with which gradient the backward pass of a loss begins."""
        slopes: list[float] = []
        self.losses.append(slopes)
        loss.register_hook(lambda slope: slopes.append(slope.item()))

    # What is checked

    def check_rewards(self, rewards: Tensor, completion_ids: Sequence[Tokens]) -> None:
        """Those over all processes, `[N, number of functions]`, as TRL has put them together."""
        n_own = len(completion_ids)
        own = rewards[self.trainer.accelerator.process_index * n_own :][:n_own].tolist()
        self._report("rewards", self._rewards(own, completion_ids))

    def _rewards(self, own: list[list[float]], completion_ids: Sequence[Tokens]) -> Iterator[str]:
        for index, (inputs, values) in self.returned.items():
            name = self.trainer.reward_func_names[index]
            if inputs.get("completion_ids") != [*completion_ids]:
                yield f"{name} did not get the completions' tokens in their order"
            expected = [float("nan") if value is None else float(value) for value in values]
            given = [row[index] for row in own]
            if not torch.allclose(torch.tensor(given), torch.tensor(expected), rtol=1e-5, equal_nan=True):
                yield f"{name} returned {expected[:8]} …, of which TRL made {given[:8]} …"

    def check_rollout(
        self,
        inputs: Sequence[Mapping[str, Any]],
        rollout: Mapping[str, Any],
        rewards: Tensor,
        completion_ids: list[Tokens],
    ) -> None:
        """A rollout of TRL, with the rewards over all processes, and the tokens of this process's completions."""
        self._report("entries of a rollout", self._entries(rollout, len(completion_ids)))
        if self.is_of_trl:
            self._report("prompts", self._prompts(inputs))
            self._report("tokens and masks", self._tokens(rollout, completion_ids))
        self._report("advantages", self._advantages(rollout["advantages"], rewards))

    def _entries(self, rollout: Mapping[str, Any], n_samples: int) -> Iterator[str]:
        trainer = self.trainer
        needed = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
        needed |= {"ref_per_token_logps"} if trainer.beta else set()
        needed |= {"tool_mask"} if self.is_of_trl and self.generated[2] is not None else set()
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            needed |= {"importance_sampling_ratio", "sampling_per_token_logps"}
        for name in sorted(needed - rollout.keys()):
            yield f"{name!r} is missing"
        for name in ROLLOUT_KEYS:
            if name in rollout and name not in MULTIMODAL_KEYS and len(rollout[name]) != n_samples:
                yield f"{name!r} has {len(rollout[name])} rows for {n_samples} completions"
        for name in sorted(rollout.keys() - {*KNOWN_KEYS}):
            where = "travels with its samples" if name in carried(rollout) else "is left out"
            logger.warning(f"A rollout has an entry {name!r} that opo_trl does not read. It {where}.")

    def _prompts(self, inputs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        trainer = self.trainer
        if trainer.environment_factories is not None or {"image", "images"} & inputs[0].keys():
            return  # they are changed before they are tokenized
        prompts = [row["prompt"] for row in inputs]
        if prompts != [*self.prompts]:
            yield "they are not those of the dataset's rows, in their order"
        group = trainer.num_generations
        firsts = [prompts[index - index % group] for index in range(len(prompts))]
        if len(prompts) % group == 0 and prompts != firsts:  # otherwise, another process has a part of a group
            yield f"the {group} completions of a group have several"
        if self.is_of_model:
            for index in (0, len(inputs) - 1):
                if trainer._tokenize_prompts([self.prompts[index]])[0][0] != [*self.generated[0][index]]:
                    yield f"the tokens of prompt {index} are those of another one"

    def _tokens(self, rollout: Mapping[str, Any], completion_ids: list[Tokens]) -> Iterator[str]:
        trainer = self.trainer
        prompt_ids, _, own_masks = self.generated[:3]
        ends = {*trainer.eos_token_ids, tokenizer_of(trainer).pad_token_id}
        for index, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            columns = {name: rollout[name][index].tolist() for name in ROLLOUT_KEYS[:4]}
            left = [0] * (len(columns["prompt_mask"]) - len(prompt))
            if columns["prompt_mask"] != [*left, *[1] * len(prompt)]:
                yield f"the mask of prompt {index}, of {len(prompt)} tokens, is {columns['prompt_mask']}"
            if columns["prompt_ids"][len(left) :] != [*prompt]:
                yield f"the tokens of prompt {index} are not those that were generated from"
            right = [0] * (len(columns["completion_mask"]) - len(completion))
            counts = int(not trainer.mask_truncated_completions or completion[-1] in ends)
            if columns["completion_mask"] != [*[counts] * len(completion), *right]:
                yield f"the mask of completion {index}, of {len(completion)} tokens, is {columns['completion_mask']}"
            if columns["completion_ids"][: len(completion)] != [*completion]:
                yield f"the tokens of completion {index} are not those that were generated"
            if own_masks is not None:
                tool_mask = rollout["tool_mask"][index].tolist()[: len(completion)]
                if tool_mask != [counts * own for own in own_masks[index]]:
                    yield f"the mask of tool output in completion {index} is {tool_mask}"
        if self.is_of_model and not trainer.tools and len(self.written) == len(completion_ids):
            yield from self._written(prompt_ids, completion_ids)

    def _written(self, prompt_ids: list[Tokens], completion_ids: list[Tokens]) -> Iterator[str]:
        most = self.trainer.args.max_completion_length
        for index, (prompt, sequence) in enumerate(self.written):
            if most is not None and len(completion_ids[index]) > most:
                yield f"completion {index} has {len(completion_ids[index])} tokens, more than {most}"
            ends = [place + 1 for place, token in enumerate(sequence) if token in self.trainer.eos_token_ids]
            completion = sequence[: min(ends, default=len(sequence))]
            if [prompt, completion] != [[*prompt_ids[index]], [*completion_ids[index]]]:
                yield f"prompt and completion {index} are not what the model has got and written, up to its first end"

    def _advantages(self, advantages: Tensor, rewards: Tensor) -> Iterator[str]:
        trainer, rewards = self.trainer, rewards.cpu()
        options = {"scale": trainer.scale_rewards, "aggregation": trainer.multi_objective_aggregation}
        weights, group = trainer.reward_weights.cpu(), trainer.num_generations
        exact = advantages_of(rewards.double(), weights.double(), group, **options)
        rounding = (advantages_of(rewards.float(), weights.float(), group, **options) - exact).abs().max()
        own = slice(trainer.accelerator.process_index * len(advantages), None)
        for index, (given, expected) in enumerate(zip(advantages.tolist(), exact[own].tolist(), strict=False)):
            allowed = 1e-3 * (1 + abs(expected)) + 10 * rounding
            if not abs(given - expected) <= allowed:  # nor is NaN
                yield f"that of completion {index} is {given:.6g}, but the rewards say {expected:.6g}"

    def check_logps(self, rows: Mapping[str, Any], logps_of_trl: Callable[..., Any], any_width: bool | None) -> None:
        """
        Log-probabilities of the longest completion of some samples, from its logits; padded as in a micro-batch if
        they are the same at `any_width`. All processes make a pass.
        """
        config = self.trainer.model.config
        if config.get_text_config() is config:  # with images, a pass needs more than tokens
            self._report("log-probabilities", self._logps(rows, logps_of_trl, n_padding=3 if any_width else 0))

    @torch.no_grad()
    def _logps(self, rows: Mapping[str, Any], logps_of_trl: Callable[..., Any], n_padding: int) -> Iterator[str]:
        trainer = self.trainer
        longest = int(rows["completion_mask"].sum(dim=1).argmax())
        prompt, completion = (
            rows[f"{text}_ids"][longest][rows[f"{text}_mask"][longest].bool()] for text in ("prompt", "completion")
        )
        prompt, completion = prompt[-_LONGEST:], completion[:_LONGEST]
        if not len(completion):  # all are masked
            prompt, completion = prompt[:-1], prompt[-1:]
        width = len(completion)
        ids = torch.cat([prompt, completion])[None]
        mask = torch.ones_like(ids)
        padded = [torch.nn.functional.pad(each, (n_padding, n_padding)) for each in (ids, mask)]
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        with padding.evaluating(trainer.model), disable_gradient_checkpointing(trainer.model, checkpointing):
            logps = logps_of_trl(trainer.model, *padded, width + n_padding)[0][:, :width]
            with trainer.accelerator.autocast():
                logits = trainer.model(input_ids=ids, attention_mask=mask).logits
        logits = logits[:, -width - 1 : -1].float() / trainer.temperature
        expected = logits.log_softmax(dim=-1).gather(2, completion[None, :, None]).squeeze(2)
        yield from self._apart(logps, expected, torch.ones_like(expected).bool(), "the model's logits")

    def check_reference(self, of_trl: Tensor, rows: Mapping[str, Any]) -> None:
        """Log-probabilities of the reference, `[B, T]`, as TRL has added them to a rollout; `rows` have those here."""
        mask, own_pass = completion_tokens(rows), rows["ref_per_token_logps"]
        self._report("the reference policy", self._apart(of_trl, own_pass, mask, "the reference model"))

    def _apart(self, logps: Tensor, expected: Tensor, mask: Tensor, source: str) -> Iterator[str]:
        difference = (logps.float() - expected.float())[mask]
        distance = difference.square().mean().sqrt().item() if len(difference) else 0.0
        if not distance <= max(padding.rounding_of_logps(self.trainer), 0.01):
            yield f"they are {distance:.3g} nats per token away from those of {source}"

    def check_step(self, n_calls: int) -> None:
        """The backward passes of an optimizer step, which was made by so many calls of `training_step`."""
        self._report("the loss of an optimizer step", self._step(n_calls))

    def _step(self, n_calls: int) -> Iterator[str]:
        trainer = self.trainer
        wanted = trainer.current_gradient_accumulation_steps
        if n_calls != wanted:
            yield f"it has {n_calls} calls of `training_step`, not {wanted}"
        scaler = trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        if trainer.is_deepspeed_enabled and trainer.args.fp16:
            return  # DeepSpeed has a scale of its own
        for slopes in self.losses:
            if slopes != [scale]:
                yield f"its gradient is multiplied by {slopes}, not once by {scale}"


def _overridden(trainer: Any) -> set[str]:
    """Names that subclasses of a user's define."""
    libraries = ("opo_trl", "trl", "transformers", "builtins")
    bases = [base for base in type(trainer).__mro__ if base.__module__.partition(".")[0] not in libraries]
    return {name for base in bases for name in vars(base)}


class _NoChecks:
    """Checks nothing, whichever method of [`FirstStep`] is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: nullcontext()


NO_CHECKS: Any = _NoChecks()


def advantages_of(rewards: Tensor, weights: Tensor, num_generations: int, *, scale: str, aggregation: str) -> Tensor:
    """
    Advantages as TRL documents them, `[N]`, of `rewards`, `[N, number of functions]`, with NaN for no score. Standard
    deviations are unbiased, and divide with 1e-4 added.
    """
    unscored = rewards.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        columns = [_centred(column, num_generations) / _spread(column, num_generations) for column in rewards.T]
        sums = (torch.stack(columns, dim=1) * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        advantages = _centred(sums, len(sums)) / _spread(sums, len(sums))
    else:
        sums = (rewards * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        advantages = _centred(sums, num_generations)
        if scale != "none":
            advantages = advantages / _spread(sums, num_generations if scale == "group" else len(sums))
    return advantages.nan_to_num()


def _centred(values: Tensor, group: int) -> Tensor:
    groups = values.view(-1, group)
    return (groups - groups.nanmean(dim=1, keepdim=True)).flatten()


def _spread(values: Tensor, group: int) -> Tensor:
    counts = (~values.isnan()).view(-1, group).sum(dim=1)
    variance = _centred(values, group).square().view(-1, group).nansum(dim=1) / (counts - 1)
    return variance.sqrt().repeat_interleave(group) + 1e-4
