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
_NAME_OF_SECRET = (
    r"(?:[\w-]*[_-])?(?i:token|secret|credentials?|passphrase|(?:api|access|secret|private|account)[_-]?key)"
    r"|\w*(?i:passw(?:or)?d)|[A-Z0-9_]+_(?:KEY|PWD|PASS)"
)
_IN_TEXT = re.compile(rf"(://)[^\s/'\"]*(?=@)|((?:[?&]|--)(?:{_NAME_OF_SECRET})=)[^\s&#'\"]+|\bhf_[A-Za-z0-9]{{20,}}")
_IN_BRACES = re.compile(rf"((?:{_NAME_OF_SECRET})[\"']?\s*:\s*)[^\s,}}]+")


def mask(content: Any, name: str = "") -> Any:
    """
    The same settings with `<secret>` for each secret: a mapping, list or text, of which `name` is the field, if it has
    one. A value is secret by its name, such as `hub_token`, or its place in a text, such as that in an address.
    """
    if isinstance(content, Mapping):
        return {key: mask(value, str(key)) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(mask(value, name) for value in content)
    if re.fullmatch(_NAME_OF_SECRET, name) and _may_be_secret(content):
        return _MARK
    return mask_text(content) if type(content) is str else content


def _may_be_secret(content: Any) -> bool:
    """
    Whether the value of a field with a secret's name, such as `pad_token`, may be one: a text or a whole number. A
    token of a vocabulary, which begins with a bracket, is none.
    """
    if type(content) not in (str, int) or not content:
        return False
    return not str(content).startswith(("<", "["))


def mask_text(text: str) -> str:
    """A message, address or mapping as text without secrets."""
    if text.startswith("{"):
        text = _IN_BRACES.sub(rf"\1{_MARK}", text)
    return _IN_TEXT.sub(_mask_value, text)


def _mask_value(secret: re.Match[str]) -> str:
    """The mark, after what stands before a value: `://` or a name."""
    before = secret[1] or secret[2] or ""
    return before + _MARK


def mask_words(words: Sequence[str]) -> list[str]:
    """A command line without secrets: the word after `--name` is taken for the value of the field `name`."""
    masked = []
    name = ""
    for word in words:
        masked.append(mask(word, "" if word.startswith("--") else name))
        name = word.removeprefix("--")
    return masked


def lost(content: Any) -> bool:
    """Whether a value lacks a secret, so that it is of no use."""
    return _MARK in str(content)


class Masked:
    """A configuration whose `to_dict`, which trackers get, and pickle, `training_args.bin`, hold no secrets."""

    def to_dict(self) -> dict[str, Any]:
        """The settings, without secrets."""
        return mask(super().to_dict())  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the fields, with secrets masked, for whatever writes them to disk."""
        settings = dict(vars(self))
        for name, value in settings.items():
            if isinstance(value, str | dict):
                settings[name] = mask(value, name)
        return settings

    def __copy__(self, memo: Any = None):
        """A copy with its secrets, deep with a `memo`: Python would copy the masked state of `__getstate__`."""
        other = object.__new__(type(self))
        settings = vars(self) if memo is None else copy.deepcopy(vars(self), memo)
        vars(other).update(settings)
        return other

    __deepcopy__ = __copy__
