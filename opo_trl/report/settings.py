"""Which fields of a run define what: the data, the model, its sampling and the method."""

DATA = (
    "dataset_name",
    "dataset_config",
    "dataset_train_split",
    "dataset_test_split",
    "columns",
    "levels",
    "fraction",
    "subset_seed",
    "prompt_style",
    "instruction",
    "max_prompt_length",
    "chat_template_kwargs",
)

MODEL = (
    "model_name_or_path",
    "model_revision",
    "dtype",
    "load_in_8bit",
    "load_in_4bit",
    "use_peft",
    "use_dora",
    "use_rslora",
)
MODEL_PREFIX = "lora_"

SAMPLING = (
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)

REWARDS = (
    "reward_funcs",
    "reward_weights",
    "reward_model_name_or_path",
    "overlong_cache",
    "scale_rewards",
    "multi_objective_aggregation",
)

OBJECTIVE = (
    "trainer",
    "alpha",
    "escort_temperature",
    "adaptive_temperature",
    "temperature_range",
    "anchor_correction",
    "drive_scaling",
    "mu",
    "chi2_radius",
    "positivity",
    "positivity_epsilon",
    "log_ratio_reduction",
    "log_ratio_clamp",
    "ratio_form",
    "max_sampling_rounds",
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "entropy_coef",
    "top_entropy_quantile",
    "off_policy_mask_threshold",
    "mask_truncated_completions",
)

# A checkpoint brings the state of optimizer and scheduler along, so that another value would have no effect.
OPTIMIZER = ("optim", "learning_rate", "lr_scheduler_type", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay")

# What a run keeps when it goes on from a checkpoint. The rest may change: its length, what it saves, logs, validates
# and reports, and what it is executed by.
KEPT_ON_RESUME = (*DATA, *MODEL, *SAMPLING, *REWARDS, *OBJECTIVE, *OPTIMIZER, "seed")
