"""
Checks of the first rollout and optimizer step of a run, on releases of TRL that have not been tested.

Each compares a quantity of TRL or Transformers with what rewards, tokens and configuration say. Every process checks
its own samples, and all of them raise the same error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import is_async_callable

from ..batch import Batch, carried, completion_tokens
from ..checks.text import one_line
from ..compatibility import untested
from ..contract import KNOWN_KEYS, MULTIMODAL_KEYS, ROLLOUT_KEYS
from ..data.prompt_ids import PROMPT_IDS
from ..patching import temporarily
from ..reuse.conversations import tokenizer_of
from ..updates import padding


logger = get_logger(__name__)

Tokens = list[int]
Tokenizer = Callable[[list[Any]], tuple[list[Tokens], ...]]
LogpFunction = Callable[..., tuple[Tensor, ...]]

_MOST_TOKENS = 24  # tokens of a prompt and of a completion whose logits are computed
_CHECKED_COMPLETIONS = 4  # number of completions whose logits are computed


class FirstStep:
    """What TRL has been asked, and what it has answered, in the first rollout and optimizer step."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.prompts: Sequence[Any] = ()  # as TRL tokenizes them
        self.generated: Any = None  # by TRL's `_generate`
        overridden = _overridden(trainer)
        # Whether rollouts are TRL's own: otherwise, a subclass may change what `_generate` returns.
        self.generates_as_trl = "_generate" not in overridden
        # Whether the tokens of prompts and completions are those that the model itself has read and written:
        # otherwise, a subclass or a `rollout_func` may take them from elsewhere.
        self.tokens_are_of_model = not overridden & {"_generate", "_generate_single_turn", "_tokenize_prompts"}
        self.written: list[tuple[Tokens, Tokens]] = []  # prompt and completion, as the model itself writes them
        # Index of a reward function → its inputs, and its rewards, in its first call
        self.returned: dict[int, tuple[Any, list[Any]]] = {}
        # For each micro-batch: the gradient that reaches its loss in each backward pass
        self.loss_gradients: list[list[float]] = []
        self.temperatures: set[float] = set()  # at which the model has sampled
        self._checked_quantities: set[str] = set()  # quantities that have been checked, each once in a run

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to check: advantages are checked in the first rollout that has any but 0."""
        return "advantages" in self._checked_quantities

    def _report(self, quantity: str, problems: Iterator[str]) -> None:
        """
        Raise the same `RuntimeError` on all processes if any has found a problem with a quantity; only once for each.
        """
        if quantity in self._checked_quantities:
            return
        self._checked_quantities.add(quantity)
        all_problems = gather_object([*problems])
        if not all_problems:
            return
        names = [f"{name} {release}" for name, release in untested().items()]
        releases = " and ".join(names) or "this release"
        raise RuntimeError(
            f"With {releases}, OPO would train something else: {quantity}: {one_line(all_problems[0])}. "
            "Install tested releases (docs/compatibility.md)."
        )

    # What is noted

    @contextmanager
    def generating(self, prompts: Sequence[Any]) -> Iterator[None]:
        """
        Within this context, note the prompts, and what the model writes if TRL generates with the model itself, in one
        turn.
        """
        trainer = self.trainer
        self.prompts = prompts
        self.written = []
        self.tokens_are_of_model &= trainer.rollout_func is None
        policy = trainer.accelerator.unwrap_model(trainer.model)
        generate = policy.generate

        def generate_and_note(*args: Any, **named: Any) -> Any:
            """What the model's `generate` returns; the prompts, completions and temperature are noted."""
            sequences = generate(*args, **named)
            sampling = named.get("generation_config")
            if sampling is not None:
                self.temperatures.add(sampling.temperature if sampling.do_sample else 0.0)
            ids = named.get("input_ids")
            mask = named.get("attention_mask")
            if isinstance(sequences, Tensor) and ids is not None and mask is not None:
                completions = sequences[:, ids.size(1) :].tolist()
                for prompt, mask_of_prompt, completion in zip(ids, mask.bool(), completions, strict=True):
                    self.written.append((prompt[mask_of_prompt].tolist(), completion))
            return sequences

        with temporarily(policy, generate=generate_and_note):
            yield

    def scoring(self) -> AbstractContextManager[None]:
        """Within this context, note what each reward function of the trainer gets and returns in its first call."""
        functions = [self._noting(index, function) for index, function in enumerate(self.trainer.reward_funcs)]
        return temporarily(self.trainer, reward_funcs=functions)

    def _noting(self, index: int, function: Any) -> Any:
        """
        A reward function that also notes in `returned`, under its `index`, what it gets and returns in its first call.

        A reward model stays as it is: TRL calls it with tokens, which say nothing of the order of the completions.
        """
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
        gradients: list[float] = []
        self.loss_gradients.append(gradients)
        loss.register_hook(lambda gradient: gradients.append(gradient.item()))

    # What is checked

    def check_sampler(self, sampler: Any) -> None:
        """Check how often TRL has the data loader repeat prompts, and how many it takes for a rollout."""
        self._report("the order of prompts", self._sampler_problems(sampler))

    def _sampler_problems(self, sampler: Any) -> Iterator[str]:
        """Attributes of TRL's sampler that differ from what the configuration says, as parts of a sentence."""
        args = self.trainer.args
        expected = {
            "mini_repeat_count": args.num_generations,
            "batch_size": args.generation_batch_size // args.num_generations,
            "repeat_count": args.num_iterations * args.steps_per_generation,
        }
        for name, value in expected.items():
            if getattr(sampler, name) != value:
                yield f"{name!r} of the sampler is {getattr(sampler, name)}, not {value}"

    def check_rewards(
        self, rewards: Tensor, completion_ids: Sequence[Tokens], inputs: Sequence[Mapping[str, Any]]
    ) -> None:
        """
        Check the rewards over all processes, `[N, number of functions]`, as TRL has put them together. `inputs` are
        the dataset's rows of this process's completions.
        """
        n_completions = len(completion_ids)
        first = self.trainer.accelerator.process_index * n_completions
        rewards_here = rewards[first : first + n_completions].cpu()
        self._report("rewards", self._reward_problems(rewards_here, completion_ids, inputs))

    def _reward_problems(
        self, rewards: Tensor, completion_ids: Sequence[Tokens], rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[str]:
        """
        Reward functions that got other inputs than this process's completions and `rows`, or whose results are not in
        `rewards`, `[B, number of functions]`.
        """
        for index, (inputs, values) in self.returned.items():
            name = self.trainer.reward_func_names[index]
            if inputs.get("completion_ids") != [*completion_ids]:
                yield f"{name} did not get the completions' tokens in their order"
            for column in sorted(rows[0].keys() & inputs.keys() - {"prompt", "completion"}):
                if [*inputs[column]] != [row[column] for row in rows]:
                    yield f"{name} did not get the column {column!r} in the order of the completions"
            expected = [math.nan if value is None else float(value) for value in values]
            of_trl = rewards[:, index].tolist()
            if not torch.allclose(torch.tensor(of_trl), torch.tensor(expected), rtol=1e-5, equal_nan=True):
                yield f"{name} returned {expected[:8]} …, of which TRL made {of_trl[:8]} …"

    def check_rollout(
        self,
        inputs: Sequence[Mapping[str, Any]],
        rollout: Mapping[str, Any],
        rewards: Tensor,
        completion_ids: list[Tokens],
        tokenize: Tokenizer,
    ) -> None:
        """
        Check a rollout of TRL, with the rewards over all processes, and the tokens of this process's completions.

        `tokenize` is TRL's method that makes tokens of prompts: a list of each prompt's, and more.
        """
        self._report("entries of a rollout", self._entry_problems(rollout, len(completion_ids)))
        if self.generates_as_trl:  # otherwise a subclass may return other tokens than TRL's `_generate`
            self._report("prompts", self._prompt_problems(inputs, tokenize))
            self._report("tokens and masks", self._token_problems(rollout, completion_ids))
        exact, rounding = self._exact_advantages(rewards)
        if exact.any():  # in the first rollout that has advantages other than 0
            self._report("advantages", self._advantage_problems(rollout["advantages"], exact, rounding))

    def _entry_problems(self, rollout: Mapping[str, Any], n_completions: int) -> Iterator[str]:
        """Entries that a rollout lacks, or that have another number of values; a warning names unknown ones."""
        for name in sorted(self._needed_entries() - rollout.keys()):
            yield f"{name!r} is missing"
        for name in ROLLOUT_KEYS:
            if name in rollout and name not in MULTIMODAL_KEYS and len(rollout[name]) != n_completions:
                yield f"{name!r} has {len(rollout[name])} rows for {n_completions} completions"
        for name in sorted(rollout.keys() - {*KNOWN_KEYS}):
            where = "travels with its samples" if name in carried(rollout) else "is left out"
            logger.warning(f"A rollout has an entry {name!r} that opo_trl does not read. It {where}.")

    def _needed_entries(self) -> set[str]:
        """Names of the entries that a rollout of this run needs."""
        trainer = self.trainer
        needed = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
        if trainer.beta:
            needed.add("ref_per_token_logps")
        if self.generates_as_trl and self.generated[2] is not None:  # masks of tools
            needed.add("tool_mask")
        if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
            needed.update(("importance_sampling_ratio", "sampling_per_token_logps"))
        return needed

    def _prompt_problems(self, inputs: Sequence[Mapping[str, Any]], tokenize: Tokenizer) -> Iterator[str]:
        """
        How the prompts that TRL tokenized differ from those of the dataset's rows, or within a group; and of the first
        and last prompt, whether TRL generated from its tokens.
        """
        trainer = self.trainer
        if trainer.environment_factories is not None or {"image", "images"} & inputs[0].keys():
            return  # prompts with images, or of an environment, are changed before they are tokenized
        prompts = [row["prompt"] for row in inputs]
        if prompts != [*self.prompts]:
            yield "they are not those of the dataset's rows, in their order"
        group = trainer.num_generations
        has_whole_groups = len(prompts) % group == 0  # otherwise, another process has a part of a group
        first_of_group = [prompts[index - index % group] for index in range(len(prompts))]
        if has_whole_groups and prompts != first_of_group:
            yield f"the {group} completions of a group have several"
        if self.tokens_are_of_model:  # otherwise a subclass or a `rollout_func` may make them
            for index in (0, len(inputs) - 1):
                tokens = inputs[index].get(PROMPT_IDS)
                if tokens is None:
                    [tokens], *_ = tokenize([self.prompts[index]])
                if tokens != [*self.generated[0][index]]:
                    yield f"the tokens of prompt {index} are those of another one"

    def _token_problems(self, rollout: Mapping[str, Any], completion_ids: list[Tokens]) -> Iterator[str]:
        """Where the padded tables of a rollout differ from the tokens that were generated and from their masks."""
        trainer = self.trainer
        # By TRL's `_generate`. In a mask, 0 is for a token that a tool has written; without tools it is `None`.
        prompt_ids, _, tool_masks = self.generated[:3]
        for index, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            yield from _problems_of_prompt(rollout, index, prompt)
            tool_mask = None if tool_masks is None else tool_masks[index]
            yield from self._problems_of_completion(rollout, index, completion, tool_mask)
        # `written` has what the model's own `generate` got and returned: nothing if vLLM generates.
        if self.tokens_are_of_model and not trainer.tools and len(self.written) == len(completion_ids):
            yield from self._generation_problems(prompt_ids, completion_ids)

    def _problems_of_completion(
        self, rollout: Mapping[str, Any], index: int, completion: Tokens, tool_mask: Sequence[int] | None
    ) -> Iterator[str]:
        """
        What is wrong with a rollout's tables in the row of one completion, which is padded on the right. `completion`
        and `tool_mask` are as generated: its tokens, and 0 for each that a tool has written.
        """
        trainer = self.trainer
        length = len(completion)
        ends = {*trainer.eos_token_ids, tokenizer_of(trainer).pad_token_id}
        # TRL masks a truncated completion as a whole, if it is asked to.
        value_of_mask = int(not trainer.mask_truncated_completions or completion[-1] in ends)
        mask = rollout["completion_mask"][index].tolist()
        right_padding = [0] * (len(mask) - length)
        if mask != [value_of_mask] * length + right_padding:
            yield f"the mask of completion {index}, of {length} tokens, is {mask}"
        tokens = rollout["completion_ids"][index, :length].tolist()
        if tokens != [*completion]:
            yield f"the tokens of completion {index} are not those that were generated"
        if tool_mask is not None:
            mask_of_trl = rollout["tool_mask"][index, :length].tolist()
            if mask_of_trl != [value_of_mask * entry for entry in tool_mask]:
                yield f"the mask of tool output in completion {index} is {mask_of_trl}"

    def _generation_problems(self, prompt_ids: list[Tokens], completion_ids: list[Tokens]) -> Iterator[str]:
        """
        Where the tokens that TRL returned are not those that the model itself got and wrote, up to its first end; and
        where it samples at another temperature, or writes more tokens, than the configuration says.
        """
        args = self.trainer.args
        sampling = {"temperature": args.temperature, "do_sample": True} | (args.generation_kwargs or {})
        expected = sampling["temperature"] if sampling["do_sample"] else 0.0
        for temperature in self.temperatures - {expected}:
            yield f"the model samples at a temperature of {temperature}, not {expected}"
        most = args.max_completion_length
        for index, (prompt, sequence) in enumerate(self.written):
            completion = [*completion_ids[index]]
            if most is not None and len(completion) > most:
                yield f"completion {index} has {len(completion)} tokens, more than {most}"
            ends = [place + 1 for place, token in enumerate(sequence) if token in self.trainer.eos_token_ids]
            up_to_first_end = sequence[: min(ends, default=len(sequence))]
            if prompt != [*prompt_ids[index]] or up_to_first_end != completion:
                yield f"prompt and completion {index} are not what the model has got and written, up to its first end"

    def _exact_advantages(self, rewards: Tensor) -> tuple[Tensor, float]:
        """
        What the advantages of all processes' completions have to be by their rewards, in float64, `[N]`, and how far
        they are off at most if they are computed in float32.
        """
        trainer = self.trainer
        rewards = rewards.cpu()
        weights = trainer.reward_weights.cpu()
        advantages_in = partial(
            advantages_of,
            num_generations=trainer.num_generations,
            scale=trainer.scale_rewards,
            aggregation=trainer.multi_objective_aggregation,
        )
        exact = advantages_in(rewards.double(), weights.double())
        in_float32 = advantages_in(rewards.float(), weights.float())
        return exact, (in_float32 - exact).abs().max().item()

    def _advantage_problems(self, advantages: Tensor, exact: Tensor, rounding: float) -> Iterator[str]:
        """
        Advantages of this process, `[B]`, that differ from the `exact` ones of all processes, `[N]`, by more than
        `rounding`, which is that of float32, explains.
        """
        first = self.trainer.accelerator.process_index * len(advantages)
        pairs = zip(advantages.tolist(), exact[first:].tolist(), strict=False)
        for index, (advantage, expected) in enumerate(pairs):
            allowed = 1e-3 * (1 + abs(expected)) + 10 * rounding
            is_close = abs(advantage - expected) <= allowed  # NaN is not
            if not is_close:
                yield f"that of completion {index} is {advantage:.6g}, but the rewards say {expected:.6g}"

    def check_logps(self, samples: Mapping[str, Any], logps_of_trl: LogpFunction, *, is_padded: bool) -> None:
        """
        Check the log-probabilities of the longest completions of some samples by their logits: under the policy, and
        under a reference that is a model of its own. All processes make as many passes.

        `logps_of_trl` is called as TRL's `_get_per_token_logps_and_entropies`: if `is_padded`, on a padded completion,
        as in a micro-batch. This has to be off for a model whose log-probabilities depend on padding.
        """
        config = self.trainer.model.config
        if config.get_text_config() is config:  # with images, a pass needs more than tokens
            self._report(
                "log-probabilities", self._logp_problems(samples, logps_of_trl, n_padding=3 if is_padded else 0)
            )

    @torch.no_grad()
    def _logp_problems(self, samples: Mapping[str, Any], logps_of_trl: LogpFunction, n_padding: int) -> Iterator[str]:
        """
        For which models TRL's log-probabilities differ from those of the model's logits: of the longest completions
        among the samples, cut to a few tokens and padded by `n_padding` columns on each side.
        """
        trainer = self.trainer
        models = {"the model": trainer.model}
        if trainer.beta and trainer.ref_model is not None:
            models["the reference model"] = trainer.ref_model
        lengths = samples["completion_mask"].sum(dim=1)
        for place in lengths.argsort(descending=True)[:_CHECKED_COMPLETIONS].tolist():
            prompt = _without_padding(samples, "prompt", place)[-_MOST_TOKENS:]
            completion = _without_padding(samples, "completion", place)[:_MOST_TOKENS]
            for name, model in models.items():
                problems = self._logp_problems_of(model, prompt, completion, logps_of_trl, n_padding)
                yield from (f"{problem}{name}'s logits" for problem in problems)

    def _logp_problems_of(
        self, model: Any, prompt: Tensor, completion: Tensor, logps_of_trl: LogpFunction, n_padding: int
    ) -> Iterator[str]:
        """
        Whether TRL's log-probabilities of the tokens of one completion differ from those of one model's logits. A
        problem is the beginning of a sentence, which ends with the model's name.
        """
        trainer = self.trainer
        if not len(completion):  # all are masked: any token will do, and a prompt may have only one
            completion = prompt[-1:]
        length = len(completion)
        ids = torch.cat([prompt, completion])[None]
        mask = torch.ones_like(ids)
        padded_ids = pad(ids, (n_padding, n_padding))
        padded_mask = pad(mask, (n_padding, n_padding))
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        with padding.evaluating(model), disable_gradient_checkpointing(model, checkpointing):
            logps, *_ = logps_of_trl(model, padded_ids, padded_mask, length + n_padding)
            with trainer.accelerator.autocast():
                logits = model(input_ids=ids, attention_mask=mask).logits
        before_each_token = logits[:, -length - 1 : -1].float()
        of_vocabulary = (before_each_token / trainer.temperature).log_softmax(dim=-1)
        expected = of_vocabulary.gather(2, completion[None, :, None]).squeeze(2)
        distances = (logps[:, :length].float() - expected).abs()
        distance = distances.max().item()
        is_close = distance <= self._allowed_distance(n_tokens=length)  # NaN is not
        if not is_close:
            yield f"that of a token is {distance:.3g} nats away from the one by "

    def check_reference(self, of_trl: Tensor, samples: Batch) -> None:
        """
        Check log-probabilities of the reference, `[B, T]`, as TRL has added them to a rollout, against ours, which
        `samples` have.
        """
        mask = completion_tokens(samples)
        problems = self._distance_problems(of_trl, samples["ref_per_token_logps"], mask, "the reference model")
        self._report("the reference policy", problems)

    def _distance_problems(self, logps: Tensor, expected: Tensor, mask: Tensor, source: str) -> Iterator[str]:
        """
        How far log-probabilities, `[B, T]`, are from those of their `source`, where the mask is true: the root of the
        mean square, unless rounding explains it.
        """
        difference = (logps.float() - expected.float())[mask]
        if not len(difference):
            return
        distance = difference.square().mean().sqrt().item()
        is_close = distance <= self._allowed_distance(n_tokens=1)  # NaN is not
        if not is_close:
            yield f"they are {distance:.3g} nats per token away from those of {source}"

    def _allowed_distance(self, n_tokens: int) -> float:
        """How far the log-probability that is most off, of so many, may be off by rounding alone, in nats."""
        # The largest of n draws from a normal distribution is below √(2 log n) + 2 standard deviations but for one
        # time in a hundred. Here 1 in place of 2 does, as `rounding` is a bound on that deviation.
        rounding = padding.rounding_of_logps(self.trainer)
        n_deviations = 1 + math.sqrt(2 * math.log(n_tokens))
        return max(rounding * n_deviations, 0.01)

    def check_step(self, n_calls: int) -> None:
        """Check the backward passes of an optimizer step, which was made by `n_calls` calls of `training_step`."""
        self._report("the loss of an optimizer step", self._step_problems(n_calls))

    def _step_problems(self, n_calls: int) -> Iterator[str]:
        """
        Whether an optimizer step had a wrong number of calls; and losses whose backward pass began with another
        gradient than 1, or the scale of a gradient scaler, or which had several.
        """
        trainer = self.trainer
        expected_calls = trainer.current_gradient_accumulation_steps
        if n_calls != expected_calls:
            yield f"it has {n_calls} calls of `training_step`, not {expected_calls}"
        if trainer.is_deepspeed_enabled and trainer.args.fp16:
            return  # DeepSpeed multiplies by a scale of its own
        scaler = trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        for gradients in self.loss_gradients:
            if gradients != [scale]:
                yield f"its gradient is multiplied by {gradients}, not once by {scale}"


def _problems_of_prompt(rollout: Mapping[str, Any], index: int, prompt: Tokens) -> Iterator[str]:
    """What is wrong with the tables' entries of one prompt, which is padded on the left."""
    length = len(prompt)
    mask = rollout["prompt_mask"][index].tolist()
    n_padding = len(mask) - length
    if mask != [0] * n_padding + [1] * length:
        yield f"the mask of prompt {index}, of {length} tokens, is {mask}"
    tokens = rollout["prompt_ids"][index, n_padding:].tolist()
    if tokens != [*prompt]:
        yield f"the tokens of prompt {index} are not those that were generated from"


def _without_padding(samples: Mapping[str, Any], text: str, index: int) -> Tensor:
    """Tokens of one row's `"prompt"` or `"completion"`, as `text` says, without those that are masked."""
    mask = samples[f"{text}_mask"][index].bool()
    return samples[f"{text}_ids"][index][mask]


def _overridden(trainer: Any) -> set[str]:
    """Names of attributes and methods that a user's subclasses of the trainer define."""
    names: set[str] = set()
    for base in type(trainer).__mro__:
        package = base.__module__.partition(".")[0]
        if package not in ("opo_trl", "trl", "transformers", "builtins"):
            names.update(vars(base))
    return names


class _NoChecks:
    """Checks nothing, whichever method of [`FirstStep`] is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: nullcontext()


NO_CHECKS: Any = _NoChecks()


def advantages_of(rewards: Tensor, weights: Tensor, num_generations: int, *, scale: str, aggregation: str) -> Tensor:
    """
    Advantages as TRL documents them, `[N]`, of `rewards`, `[N, number of functions]`, with NaN for no score. Standard
    deviations are unbiased, and divide with 1e-4 added.
    """
    unscored = rewards.isnan().all(dim=1)
    if aggregation == "normalize_then_sum":
        columns = [
            _centred(column, num_generations) / _standard_deviations(column, num_generations) for column in rewards.T
        ]
        normalized = torch.stack(columns, dim=1)
        sums = (normalized * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        advantages = _centred(sums, len(sums)) / _standard_deviations(sums, len(sums))
    else:
        sums = (rewards * weights).nansum(dim=1).masked_fill(unscored, torch.nan)
        advantages = _centred(sums, num_generations)
        if scale == "group":
            advantages = advantages / _standard_deviations(sums, num_generations)
        elif scale == "batch":
            advantages = advantages / _standard_deviations(sums, len(sums))
    return advantages.nan_to_num()


def _centred(values: Tensor, group: int) -> Tensor:
    """Values less the mean of their group; `group` is the number of values in one."""
    groups = values.view(-1, group)
    means = groups.nanmean(dim=1, keepdim=True)
    return (groups - means).flatten()


def _standard_deviations(values: Tensor, group: int) -> Tensor:
    """For each value, the standard deviation of its group, with 1e-4 added."""
    is_scored = ~values.isnan().view(-1, group)
    squares = _centred(values, group).view(-1, group).square()
    variance = squares.nansum(dim=1) / (is_scored.sum(dim=1) - 1)
    return variance.sqrt().repeat_interleave(group) + 1e-4
