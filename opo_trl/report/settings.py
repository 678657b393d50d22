"""Which fields of a run determine its data, model, sampling, rewards, objective and optimizer."""

from .. import methods
from ..fields import DATA, MODEL, OBJECTIVE, OPTIMIZER, REWARDS, SAMPLING, deciding


# Fields of TRL and Transformers. Ours are annotated where they are defined: `alpha: Annotated[float, OBJECTIVE]`.
_INHERITED = {
    DATA: "dataset_name dataset_config dataset_train_split dataset_test_split chat_template_kwargs",
    MODEL: "model_name_or_path model_revision dtype load_in_8bit load_in_4bit use_peft use_dora use_rslora",
    SAMPLING: "num_generations max_completion_length temperature top_p top_k min_p repetition_penalty",
    REWARDS: "reward_weights scale_rewards multi_objective_aggregation",
    OBJECTIVE: "loss_type importance_sampling_level epsilon epsilon_high delta beta entropy_coef top_entropy_quantile "
    "off_policy_mask_threshold mask_truncated_completions",
    OPTIMIZER: "optim learning_rate lr_scheduler_type adam_beta1 adam_beta2 adam_epsilon weight_decay",
}
MODEL_PREFIX = "lora_"


def fields_deciding(*topics: str) -> tuple[str, ...]:
    """Fields of all methods that decide one of these topics. Imports TRL."""
    return tuple(name for topic in topics for name in (*_INHERITED[topic].split(), *_ours(topic)))


def kept_on_resume() -> tuple[str, ...]:
    """
    Fields that a run keeps when it resumes from a checkpoint.

    The others may change: the length of the run, what it saves, logs, validates and reports, and how it is executed.
    The optimizer's may not: a checkpoint restores the state of optimizer and scheduler, which would hide a new value.
    """
    return (*fields_deciding(*_INHERITED), "seed")


def _ours(topic: str) -> tuple[str, ...]:
    from ..arguments import OPOScriptArguments  # imports TRL, which takes seconds

    kinds = (OPOScriptArguments, *(method.config_class for method in methods.METHODS))
    return tuple(dict.fromkeys(name for kind in kinds for name in deciding(kind, topic)))
