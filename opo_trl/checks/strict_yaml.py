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


class _Loader(yaml.SafeLoader):
    """Rejects equal keys, and reads `1e-4` as a number, too."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        names = [str(key.value) for key, _ in node.value]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise yaml.YAMLError(f"duplicate key {twice[0]!r}. Remove one.")
        return node


_Loader.add_implicit_resolver(
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
        typed, written = yaml.load(text, _Loader), yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"config={str(path)!r} is not valid YAML: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"config={str(path)!r} has no `field: value` lines. Write one field per line.")
    fields = {}
    for (name, as_text), value in zip(written.items(), typed.values(), strict=True):
        has_types = isinstance(value[0] if isinstance(value, list) and value else value, dict | None)
        fields[name] = value if has_types and name != "env" else as_text
    return fields
