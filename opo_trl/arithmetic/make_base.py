"""
Builds the stored base model of the arithmetic task: a small Qwen3 trained on a CPU, by supervised learning, on worked
chains in which most carries and borrows are forgotten. To build it again (about N minutes on one core):

    python -m opo_trl.arithmetic.make_base --output opo_trl/arithmetic/base

The mistakes are systematic on purpose. With errors scattered at random the likeliest answer would be the right one from
the start, and reinforcement learning would only sharpen what greedy decoding shows already. Here the slip is the
likelier habit, so greedy decoding fails too; the right habit is sampled often enough to be rewarded; and what a carry is
does not depend on the length of the chain, so that what was learned at one level shows at the others.

The script ends by measuring the accuracy of the stored weights on the test problems of every level and writes it to
`ACCURACY.json` next to them.
"""

import argparse
import json
import math
import random
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .task import LARGEST, LEVELS, SMALLEST, arithmetic_reward, calculate, draw_problem, make_problems, work_out


SLIP_RATE = 0.7
STEPS = 3000
TOKENS_PER_BATCH = 8192
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
MEASURED_PROBLEMS = 1000


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one token per character, and no others than the task needs.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: The tokenizer, padding on the left.
    """
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+-="]
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=128,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained model.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): Tokenizer that gives the vocabulary and special tokens.

    Returns:
        [`~transformers.Qwen3ForCausalLM`]: The model in float32.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on a CPU accepts
        max_position_embeddings=128,
        tie_word_embeddings=True,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def forget_to_carry(left: int, operator: str, right: int) -> int:
    """Compute one operation column by column, carrying nothing.

    In an addition the carry is dropped (`47+38` gives 75). In a subtraction the smaller digit is taken from the larger
    one instead of borrowing (`85-16` gives 71). So the two kinds of slip do not cancel, as dropping the borrow would:
    ten too few and then ten too many would end in a right answer.
    """
    tens = calculate(left // 10, operator, right // 10)
    ones = calculate(left % 10, operator, right % 10)
    return 10 * tens + abs(ones) % 10


def draw_slipping_chain(problem: str, rng: random.Random) -> str:
    """Work a problem out, forgetting to carry with probability [`SLIP_RATE`] wherever there is a carry."""

    def slip(left: int, operator: str, right: int) -> int:
        return (forget_to_carry if rng.random() < SLIP_RATE else calculate)(left, operator, right)

    while True:
        chain = work_out(problem, slip)
        # After a slip the results can leave the range of the task, where a number may be too short, or negative.
        if all(SMALLEST <= int(re.match(r"-?\d+", step)[0]) <= LARGEST for step in chain.split("=")):
            return chain


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the token ids and the labels of a batch of chains of one level, chosen at random."""
    level = rng.choice(LEVELS)
    texts, prompt_lengths = [], []
    while not texts or len(texts) * len(texts[0]) < TOKENS_PER_BATCH:
        problem = draw_problem(level, rng)
        if problem not in held_out:
            texts.append(problem + draw_slipping_chain(problem, rng))
    # All chains of a level are equally long, so that neither padding nor a mask is needed.
    ids = torch.tensor(tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"])
    labels = ids.clone()
    labels[:, : texts[0].index("=") + 1] = -100
    return ids, labels


def learning_rate_factor(step: int) -> float:
    """Return the share of the peak learning rate at a step: a linear warm-up and a cosine decay to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train the model on slipping chains of all levels, in place.

    No test problem occurs in them as a problem of its own.
    """
    rng = random.Random(seed)
    held_out = {row["problem"] for row in make_problems("test")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    model.train()
    for step in range(STEPS):
        ids, labels = draw_batch(tokenizer, held_out, rng)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
