"""
An independent computation of OPO: loss and gradient of an optimizer step in float64 from the definition, sample by
sample, with the logits of an unpatched model. It shares no code with the package or TRL.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable
from types import SimpleNamespace

import torch
from named_tensors import in_float64, norm, relative_error
from recording_trainers import Recording, Step
from scripted_rollouts import Script
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import GRPOConfig

from opo_trl import OPOConfig


EXACT = 1e-4  # relative error of a float32 gradient of the tiny model against float64 (4e-7 to 1.1e-5 were measured)


def centered(values: list[float | None], scale: bool) -> list[float | None]:
    """A group's values less their mean, divided by their deviation if `scale`; `None` where that does not exist."""
    known = [value for value in values if value is not None]
    if not known or (scale and len(known) < 2):
        return [None] * len(values)
    mean = statistics.fmean(known)
    divisor = statistics.stdev(known) + 1e-4 if scale else 1.0
    return [None if value is None else (value - mean) / divisor for value in values]


def weighted_sum(rewards: list[float | None], weights: list[float]) -> float | None:
    """The sum over the functions that could score; `None` if none could."""
    terms = [weight * reward for weight, reward in zip(weights, rewards, strict=True) if reward is not None]
    return sum(terms) if terms else None


def advantages(rewards: list[list[float | None]], args: GRPOConfig, G: int) -> list[float]:
    """TRL's documented advantages, from raw rewards: `rewards[row][function]`. 0 where no function could score."""
    weights = args.reward_weights or [1.0] * len(rewards[0])
    scale = args.scale_rewards == "group"
    sums = [weighted_sum(row_rewards, weights) for row_rewards in rewards]
    result = []
    for start in range(0, len(sums), G):
        of_group = sums[start : start + G]
        result += centered(of_group, scale)
    return [0.0 if advantage is None else advantage for advantage in result]


def positive_part(values: list[float], threshold: float) -> list[float]:
    """By how much each value exceeds the threshold; 0 where it does not."""
    return [max(value - threshold, 0.0) for value in values]


def simplex_projection(target: list[float]) -> list[float]:
    """Euclidean projection of 1 + target on {t ≥ 0, mean(t) = 1}, less 1, by bisection on the threshold."""
    ratios = [1 + value for value in target]
    low = min(target) - 1
    high = max(target) + 1
    for _ in range(200):
        middle = (low + high) / 2
        mass = sum(positive_part(ratios, middle))
        if mass > len(target):
            low = middle
        else:
            high = middle
    return [ratio - 1 for ratio in positive_part(ratios, low)]


def valid_groups(valid: list[bool], G: int) -> list[list[int]]:
    """The valid rows of each group that has any."""
    groups = []
    for start in range(0, len(valid), G):
        rows = [row for row in range(start, start + G) if valid[row]]
        if rows:
            groups.append(rows)
    return groups


def escort_weights_of(
    args: OPOConfig, A: list[float], correction: list[float], tau: float, groups: list[list[int]]
) -> list[float]:
    omega = [0.0] * len(A)
    for rows in groups:
        exponents = {}
        for row in rows:
            tilt = A[row] / tau - correction[row]
            exponents[row] = (1 - args.alpha) * tilt
        largest = max(exponents.values())
        factors = {row: math.exp(exponent - largest) for row, exponent in exponents.items()}
        mean = sum(factors.values()) / len(rows)
        for row, factor in factors.items():
            omega[row] = factor / mean
    return omega


def drive_of(args: OPOConfig, omega: list[float], groups: list[list[int]]) -> list[float]:
    drive = [0.0] * len(omega)
    for rows in groups:
        weights = [omega[row] for row in rows]
        mean = statistics.fmean(weights)
        spread = statistics.stdev(weights) if len(rows) > 1 else 0.0
        if spread > 1e-12:
            divisor = spread if args.drive_scaling == "group" else 1.0
            for row in rows:
                drive[row] = (omega[row] - mean) / divisor
    if args.drive_scaling == "batch":
        valid_rows = itertools.chain.from_iterable(groups)
        spread = statistics.stdev(drive[row] for row in valid_rows)
        drive = [force / spread for force in drive]
    return drive


def stiffness_of(args: OPOConfig, drive: list[float], groups: list[list[int]]) -> float:
    mu = args.mu
    if args.chi2_radius is not None:
        valid_rows = itertools.chain.from_iterable(groups)
        mean_square = statistics.fmean(drive[row] ** 2 for row in valid_rows)
        mu = math.sqrt(mean_square / args.chi2_radius)
    if args.positivity == "stiffen":
        mu = max(mu, -min(drive))
    return mu


def target_of(args: OPOConfig, drive: list[float], mu: float, groups: list[list[int]]) -> list[float]:
    target = [force / mu for force in drive]
    if args.positivity == "clip":
        least = -1 + args.positivity_epsilon
        return [max(value, least) for value in target]
    if args.positivity == "project":
        for rows in groups:
            projected = simplex_projection([target[row] for row in rows])
            for row, value in zip(rows, projected, strict=True):
                target[row] = value
    return target


def drive_and_target(
    args: OPOConfig, A: list[float], valid: list[bool], correction: list[float], tau: float, G: int
) -> SimpleNamespace:
    """Escort weights, drive, target and mu, computed on lists."""
    groups = valid_groups(valid, G)
    omega = escort_weights_of(args, A, correction, tau, groups)
    drive = drive_of(args, omega, groups)
    mu = stiffness_of(args, drive, groups)
    target = target_of(args, drive, mu, groups)
    return SimpleNamespace(omega=omega, drive=drive, target=target, mu=mu, temperature=tau)


@functools.cache
def _float64_model(folder: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.double().eval()


class Reference:
    """
    OPO in float64 for a recorded trainer.

    Args:
        trainer: after training.
        script: its script.
        model: the same architecture, in float64 and without TRL's patches; loaded from the trainer's model by default.
    """

    def __init__(self, trainer: Recording, script: Script, model: torch.nn.Module | None = None):
        self.trainer = trainer
        self.script = script
        self.args = trainer.args
        self.G = trainer.args.num_generations
        if model is None:
            self.model = _float64_model(trainer.model.config._name_or_path)
        else:
            self.model = model.double().eval()
        self._anchors: dict[tuple[int, int], Tensor] = {}

    def logps(self, policy: dict[str, Tensor], row: SimpleNamespace) -> tuple[Tensor, Tensor]:
        """Log-probability of each completion token and entropy at its position, from the full logits."""
        tokens = torch.tensor([row.prompt + row.completion])
        attended = vars(row).get("attended", [1] * tokens.numel())
        mask = {"attention_mask": torch.tensor([attended])}
        output = torch.func.functional_call(self.model, policy, args=(tokens,), kwargs=mask)
        of_completion = output.logits[0, len(row.prompt) - 1 : -1]
        all_logps = (of_completion / self.args.temperature).log_softmax(-1)
        token_ids = torch.tensor(row.completion)[:, None]
        chosen = all_logps.gather(1, token_ids).squeeze(1)
        negative_entropies = (all_logps.exp() * all_logps).sum(-1)
        return chosen, -negative_entropies

    @torch.no_grad()
    def anchor(self, rollout: int, row: int) -> Tensor:
        """Log-probability of each completion token under the policy that generated it."""
        if (rollout, row) not in self._anchors:
            policy = in_float64(self.trainer.rollouts[rollout].policy)
            entry = self.script.calls[rollout][row]
            self._anchors[rollout, row], _ = self.logps(policy, entry)
        return self._anchors[rollout, row]

    def valid(self, row: SimpleNamespace) -> bool:
        masked = row.truncated and self.args.mask_truncated_completions
        has_reward = any(reward is not None for reward in row.rewards)
        return not masked and any(row.own) and has_reward

    def mean_length(self, rollout: int) -> float:
        """Mean number of tokens of a rollout's valid completions."""
        lengths = [sum(row.own) for row in self.script.calls[rollout] if self.valid(row)]
        return statistics.fmean(lengths) if lengths else 1.0

    def drive(self, rollout: int) -> SimpleNamespace:
        """Advantages, escort weights, drive and target of a rollout."""
        args = self.args
        rows = self.script.calls[rollout]
        valid = [self.valid(row) for row in rows]
        sums = []
        means = []
        needs_logps = args.anchor_correction != "absorbed" or args.adaptive_temperature
        for i, row in enumerate(rows):
            own = torch.tensor(row.own).bool()
            logps = self.anchor(rollout, i)[own] if needs_logps else torch.zeros(1)
            total = logps.sum().item()
            sums.append(total)
            means.append(total / max(len(logps), 1))
        rewards = [row.rewards for row in rows]
        A = advantages(rewards, args, self.G)
        corrections = {"absorbed": [0.0] * len(rows), "length_normalized": means, "sequence": sums}
        correction = corrections[args.anchor_correction]
        tau = args.escort_temperature
        if args.adaptive_temperature:
            mean_logps = list(itertools.compress(means, valid))
            valid_rewards = list(itertools.compress(rewards, valid))
            tau = self._temperature(mean_logps, valid_rewards)
        result = drive_and_target(args, A, valid, correction, tau, self.G)
        return SimpleNamespace(**vars(result), advantages=A, valid=valid)

    def _temperature(self, mean_logps: list[float], rewards: list[list[float | None]]) -> float:
        """From the valid completions' mean log-probabilities per token, and their rewards by function."""
        args = self.args
        surprise = -statistics.fmean(mean_logps)
        entropy = surprise / math.log(self.model.config.vocab_size)
        H = min(max(entropy, 0.0), 1.0)
        weights = args.reward_weights or [1.0] * len(rewards[0])
        sums = [weighted_sum(row_rewards, weights) for row_rewards in rewards]
        low = min(sums)
        high = max(sums)
        success = 0.0
        if high > low:
            mean = statistics.fmean(sums)
            success = 2 * (mean - low) / (high - low) - 1
        cooling = 0.5 * (1 - H) * success
        tau = args.escort_temperature * (1 + 0.2 * H - cooling)
        least, most = args.temperature_range
        return min(max(tau, least), most)

    def _reduced(self, total: Tensor, length: int) -> Tensor:
        """The sum over a completion's tokens, or with "mean" that sum over their number."""
        return total / length if self.args.log_ratio_reduction == "mean" else total

    def _clamped(self, delta: Tensor) -> Tensor:
        """The log-ratio within its bounds, with the gradient of one that is not bounded."""
        bound = self.args.log_ratio_clamp
        excess = delta.clamp(-bound, bound) - delta
        return delta + excess.detach()

    def _age(self, log_ratio: Tensor) -> float:
        """The bounded weight of a completion for the policy's distance to the one that generated it."""
        are_reused = self.args.num_iterations > 1 or self.args.prefetch_rollouts > 0
        if are_reused and self.args.ratio_form != "truncated":
            return min(math.exp(log_ratio.item()), 2.0)
        return 1.0

    def _work_and_dissipation(self, delta: Tensor, weight: float, target: float, mu: float) -> tuple[Tensor, Tensor]:
        stiffness = weight * mu
        if self.args.ratio_form == "truncated":
            ratio = min(delta.exp().item(), 2.0)
            push = stiffness * ratio * delta
            return -target * push, (ratio - 1) * push
        u = delta if self.args.ratio_form == "log" else delta.exp() - 1
        force = stiffness * target
        return -force * u, stiffness / 2 * u**2

    def _kl(self, logps: Tensor, reference_logps: Tensor, log_ratios: Tensor) -> Tensor:
        """TRL's estimate for each token."""
        difference = reference_logps - logps
        kl = difference.exp() - difference - 1
        return kl * log_ratios.exp() if self.args.use_bias_correction_kl else kl

    def step(
        self,
        step: int,
        *,
        row_weight: Callable[[int, int], float] = lambda rollout, row: 1.0,
        steering_tokens: Callable[[int, int], Tensor] | None = None,
        entropy_coef: float = 0.0,
        reference_policy: dict[str, Tensor] | None = None,
    ) -> SimpleNamespace:
        """
        Loss and gradient of one optimizer step, and the completions' log-ratios.

        Args:
            row_weight: of a completion, from its rollout and index.
            steering_tokens: bool mask of a completion's tokens that steer the policy, from its rollout and index.
            entropy_coef: coefficient of the entropy bonus in this step.
            reference_policy: reference of the KL term; the initial policy by default.
        """
        args = self.args
        record = self.trainer.steps[step]
        policy = in_float64(record.policy)
        for tensor in policy.values():
            tensor.requires_grad_()
        reference_policy = in_float64(self.trainer.initial if reference_policy is None else reference_policy)
        members = []
        for batch in record.batches:
            members += zip(map(int, batch["rollout"]), map(int, batch["row"]), strict=True)  # tensors, or lists
        drives = {}
        scales = {}
        for k, _ in members:
            if k not in drives:
                drives[k] = self.drive(k)
                scales[k] = 1.0 if args.log_ratio_reduction == "mean" else 1 / self.mean_length(k)
        out = SimpleNamespace(deltas=[], ratios=[], weights=[], targets=[], mus=[], work=[], dissipation=[], rows=[])
        losses = []
        for k, i in members:
            row = self.script.calls[k][i]
            drive = drives[k]
            own = torch.tensor(row.own).bool()
            if args.mask_truncated_completions and row.truncated:
                own = torch.zeros_like(own)
            length = max(int(own.sum()), 1)
            logps, entropies = self.logps(policy, row)
            log_ratios = logps - self.anchor(k, i)
            log_ratio = log_ratios[own].sum()
            age = self._age(self._reduced(log_ratio, length))
            steering = own if steering_tokens is None else own & steering_tokens(k, i)
            steering_log_ratio = log_ratios[steering].sum()
            delta = self._clamped(self._reduced(steering_log_ratio, length))
            target = drive.target[i]
            weight = age * row_weight(k, i) if drive.valid[i] else 0.0
            work, dissipation = self._work_and_dissipation(delta, weight, target, drive.mu)
            loss = scales[k] * (work + dissipation)
            if args.beta:
                with torch.no_grad():
                    reference_logps, _ = self.logps(reference_policy, row)
                kl = self._kl(logps, reference_logps, log_ratios)
                reduced_kl = self._reduced(kl[own].sum(), length)
                loss = loss + args.beta * scales[k] * reduced_kl
            if entropy_coef:
                mean_entropy = entropies[steering].sum() / max(int(steering.sum()), 1)
                loss = loss - entropy_coef * mean_entropy
            losses.append(loss if drive.valid[i] else 0.0)  # invalid completions have no KL term and no bonus either
            out.rows.append((k, i))
            out.deltas.append(delta.item())
            out.ratios.append(log_ratio.item())
            out.weights.append(weight)
            out.targets.append(target)
            out.mus.append(drive.mu)
            out.work.append(work.item())
            out.dissipation.append(dissipation.item())
        total = sum(losses) / len(losses)
        # Parameters without any effect have a gradient of zero.
        gradients = torch.autograd.grad(total, list(policy.values()), allow_unused=True, materialize_grads=True)
        out.loss = total.item()
        out.gradient = dict(zip(policy, gradients, strict=True))
        return out


def assert_step_equals(record: Step, reference: SimpleNamespace, tolerance: float = EXACT):
    """Loss and gradient of a recorded optimizer step against the reference."""
    assert norm(reference.gradient) > 1e-3, "the reference has no gradient: the comparison would prove nothing"
    assert relative_error(record.gradient, reference.gradient) < tolerance
    # Work and bonus may cancel, so the error of the loss is relative to the size of its terms.
    size_of_work = statistics.fmean(map(abs, reference.work))
    size_of_terms = size_of_work + statistics.fmean(reference.dissipation)
    error = abs(sum(record.losses) - reference.loss)
    assert error < 1e-5 * (1 + abs(reference.loss) + size_of_terms)
