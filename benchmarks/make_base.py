"""
Builds the stored base model of the arithmetic task: a small Qwen3, trained by plain supervised learning on worked
chains in which most carries and borrows are forgotten. To build it again (about ten minutes on one CPU core):

    python -m benchmarks.make_base --output opo_trl/data/arithmetic/base

The mistakes are systematic on purpose. With errors scattered at random the likeliest answer would be the right one
from the start, and reinforcement learning would only sharpen what greedy decoding shows already. Here the slip is the
likelier habit, so greedy decoding fails too; the right habit is sampled often enough to be rewarded; and carrying is
the same skill in a chain of any length, so that what is learned at one level shows at the others.

The script ends by measuring the accuracy of the stored weights on the test problems of every level and writes it to
`ACCURACY.json` next to them. The same seed draws the same chains everywhere; the weights may differ in the last bits
between machines and numbers of threads.
"""

import argparse
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from opo_trl.data.arithmetic.task import (
    LARGEST,
    LEVELS,
    SMALLEST,
    arithmetic_reward,
    calculate,
    draw_problem,
    make_problems,
    work_out,
)
from opo_trl.evaluate import wilson_interval


SLIP_RATE = 0.7
STEPS = 2000
TOKENS_PER_BATCH = 4096
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
MAX_LENGTH = 128


def build_tokenizer() -> PreTrainedTokenizerFast:
    """
    Build the tokenizer: one token per character, and only those that the task needs.

    Returns:
        [`~transformers.PreTrainedTokenizerFast`]: The tokenizer, which pads on the left.
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
        model_max_length=MAX_LENGTH,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """
    Build the untrained model.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer that gives the size of the vocabulary and the special tokens.

    Returns:
        [`~transformers.Qwen3ForCausalLM`]: The model, in float32.
    """
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on a CPU accepts
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        **special,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def forget_to_carry(left: int, operator: str, right: int) -> int:
    """
    Compute one operation column by column, carrying nothing.

    In an addition the carry is dropped: `47+38` gives 75. In a subtraction the smaller digit is taken from the larger
    one, so that nothing need be borrowed: `85-16` gives 71. (With the borrow dropped instead, which gives 79, one slip
    of either kind in a chain would cancel out to a right answer.)

    Args:
        left (`int`), right (`int`):
            The operands.
        operator (`str`):
            `"+"` or `"-"`.

    Returns:
        `int`: The slipped result; the exact one where there is nothing to carry.
    """
    tens = calculate(left // 10, operator, right // 10)
    ones = calculate(left % 10, operator, right % 10)
    return 10 * tens + abs(ones) % 10


def draw_slipping_chain(problem: str, rng: random.Random) -> str:
    """
    Work a problem out, forgetting to carry with probability `SLIP_RATE` in each operation.

    Args:
        problem (`str`):
            The prompt.
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `str`: The chain, which goes on from slipped results.
    """

    def slip(left: int, operator: str, right: int) -> int:
        return (forget_to_carry if rng.random() < SLIP_RATE else calculate)(left, operator, right)

    while True:
        chain = work_out(problem, slip)
        # After a slip the results can leave the range of the task, where numbers have another length, or a sign.
        if all(SMALLEST <= int(re.match(r"-?\d+", step)[0]) <= LARGEST for step in chain.split("=")):
            return chain


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, held_out: set[str], rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Draw a batch of problems of one level, itself drawn at random, with their slipping chains.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        held_out (`set[str]`):
            Problems to leave out.
        rng (`random.Random`):
            Source of randomness.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Token ids and labels, which leave the prompts out.
    """
    level = rng.choice(LEVELS)
    texts: list[str] = []
    while not texts or len(texts) * len(texts[0]) < TOKENS_PER_BATCH:
        problem = draw_problem(level, rng)
        if problem not in held_out:
            texts.append(problem + draw_slipping_chain(problem, rng))
    # The texts of a level are equally long, so that neither padding nor a mask is needed.
    ids = torch.tensor(tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"])
    labels = ids.clone()
    labels[:, : texts[0].index("=") + 1] = -100
    return ids, labels


def learning_rate_factor(step: int) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then cosine decay to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)))


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """
    Train the model in place on slipping chains of all levels, without the problems of the test split.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        seed (`int`):
            Seed of the chains.
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
            print(f"step {step} of {STEPS}: loss {loss.item():.4f}", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """
    Store the model, in bfloat16 to keep the package small, and the tokenizer.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            The tokenizer.
        folder (`Path`):
            Where to.
    """
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Transformers 5 stores a class name that transformers 4 does not know. Both know this one.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[str], *, do_sample: bool
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

    Returns:
        `list[str]`: The completions, without special tokens.
    """
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0} if do_sample else {}
    inputs = tokenizer(problems, padding=True, return_tensors="pt")
    model.eval()
    ids = model.generate(  # type: ignore[misc]  # transformers annotates `self` as a type that no model matches
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=64,
        do_sample=do_sample,
        **sampling,
    )
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, str]], *, do_sample: bool
) -> dict[str, Any]:
    """
    Measure the accuracy, one completion per problem.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        rows (`list[dict[str, str]]`):
            Problems, as from [`make_problems`].
        do_sample (`bool`):
            Sample at temperature 1 from the whole vocabulary, rather than greedily.

    Returns:
        `dict[str, Any]`: Number of problems and of right answers, their share and its 95 % Wilson interval.
    """
    completions = complete(model, tokenizer, [row["problem"] for row in rows], do_sample=do_sample)
    right = int(sum(arithmetic_reward(completions, [row["solution"] for row in rows])))
    interval = [round(bound, 4) for bound in wilson_interval(right, len(rows))]
    return {"problems": len(rows), "right": right, "accuracy": right / len(rows), "interval_95": interval}


def measure_stored(folder: Path) -> None:
    """
    Measure the stored weights, loaded in float32 as for training, and write the result to `ACCURACY.json` beside them.

    Args:
        folder (`Path`):
            Where the model is.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    accuracy = {}
    for level in LEVELS:
        rows = make_problems("test", [level])
        modes = {"sampled": True, "greedy": False}
        accuracy[level] = {
            mode: measure(model, tokenizer, rows, do_sample=do_sample) for mode, do_sample in modes.items()
        }
        print(level, *(f"{mode} {figures['accuracy']:.3f}" for mode, figures in accuracy[level].items()))
    (folder / "ACCURACY.json").write_text(json.dumps(accuracy, indent=2) + "\n")


def main() -> None:
    """Build, store and measure the base model, as the command line says."""
    parser = argparse.ArgumentParser(description="Build the base model of the arithmetic task.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and of the chains")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.seed)
    save(model, tokenizer, arguments.output)
    measure_stored(arguments.output)


if __name__ == "__main__":
    main()
