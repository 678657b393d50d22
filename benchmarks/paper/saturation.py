r"""
The toy of gradient saturation in the paper (section "Why KL-Based Objectives Saturate"): ∂ℒ/∂z of a one-logit policy.

    python -m benchmarks.paper.saturation_figure [--output FILE]

A prompt has two completions of one token each, y = 1 (rewarded) and y = 0. The policy has one parameter, the logit z:

    pi(1) = p = sigma(z),  pi(0) = 1 − p,  ∂log pi(1)/∂z = 1 − p,  ∂log pi(0)/∂z = −p

The behaviour policy (the paper's anchor) and the reference are z_ref = 0, that is p = 1/2, so the ratios to it are
r(1) = 2p and r(0) = 2(1 − p). The group is {1, 0}, so its mean is the expectation under the behaviour policy. Rewards
1 and 0, centred and divided by their standard deviation (over G, not G − 1), are the advantages A = +1 and −1. The
losses are means over the group; automatic differentiation gives:

    SFT    ℒ = −log pi(1)                                   ∂ℒ/∂z = −(1 − p)
    DPO    ℒ = −log sigma(beta·(Delta(1) − Delta(0)))       ∂ℒ/∂z = −beta·sigma(−beta·z), as Delta(1) − Delta(0) = z
    GRPO   ℒ = −mean min(r·A, clip(r)·A)                    ∂ℒ/∂z = −p(1 − p)·([r(1) ≤ 1 + high] + [r(0) ≥ 1 − low])
    DAPO, GSPO: like GRPO, with other clip ranges
    OPO    ℒ = mean mu/2·(u − v*)², up to a constant, with v* = ±tanh(1 − alpha)/mu
           u = Delta:           ∂ℒ/∂z = mu/2·((log 2p − v*(1))·(1 − p) − (log 2(1 − p) − v*(0))·p)
           u = exp(Delta) − 1:  ∂ℒ/∂z = mu·(2p − 1 − v*(1))·2p(1 − p)

The formulas are for readers and tests. The code differentiates [`opo_loss`] on a target from this package's own
functions, and the `compute_loss` of TRL's trainers. `benchmarks/paper/saturation.md` says what the toy shows and
what it does not.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opo_trl.objective import RatioForm, admissible_target, escort_weights, opo_loss, project, token_sum


ALPHA, MU = 0.4, 1.0  # the paper's
BETA = 0.1  # of DPO: TRL's default

# Without p = 0.6: there r(0) = 0.8 and r(1) = 1.2 are the edges of the clip ranges, where rounding decides.
CONFIDENCES = (0.5, 0.59, 0.62, 0.73, 0.9, 0.99, 0.999)


@dataclass(frozen=True)
class Rows:
    """
    B completions in complete groups.

    Args:
        tokens (`torch.Tensor`):
            The token, 1 or 0, shape `[B]`.
        advantages (`torch.Tensor`):
            Advantages A, shape `[B]`.
        anchor_logps (`torch.Tensor`):
            Log-probabilities under the behaviour policy, shape `[B, 1]`.
        num_generations (`int`):
            Group size G.
    """

    tokens: Tensor
    advantages: Tensor
    anchor_logps: Tensor
    num_generations: int


class BinaryPolicy(torch.nn.Module):
    """
    A language model of two tokens with the logits 0 and z for any prompt, with the interface that TRL's trainers use.

    Args:
        z (`torch.Tensor`):
            Logit of token 1 in each row, shape `[B]`.
    """

    def __init__(self, z: Tensor):
        super().__init__()
        self.z = z

    def forward(self, input_ids: Tensor, labels: Tensor, **ignored) -> SimpleNamespace:
        """Returns what TRL's fused LM head does, for a prompt and a completion of one token each."""
        chosen = labels[:, 1:]
        logits = torch.stack([torch.zeros_like(self.z), self.z], dim=-1).unsqueeze(1)
        logps = logits.log_softmax(dim=-1)  # of both tokens
        log_probs = logps.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        entropy = -(logps.exp() * logps).sum(dim=-1)
        is_top1 = logits.argmax(dim=-1) == chosen
        return SimpleNamespace(
            log_probs=log_probs,
            entropy=entropy,
            mean_logits=logits.mean(dim=-1),
            is_top1=is_top1,
            label_mask=torch.ones_like(chosen, dtype=torch.bool),
        )

    def logps(self, tokens: Tensor) -> Tensor:
        """Log-probability of each row's token, shape `[B, 1]`."""
        inputs = _model_inputs(tokens)
        return self(inputs["input_ids"], labels=inputs["input_ids"]).log_probs


def gradient(method: str, z: Tensor, *, anchor: Tensor | float = 0.0, rewards: Sequence[float] = (1.0, 0.0)) -> Tensor:
    """
    ∂ℒ/∂z of a group, by automatic differentiation of the training loss.

    Args:
        method (`str`):
            A key of [`METHODS`].
        z (`torch.Tensor`):
            Logits of the policy, shape `[K]`.
        anchor (`torch.Tensor` or `float`, *optional*, defaults to `0.0`):
            Logits of the behaviour policy.
        rewards (`Sequence[float]`, *optional*, defaults to `(1.0, 0.0)`):
            The group: rewards of its completions, 1 for token 1 and 0 for token 0. Not all equal.

    Returns:
        `torch.Tensor`: ∂ℒ/∂z at each logit, shape `[K]`, float64.
    """
    z = z.detach().double().requires_grad_()
    reward = torch.tensor(rewards, dtype=torch.float64)
    tokens = reward.long().repeat(len(z))
    advantages = ((reward - reward.mean()) / reward.std(correction=0)).repeat(len(z))
    anchor = torch.as_tensor(anchor, dtype=torch.float64).expand_as(z).repeat_interleave(len(reward))
    rows = Rows(tokens, advantages, BinaryPolicy(anchor).logps(tokens), len(reward))
    loss = METHODS[method](z.repeat_interleave(len(reward)), rows)  # a mean over K groups
    return torch.autograd.grad(len(z) * loss, z)[0]


def on_policy_gradient(method: str, z: Tensor, *, num_generations: int = 8) -> Tensor:
    """
    Expectation of ∂ℒ/∂z for the behaviour policy itself, over the groups that it draws.

    Args:
        method (`str`):
            A key of [`METHODS`] except SFT and DPO, which have no groups.
        z (`torch.Tensor`):
            Logits of the policy, shape `[K]`.
        num_generations (`int`, *optional*, defaults to `8`):
            Group size G.

    Returns:
        `torch.Tensor`: the expected ∂ℒ/∂z at each logit, shape `[K]`, float64.
    """
    z = z.detach().double()
    expected = torch.zeros_like(z)
    for successes in range(1, num_generations):  # a zero-variance group has no gradient
        failures = num_generations - successes
        of_successes = z.sigmoid() ** successes
        of_failures = (-z).sigmoid() ** failures
        probability = math.comb(num_generations, successes) * of_successes * of_failures
        rewards = [1.0] * successes + [0.0] * failures
        expected += probability * gradient(method, z, anchor=z, rewards=rewards)
    return expected


# The losses: functions of the logit of each row and the rows, means over the groups.


def _opo(z: Tensor, rows: Rows, *, ratio_form: RatioForm = "log") -> Tensor:
    size = rows.num_generations
    omega = escort_weights(rows.advantages, alpha=ALPHA, num_generations=size)
    drive, _ = project(omega, num_generations=size)
    target, mu = admissible_target(drive, mu=MU, num_generations=size)
    logps = BinaryPolicy(z).logps(rows.tokens)
    log_ratio = token_sum(logps - rows.anchor_logps, torch.ones_like(logps))
    return opo_loss(log_ratio, target, mu=mu, ratio_form=ratio_form).mean()


def _grpo(z: Tensor, rows: Rows, **options) -> Tensor:
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(**_ON_CPU, **options)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer = _without_init(
        GRPOTrainer,
        args,
        BinaryPolicy(z),
        epsilon_low=args.epsilon,
        epsilon_high=high,
        _entropy_bonus_enabled=False,
        state=SimpleNamespace(global_step=0),
    )
    column = rows.tokens.unsqueeze(1)
    inputs = {
        "prompt_ids": torch.zeros_like(column),
        "prompt_mask": torch.ones_like(column),
        "completion_ids": column,
        "completion_mask": torch.ones_like(column),
        "advantages": rows.advantages,
        "old_per_token_logps": rows.anchor_logps,
        "num_items_in_batch": torch.tensor(len(column)),
    }
    return trainer.compute_loss(trainer.model, inputs)


def _dpo(z: Tensor, rows: Rows) -> Tensor:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**_ON_CPU, beta=BETA, precompute_ref_log_probs=True)
    chosen_first = torch.cat([rows.tokens.nonzero(), (rows.tokens == 0).nonzero()]).squeeze(1)
    trainer = _without_init(
        DPOTrainer,
        args,
        BinaryPolicy(z[chosen_first]),
        loss_types=args.loss_type,
        loss_weights=[1.0],
        precompute_ref_logps=True,
    )
    inputs = _model_inputs(rows.tokens[chosen_first])
    chosen, rejected = rows.anchor_logps[chosen_first, 0].chunk(2)
    completion_mask = torch.tensor([0, 1]).expand_as(inputs["input_ids"])
    inputs |= {"completion_mask": completion_mask, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return trainer.compute_loss(trainer.model, inputs)


def _sft(z: Tensor, rows: Rows) -> Tensor:
    from trl import SFTConfig, SFTTrainer

    rewarded = rows.tokens == 1
    trainer = _without_init(
        SFTTrainer, SFTConfig(**_ON_CPU), BinaryPolicy(z[rewarded]), compute_loss_func=None, label_smoother=None
    )
    inputs = _model_inputs(rows.tokens[rewarded])
    return trainer.compute_loss(trainer.model, inputs | {"labels": inputs["input_ids"]})


_ON_CPU: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": None}


def _model_inputs(tokens: Tensor) -> dict[str, Tensor]:
    """Model inputs: prompt token 0 and the completion's token."""
    input_ids = torch.stack([torch.zeros_like(tokens), tokens], dim=1)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def _without_init(trainer_class: type, args: Any, model: BinaryPolicy, **attributes) -> Any:
    """
    A TRL trainer with nothing but its loss: no data, no tokenizer, one process, no output.

    TRL's trainers keep most settings as attributes of the same name; `attributes` are the others.
    """
    accelerator = SimpleNamespace(
        num_processes=1,
        is_main_process=True,
        device=torch.device("cpu"),
        parallelism_config=None,
        autocast=nullcontext,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    trainer: Any = object.__new__(trainer_class)
    vars(trainer).update(
        vars(args),
        args=args,
        model=model,
        accelerator=accelerator,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )
    return trainer


METHODS: dict[str, Callable[[Tensor, Rows], Tensor]] = {
    "SFT": _sft,
    "DPO": _dpo,
    "GRPO": functools.partial(_grpo, loss_type="grpo", epsilon=0.2),
    "DAPO": functools.partial(_grpo, loss_type="dapo", epsilon=0.2, epsilon_high=0.28),
    # Section 5.1 of the GSPO paper, as in TRL's paper index.
    "GSPO": functools.partial(
        _grpo, loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "OPO": _opo,
    "OPO, exact": functools.partial(_opo, ratio_form="exact"),
}


def tables() -> dict[str, str]:
    """
    The tables of `benchmarks/paper/saturation.md`: −∂ℒ/∂z at [`CONFIDENCES`]. Positive values raise p.

    Returns:
        `dict[str, str]`: Markdown tables, `"fixed anchor"` ([`gradient`]) and `"on-policy"` ([`on_policy_gradient`]).
    """
    z = torch.tensor(CONFIDENCES, dtype=torch.float64).logit()
    fixed = {method: -gradient(method, z) for method in METHODS}
    # At ratio 1, no clip range matters and both forms of OPO have the same derivative.
    moving = {"GRPO, DAPO, GSPO": -on_policy_gradient("GRPO", z), "OPO, both forms": -on_policy_gradient("OPO", z)}
    return {"fixed anchor": _markdown(fixed), "on-policy": _markdown(moving)}


def _markdown(rows: dict[str, Tensor]) -> str:
    lines = [f"| p | {' | '.join(map(str, CONFIDENCES))} |", "| --- |" + " ---: |" * len(CONFIDENCES)]
    for name, values in rows.items():
        cells = ("0" if value == 0 else f"{value:+.3g}".replace("-", "−") for value in values.tolist())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
