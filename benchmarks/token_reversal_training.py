"""
Policy, optimizer, objectives and loop of [`benchmarks.token_reversal`], which says where they come from.

Equal prompts and equal completions of a rollout are computed once: late in training this is most of the work. It
changes nothing but the rounding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from opo_trl.objective import (
    admissible_target,
    escort_weights,
    grouped,
    opo_loss,
    project,
    stiffness_for_radius,
    token_sum,
)


PROMPTS, GENERATIONS, VOCABULARY, RATE = 100, 8, 2, 1e-3
Past = list[tuple[Tensor, Tensor]]
Params = dict[str, Tensor]


# The policy


class Policy(nn.Module):
    """
    Causal transformer, initialized and laid out (inputs × outputs) as in Flax.

    Args:
        length (`int`): H, half of the longest sequence.
    """

    def __init__(self, length: int, width: int = 64, heads: int = 2, layers: int = 2):
        super().__init__()
        self.heads, self.layers = heads, layers

        def kernel(fan_in: int, fan_out: int) -> nn.Parameter:  # LeCun's, truncated at two standard deviations
            std = 1 / math.sqrt(fan_in) / 0.87962566103423978
            return nn.Parameter(nn.init.trunc_normal_(torch.empty(fan_in, fan_out), std=std, a=-2 * std, b=2 * std))

        weights = {"embedding": nn.Parameter(torch.randn(VOCABULARY, width) / math.sqrt(width))}
        weights["positions"] = nn.Parameter(0.02 * torch.randn(2 * length, width))
        for i in range(layers):
            for name in "qkvo":
                weights[f"{i}_{name}_kernel"] = kernel(width, width)
                shape = (width,) if name == "o" else (heads, width // heads)
                weights[f"{i}_{name}_bias"] = nn.Parameter(torch.zeros(shape))
            for name, fan_in, fan_out in (("up", width, 4 * width), ("down", 4 * width, width)):
                weights[f"{i}_{name}"] = kernel(fan_in, fan_out)
                weights[f"{i}_{name}_bias"] = nn.Parameter(torch.zeros(fan_out))
            for name in (f"{i}_attention_norm", f"{i}_mlp_norm"):
                weights[name] = nn.Parameter(torch.ones(width))
                weights[name + "_bias"] = nn.Parameter(torch.zeros(width))
        weights["norm"], weights["norm_bias"] = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        weights["head"], weights["head_bias"] = kernel(width, VOCABULARY), nn.Parameter(torch.zeros(VOCABULARY))
        for name, weight in weights.items():
            self.register_parameter("w" + name, weight)

    def forward(self, tokens: Tensor, past: Past) -> tuple[Tensor, Past]:
        """Log-probabilities after each of the `tokens` `[R, T]`, `[R, T, V]`; keys and values, with the past's."""
        w = {name[1:]: weight for name, weight in self.named_parameters()}

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], w[name], w[name + "_bias"], eps=1e-6)

        begin = past[0][0].shape[1] if past else 0
        end = begin + tokens.shape[1]
        causal = torch.ones(tokens.shape[1], end, dtype=torch.bool, device=tokens.device).tril(begin)
        x = w["embedding"][tokens] + w["positions"][begin:end]
        present = []
        for i in range(self.layers):
            y = norm(x, f"{i}_attention_norm")
            q, k, v = ((y @ w[f"{i}_{n}_kernel"]).unflatten(-1, (self.heads, -1)) + w[f"{i}_{n}_bias"] for n in "qkv")
            if past:
                k, v = torch.cat([past[i][0], k], 1), torch.cat([past[i][1], v], 1)
            present.append((k, v))
            scores = torch.einsum("rthd,rshd->rhts", q, k) / math.sqrt(q.shape[-1])
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            y = torch.einsum("rhts,rshd->rthd", weights, v).flatten(-2)
            x = x + y @ w[f"{i}_o_kernel"] + w[f"{i}_o_bias"]
            y = F.gelu(norm(x, f"{i}_mlp_norm") @ w[f"{i}_up"] + w[f"{i}_up_bias"], approximate="tanh")
            x = x + y @ w[f"{i}_down"] + w[f"{i}_down_bias"]
        return (norm(x, "norm") @ w["head"] + w["head_bias"]).log_softmax(-1), present


class Muon:
    """
    Optax's `muon` with its defaults, on stacked parameters `[seeds, …]`, which it changes in place.

    Muon: Nesterov momentum, orthogonalized by five steps of Newton and Schulz, times √max(1, outputs ÷ inputs).
    """

    def __init__(self, params: Params, rate: float = RATE):
        self._params, self._rate, self._count = params, rate, 0
        is_kernel = {n for n, p in params.items() if n.endswith("_kernel")}  # three axes in Flax
        self._matrices = [n for n, p in params.items() if p.dim() == 3 and n not in is_kernel]
        self._others = [n for n in params if n not in self._matrices]
        self._first = {n: torch.zeros_like(p) for n, p in params.items()}
        self._second = {n: torch.zeros_like(params[n]) for n in self._others}

    @torch.no_grad()
    def step(self, grads: Params) -> None:
        self._count += 1
        for names, beta in ((self._matrices, 0.95), (self._others, 0.9)):
            gradient, first = [grads[n] for n in names], [self._first[n] for n in names]
            torch._foreach_lerp_(first, gradient, 1 - beta)
            ahead = torch._foreach_mul(first, beta / (1 - beta ** (self._count + 1)))
            torch._foreach_add_(ahead, torch._foreach_mul(gradient, (1 - beta) / (1 - beta**self._count)))
            if names is self._others:
                second = [self._second[n] for n in names]
                torch._foreach_mul_(second, 0.999)
                torch._foreach_addcmul_(second, gradient, gradient, 1 - 0.999)
                scale = torch._foreach_sqrt(torch._foreach_div(second, 1 - 0.999**self._count))
                torch._foreach_add_(scale, 1e-8)
                torch._foreach_div_(ahead, scale)
            else:
                ahead = orthogonalized(ahead)
            torch._foreach_add_([self._params[n] for n in names], ahead, alpha=-self._rate)


def orthogonalized(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Each of the stacked matrices `[seeds, inputs, outputs]` with singular values near √max(1, outputs ÷ inputs)."""
    wide = [m if m.shape[1] <= m.shape[2] else m.mT for m in matrices]
    done: list[Tensor] = [torch.empty(0)] * len(wide)
    for shape in {m.shape for m in wide}:  # matrices of one shape together
        chosen = [i for i, m in enumerate(wide) if m.shape == shape]
        x = torch.stack([wide[i] for i in chosen])
        x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-8)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        for i, result in zip(chosen, x, strict=True):
            inputs, outputs = matrices[i].shape[1:]
            result = result if wide[i] is matrices[i] else result.mT
            done[i] = result * math.sqrt(max(1, outputs / inputs))
    return done


# The objectives: what a method keeps of a rollout, `[N]` each, and its loss of the log-ratios, `[N]`


def standardized(rewards: Tensor) -> Tensor:
    """Rewards less their group's mean, over its standard deviation; 0 in a group of equal rewards."""
    group = grouped(rewards, GENERATIONS)
    centred = group - group.mean(1, keepdim=True)
    std = centred.square().mean(1, keepdim=True).sqrt()
    return (centred / torch.where(std > 1e-6, std, 1.0)).flatten()


def grpo_keeps(rewards: Tensor, old: Tensor, fields: dict[str, Any]) -> tuple[Tensor, ...]:
    return (standardized(rewards),)


def grpo_loss(log_ratio: Tensor, kept: tuple[Tensor, ...], fields: dict[str, Any]) -> Tensor:
    advantages, log_ratio = kept[0], log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - fields["epsilon"], 1 + fields["epsilon"])
    penalty = torch.expm1(-log_ratio) + log_ratio
    losses = fields["beta"] * penalty - torch.minimum(ratio * advantages, clipped * advantages)
    return grouped(losses, GENERATIONS).sum(1).mean()


def tpo_keeps(rewards: Tensor, old: Tensor, fields: dict[str, Any]) -> tuple[Tensor, ...]:
    """The target q ∝ p_old · exp(u / η) over the group, and log p_old up to a constant."""
    return grouped(old + standardized(rewards) / fields["eta"], GENERATIONS).softmax(1), old


def tpo_loss(log_ratio: Tensor, kept: tuple[Tensor, ...], fields: dict[str, Any]) -> Tensor:
    target, old = kept
    return -(target * grouped(old + log_ratio, GENERATIONS).log_softmax(1)).sum(1).mean()


def opo_keeps(rewards: Tensor, old: Tensor, fields: dict[str, Any]) -> tuple[Tensor, ...]:
    """v* and μ; advantages as the other methods'."""
    omega = escort_weights(standardized(rewards), alpha=fields["alpha"], num_generations=GENERATIONS)
    drive, _ = project(omega, num_generations=GENERATIONS)
    mu = fields["mu"] if "mu" in fields else stiffness_for_radius(drive, fields["chi2_radius"])
    return admissible_target(drive, mu=mu, num_generations=GENERATIONS)


def opo_mean_loss(log_ratio: Tensor, kept: tuple[Tensor, ...], fields: dict[str, Any]) -> Tensor:
    target, mu = kept
    return opo_loss(log_ratio, target, mu=mu, ratio_form="log").mean()


Keeps = Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, ...]]
Loss = Callable[[Tensor, tuple[Tensor, ...], dict[str, Any]], Tensor]
OBJECTIVES: dict[str, tuple[Keeps, Loss]] = {
    "GRPO": (grpo_keeps, grpo_loss),
    "TPO": (tpo_keeps, tpo_loss),
    "OPO": (opo_keeps, opo_mean_loss),
}


# Training


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """
    Of each row of the `keys` `[seeds, N]`, the position of one of each value, `[seeds, U]` (U of the row with most;
    others are padded with position 0), and of each key its place among them, `[seeds, N]`.
    """
    values, order = keys.sort(dim=1)
    place = torch.cat([torch.zeros_like(values[:, :1]), (values[:, 1:] != values[:, :-1]).long()], 1).cumsum(1)
    positions = torch.zeros_like(keys[:, : int(place[:, -1].max()) + 1]).scatter(1, place, order)
    return positions, torch.empty_like(keys).scatter(1, order, place)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows `[seeds, R]` of x, `[seeds, N, …]`."""
    return x[torch.arange(len(x), device=x.device)[:, None], rows]


class Training:
    """
    Several seeds of one method at once, with stacked parameters.

    Args:
        method (`str`): key of `OBJECTIVES`.
        fields (`dict[str, Any]`): the method's, with `epochs`, optimizer steps per rollout.
        length (`int`): H.
        seeds (`Sequence[int]`): each determines initialization, prompts and samples.
        device (`str`), dtype (`torch.dtype`): of the policy.
    """

    def __init__(
        self,
        method: str,
        fields: dict[str, Any],
        length: int,
        seeds: Sequence[int],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self._keeps, self._loss = OBJECTIVES[method]
        self._fields, self._length, self._device, self._dtype = fields, length, device, dtype
        policies = []
        for seed in seeds:
            torch.manual_seed(seed)
            policies.append(Policy(length).to(device, dtype))
        self._policy = policies[0]
        self.params = {n: p.detach() for n, p in stack_module_state(policies)[0].items()}
        self._optimizer = Muon(self.params)
        # On the CPU whatever the device, so that a seed draws the same everywhere.
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._forward = vmap(lambda params, tokens, past: functional_call(self._policy, params, (tokens, past)))
        self._gradient = vmap(grad(self.loss))

    def episode(self) -> Tensor:
        """Sample and train; the error of each seed's samples."""
        rollout, kept, error = self.rollout()
        for _ in range(self._fields["epochs"]):
            self._optimizer.step(self._gradient(self.params, rollout, kept))
        return error

    @torch.no_grad()
    def rollout(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Prompts and completions, each once, with their places among the samples; what the method keeps; error."""
        draws = [
            (
                torch.randint(VOCABULARY, (PROMPTS, self._length), generator=generator),
                torch.rand(PROMPTS * GENERATIONS, self._length, generator=generator),
            )
            for generator in self._generators
        ]
        prompts, uniform = (torch.stack(drawn).to(self._device) for drawn in zip(*draws, strict=True))
        digits = VOCABULARY ** torch.arange(self._length, device=self._device)
        rows, place = distinct((prompts * digits).sum(-1))
        target = prompts.flip(-1).repeat_interleave(GENERATIONS, 1)
        prompts, owner = take(prompts, rows), place.repeat_interleave(GENERATIONS, 1)
        log_probs, past = self._forward(self.params, prompts, [])
        key = place = begun = owner
        tokens, logps = [], []
        for _ in range(self._length):
            if tokens:  # each distinct beginning once, with the keys and values of what it continues
                before = take(place, rows)
                past = [(take(k, before), take(v, before)) for k, v in past]
                log_probs, past = self._forward(self.params, take(tokens[-1], rows)[..., None], past)
                place = begun
            chances = take(log_probs[:, :, -1], place)
            sample = uniform[..., len(tokens), None]
            tokens.append((chances.exp().cumsum(-1)[..., :-1] < sample).sum(-1))
            logps.append(chances.gather(-1, tokens[-1][..., None])[..., 0])
            key = key * VOCABULARY + tokens[-1]
            rows, begun = distinct(key)
        completions, old = torch.stack(tokens, -1), torch.stack(logps, -1)
        rewards = (completions == target).all(-1).to(self._dtype)
        kept = vmap(lambda r, o: self._keeps(r, o, self._fields))(rewards, old.sum(-1))
        rollout = (prompts, take(completions, rows), take(owner, rows), begun, old)
        return rollout, kept, 1 - rewards.mean(1)

    def loss(self, params: Params, rollout: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> Tensor:
        """Loss of one seed's rollout."""
        prompts, completions, owner, place, old = rollout
        first, past = functional_call(self._policy, params, (prompts, []))
        past = [(k[owner], v[owner]) for k, v in past]
        rest, _ = functional_call(self._policy, params, (completions[:, :-1], past))
        log_probs = torch.cat([first[:, -1:][owner], rest], 1)
        logps = log_probs.gather(-1, completions[..., None])[..., 0][place]
        log_ratio = token_sum(logps - old, torch.ones_like(old))
        return self._loss(log_ratio, kept, self._fields)
