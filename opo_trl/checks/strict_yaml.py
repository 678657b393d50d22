"""
YAML of recipes: one mapping of fields, whose values stay as they are written.

PyYAML would make false of `no`, 8 of `010`, and keep the last of two equal keys. Here the value of a field is text, as
on a command line, until its type is known, and equal keys are an error. Only within a mapping, such as
`generation_kwargs`, do values have the types that YAML gives them.
"""

import re
from pathlib import Path
from typing import Any

import yaml


class _Unique:
    """Rejects equal keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # type: ignore[misc]
        names = [str(key.value) for key, _ in node.value]
        if twice := [key for key, _ in node.value if names.count(str(key.value)) > 1]:
            raise yaml.YAMLError(
                f"line {twice[-1].start_mark.line + 1}: duplicate key {twice[-1].value!r}. Remove one."
            )
        return node


class _Typed(_Unique, yaml.SafeLoader):
    """Reads `1e-4` as a number, too."""


class _Written(_Unique, yaml.BaseLoader):
    """Reads each value as text."""


_Typed.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), [*"-+.0123456789"]
)


def read(path: str | Path) -> dict[str, Any]:
    """
    Read a YAML file of fields: name → text, `None`, a list of these, or a mapping; of `env`, all values are text.

    Raises:
        `ValueError`: the file is not valid YAML, or not one mapping of fields without equal keys.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        typed, written = yaml.load(text, _Typed), yaml.load(text, _Written)
    except yaml.YAMLError as error:
        raise ValueError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"config={str(path)!r} has no `field: value` lines. Write one field per line.")
    fields = {}
    for (name, as_text), value in zip(written.items(), typed.values(), strict=True):
        has_types = isinstance(value[0] if isinstance(value, list) and value else value, dict | None)
        fields[name] = value if has_types and name != "env" else as_text
    return fields


def read_mapping(field: str, text: str) -> dict[str, Any]:
    """Read a mapping from a command line: `{key: value}`, in YAML or JSON."""
    try:
        return yaml.load(text, _Typed)
    except yaml.YAMLError as error:
        raise ValueError(f"{field}={text!r} is not valid YAML: {error}") from error
