"""
Passwords, tokens and keys in settings: no file of a run, tracker or message shows them, but `<secret>`.

They are recognized by their name (`hub_token`, `WANDB_API_KEY`, `?token=…`), by their place in an address
(`https://user:password@host`), or as a token of the Hub (`hf_…`).
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any


_MARK = "<secret>"
_NAME = (
    r"(?:[\w-]*[_-])?(?i:token|secret|credentials?|passphrase|(?:api|access|secret|private|account)[_-]?key)"
    r"|\w*(?i:passw(?:or)?d)|[A-Z0-9_]+_(?:KEY|PWD|PASS)"
)
_IN_TEXT = re.compile(rf"(://)[^\s/'\"]*(?=@)|((?:[?&]|--)(?:{_NAME})=)[^\s&#'\"]+|\bhf_[A-Za-z0-9]{{20,}}")
_IN_BRACES = re.compile(rf"((?:{_NAME})[\"']?\s*:\s*)[^\s,}}]+")


def mask(content: Any, name: str = "") -> Any:
    """The same settings without secrets: a mapping, list or text, of which `name` is the field, if it has one."""
    if isinstance(content, Mapping):
        return {key: mask(value, str(key)) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(mask(value, name) for value in content)
    # A token of the vocabulary begins with a bracket.
    is_word = content and type(content) in (str, int) and not str(content).startswith(("<", "["))
    if is_word and re.fullmatch(_NAME, name):
        return _MARK
    return mask_text(content) if type(content) is str else content


def mask_text(text: str) -> str:
    """A message, address or mapping as text without secrets."""
    if text.startswith("{"):
        text = _IN_BRACES.sub(rf"\1{_MARK}", text)
    return _IN_TEXT.sub(lambda found: f"{found[1] or found[2] or ''}{_MARK}", text)


def mask_words(words: Sequence[str]) -> list[str]:
    """A command line without secrets."""
    pairs = zip(["", *words], words, strict=False)
    return [mask(word, "" if word.startswith("--") else before.removeprefix("--")) for before, word in pairs]


def lost(content: Any) -> bool:
    """Whether a value lacks a secret, so that it is of no use."""
    return _MARK in str(content)


class Masked:
    """A configuration whose `to_dict`, which trackers get, and pickle, `training_args.bin`, hold no secrets."""

    def to_dict(self) -> dict[str, Any]:
        """The settings, without secrets."""
        return mask(super().to_dict())  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        plain = {name: mask(value, name) for name, value in vars(self).items() if isinstance(value, str | dict)}
        return {**vars(self), **plain}

    def __copy__(self, memo: Any = None):  # Python would copy the masked state
        other = object.__new__(type(self))
        vars(other).update(vars(self) if memo is None else copy.deepcopy(vars(self), memo))
        return other

    __deepcopy__ = __copy__
