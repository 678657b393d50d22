"""
Makes what the recipes need, in a minute or two on a CPU:

    python -m recipes.agent.prepare

writes tasks (`runs/agent/tasks`), a log of the scripted expert (`runs/agent/expert.jsonl`) and a small model that has
learnt from such games, half of which fail (`runs/agent/base`). With a model of yours, `--steps 0` leaves it out.
"""

import argparse
import json
import re
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .play import TOOLS, as_log_line
from .storeroom import HELD_OUT, KINDS, WORDS, draw, play_by_script


SPECIAL = ("<pad>", "<eos>", "<unk>")
MARKS = ("<tools>", "</tools>", "<user>", "<assistant>", "<result>", "<call>", "</call>")
# JSON before and after a value of a type.
OPENING = {"string": '"', "integer": "", "array": '["'}
CLOSING = {"string": '"', "integer": "", "array": '"]'}

# Tools are rendered as `take(shelf, count)`, calls as Qwen renders them. `generation` marks what the model writes.
CHAT_TEMPLATE = """\
{%- if tools -%}<tools>
{%- for tool in tools -%}
{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{%- endfor -%}
</tools>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<assistant>{%- generation -%}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor -%}
<eos>{%- endgeneration -%}
{%- elif message.role == 'tool' -%}<result>{{ message.content }}
{%- else -%}<user>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""

# How TRL and transformers read a call in what the model has written.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,  # the smallest that vLLM's attention on a CPU accepts
    "max_position_embeddings": 512,
}
LEARNING_RATE, BATCH = 3e-3, 64
GAMES_OF_TASK = 8  # in the expert's log


def pieces_of_tool(tool: dict) -> list[str]:
    """The tool's signature and the fixed parts of a call of it, each of which is one token."""
    name, parameters = tool["function"]["name"], tool["function"]["parameters"]["properties"]
    pieces = [f"{name}({', '.join(parameters)})"]
    before = f'<call>{{"name": "{name}", "arguments": {{'
    for parameter, schema in parameters.items():
        pieces.append(f'{before}"{parameter}": {OPENING[schema["type"]]}')
        before = f"{CLOSING[schema['type']]}, "
    return [*pieces, f"{before.removesuffix(', ')}}}}}</call>"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with exactly the tokens that the game needs, and its chat template."""
    of_tools = [piece for tool in TOOLS for piece in pieces_of_tool(tool)]
    pieces = dict.fromkeys((*SPECIAL, *MARKS, *of_tools, '", "', *WORDS))  # without duplicates
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    longest_first = sorted(pieces, key=len, reverse=True)
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("|".join(map(re.escape, longest_first))), behavior="isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=SHAPE["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The untrained model, in float32."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **SHAPE, **special)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Tokens of a game, and which of them the assistant has written."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    rendered = tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return rendered["input_ids"], rendered["assistant_masks"]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, games: list[list[dict]]) -> None:
    """Supervised learning of the assistant's turns in these games."""
    encoded = [encode(tokenizer, messages) for messages in games]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(encoded), (BATCH,), generator=generator).tolist()
        width = max(len(encoded[index][0]) for index in chosen)
        ids = torch.full((BATCH, width), tokenizer.pad_token_id)
        labels = torch.full((BATCH, width), -100)
        for row, index in enumerate(chosen):
            tokens, mask = (torch.tensor(values) for values in encoded[index])
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = tokens.where(mask == 1, -100)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.4f}, {time.perf_counter() - start:.0f} s", flush=True)


def write_tasks(folder: Path, split: str, kinds: tuple[str, ...], n_tasks: int) -> None:
    """Tasks as rows of a dataset: what the customer says, and what `Storeroom.reset` reads."""
    rows = []
    for kind in kinds:
        for seed in range(n_tasks):
            prompt = [{"role": "user", "content": draw(kind, seed, split).text}]
            rows.append({"prompt": prompt, "level": kind, "seed": seed, "split": split})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    """Write tasks, the expert's log and the base model."""
    parser = argparse.ArgumentParser(description="Make tasks, a log and a small model for the recipes of the agent.")
    parser.add_argument("--output", type=Path, default=Path("runs/agent"), help="folder to write to")
    parser.add_argument("--games", type=int, default=8000, help="games of the expert in its log")
    parser.add_argument("--steps", type=int, default=300, help="of supervised learning")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    arguments = parser.parse_args()
    write_tasks(arguments.output / "tasks", "train", KINDS, 1000)
    write_tasks(arguments.output / "tasks", "test", (*KINDS, HELD_OUT), 1000)
    games, lines = [], []
    for index in range(arguments.games):
        kind, number_of_kind = KINDS[index % len(KINDS)], index // len(KINDS)
        seed, game_number = divmod(number_of_kind, GAMES_OF_TASK)
        messages, reward = play_by_script(kind, seed, game_number=game_number)
        games.append(messages)
        lines.append(as_log_line(messages, reward, kind, seed))
    (arguments.output / "expert.jsonl").write_text("".join(lines))
    if arguments.steps:
        torch.manual_seed(arguments.seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        train(model, tokenizer, arguments.steps, games)
        model.save_pretrained(arguments.output / "base")
        tokenizer.save_pretrained(arguments.output / "base")


if __name__ == "__main__":
    main()
