"""
YAML of recipes: one mapping of fields, whose values stay as they are written.

PyYAML would make false of `no`, 8 of `010` and text of `1e-4`, and keep the last of two equal keys. Here the value of
a field is text, as on a command line, until its type is known, and equal keys are an error. Only within a mapping,
such as `generation_kwargs`, do values have the types that YAML gives them. What [`dump`] writes, [`read`] reads back.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Rejects equal keys, which PyYAML reads as the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"lines {lines[name]} and {line}: duplicate key {name!r}. Remove one.")
            lines[name] = line
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that [`_Loader`] takes for a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z"), [*"-+.0123456789"]
    )


def dump(fields: Mapping[str, Any]) -> str:
    """Write a mapping of fields, in its order, as YAML that [`read`] reads back."""
    return yaml.dump(dict(fields), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read(path: str | Path) -> dict[str, Any]:
    """
    Read a YAML file of fields: name → text, `None`, a list of these, or a mapping.

    Raises:
        `ValueError`: the file is not valid YAML, or not one mapping of fields without equal keys.
    """
    named = f"config={str(path)!r}"
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{named} has no `field: value` lines. Write one field per line.")
        loader.flatten_mapping(node)  # `<<: *other`
        return {
            str(key.value): _written(value) if key.value == "env" else _value(loader, value)
            for key, value in node.value
        }
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{named} is not valid YAML: {error}") from error


def read_mapping(field: str, text: str) -> dict[str, Any]:
    """Read a mapping from a command line: `{key: value}`, in YAML or JSON."""
    try:
        return yaml.load(text.replace("\t", " "), _Loader)  # JSON may be indented with tabs
    except yaml.YAMLError as error:
        raise ValueError(f"{field}={text!r} is not valid YAML: {error}") from error


def _value(loader: _Loader, node: yaml.Node) -> Any:
    if node.tag == "tag:yaml.org,2002:seq":
        return [_value(loader, item) for item in node.value]
    return _written(node) if isinstance(node, yaml.ScalarNode) else loader.construct_object(node, deep=True)


def _written(node: yaml.Node) -> Any:
    """The text of a value, whatever YAML takes it for; `None` for null or nothing."""
    if isinstance(node, yaml.ScalarNode):
        text = re.sub(r"\A([-+]?)\.(inf|nan)\Z", r"\1\2", node.value)  # as Python's `float` spells them
        return None if node.tag == "tag:yaml.org,2002:null" else text
    if isinstance(node, yaml.SequenceNode):
        return [_written(item) for item in node.value]
    return {str(key.value): _written(value) for key, value in node.value}
