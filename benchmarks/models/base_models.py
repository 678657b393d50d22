"""
Base models that make systematic mistakes: what the scripts of the embedded tasks share.

A base model is a small Qwen3, trained by supervised learning on worked solutions in which most carries are forgotten.
The mistakes are systematic on purpose. With errors scattered at random, the most likely answer would be right from the
start, and reinforcement learning would only sharpen what greedy decoding already shows. Here the slip is the more
likely habit, so greedy decoding fails too; the right habit is sampled often enough to be rewarded; and carrying is the
same skill in a solution of any length, so that what is learned at one level shows at the others.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opo_trl.data.arithmetic import Calculator, calculate


SLIP_RATE = 0.7


def build_tokenizer(pieces: Iterable[str], pattern: str, max_length: int) -> PreTrainedTokenizerFast:
    """
    Build a tokenizer with exactly the tokens that a task needs. It pads on the left.

    Args:
        pieces (`Iterable[str]`):
            The vocabulary, without special tokens.
        pattern (`str`):
            Regular expression that matches one token.
        max_length (`int`):
            Longest text, in tokens.
    """
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<eos>", "<unk>", *pieces])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Mapping[str, int]) -> Qwen3ForCausalLM:
    """Build the untrained model, in float32; `shape` is part of its configuration."""
    special: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        **shape,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def forget_to_carry(left: int, operator: str, right: int) -> int:
    """
    Compute one addition or subtraction column by column, carrying nothing. Exact if there is nothing to carry.

    In an addition the carry is dropped: `47+38` gives 75. In a subtraction the smaller digit is taken from the larger
    one, so that nothing is borrowed: `85-16` gives 71. (With the borrow dropped instead, which gives 79, one slip of
    either kind in a chain would cancel out to a right answer.)
    """
    tens = calculate(left // 10, operator, right // 10)
    ones = calculate(left % 10, operator, right % 10)
    return 10 * tens + abs(ones) % 10


def draw_slipping(
    work_out: Callable[[Calculator], str],
    rng: random.Random,
    *,
    right: Calculator,
    slip: Calculator,
    smallest: int,
    largest: int,
) -> str:
    """
    Work a problem out, slipping with probability `SLIP_RATE` in each operation.

    Args:
        work_out (`Callable`):
            Writes the solution, given a calculator for one operation. It continues from slipped results.
        rng (`random.Random`):
            Source of randomness.
        right (`Callable`), slip (`Callable`):
            The calculators.
        smallest (`int`), largest (`int`):
            Range of the task's results, which slips may leave, even below 0. Such a solution is drawn again.

    Returns:
        `str`: The solution.
    """

    def sometimes(left: int, operator: str, operand: int) -> int:
        return (slip if rng.random() < SLIP_RATE else right)(left, operator, operand)

    while True:
        solution = work_out(sometimes)
        if all(smallest <= int(result) <= largest for result in re.findall(r"(?:^|=)(-?\d+)", solution)):
            return solution


def pad_batch(
    tokenizer: PreTrainedTokenizerBase, examples: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Turn problems with their solutions into a batch, padded on the right, where causal attention needs no mask.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        examples (`list[tuple[str, str]]`):
            Problems and solutions. A solution gets the end of the text.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Token ids and labels `[B, T]`; the labels leave the problems out.
    """
    problems = tokenizer([problem for problem, _ in examples])["input_ids"]
    solutions = tokenizer([solution + tokenizer.eos_token for _, solution in examples])["input_ids"]
    width = max(len(problem) + len(solution) for problem, solution in zip(problems, solutions, strict=True))
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), -100)
    for row, (problem, solution) in enumerate(zip(problems, solutions, strict=True)):
        end = len(problem) + len(solution)
        ids[row, :end] = torch.tensor(problem + solution)
        labels[row, len(problem) : end] = torch.tensor(solution)
    return ids, labels


def build_optimizer(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)


def train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """One optimizer step on token ids and labels `[B, T]`, in bfloat16 on a GPU; returns the loss."""
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def complete(
    model: Any, tokenizer: PreTrainedTokenizerBase, problems: list[str], *, do_sample: bool, max_new_tokens: int = 64
) -> list[str]:
    """
    Generate one completion per problem.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        problems (`list[str]`):
            The prompts.
        do_sample (`bool`):
            Sample at temperature 1 from the whole vocabulary, rather than greedily.
        max_new_tokens (`int`, *optional*, defaults to 64):
            Longest completion.

    Returns:
        `list[str]`: The completions, without special tokens.
    """
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if do_sample else {}
    inputs = tokenizer(problems, padding=True, return_tensors="pt").to(model.device)
    model.eval()
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=do_sample,
            **sampling,
        )
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
