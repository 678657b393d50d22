"""`action_reward`: the near-misses of docs/pivots.md, what a model may write, and chat templates of all families."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from device_fields import SMALL
from tiny import make_tokenizer

from opo_trl import OPOConfig, OPOTrainer
from opo_trl.checks.files import read_lines
from opo_trl.reuse.response_items import messages_of, tools_of
from opo_trl.rewards import action_reward, actions
from opo_trl.rewards.actions import (
    MALFORMED,
    SAME,
    Action,
    ActionReader,
    Call,
    logged_action,
    normalized,
    word_overlap,
)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pivots.md").read_text(encoding="utf-8")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a room.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "nights": {"type": "integer"},
                "breakfast": {"type": "string", "default": "none"},
            },
        },
    },
}


def tokenizer_with(template: str):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module")
def reader() -> ActionReader:
    return ActionReader(tokenizer_with("qwen3"))


END = "<|im_end|>"


def written(arguments: dict | str, name: str = "book") -> str:
    """A call in Qwen3's form."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


def turn(*calls: dict | str) -> str:
    """A turn that consists of such calls of one tool."""
    return "\n".join(map(written, calls)) + END


def encoded(reader: ActionReader, text: str) -> list[int]:
    return reader.tokenizer(text, add_special_tokens=False)["input_ids"]


def message(arguments: dict, name: str = "book", *, count: int = 1) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


def read(reader: ActionReader, text: str) -> Action:
    return reader.read(encoded(reader, text))


def verdict(reader: ActionReader, logged: dict, text: str, tools=(), **overlap: float) -> str:
    return reader.verdict(logged_action(logged), read(reader, text), tools, overlap)


# The page


LOGGED = json.loads(re.search(r"^Logged: `(.*)`$", PAGE, re.MULTILINE)[1])
_SCHEMAS = {
    "city": {"type": "string"},
    "nights": {"type": "integer"},
    "price": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "quiet": {"type": "boolean"},
}
TOOL_OF_PAGE = {"type": "function", "function": {"name": "book", "parameters": {"properties": _SCHEMAS}}}
NEAR_MISSES = re.findall(r"^\| (\d+) \| `(.*)` \| (.*) \| ([01]) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("number", "text", "stated", "reward"), NEAR_MISSES, ids=lambda value: value[:20])
def test_near_miss_of_the_page(reader, number, text, stated, reward):
    if text.startswith("{"):
        text = written({**LOGGED["arguments"], **json.loads(text)})
    text = text.replace("CALL", written(LOGGED["arguments"])) + END
    logged = message(LOGGED["arguments"])
    for tools in ((), [TOOL_OF_PAGE]):
        assert verdict(reader, logged, text, tools) == stated
    rewards = action_reward([encoded(reader, text)], [logged], tokenizer=reader.tokenizer)
    assert rewards == [float(reward)]


@pytest.mark.pages
def test_near_misses_of_the_page_are_numbered_from_1_to_20():
    assert [int(number) for number, *_ in NEAR_MISSES] == list(range(1, 21))


# What a model may write


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<|im_end|>",
        "Hi.<|endoftext|>Hi.<|im_end|>",
        "<think>\nI call\n</think>\n\n<|im_end|>",
        "<think>\nI never stop",
        "<think>\n" + written({"city": "Rome"}),
        written({"city": "Rome"}).removesuffix("\n</tool_call>"),
        written('"{}"') + END,
        written("[1, 2]") + END,
        "<tool_call>\n[1]\n</tool_call><|im_end|>",
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call><|im_end|>',
        '<tool_call>\n{"arguments": {}}\n</tool_call><|im_end|>',
        written('{"city": ' + "[" * 20_000) + END,
        written('{"city": ' + "[" * 20_000 + "]" * 20_000 + "}") + END,
        written('{"city": ' + "1" * 6_000 + "}") + END,
        "<tool_call><tool_call>" + END,
    ],
    ids=lambda text: text[:40],
)
def test_neither_a_call_nor_a_message(reader, text):
    for logged in (message({"city": "Rome"}), {"role": "assistant", "content": "Hello."}):
        assert verdict(reader, logged, text) == MALFORMED


@pytest.mark.parametrize(
    "value",
    ['"' + "x" * 20_000 + '"', "1e400", "-1e999", "NaN", "1" * 4_000, "[" * 300 + "]" * 300, '"\\ud83d"', "{}"],
    ids=lambda value: value[:10],
)
@pytest.mark.parametrize(
    "logged", ["Rome", 1, 1.5, None, True, [1], {"a": 1}, 10**400], ids=lambda value: f"{value!r:.9}"
)
def test_any_value_has_a_verdict(reader, value, logged):
    text = turn(f'{{"city": {value}}}')
    assert verdict(reader, message({"city": logged}), text) in ("another 'city'", "'city' is not in the log")


def test_patterns_that_take_too_long_are_malformed(monkeypatch):
    """Spaces in an argument of Qwen3.5's that does not end: without a limit, these take hours."""
    monkeypatch.setattr(actions, "SECONDS", 0.2)
    reader = ActionReader(tokenizer_with("qwen3_5_nothink"))
    spaces = " " * 20_000
    text = f"<tool_call>\n<function=book>\n<parameter=city>{spaces}</tool_call>{END}"
    assert read(reader, text).is_malformed
    assert read(reader, f"Hi.{END}") == Action([], "Hi.")


def test_whole_numbers_are_exact_and_others_nearly(reader):
    def is_same(logged, value):
        return verdict(reader, message({"city": logged}), turn({"city": value})) == SAME

    assert not is_same(12345678901, 12345678902)
    assert not is_same(12345678901, 12345678902.0)
    assert is_same(12345678901, 12345678901.0)
    assert is_same(0.1 + 0.2, 0.3)
    assert is_same(1e300, 1e300)
    assert not is_same(0, 1e-9)
    assert is_same(math.nan, math.nan)


def test_a_number_that_is_written_as_text_is_another_value(reader):
    tools = [{"name": "book", "parameters": {"properties": {"nights": {"type": "integer"}}}}]
    ids = encoded(reader, turn({"nights": "3"}))
    done = reader.read(ids, tools=[{"type": "function", "function": tool} for tool in tools])
    assert reader.verdict(logged_action(message({"nights": 3})), done, (), {}) == "another 'nights'"


def test_calls_come_in_any_order_and_each_counts_once(reader):
    rome, oslo = {"city": "Rome"}, {"city": "Oslo"}
    logged = message(rome)
    logged["tool_calls"] += message(oslo)["tool_calls"]
    assert verdict(reader, logged, turn(oslo, rome)) == SAME
    assert verdict(reader, logged, turn(rome, rome)) == "another 'city'"
    assert verdict(reader, logged, turn(rome)) == "1 calls, not 2"
    other_tool = written(rome, "look") + END
    assert verdict(reader, message(rome), other_tool) == "another tool"
    logged["tool_calls"][1:] = message(oslo, "look")["tool_calls"]
    assert verdict(reader, logged, turn({"city": "Bonn"}, {"town": "Bonn"})) == "another 'city'"  # of the first two


def test_calls_that_only_have_to_overlap_come_in_any_order(reader):
    """The first call that is done is the same as both logged ones, the other only as one of them."""
    logged = message({"city": "a b c d"})
    logged["tool_calls"] += message({"city": "a b x y"})["tool_calls"]
    done = [{"city": "c d e f a b"}, {"city": "a b x y"}]
    overlap = {"book.city": 0.5}

    def verdict_on(calls: list[dict]) -> str:
        return reader.verdict(logged_action(logged), read(reader, turn(*calls)), (), overlap)

    for _ in range(2):
        assert verdict_on(done) == verdict_on(done[::-1]) == SAME
        assert verdict_on([done[0], {"city": "u v w"}]) == "another 'city'"
        logged["tool_calls"].reverse()


def test_hundreds_of_calls_have_a_verdict(reader):
    cities = [{"city": f"c{number}"} for number in range(200)]
    logged = message({})
    logged["tool_calls"] = [message(city)["tool_calls"][0] for city in cities]
    assert verdict(reader, logged, turn(*cities[::-1])) == SAME
    assert verdict(reader, logged, turn(*cities[1:], {"town": "c0"})) == "'city' is missing"
    assert verdict(reader, message({"city": "c0"}), turn(*cities)) == "200 calls, not 1"


def test_nulls_at_any_depth_of_mappings_state_nothing(reader):
    with_null = {"filter": {"owner": None, "state": "open", "by": [{"name": "a", "id": None}]}}
    without = {"filter": {"state": "open", "by": [{"name": "a"}]}}
    for logged in (with_null, without):
        as_text = message({})
        as_text["tool_calls"][0]["function"]["arguments"] = json.dumps(logged)
        for done in (with_null, without):
            assert verdict(reader, message(logged), turn(done)) == SAME
            assert verdict(reader, as_text, turn(done)) == SAME
    assert verdict(reader, message({"tags": [None, 1]}), turn({"tags": [1]})) == "another 'tags'"
    assert verdict(reader, message({"tags": [None, 1]}), turn({"tags": [None, 1]})) == SAME
    assert verdict(reader, message(without), turn({"filter": {"state": None}})) == "another 'filter'"


def test_defaults_of_tools_and_nulls_are_as_if_stated(reader):
    logged = message({"city": "Rome", "breakfast": "none", "nights": None})
    text = turn({"city": "Rome"})
    assert verdict(reader, logged, text, [TOOL]) == SAME
    assert verdict(reader, logged, text) == "'breakfast' is missing"


def test_a_default_that_a_family_writes_as_text_is_as_if_stated():
    """Qwen3.5 writes no types, and the tool declares none here: the default has one."""
    stars = {"enum": [1, 2], "default": 1}
    function = {**TOOL["function"], "parameters": {"type": "object", "properties": {"stars": stars}}}
    reader = ActionReader(tokenizer_with("qwen3_5_nothink"))
    calls = "<tool_call>\n<function=book>\n<parameter=stars>\n{}\n</parameter>\n</function>\n</tool_call>"
    verdicts = [
        verdict(reader, message({}), calls.format(text) + END, [{**TOOL, "function": function}]) for text in "12"
    ]
    assert verdicts == [SAME, "another 'stars'"]


def test_messages_are_alike_whatever_they_say(reader):
    logged = {"role": "assistant", "content": "Which city?"}
    assert verdict(reader, logged, "Where to?<|im_end|>") == SAME
    assert verdict(reader, logged, "<think>\nhm\n</think>\n\nWhere to?<|im_end|>") == SAME
    assert verdict(reader, logged, turn({})) == "a call, not a message"


def test_overlap_of_words_only_where_it_is_asked_for(reader):
    logged = message({"city": "The user wants to change the seat", "nights": 1})
    text = turn({"city": "user wants another seat", "nights": 1})
    overlap = word_overlap("The user wants to change the seat", "user wants another seat")
    assert overlap == pytest.approx(2 * 3 / (7 + 4))
    assert verdict(reader, logged, text) == "another 'city'"
    shares = [{"book.city": overlap}, {"book.city": 0.6}]
    ids = [encoded(reader, text)] * 2
    assert action_reward(ids, [logged] * 2, overlap=shares, tokenizer=reader.tokenizer) == [1.0, 0.0]
    assert word_overlap("", "?!") == 1.0
    assert word_overlap("To ROME", "to Rome") == 1.0


def test_white_space_alone_is_compared_as_it_is():
    keys = ["", " ", "\t", "\n"]
    assert [actions._is_same("\n", key) for key in keys] == [False, False, False, True]
    assert [actions._is_same("", key) for key in keys] == [True, False, False, False]


def test_normalized_keeps_indentation():
    assert normalized(" a \t b ") == "a b"
    assert normalized("if x:\n    y  \n\n") == "if x:\n    y"
    assert normalized("a\n b\n   ") == "a\n b"
    assert normalized("e\u0301") == "\u00e9"
    assert normalized("\n") == "\n"


# Families


WITH_CALLS = [
    path.stem
    for path in sorted(TEMPLATES.glob("*.jinja"))
    if not path.stem.endswith("_training")
    and re.match("qwen2_5$|qwen3|glm4|gptoss|llama3_[12]|lfm2_2_5|lfm2_v2|nemotron_3|gemma4", path.stem)
]


@pytest.mark.parametrize("template", WITH_CALLS)
def test_what_a_template_writes_is_read_as_the_same_call(template):
    reader = ActionReader(tokenizer_with(template))
    tokenizer = reader.tokenizer
    asked = [{"role": "user", "content": "A room, please."}]
    options = {"tools": [TOOL], "tokenize": False}
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
    completions = []
    for nights in (2, 3):
        done = message({"city": "Rome", "nights": nights})
        text = tokenizer.apply_chat_template([*asked, done], **options)
        if not text.startswith(prompt):
            pytest.skip("its prompt opens a thought")
        completions.append(encoded(reader, text.removeprefix(prompt)))
    logged = message({"city": "Rome", "nights": 2})
    prompts = [encoded(reader, prompt)] * 2
    of_rows = {"tools": [[TOOL]] * 2, "prompt_ids": prompts, "tokenizer": tokenizer}
    assert action_reward(completions, [logged] * 2, **of_rows) == [1.0, 0.0]


VALUES = [
    *(2, -3, 1.5, 1e-7, True, False, None, [], {}, ["a", "b"], [[1, "x"], [True, None]], [True, False, None]),
    *({"a": 1, "b": "x)"}, {"a": {"b": [1, {"c": True}], "d": None}}, ["it's", "a, b"], ["a)", "b]"], [[[[["x"]]]]]),
    *("", "2", "2.50", "true", "True", "null", "None", '{"a": 1}', '["a"]', "a, b=3, c", "f(x), g(y)", "a[0] (b) {c}"),
    *('say "hi"', "x) ]", "a=1", "</b> <x>", "a & b < c", "é\u2028ü", "a\nb", "a\tb", "  x "),
]
QUOTED = ["it's", 'it\'s "x"', "def f():\n  return 'x'", "C:\\new\\x", "\\d+", "a\\nb"]
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def prompt_and_turn(reader: ActionReader, done: dict, tools: list[dict] | None) -> tuple[str, str]:
    """The prompt that a chat template writes, and the turn in which the assistant does what the message says."""
    asked = [{"role": "user", "content": "A room, please."}]
    render = partial(reader.tokenizer.apply_chat_template, tools=tools, tokenize=False)
    prompt = render(asked, add_generation_prompt=True)
    text = render([*asked, done])
    if not text.startswith(prompt):  # It opens a thought.
        prompt, _, _ = prompt.rpartition("<think>")
    return prompt, text.removeprefix(prompt)


@pytest.mark.parametrize("template", WITH_CALLS)
def test_values_of_all_types_are_read_as_a_template_writes_them(template):
    reader = ActionReader(tokenizer_with(template))
    differing = []
    for value in VALUES + QUOTED:
        done = message({"value": value, "city": "Rome"})
        schema = {"type": JSON_TYPES.get(type(value), "null")}
        parameters = {"type": "object", "properties": {"city": {"type": "string"}, "value": schema}}
        tool = {"type": "function", "function": {"name": "book", "description": "", "parameters": parameters}}
        prompt, text = prompt_and_turn(reader, done, [tool])
        for tools in (None, [tool]):
            action = reader.read(encoded(reader, text), prompt_ids=encoded(reader, prompt), tools=tools)
            if reader.verdict(logged_action(done), action, tools, {}) != SAME:
                differing.append(value)
    # LFM2.5's templates write text without escapes, which is then another one, or none at all.
    is_raw = template in ("lfm2_2_5", "lfm2_2_5_v2")
    assert [value for value in differing if value not in QUOTED] == []
    assert set(differing) <= set(QUOTED if is_raw else [])


@pytest.mark.parametrize("template", WITH_CALLS)
def test_a_call_that_is_cut_off_is_never_the_same(template):
    """Though what is said before it has what calls of some families end with."""
    reader = ActionReader(tokenizer_with(template))
    done = message({"city": "a) ]", "nights": [{"b": "}"}, 2]})
    prompt, text = prompt_and_turn(reader, done, None)
    prompt_ids = encoded(reader, prompt)
    end = max(match.end() for match in reader._ends.finditer(text.rstrip()))
    ends = "(I call it) </tool_call> "

    def verdict_on(written: str) -> str:
        return reader.verdict(
            logged_action(done), reader.read(encoded(reader, written), prompt_ids=prompt_ids), (), {}
        )

    n_thoughts = text.find("</think>") + len("</think>") if "</think>" in text else 0
    thoughts, call = text[:n_thoughts], text[n_thoughts:end]
    assert verdict_on(thoughts + ends + call) == SAME
    cut = [verdict_on(thoughts + ends + call[:place]) for place in range(len(call.rstrip()))]
    assert SAME not in cut


@pytest.mark.parametrize("template", ["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"])
def test_calls_of_lfm2_are_literals_of_python(template):
    reader = ActionReader(tokenizer_with(template))

    def verdict_on(logged: dict, calls: str, name: str = "book") -> str:
        return verdict(reader, message(logged, name), f"<|tool_call_start|>{calls}<|tool_call_end|>{END}")

    rome = {"city": "Rome"}
    for calls in ("[book(city='Rome')]", '[ book( city = "Rome", ) ]', "[book(city='Ro' 'me', stars=None)]"):
        assert verdict_on(rome, calls) == SAME
    no_calls = ["[book(city=Rome)]", "[book('Rome')]", "[book(**{'city': 'Rome'})]", "book(city='Rome')", "[]", ""]
    no_calls += ["[book(city='Rome', city='Rome')]", "[book(city='Rome')", "[book(city=f'Rome')]", "[book]", "book"]
    no_calls += ["[book({'city': 'Rome'})]", "['book']", "[book(city='it's')]", "[book(city=open('Rome'))]", "[a.b]"]
    for calls in no_calls:
        assert verdict_on(rome, calls) == MALFORMED
    assert verdict_on({"city": "True"}, "[book(city=True)]") == "another 'city'"
    assert verdict_on({"city": True}, "[book(city='True')]") == "another 'city'"
    for text in ("True", "true"):
        assert verdict_on({"quiet": True}, f"[book(quiet={text})]") == SAME
    assert verdict_on({"a": [None, False]}, '[book(a=[null, false], b={"c": null})]') == "'b' is not in the log"
    assert verdict_on({"from": "it's"}, "[get-room(from='it\\'s')]", "get-room") == SAME
    assert verdict_on({"$filter": [{"a:b": True}]}, "[db:find($filter=[{'a:b':true}])]", "db:find") == SAME
    assert verdict_on({"a": "x\ny\\d"}, "[book(a='x\\ny\\d')]") == SAME
    assert read(reader, "(I call it) <|tool_call_start|>[book(city='Rome'").is_malformed
    assert read(reader, f"Well, look(it){END}") == Action([], "Well, look(it)")
    assert read(reader, f"<|tool_call_start|>[book(a={'a' * 50_000}{END}").is_malformed


def test_an_argument_that_does_not_end_is_malformed():
    """The parser leaves it out, as it does with a second function in a call."""
    reader = ActionReader(tokenizer_with("qwen3_5_nothink"))
    city = "<parameter=city>\nRome\n</parameter>\n"

    def verdict_on(text: str) -> str:
        text = f"<tool_call>\n<function=book>\n{text}</tool_call>{END}"
        return verdict(reader, message({"city": "Rome"}), text)

    assert verdict_on(city + "</function>\n") == SAME
    assert verdict_on(city) == SAME
    assert verdict_on(city + "<parameter=nights>\n2\n</function>\n") == MALFORMED
    assert verdict_on(city + "</function>\n<function=pay>\n</function>\n") == MALFORMED


def test_gptoss_may_name_the_tool_behind_the_channel():
    reader = ActionReader(tokenizer_with("gptoss"))
    beginnings = [
        "to=functions.book<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.book <|constrain|>json<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.book "
        "<|constrain|>json<|message|>",
        " to=functions.book<|channel|>commentary <|constrain|>json<|message|>",
    ]
    for beginning in beginnings:
        assert verdict(reader, message({"nights": 2}), beginning + '{"nights": 2}<|call|>') == SAME
        assert verdict(reader, message({"nights": 2}), beginning + '{"nights": 2}') == MALFORMED


def test_types_of_a_family_that_writes_none_are_those_of_the_log():
    reader = ActionReader(tokenizer_with("qwen3_5_nothink"))

    def verdict_on(logged, value: str) -> str:
        argument = f"<parameter=nights>\n{value}\n</parameter>"
        text = f"<tool_call>\n<function=book>\n{argument}\n</function>\n</tool_call>{END}"
        return verdict(reader, message({"nights": logged}), text)

    assert verdict_on(2, "2") == SAME  # no tool says of which type it is
    assert verdict_on("2", "2") == SAME
    assert verdict_on([1], "[1]") == SAME
    assert verdict_on(2, "two") == "another 'nights'"
    assert verdict_on(True, "True") == SAME
    assert verdict_on("True", "True") == SAME
    assert verdict_on(None, "None") == SAME
    assert verdict_on([1], '["1"]') == "another 'nights'"  # In JSON, types are written.
    assert verdict_on({"a": 1}, '{"a": "1"}') == "another 'nights'"


@pytest.mark.parametrize("template", ["smolvlm", "deepseek_r1_distill"])
def test_a_family_without_calls_is_refused_before_a_run(template, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the calls of .*Set `response_template` in its tokenizer_conf"):
        ActionReader(tokenizer_with(template))
    rows = Dataset.from_list([{"prompt": "a", "action": message({})}] * 2)
    args = OPOConfig(output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, **SMALL)
    with pytest.raises(ValueError, match="TRL does not know its chat template"):
        OPOTrainer(tiny_model, action_reward, args, rows)


def test_a_response_template_of_ones_own_is_used():
    tokenizer = make_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": ["!", "!!"],
                "close": ";",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
        },
    }
    reader = ActionReader(tokenizer)
    assert read(reader, '!{"name": "book", "arguments": {}};<|im_end|>').calls == [Call("book", {})]
    assert read(reader, '!!{"name": "book", "arguments": {}};<|im_end|>').calls == [Call("book", {})]
    assert read(reader, '!{"name": "book", "arguments": {}').is_malformed
    assert read(reader, 'Yes; !{"name": "book", "arguments": {}}').is_malformed
    assert read(reader, "book<|im_end|>") == Action([], "book")


def test_without_a_tokenizer_the_error_says_how_to_give_one():
    with pytest.raises(ValueError, match=r"needs a tokenizer.*functools\.partial"):
        action_reward([[1]], [message({})])


def test_each_completion_is_compared_with_its_own_row(reader):
    rome, oslo = {"city": "Rome"}, {"city": "Oslo"}
    reward = partial(action_reward, tokenizer=reader.tokenizer)
    ids = [encoded(reader, turn(arguments)) for arguments in (rome, oslo)]
    assert reward(ids, [message(rome), message(oslo)]) == [1.0, 1.0]
    of_first = [encoded(reader, turn(rome))] * 2
    with_default = message({**rome, "breakfast": "none"})
    assert reward(of_first, [with_default] * 2, tools=[[], [TOOL]]) == [0.0, 1.0]
    messages = [encoded(reader, "Hi.<|im_end|>")] * 2
    prompts = [encoded(reader, prompt) for prompt in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")]
    said = {"role": "assistant", "content": "Hello."}
    assert reward(messages, [said] * 2, prompt_ids=prompts) == [1.0, 0.0]  # The second one is in a thought.


def test_verdicts_go_to_the_table_of_completions(reader):
    columns = {}
    reward = partial(action_reward, tokenizer=reader.tokenizer, log_extra=columns.__setitem__)
    ids = [encoded(reader, text) for text in (turn({}), "Hi.<|im_end|>")]
    assert reward(completion_ids=ids, action=[message({})] * 2, prompts=["", ""]) == [1.0, 0.0]
    assert columns == {"verdict": [SAME, "a message, not a call"]}


# NeMo Gym


def test_verdicts_beside_those_of_nemo_gym(reader, shared_data):
    """All are as NeMo Gym's but two, which docs/pivots.md names: a rule for one tool, and an empty text left out."""
    differing = []
    for folder in ("single_step_tool_use_with_argument_comparison", "terminal_multi_harness"):
        rows = read_lines(shared_data / "nemo_gym" / folder / "example_rollouts.jsonl")
        for number, row in enumerate(rows):
            if reward_here(reader, row) != row["reward"]:
                differing.append((folder, number, row["reward"]))
    assert differing == [("terminal_multi_harness", 2, 1.0), ("terminal_multi_harness", 3, 1.0)]


def reward_here(reader: ActionReader, row: dict) -> float:
    """The reward of a rollout of NeMo Gym with one step."""
    expected = row["expected_action"]
    items = expected.get("calls", [expected])
    (logged,) = messages_of([{"role": "assistant", **item} for item in items])
    (answer,) = messages_of(row["response"]["output"])
    tools = tools_of(row["responses_create_params"].get("tools") or ())
    return float(reader.verdict(logged_action(logged), logged_action(answer), tools, {}) == SAME)
