"""What `opo-trl train --help` prints: the fields of a recipe, ours first, by what they are about."""

import re
import shutil
import textwrap
from dataclasses import fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from trl import ModelConfig

from ..config import OPOConfig
from ..fields import default, described, hints
from .arguments import OPOScriptArguments


USAGE = """\
usage: opo-trl train [RECIPE] [--field value …] [--plan] [--debug]

Trains from a recipe, a YAML file of fields. Fields on the command line override it, and options that are not fields,
such as --num_processes, go to accelerate.

With --plan, everything is checked and the plan printed, without training; --debug shows the traceback of an error.
"""
_MORE = "TRL's and Transformers' fields, which a recipe can set too: opo-trl train --help all"
_OF_OTHERS = "Fields of TRL and Transformers"


def help_text(*, of_others: bool = False) -> str:
    """
    The usage, and every field of this package with its type, default and description, by subject. With `of_others`,
    also the fields of TRL and Transformers.
    """
    parts = [USAGE]
    documented: set[str] = set()
    for kind in (OPOConfig, OPOScriptArguments):
        for heading, texts in described(kind).items():
            about = heading.removeprefix("Parameters that control ")
            parts.append(f"{about[0].upper()}{about[1:]}\n")
            parts += [_field_help(kind, name, text) for name, text in texts.items()]
            documented |= texts.keys()
    if not of_others:
        return "\n".join([*parts, _MORE])
    parts.append(f"{_OF_OTHERS}\n")
    for other_kind in (OPOConfig, OPOScriptArguments, ModelConfig):
        for field in fields(other_kind):
            if field.init and field.name not in documented:
                text = field.metadata.get("help", "").replace("%%", "%")  # argparse's escape
                parts.append(_field_help(other_kind, field.name, text))
    return "\n".join(parts)


def _field_help(kind: type, name: str, text: str) -> str:
    """
    The help of a field, which is one of the dataclass `kind`: a line with its type and default, and its description
    `text` below, as wide as the terminal.
    """
    by_name = {field.name: field for field in fields(kind)}
    usual = default(by_name[name])
    suffix = "" if usual is None else f"  (default: {_default_as_written(usual)})"
    width = min(shutil.get_terminal_size().columns, 120)
    description = textwrap.fill(_without_markup(text), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{name} {_type_name(hints(kind)[name])}{suffix}\n{description}\n"


def _default_as_written(usual: Any) -> str:
    """A default as a command line has it."""
    if isinstance(usual, list):
        return " ".join(map(str, usual))
    if isinstance(usual, bool):
        return str(usual).lower()
    return str(getattr(usual, "value", usual))  # the `value` of a member of an enumeration


def _type_name(hint: Any) -> str:
    """
    The type of a field in words: the choices of a literal, `text …` for a list, and of a union the first part that is
    not `None`.
    """
    parts = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) is Literal:
        return "|".join(map(str, parts))
    if get_origin(hint) is list:
        return f"{_type_name(parts[0])} …"
    if get_origin(hint) is dict or hint is dict:
        return "mapping"
    if parts:
        return _type_name(parts[0])
    names = {str: "text", int: "integer", float: "number", bool: "true|false"}
    return names.get(hint, "text")


def _without_markup(text: str) -> str:
    """A description without markup: links, code and escapes."""
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[`~?([^`\]]+)`\]", r"\1", text)
    return re.sub(r"[`\\]|\*\*", "", text)
