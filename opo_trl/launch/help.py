"""`opo-trl train --help`: this package's fields and a few of TRL's, in groups. `--help_all` lists all."""

import argparse
import copy
import sys
from typing import Any

from ..fields import DATA, OBJECTIVE, REWARDS, RUN, WORK, declared


# Title → the topics whose fields of this package it shows, and fields of TRL.
_GROUPS = {
    "task": (
        (DATA, REWARDS),
        "model_name_or_path dataset_name dataset_config max_tool_calling_iterations reward_weights",
    ),
    "objective": ((OBJECTIVE,), "loss_type epsilon num_iterations learning_rate"),
    "rollout": (
        (WORK,),
        "num_generations max_completion_length temperature steps_per_generation per_device_train_batch_size "
        "gradient_accumulation_steps use_vllm vllm_mode",
    ),
    "run": ((RUN,), "output_dir max_steps num_train_epochs resume_from_checkpoint save_steps seed report_to"),
}

_MORE = "--help_all lists every field, those of TRL and Transformers too. `opo-trl recipes` has recipes to begin with."


def short_help(parser: Any) -> str:
    """The groups, as far as the trainer of a [`~trl.TrlParser`] has their fields."""
    actions = {action.dest: _plain(action) for action in reversed(parser._actions)}  # `--field` precedes `--no_field`
    formatter = argparse.ArgumentDefaultsHelpFormatter(parser.prog, max_help_position=36, width=120)
    formatter.add_text(f"{parser.prog} --config RECIPE [--field value ...]")
    formatter.add_text("Fields of a recipe; on the command line they take precedence.")
    said = {name: topics for kind in parser.dataclass_types for name, topics in declared(kind).items()}
    rejected = {name for kind in parser.dataclass_types for name in getattr(kind, "rejected_fields", ())}
    for title, (topics, of_trl) in _GROUPS.items():
        own = (name for name in said if any(topic in said[name] for topic in topics) and name not in rejected)
        names = [*of_trl.split(), *own]
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
