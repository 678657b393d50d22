"""Recorded conversations, turn by turn, against a rendering of its own for each family of chat templates."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from tiny import make_tokenizer
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from opo_trl.checks.files import write_lines
from opo_trl.reuse import turns
from opo_trl.reuse.conversations import UnfaithfulError
from opo_trl.reuse.reading import RECORDED, load_rollouts


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WORDS = ["north", "Überzug", "思考", "🤔 so", "a  b", 'say "no"', "x\ny", "1,5", "end.", "<b>"]
PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": PARAMETERS}}
    for name in ("guess", "look_up")
]


# Conversations


def some_text(generator: random.Random) -> str:
    """Text that neither begins nor ends with white space, which templates remove."""
    return " ".join(generator.choices(WORDS, k=generator.randint(1, 5)))


def some_call(generator: random.Random) -> dict:
    arguments = {"number": generator.randint(-9, 999), "why": some_text(generator), "also": [1, None, True]}
    name = generator.choice(["guess", "look_up"])
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"type": "function", "id": f"call{generator.randint(10_000, 99_999)}", "function": function}


def conversation(seed: int, family: "Family") -> list[dict]:
    """One to three questions; each answer may think, and call tools, some at once, before; the last may be cut."""
    generator = random.Random(seed)
    messages = []
    if family.has_system and generator.random() < 0.5:
        messages.append({"role": "system", "content": some_text(generator)})
    for _ in range(generator.randint(1, 3)):
        messages.append({"role": "user", "content": some_text(generator)})
        n_rounds = generator.randint(0, 3) if family.has_tools else 0
        for _ in range(n_rounds):
            calls = [some_call(generator) for _ in range(generator.randint(1, 3))]
            content = "" if generator.random() < 0.5 else some_text(generator)
            messages.append(with_thought({"role": "assistant", "content": content, "tool_calls": calls}, generator))
            for call in calls:
                result = some_text(generator)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        messages.append(with_thought({"role": "assistant", "content": some_text(generator)}, generator))
        if not family.thinks:
            for message in messages:
                message.pop("reasoning_content", None)
    if generator.random() < 0.3:  # cut by the number of tokens
        messages[-1]["content"] = messages[-1]["content"][:3].strip()
    return messages


def with_thought(turn: dict, generator: random.Random) -> dict:
    return {**turn, "reasoning_content": some_text(generator)}


# Renderings: what is written before a turn, and what the model writes


def chat_ml(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def qwen3_turn(message: dict, *, thinks: bool) -> str:
    """What Qwen3 writes; it has thought what is in `reasoning_content` if it is asked to."""
    text = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if thinks else ""
    text += message["content"]
    for place, call in enumerate(message.get("tool_calls", ())):
        arguments = json.loads(call["function"]["arguments"])
        fields = json.dumps({"name": call["function"]["name"], "arguments": arguments}, ensure_ascii=False)
        line_break = "\n" if place > 0 or message["content"] else ""
        text += f"{line_break}<tool_call>\n{fields}\n</tool_call>"
    return f"{text}<|im_end|>"


def qwen3_context(messages: list[dict], *, thinks: bool) -> str:
    """What Qwen3 reads: without the thoughts before the last question."""
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    described = "".join("\n" + json.dumps(tool) for tool in TOOLS)
    text = chat_ml(
        "system",
        f"{system}# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>{described}\n</tools>\n\nFor each function call, return a json object with function name and "
        "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    )
    roles = [message["role"] for message in messages]
    last_question = len(roles) - 1 - roles[::-1].index("user")
    for place, message in enumerate(messages):
        if message["role"] == "user":
            text += chat_ml("user", message["content"])
        elif message["role"] == "assistant":
            written = qwen3_turn(message, thinks=thinks and place > last_question)
            text += f"<|im_start|>assistant\n{written}\n"
        elif message["role"] == "tool":
            text += "" if roles[place - 1] == "tool" else "<|im_start|>user"
            text += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            is_last_result = place + 1 == len(roles) or roles[place + 1] != "tool"
            text += "<|im_end|>\n" if is_last_result else ""
    return text + "<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n")


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def smollm2_context(messages: list[dict]) -> str:
    text = ""
    if messages[0]["role"] != "system":
        text = chat_ml("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face")
    for message in messages:
        text += chat_ml(message["role"], message["content"])
    return text + "<|im_start|>assistant\n"


def llama3_context(messages: list[dict]) -> str:
    text = "<|begin_of_text|>"
    for message in messages:
        text += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{message['content']}<|eot_id|>"
    return f"{text}<|start_header_id|>assistant<|end_header_id|>\n\n"


# As Mistral's, tools are described before the last question, so that a later question moves them.
MISTRAL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    "</s>{% endif %}{% endfor %}"
)


def mistral_turn(message: dict) -> str:
    functions = []
    for call in message.get("tool_calls", ()):
        functions.append({**call["function"], "arguments": json.loads(call["function"]["arguments"])})
    calls = f"[TOOL_CALLS]{json.dumps(functions, ensure_ascii=False)}" if functions else ""
    return f"{message['content']}{calls}</s>"


def mistral_context(messages: list[dict]) -> str:
    roles = [message["role"] for message in messages]
    last_question = len(roles) - 1 - roles[::-1].index("user")
    text = "<s>"
    for place, message in enumerate(messages):
        if place == last_question:
            text += f"[AVAILABLE_TOOLS]{json.dumps(TOOLS)}[/AVAILABLE_TOOLS]"
        if message["role"] == "user":
            text += f"[INST]{message['content']}[/INST]"
        elif message["role"] == "tool":
            text += f"[TOOL_RESULTS]{message['content']}[/TOOL_RESULTS]"
        else:
            text += mistral_turn(message)
    return text


def gemma_context(messages: list[dict]) -> str:
    text = "<bos>"
    for message in messages:
        role = "model" if message["role"] == "assistant" else message["role"]
        text += f"<start_of_turn>{role}\n{message['content']}<end_of_turn>\n"
    return f"{text}<start_of_turn>model\n"


@dataclass(frozen=True)
class Family:
    """A chat template, and a rendering of its own: `context` of the messages before a turn, and `turn` of one."""

    template: str
    context: Callable[[list[dict]], str]
    turn: Callable[[dict], str]
    end: str
    special: tuple[str, ...] = ()
    bos: str | None = None
    has_tools: bool = False
    has_system: bool = True
    thinks: bool = False
    options: tuple[tuple[str, bool], ...] = ()


def of_trl(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


QWEN3 = of_trl("qwen3")
FAMILIES = {
    "Qwen3, thinking": Family(
        QWEN3,
        lambda messages: qwen3_context(messages, thinks=True),
        lambda message: qwen3_turn(message, thinks=True),
        "<|im_end|>",
        has_tools=True,
        thinks=True,
    ),
    "Qwen3, not thinking": Family(
        QWEN3,
        lambda messages: qwen3_context(messages, thinks=False),
        lambda message: qwen3_turn(message, thinks=False),
        "<|im_end|>",
        has_tools=True,
        options=(("enable_thinking", False),),
    ),
    "SmolLM2": Family(SMOLLM2, smollm2_context, lambda message: f"{message['content']}<|im_end|>", "<|im_end|>"),
    "Llama 3": Family(
        of_trl("llama3"),
        llama3_context,
        lambda message: f"{message['content']}<|eot_id|>",
        "<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
    ),
    "Mistral": Family(
        MISTRAL,
        mistral_context,
        mistral_turn,
        "</s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        bos="<s>",
        has_tools=True,
        has_system=False,
    ),
    "Gemma": Family(
        of_trl("gemma"),
        gemma_context,
        lambda message: f"{message['content']}<end_of_turn>",
        "<end_of_turn>",
        special=("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        has_system=False,
    ),
}


@pytest.fixture(params=["bytes", "Qwen3-1.7B"])
def tokenizer(request):
    if request.param == "bytes":
        return make_tokenizer()
    return AutoTokenizer.from_pretrained(request.getfixturevalue("shared_data") / "Qwen3-1.7B")


def expected_rows(messages: list[dict], family: Family, encode) -> list[dict]:
    """The rows of a conversation, token by token: the tokens of each piece are joined."""
    rows = []
    text_of_row = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        context = family.context(messages[:place])
        ids = encode(family.turn(message))
        if text_of_row is None or not context.startswith(text_of_row):
            rows.append({"prompt_ids": encode(context), "completion_ids": [], "completion_mask": []})
        else:
            between = encode(context.removeprefix(text_of_row))
            rows[-1]["completion_ids"] += between
            rows[-1]["completion_mask"] += [0] * len(between)
        rows[-1]["completion_ids"] += ids
        rows[-1]["completion_mask"] += [1] * len(ids)
        text_of_row = context + family.turn(message)
    return rows


@pytest.mark.parametrize("n_conversations", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_rows_are_what_the_model_has_read_and_written(tokenizer, family, n_conversations):
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    if family.bos is not None:
        tokenizer.add_special_tokens({"bos_token": family.bos})
    tokenizer.chat_template = family.template
    end = tokenizer.convert_tokens_to_ids(family.end)
    tools = TOOLS if family.has_tools else None
    options = dict(family.options)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    n_rows = 0
    for seed in range(n_conversations):
        messages = conversation(seed, family)
        rows = turns.rows(tokenizer, messages, tools, options, [end])
        assert [row.reason for row in rows] == [None] * len(rows)
        assert [row.tokens(tokenizer) for row in rows] == expected_rows(messages, family, encode)
        first_turn = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
        text, ids = turns.context(tokenizer, messages[:first_turn], tools, options)
        assert text == family.context(messages[:first_turn])
        assert ids == encode(text)
        n_rows += len(rows)
    # Some conversations have several rows where the template changes what stood before, and none has where not.
    changes = family.template in (QWEN3, MISTRAL)
    assert (n_rows > n_conversations) == changes


ASKED = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
WITH_THOUGHT = {**ANSWER, "content": "<think>\neasy\n</think>\n\n2"}


def reasons(template: str, messages: list[dict], **options) -> list[str | None]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = of_trl(template)
    rows = turns.rows(tokenizer, messages, TOOLS, options, [tokenizer.eos_token_id])
    return [row.reason for row in rows]


@pytest.mark.parametrize("template", ["deepseek_r1_distill", "nemotron_3_nano", "qwen3_5_think"])
def test_a_turn_whose_generation_prompt_opens_a_thought_that_it_lacks_is_left_out(template):
    options = {"enable_thinking": False} if template == "qwen3_5_think" else {}
    turn = WITH_THOUGHT if options else ANSWER
    (reason,) = reasons(template, [ASKED, turn], **options)
    assert "something else before a turn than its generation prompt" in reason


@pytest.mark.parametrize("template", ["nemotron_3_nano", "qwen3_5_think", "qwen3_6", "glm4moe"])
def test_a_thought_that_the_generation_prompt_opens_is_found(template):
    assert reasons(template, [ASKED, WITH_THOUGHT]) == [None]


@pytest.mark.parametrize("template", ["qwen3", "glm4moe"])
def test_what_drops_earlier_thoughts_gives_a_row_for_each_question(template):
    assert reasons(template, [ASKED, WITH_THOUGHT, ASKED, WITH_THOUGHT]) == [None, None]


def test_what_the_context_leaves_out_is_an_error():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = of_trl("qwen3")
    call = {"type": "function", "function": {"name": "guess", "arguments": "{}"}}
    for messages in (
        [{"role": "developer", "content": "user"}, ASKED],
        [ASKED, {"role": "assistant", "content": "", "function_call": {"name": "guess", "arguments": "{}"}}],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": {"is": 3}}],
    ):
        with pytest.raises(UnfaithfulError, match="of a message of"):
            turns.context(tokenizer, messages, TOOLS, {})


def test_a_turn_without_a_token_that_ends_it_is_its_text():
    tokenizer = make_tokenizer()
    (row,) = turns.rows(tokenizer, [ASKED, ANSWER, ASKED], None, {}, [])
    assert row.text.endswith("assistant\n2<|im_end|>")
    (start, end), *_ = row.turns.values()
    assert row.text[start:end] == "2<|im_end|>"


def test_calls_and_tools_are_rendered_as_a_log_has_them(tmp_path):
    """Names in their order, nulls, and whole numbers, whatever other calls and tools have."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    calls = {"write": {"path": "a", "limit": 0.5}, "read": {"limit": 1, "path": "b", "mode": None}}
    integer = {"default": None, "type": "integer"}
    number = {"type": "number", "default": 0.5}
    parameters = {"write": {"path": {"type": "string"}, "limit": number}, "read": {"limit": integer, "path": {}}}
    tools = []
    for name, properties in parameters.items():
        function = {"name": name, "parameters": {"type": "object", "properties": properties}}
        tools.append({"type": "function", "function": function})
    asked = {"role": "user", "content": "Do."}
    rows = []
    for name, arguments in calls.items():
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [asked, turn], "tools": tools, "reward": 1.0, "group": "a"})
    write_lines(tmp_path / "rows.jsonl", rows)
    (group,) = load_rollouts(str(tmp_path / "rows.jsonl"), 2)[RECORDED]
    called = {}
    for completion in group:
        messages = [asked, *completion["completion"]]
        (row,) = turns.rows(tokenizer, messages, completion["tools"], {}, [tokenizer.eos_token_id], first=1)
        assert all(json.dumps(tool) in row.text for tool in tools)
        ((start, end),) = row.turns.values()
        call = json.loads(row.text[start:end].partition("<tool_call>")[2].partition("</tool_call>")[0])
        called[call["name"]] = json.dumps(call["arguments"])
    assert called == {name: json.dumps(arguments) for name, arguments in calls.items()}
    # A table gives each mapping the names of all others, as null: these are none of its own.
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (group,) = load_rollouts(str(tmp_path / "rows.parquet"), 2)[RECORDED]
    in_table = {}
    for completion in group:
        (message,) = completion["completion"]
        function = message["tool_calls"][0]["function"]
        in_table[function["name"]] = set(function["arguments"])
    assert in_table == {"write": {"path", "limit"}, "read": {"path", "limit"}}


def test_spaces_of_a_turn_are_its_own_where_a_tokenizer_leaves_them_out_of_places():
    tokenizer = make_tokenizer()
    row = turns.TurnRow("Ask.\n  a   b", turns={1: (5, 12)})
    expected = row.tokens(tokenizer)
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    encoding = tokenizer(row.text, return_offsets_mapping=True)
    assert (6, 6) in encoding["offset_mapping"]  # an empty place
    assert row.tokens(tokenizer) == expected
    assert expected["completion_mask"] == [1] * 7


def test_a_turn_that_is_not_rendered_as_it_was_costs_itself_only():
    """As the last one, the first turn has another role than its generation prompt; as context, it has the same."""
    tokenizer = make_tokenizer()
    role = "{{ 'model' if loop.last and m['content'] == '3' else m['role'] }}"
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['role'] }}", role)
    contents = {"user": ["1+2=", "2+2="], "assistant": ["3", "4"]}
    messages = []
    for place in range(2):
        messages += [{"role": role, "content": texts[place]} for role, texts in contents.items()]
    unfaithful, faithful = turns.rows(tokenizer, messages, None, {}, [tokenizer.eos_token_id])
    assert "renders something else before a turn" in unfaithful.reason
    assert faithful.reason is None
    assert [faithful.text[start:end] for start, end in faithful.turns.values()] == ["4<|im_end|>"]


def test_empty_thoughts_of_a_message_are_not_those_that_the_template_has_added():
    thought = "<think>\n</think>"
    row = turns.TurnRow(f"{thought}3", {1: (0, len(thought) + 1)})
    question = {"role": "user", "content": "1+2="}
    for content, n_added in (("3", 1), (f"{thought}3", 0)):
        assert turns.n_added_thoughts(row, [question, {"role": "assistant", "content": content}]) == n_added
