"""
An agent with a tool, trained by `AsyncOPOTrainer` on a CPU: the model of the embedded task learns to use a calculator.

    python recipes/arithmetic/async/agent.py [--steps 40] [--output runs/arithmetic/async/agent]

1. A short fine-tuning teaches the embedded model how a call of the tool is written, for which it has no tokens yet. It
   then calls the tool for about half of the problems, with some numbers miscopied, and works the others out itself,
   mostly forgetting to carry.
2. Reinforcement learning with the tool: the reward is 1 for a right answer, however it was found. What the tool writes
   is not trained; the call and the answer of a conversation are one completion, with one log-ratio.

No problem occurs twice, nor in both parts, so the mean reward is an accuracy on new ones. With a vLLM server, pass
`reward_funcs` and `tools` to the trainer instead of the worker.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.trainer_callback import PrinterCallback

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer
from opo_trl.asynchronous.in_process import InProcessWorker, sample
from opo_trl.data.arithmetic import arithmetic_reward, base_model_path, make_problems
from opo_trl.launch.callbacks import ProgressBar


# What the model writes to call the tool, and what it reads from it, are four tokens and the characters between them.
CALL, END_OF_CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
RESULT, END_OF_RESULT = "<tool_response>", "</tool_response>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endif %}{% endfor %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": "=|</tool_response>",  # the last one in the prompt is its end
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def calculate(expression: str) -> str:
    """
    Add and subtract numbers.

    Args:
        expression: numbers with + and - between them.

    Returns:
        The result.
    """
    numbers = expression.replace("-", "+-").split("+")
    return str(sum(map(int, numbers)))


def problems_of_half(half: int) -> list[dict]:
    """A half of the training problems: the first one for reinforcement learning, the other for the fine-tuning."""
    rows = list(make_problems("train", ["Level 3"]))
    middle = len(rows) // 2
    return rows[middle:] if half else rows[:middle]


def build_base(folder: Path, *, steps: int, share: float, seed: int = 0) -> None:
    """
    Save the embedded model after it has seen calls of the tool, and its tokenizer with the tokens for them.

    Args:
        folder (`Path`): where to save them.
        steps (`int`): of the fine-tuning, with 64 conversations each.
        share (`float`): of the conversations with a call; in the others the model repeats what it wrote before.
        seed (`int`, *optional*, defaults to `0`): of the conversations.
    """
    tokenizer = AutoTokenizer.from_pretrained(base_model_path())
    model = AutoModelForCausalLM.from_pretrained(base_model_path(), dtype=torch.float32)
    problems = [row["problem"] for row in problems_of_half(1)]
    own = work_out(model, tokenizer, problems)
    tokenizer.add_special_tokens({"additional_special_tokens": [CALL, END_OF_CALL, RESULT, END_OF_RESULT]})
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    model.resize_token_embeddings(len(tokenizer))
    rng, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters())
    for step in range(steps):
        rows = []
        for i in rng.sample(range(len(problems)), 64):
            problem, expression = problems[i], problems[i].removesuffix("=")
            parts = [(problem, False), (own[i], True)]
            if rng.random() < share:
                result = calculate(expression)
                call, heard = f"{CALL}{expression}{END_OF_CALL}<eos>", f"{RESULT}{result}{END_OF_RESULT}"
                parts = [(problem, False), (call, True), (heard, False), (f"{result}<eos>", True)]
            rows.append([(token, trained) for text, trained in parts for token in tokenizer(text)["input_ids"]])
        width = max(map(len, rows))
        ids = torch.tensor([[t for t, _ in row] + [0] * (width - len(row)) for row in rows])
        labels = torch.tensor([[t if own else -100 for t, own in row] + [-100] * (width - len(row)) for row in rows])
        optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 20, 1 - step / steps)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def work_out(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, problems: list[str]) -> list[str]:
    """What a model writes after each problem, up to the end."""
    eos = tokenizer.eos_token_id
    prompts = [tokenizer(problem)["input_ids"] for problem in problems]
    tokens, _ = sample(
        model,
        prompts,
        max_tokens=32,
        temperature=1.0,
        eos=torch.tensor([eos]),
        generator=torch.Generator().manual_seed(0),
    )
    ends = [[*row, eos].index(eos) for row in tokens.tolist()]
    return [tokenizer.decode(row[:end]) + "<eos>" for row, end in zip(tokens.tolist(), ends, strict=True)]


def train(base: Path, folder: Path, *, steps: int, staleness: int = 2) -> list[dict]:
    """Train with the tool; the entries of the log."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["problem"]}], "solution": row["solution"]}
            for row in problems_of_half(0)
        ]
    )
    args = AsyncOPOConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=96,
        num_generations=6,
        max_completion_length=32,  # of each turn
        max_tool_calling_iterations=1,
        token_budget=0,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    worker = InProcessWorker(
        str(base), args, data, arithmetic_reward, tokenizer, tools=[calculate], staleness=staleness
    )
    trainer = AsyncOPOTrainer(
        str(base),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=worker,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ProgressBar())
    trainer.train()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    """Build the base, train it, and print what it has learned."""
    parser = argparse.ArgumentParser(description="Train an agent with a tool on a CPU.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=Path("runs/arithmetic/async/agent"))
    arguments = parser.parse_args()
    set_seed(0)
    build_base(arguments.output / "base", steps=250, share=0.5)
    log = train(arguments.output / "base", arguments.output, steps=arguments.steps)
    (arguments.output / "log.json").write_text(json.dumps(log))
    for name, entries in (("first", log[:5]), ("last", log[-5:])):
        turns, right = (statistics.fmean(entry[m] for entry in entries) for m in ("rollout/turns_mean", "reward"))
        print(f"{name} five steps: {turns - 1:.1%} of the conversations call the tool, {right:.1%} end right")


if __name__ == "__main__":
    main()
