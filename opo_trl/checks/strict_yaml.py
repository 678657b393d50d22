"""
YAML without the surprises of YAML 1.1.

PyYAML reads YAML 1.1, which changes what a recipe says: `no` becomes false, `010` becomes 8, `1:30` becomes 90, `1e-4`
stays text, a commit `1234e5` becomes a number, and of a duplicate key only the last value survives. Here text fields
keep their characters, numbers are those of JSON, and anything ambiguous is an error.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml


# How a field is read: text as written, a switch that may also be yes, no, on or off, or by the look of the value.
Kind = Literal["text", "switch", "plain"]

_TAG = "tag:yaml.org,2002:"
_AMBIGUOUS = "!ambiguous"
_UNQUOTED = {_AMBIGUOUS, *(f"{_TAG}{name}" for name in ("bool", "int", "float", "merge"))}


class _Rejected(yaml.YAMLError):
    """Valid YAML that a recipe may not contain."""


class _Loader(yaml.SafeLoader):
    kind: Kind = "plain"
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 (PyYAML's own)
    yaml_constructors: ClassVar[dict] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")))
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise _Rejected(f"line {line}: a {key.id} cannot be a key. Write `name: value`.")
            if key.value in lines:
                raise _Rejected(f"lines {lines[key.value]} and {line}: duplicate key {key.value!r}. Remove one.")
            lines[key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag in _UNQUOTED and isinstance(node, yaml.ScalarNode):
            if self.kind == "text":
                return node.value
            if self.kind == "switch" and node.value.lower() in self.bool_values:
                return self.bool_values[node.value.lower()]
            if node.tag == _AMBIGUOUS:
                line = node.start_mark.get_snippet().splitlines()[0].strip()
                raise _Rejected(
                    f"line {node.start_mark.line + 1}: {node.value[:20]} in `{line}` is ambiguous in YAML. Write a "
                    "decimal number of at most 1000 digits, true or false, or text in quotes."
                )
        return super().construct_object(node, deep)


# The first match wins.
for _tag, _pattern in (
    (f"{_TAG}null", r"~|null|Null|NULL|"),
    (f"{_TAG}merge", r"<<"),
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE"),
    (_AMBIGUOUS, r"[-+]?[0-9_]{1001,}"),  # Python reads at most 4300 digits
    (f"{_TAG}int", r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)"),
    (_AMBIGUOUS, r"[-+]?0[0-9_]+|[-+]?0[xob][0-9a-fA-F_]+"),
    (f"{_TAG}float", r"[-+]?(\.[0-9]+|[0-9]+\.?[0-9]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    (_AMBIGUOUS, r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"),
    (_AMBIGUOUS, r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?"),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def read(path: str | Path, kind_of: Callable[[str], Kind]) -> dict[str, Any]:
    """
    Read a YAML file of fields: one mapping of names to values.

    `kind_of` gives the [`Kind`] of a field's value and of everything nested in it.

    Raises:
        `ValueError`: the file cannot be read or is not a single mapping, a key is a duplicate or not a name, or a
            value is ambiguous. The message names the line.
    """
    named = f"config={str(path)!r}"
    fields = {}
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _Rejected("no `field: value` lines. Write one field per line.")
        loader.flatten_mapping(node)  # `<<: *other`
        for key, value in node.value:
            loader.kind = kind_of(key.value)
            loader.constructed_objects.clear()  # an alias may stand for values of two kinds
            fields[key.value] = loader.construct_object(value, deep=True)
    except _Rejected as error:
        raise ValueError(f"{named}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{named} is not valid YAML: {error}. Fix the file.") from error
    except OSError as error:
        raise ValueError(f"{named} cannot be read: {error}. Pass the path of a recipe.") from error
    return fields
