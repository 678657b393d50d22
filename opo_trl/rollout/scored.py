"""Rewards as the outermost override returns them, how many completions they fail to score, and who else fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from trl import GRPOTrainer

from ..config import RolloutConfig
from ..metrics.step_clock import StepClock
from ..rewards.checked import checked, checked_environments, checked_tools
from ..rewards.errors import CountingReward, RewardError


logger = get_logger(__name__)

# Weight of a round of generation in the moving average of reward failures: about ten rounds count.
_FAILURE_WEIGHT = 0.1


@contextmanager
def temporarily(holder: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards."""
    attributes = vars(holder)
    own = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(own)


class ScoringTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] that records its rewards, ends when isolated ones fail too often, and names what fails."""

    args: RolloutConfig
    _clock: StepClock

    _reward_failures: dict[str, float]  # by kind, over all processes; logging resets them
    _reward_failure_rate = 0.0  # in training, over all processes

    @contextmanager
    def _recorded_rewards(self) -> Iterator[list[torch.Tensor]]:
        """
        Record the rewards over all processes, as the outermost `_calculate_rewards` returns them: a subclass may
        change what `super()` returned, or never call it.
        """
        outermost = self._calculate_rewards
        recorded: list[torch.Tensor] = []

        def calculate(*args, **kwargs):
            recorded.append(self._finite_rewards(outermost(*args, **kwargs)))
            return recorded[-1]

        with temporarily(self, _calculate_rewards=calculate):
            yield recorded

    def _generate_and_score_completions(self, inputs):
        factories = self.environment_factories or {}
        with checked_environments(factories.values(), self._environment_pool if factories else {}):
            return super()._generate_and_score_completions(inputs)

    def _tool_call_loop(self, *args, **kwargs):
        with checked_tools(self):
            return super()._tool_call_loop(*args, **kwargs)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self._clock.phase("score"), checked(self):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        isolated = [reward for reward in self.reward_funcs if isinstance(reward, CountingReward)]
        if isolated and self.model.training:  # the log and the limit cover training only
            self._count_failures(isolated, len(completions))
        return rewards

    def _finite_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """Rewards `[N, number of reward functions]`; infinite ones count as unscored."""
        infinite = rewards.isinf()
        if infinite.any():
            # An override may return further columns.
            names = [name for name, found in zip(self.reward_func_names, infinite.any(dim=0), strict=False) if found]
            logger.warning(
                f"Of {len(rewards)} completions, {int(infinite.any(dim=1).sum())} have an infinite reward, by "
                f"{', '.join(names) or 'an override'}: they count as unscored. Fix the function, or have it return "
                "None."
            )
        return rewards.masked_fill(infinite, torch.nan)

    def _count_failures(self, rewards: list[CountingReward], n_completions: int) -> None:
        counts = [sum(r.timeouts for r in rewards), sum(r.errors for r in rewards), len(rewards) * n_completions]
        gathered = self.accelerator.gather(torch.tensor([counts], device=self.accelerator.device))
        timeouts, errors, n_scores = gathered.sum(dim=0).tolist()
        for kind, count in (("reward/timeouts", timeouts), ("reward/errors", errors)):
            self._reward_failures[kind] = self._reward_failures.get(kind, 0) + count
        self._reward_failure_rate += _FAILURE_WEIGHT * ((timeouts + errors) / n_scores - self._reward_failure_rate)
        limit = self.args.max_reward_failure_rate
        if self._reward_failure_rate > limit:
            raise RewardError(
                f"max_reward_failure_rate={limit} is exceeded: {self._reward_failure_rate:.1%} of the completions of "
                f"about the last {1 / _FAILURE_WEIGHT:.0f} rounds of generation could not be scored, {timeouts} of "
                f"{n_scores} in the last one by running out of time and {errors} by errors. The warnings above say "
                "why: fix the reward function, give it more time or memory, or raise `max_reward_failure_rate`."
            )
