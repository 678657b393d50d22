"""`opo-trl train --help`: this package's fields and a few of TRL's, in groups. `--help_all` lists all."""

import argparse
import copy
import sys


_GROUPS: dict[str, tuple[str, ...]] = {
    "task": (
        *("model_name_or_path", "dataset_name", "dataset_config", "dataset_settings", "columns", "levels", "fraction"),
        *("subset_seed", "prompt_style", "instruction", "max_prompt_length", "tools", "environment_factory"),
        *("max_tool_calling_iterations", "reward_funcs", "reward_weights", "overlong_cache"),
        *("reward_model_name_or_path", "reward_workers", "reward_timeout", "reward_memory", "max_reward_failure_rate"),
        *("datasets", "test_split_size", "streaming", "test_fraction"),
    ),
    "objective": (
        *("trainer", "alpha", "escort_temperature", "adaptive_temperature", "temperature_range", "mu", "chi2_radius"),
        *("drive_scaling", "positivity", "positivity_epsilon", "log_ratio_reduction", "log_ratio_clamp", "ratio_form"),
        *("anchor_correction", "loss_type", "epsilon", "learning_rate"),
    ),
    "rollout": (
        *("num_generations", "max_completion_length", "temperature", "steps_per_generation", "max_sampling_rounds"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "use_vllm", "vllm_mode"),
        *("plan_micro_batches", "max_tokens_per_micro_batch", "skip_inert_rows", "padding_free"),
    ),
    "reuse": ("num_iterations", "max_staleness"),
    "run": (
        *("output_dir", "max_steps", "num_train_epochs", "max_completions", "resume_from_checkpoint", "overwrite"),
        *("save_steps", "save_failure", "max_skipped_steps", "watches", "accelerate_config", "seed"),
        *("validation_levels", "validation_size", "validation_steps", "validation_decoding"),
        *("report_levels", "report_size", "report_samples", "report_to"),
    ),
}

_MORE = "--help_all lists every field, those of TRL and Transformers too. `opo-trl recipes` has recipes to begin with."


def short_help(parser: argparse.ArgumentParser) -> str:
    """The groups, as far as the parser's trainer has their fields."""
    actions = {action.dest: _plain(action) for action in reversed(parser._actions)}  # `--field` precedes `--no_field`
    formatter = argparse.ArgumentDefaultsHelpFormatter(parser.prog, max_help_position=36, width=120)
    formatter.add_text(f"{parser.prog} --config RECIPE [--field value ...]")
    formatter.add_text("Fields of a recipe; on the command line they take precedence.")
    for title, names in _GROUPS.items():
        formatter.start_section(title)
        formatter.add_arguments([actions[name] for name in names if name in actions])
        formatter.end_section()
    formatter.add_text(_MORE)
    return formatter.format_help()


def _plain(action: argparse.Action) -> argparse.Action:
    """The option without its other spelling, and with a short name for its value."""
    shown = copy.copy(action)
    shown.option_strings = action.option_strings[:1]
    shown.metavar = None if action.choices else "X"
    return shown


class ShortHelp(argparse.Action):
    """`--help`: print [`short_help`]."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        sys.stdout.write(short_help(parser))
        parser.exit()
