"""
Prompts whose rows bring their tokens, in a column `prompt_ids`.

TRL renders all prompts of a run with the same tools, and a text that is tokenized again gets a second token for its
beginning from some tokenizers. Rows such as those of [`reuse.to_pivots`] were rendered with tools of their own: the
trainer takes their tokens as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from ..checks.text import without_white_space


PROMPT_IDS = "prompt_ids"

_CHECKED_ROWS = 32  # of which the tokens are compared with the text


class PromptsOfRows(NamedTuple):
    """The prompts of a round of generation, and their tokens."""

    prompts: list[Any]
    ids: list[list[int]]

    def tokens_of(self, prompts: list[Any]) -> list[list[int]]:
        """
        A copy of the tokens of each of these prompts, which are all of the round or some of them. A `ValueError` for a
        prompt that is not of the round.
        """
        if prompts == self.prompts:  # equal prompts may have different tokens, as of other tools
            return [list(ids) for ids in self.ids]
        tokens = []
        for prompt in prompts:
            if prompt not in self.prompts:
                raise ValueError(
                    f"prompt_ids: the prompt {prompt!r:.60} is none of the dataset's, whose tokens are used. "
                    "Remove the column, or what changes its prompts."
                )
            tokens.append(list(self.ids[self.prompts.index(prompt)]))
        return tokens


def of_rows(rows: Sequence[Mapping[str, Any]]) -> PromptsOfRows | None:
    """The prompts of some rows with their tokens; `None` if the rows do not bring these."""
    if not rows or rows[0].get(PROMPT_IDS) is None:
        return None
    prompts = [row["prompt"] for row in rows]
    return PromptsOfRows(prompts, [row[PROMPT_IDS] for row in rows])


def datasets_with_tokens(*datasets: Any) -> Iterator[Any]:
    """Those of the datasets, or of mappings of datasets, whose rows bring their prompts' tokens."""
    for dataset in datasets:
        of_names = dataset.values() if isinstance(dataset, dict) else [dataset]
        for named in of_names:
            if PROMPT_IDS in (getattr(named, "column_names", None) or ()):
                yield named


def check(trainer: Any, dataset: Any) -> None:
    """
    Check that a trainer can generate from the tokens that the rows of a dataset bring.

    Raises:
        `ValueError`: something else would decide what the model gets, or the tokens are not of the trainer's
            tokenizer.
    """
    images = sorted({"image", "images"}.intersection(dataset.column_names))
    obstacles = {
        "tools": trainer.tools,
        "environment_factory": trainer.environment_factories,
        "rollout_func": trainer.rollout_func,
        "chat_template_kwargs": trainer.chat_template_kwargs,
        "remove_unused_columns": trainer.args.remove_unused_columns,
        "images": images,
    }  # what would add to the prompts' tokens, replace them or remove their column: name → its value
    for name, value in obstacles.items():
        if value:
            raise ValueError(
                f"{name} cannot be combined with a dataset that has the column 'prompt_ids': these tokens are what "
                f"the model gets. Remove {name}, or the column."
            )
    if trainer._is_vlm:
        raise ValueError(
            "a dataset with the column 'prompt_ids' needs a model of text alone: this one has a processor of images. "
            "Load its text model, or remove the column."
        )
    if isinstance(dataset, Dataset):
        _check_tokens(trainer, dataset)


def _check_tokens(trainer: Any, dataset: Dataset) -> None:
    """
    Check that the tokens of prompts are in the model's vocabulary and, of the first rows, that at least half decode to
    a text with the prompt's last message in it: those of another tokenizer do not.
    """
    tokenizer = trainer.processing_class
    n_tokens = trainer.model.config.get_text_config().vocab_size
    for row, ids in enumerate(dataset[PROMPT_IDS], 1):
        if not ids or min(ids) < 0 or max(ids) >= n_tokens:
            raise ValueError(
                f"prompt_ids of row {row} is {ids!r:.60}, which is not a list of tokens of this model, from 0 to "
                f"{n_tokens - 1}. Make the dataset with the run's model."
            )
    first_rows = dataset.select(range(min(_CHECKED_ROWS, len(dataset))))
    n_alike = 0
    for row in first_rows:
        # Templates change white space, and some also the text: a part of the rows may differ.
        text = without_white_space(tokenizer.decode(row[PROMPT_IDS]))
        n_alike += without_white_space(_last_text(row["prompt"])) in text
    if n_alike < len(first_rows) / 2:
        raise ValueError(
            f"prompt_ids: only {n_alike} of the first {len(first_rows)} prompts are found in their tokens, so they "
            "are of another tokenizer. Make the dataset with the run's model."
        )


def _last_text(prompt: Any) -> str:
    """A prompt of text as it is; of a conversation, the last `content` that is text, or nothing if there is none."""
    if isinstance(prompt, str):
        return prompt
    texts = [message["content"] for message in prompt if isinstance(message.get("content"), str)]
    return texts[-1] if texts else ""
