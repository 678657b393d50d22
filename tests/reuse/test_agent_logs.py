"""
Logs of other programs as recorded rollouts. A test names the program, its file and the version whose source was read.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from opo_trl.checks.files import write_lines
from opo_trl.reuse.reading import RECORDED, load_rollouts


def written(folder: Path, rows: list[dict], name: str = "rows.jsonl") -> str:
    file = folder / name
    write_lines(file, rows)
    return str(file)


def of_completions(groups: Dataset, name: str) -> list[list]:
    """The values of a column, for the completions of each group."""
    return [[completion[name] for completion in group] for group in groups[RECORDED]]


# verifiers 0.4.0: v1/utils/trace_store.py writes an `Episode` (v1/episode.py) per line, with the nodes of v1/graph.py


def node(parent: int | None, role: str, content: str | None, ids=(), n_sampled=0, **more) -> dict[str, Any]:
    """A message, and its tokens, the last of which the model has sampled."""
    message = {"role": role, **more}
    if content is not None:
        message["content"] = content
    n_context = len(ids) - n_sampled
    graph_node = {
        "message": message,
        "sampled": role == "assistant",
        "token_ids": list(ids),
        "mask": [False] * n_context + [True] * n_sampled,
        "logprobs": [-0.5] * n_sampled,
    }
    if parent is not None:
        graph_node["parent"] = parent
    return graph_node


CALL = {"id": "c0", "type": "function", "name": "guess", "arguments": '{"number": 3}'}
TOOL = {"type": "function", "name": "guess", "description": "Guess.", "parameters": {"type": "object"}}
NODES = [
    node(None, "user", "Game 1.", [10, 11]),
    node(0, "assistant", None, [12, 20, 21], 2, tool_calls=[CALL]),
    node(1, "tool", "higher", [30], tool_call_id="c0"),
    node(2, "assistant", "done", [31, 40], 1),
]
WITHOUT_TOKENS = {"token_ids": [], "mask": [], "logprobs": []}


def episode(key: str, *, nodes=NODES, reward: float = 1.0, ok: bool = True, trainable: bool = True) -> dict[str, Any]:
    task = {"type": "Task", "data": {"idx": 0, "prompt": "Game 1."}, "key": key, "hash": key}
    trace = {
        "version": 1,
        "verifiers": {"version": "0.4.0"},
        "task": task,
        "agent": {"config": {}, "name": "solver", "trainable": trainable},
        "tools": [TOOL],
        "nodes": nodes,
        "calls": [{"node": 1, "sampling": {"temperature": 0.7}}, {"node": 3, "sampling": {"top_p": 0.9}}],
        "rewards": {"found": {"score": reward, "weight": 2.0}, "style": {"score": 0.5, "weight": 1.0}},
        "ok": ok,
    }
    return {"id": "0", "env": {"id": "game"}, "task": task, "ok": ok, "errors": [], "traces": [trace]}


def test_verifiers_with_tokens(tmp_path, caplog):
    answered = NODES[3]
    rows = [
        episode("a"),
        episode("a", reward=0.0, nodes=[*NODES, node(3, "user", "over", [50])]),
        episode("b"),
        episode("b", ok=False),
        episode("a", trainable=False),  # a judge
        episode("a", nodes=NODES[:1]),
        {"id": "1", "env": {"id": "game"}, "task": episode("a")["task"], "ok": False, "errors": [], "traces": []},
    ]
    groups = load_rollouts(written(tmp_path, rows, "traces.jsonl"), 2)
    assert "1 of its 5 traces have no turn that a model has written" in caplog.text
    assert groups["prompt"] == [[{"role": "user", "content": "Game 1."}]] * 2
    assert of_completions(groups, "reward") == [[2.5, 0.5], [2.5, None]]
    first_group, _ = groups[RECORDED]
    _, row = first_group  # What follows the last sampled token is left out.
    assert (row["prompt_ids"], row["completion_ids"]) == ([10, 11, 12], [20, 21, 30, 31, 40])
    assert (row["completion_mask"], row["logprobs"]) == ([1, 1, 0, 0, 1], [-0.5, -0.5, 0, 0, -0.5])
    assert row["temperature"] == pytest.approx(0.7)
    assert (row["top_p"], row["top_k"]) == (0.9, None)
    assert row["completion"] == "done"  # for the check that tokens are of the model's tokenizer
    # Log-probabilities that are not there are not taken for 0.
    lacking = [*NODES[:3], {**answered, "logprobs": []}]
    file = written(tmp_path, [episode("a"), episode("a", nodes=lacking)])
    with pytest.raises(ValueError, match=r"row 2: `logprobs` is \[-0\.5, -0\.5, None"):
        load_rollouts(file, 2)


def test_verifiers_without_tokens(tmp_path):
    """As its default client, which calls any server, writes them."""
    nodes = [graph_node | WITHOUT_TOKENS for graph_node in NODES]
    file = written(tmp_path, [episode("a", nodes=nodes)] * 2)
    (group,) = load_rollouts(file, 2)[RECORDED]
    row, _ = group
    call = {"type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}
    assert [turn["content"] for turn in row["completion"]] == ["", "higher", "done"]
    assert row["completion"][0]["tool_calls"] == [call]
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert row["tools"] == [{"type": "function", "function": function}]
    assert "completion_ids" not in row
    # prime-rl, which writes the same, names the group: a task comes again in a later step. `effective` repeats.
    rows = []
    for name in "xy":
        for reward in (0.0, 1.0):
            rows.append({**episode("a", nodes=nodes, reward=reward), "group": {"id": name}})
    rollouts = tmp_path / "rollouts"
    for part in ("train/all", "train/effective", "eval/all"):
        folder = rollouts / "step_1" / part
        folder.mkdir(parents=True)
        written(folder, rows, "traces.jsonl")
    groups = load_rollouts(str(rollouts), 2)
    assert of_completions(groups, "reward") == [[0.5, 2.5]] * 2


def test_the_agents_of_an_episode_are_groups_of_their_own(tmp_path):
    """Also where they were asked the same."""
    rows = []
    for reward in (0.0, 1.0):
        row = episode("a", reward=reward)
        (solver,) = row["traces"]
        critic = {**solver, "agent": {**solver["agent"], "name": "critic"}, "rewards": {}}
        rows.append({**row, "traces": [solver, critic]})
    groups = load_rollouts(written(tmp_path, rows), 2)
    assert of_completions(groups, "reward") == [[0.5, 2.5], [None, None]]


def test_a_trace_of_verifiers_without_tokens_costs_itself_only(tmp_path, caplog):
    """As if the server had failed to return those of one turn."""
    lacking = [*NODES[:3], NODES[3] | WITHOUT_TOKENS]
    rows = [episode("a"), episode("a", nodes=lacking), episode("a", reward=0.0)]
    (group,) = load_rollouts(written(tmp_path, rows), 2)[RECORDED]
    assert [row["completion_ids"] for row in group] == [[20, 21, 30, 31, 40]] * 2
    assert [row["reward"] for row in group] == [2.5, 0.5]
    assert "1 of its 3 traces have no tokens. They are left out." in caplog.text


def test_each_path_of_a_branched_trace_is_a_row(tmp_path):
    """What both paths have in common is trained on once, and an injected turn never."""
    asked, called, result, answered = NODES
    branch = node(2, "assistant", "on a branch", [31, 50], 1)
    asked_again = node(4, "user", "so?", [32])
    injected = {**node(5, "assistant", "injected", [33, 51]), "sampled": False}
    nodes = [asked, called, result, answered, branch, asked_again, injected]
    (group,) = load_rollouts(written(tmp_path, [episode("a", nodes=nodes)]), 2)[RECORDED]
    rows = sorted(group, key=lambda row: row["completion_ids"])
    assert [row["prompt_ids"] for row in rows] == [[10, 11, 12], [10, 11, 12, 20, 21, 30, 31]]
    assert [row["completion_ids"] for row in rows] == [[20, 21, 30, 31, 40], [50]]
    assert [row["completion_mask"] for row in rows] == [[1, 1, 0, 0, 1], [1]]
    without = [graph_node | WITHOUT_TOKENS for graph_node in nodes]
    (group,) = load_rollouts(written(tmp_path, [episode("a", nodes=without)]), 2)[RECORDED]
    first, second = sorted((row["completion"] for row in group), key=lambda turns: turns[0]["content"])
    assert [turn["content"] for turn in first] == ["", "higher", "done"]
    assert [turn["content"] for turn in second] == ["on a branch", "so?", "injected"]
    assert [turn.get("trainable") for turn in second] == [None, None, False]


def test_each_path_has_the_tools_of_its_requests(tmp_path):
    """verifiers 0.4.0: the first message of a path has them (v1/graph.py, `MessageNode.tools`)."""
    alone = [node(None, "user", "Sum up."), node(4, "assistant", "so far")]
    nodes = [{**NODES[0], "tools": [TOOL]}, *NODES[1:], *alone]
    rows = [episode("a", nodes=[graph_node | WITHOUT_TOKENS for graph_node in nodes])]
    (group,) = load_rollouts(written(tmp_path, rows), 2)[RECORDED]
    n_tools = {row["completion"][-1]["content"]: len(row["tools"]) for row in group}
    assert n_tools == {"done": 1, "so far": 0}


def test_a_summary_with_which_the_agent_did_not_go_on_is_left_out(tmp_path):
    """verifiers 0.4.0: such a path is not trained on (v1/trace.py, `Trace.branches`)."""
    unused = node(2, "assistant", "unused", [31, 50], 1)
    used = node(2, "assistant", "used", [31, 51], 1)
    for attempt in (unused, used):
        attempt["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    went_on = [node(None, "user", "used", [60]), node(6, "assistant", "end", [61, 52], 1)]
    went_on[1]["semantic_parents"] = [{"node": 5, "type": "compaction"}]
    nodes = [*NODES, unused, used, *went_on]
    groups = load_rollouts(written(tmp_path, [episode("a", nodes=nodes)]), 3)
    (last_ids,) = [sorted(row["completion_ids"][-1] for row in group) for group in groups[RECORDED]]
    assert last_ids == [40, 51, 52]


def test_files_of_a_folder_that_differ_are_rejected(tmp_path):
    tokens = {"prompt": "1+1=", "completion_ids": [4, 5], "logprobs": [-1.0, -1.0], "reward": 1.0}
    folder = tmp_path / "tokens"
    folder.mkdir()
    written(folder, [tokens], "a.jsonl")
    written(folder, [{**tokens, "loss_mask": [1, 0]}], "b.jsonl")
    with pytest.raises(ValueError, match=r"only one of '.*a\.jsonl' and '.*b\.jsonl' has 'loss_mask'"):
        load_rollouts(str(folder), 2)
    row = {"prompt": "1+1=", "completion": "2"}
    written(tmp_path, [{**row, "reward": 1.0}], "a.jsonl")
    written(tmp_path, [row], "b.jsonl")
    with pytest.raises(ValueError, match=r"only one of '.*a\.jsonl' and '.*b\.jsonl' has 'reward'"):
        load_rollouts(str(tmp_path), 2)


def test_the_folder_of_a_run_is_not_its_metrics(tmp_path):
    """prime-rl (a28a9a4): utils/monitor/file.py writes metrics.jsonl beside `rollouts`."""
    written(tmp_path, [{"step": 0, "time": 1.0, "loss": 0.1}], "metrics.jsonl")
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(ValueError, match=r"rollouts=.* is the folder of a run. Name its '.*/rollouts', where"):
        load_rollouts(str(tmp_path), 2)


# Others, in the forms that these programs write


ASK = {"role": "user", "content": "1+2="}
ANSWER = {"role": "assistant", "content": "3"}
ITEM = {"type": "function_call", "call_id": "c0", "name": "guess", "arguments": "{}"}  # openai 2.x, `Response.output`
OTHERS = {
    # prime-rl 0.8.0 (559b447): trainer/rl/token_export.py, into token_exports/step_N/rank_N.jsonl
    r"no rewards and no groups.*Name a `traces\.jsonl` in `rollouts`": {
        "token_ids": [1, 2],
        "loss_mask": [False, True],
        "inference_logprobs": [0.0, -1.0],
        "advantages": [0.0, 0.5],
    },
    "row 1, is a trace of verifiers without its episode. Write": episode("a")["traces"][0],
    ": a row lacks 'agent', which the versions": {"task": {}, "traces": [{"nodes": []}]},
    "row 1, is a task of NeMo Gym, without a response": {"responses_create_params": {}, "expected_action": {}},
    "row 1, is a response of OpenAI's chat API": {"id": "x", "choices": [{"message": ANSWER}], "model": "m"},
    "row 1, is a request with its response": {"request": {"messages": [ASK]}, "response": {"choices": []}},
    "row 1, is a result of OpenAI's Batch API": {"custom_id": "1", "response": {"body": {}}},
    "row 1, is a response of OpenAI's Responses API": {"object": "response", "output": [ITEM], "prompt": None},
    r"its output is '3', and no list of items \(2, such as row 1\)\. None is left": {"input": [ASK], "output": "3"},
    "row 1, is verl's": {"input": "1+2=", "output": "3", "score": 1.0, "step": 1},
    "row 1, is TRL's table": {"step": 1, "prompt": "1+2=", "completion": "3", "right": 1.0, "advantage": 0.0},
    "row 1, is a run as LangSmith": {"run_type": "chain", "inputs": {"messages": []}, "outputs": {}},
    "row 1, is a conversation under another name than": {"conversations": [{"from": "human", "value": "1+2="}]},
    "row 1, is a whole table, as Weights & Biases": {"columns": ["prompt"], "data": [["1+2="]]},
    "row 1, is a preference. Write it as two rows": {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
    "row 1, is a problem of verl, without completions": {"data_source": "a", "prompt": [ASK], "reward_model": {}},
    r"no column 'completion', only \['prompt', 'response'\]. Add it": {"prompt": "1+2=", "response": "3"},
    "row 1: `completion` is not used beside `messages`": {"messages": [ASK, ANSWER], "completion": "4"},
    "row 1: `messages` is .*, which is text. Write the list itself": {"messages": "1+2=3"},
    "row 1: `tools` is .*, which is text. Write the list itself": {"messages": [ASK, ANSWER], "tools": "guess"},
}


@pytest.mark.parametrize("said", OTHERS)
def test_rows_of_others_are_named_with_what_to_do(tmp_path, said):
    file = written(tmp_path, [OTHERS[said]] * 2)
    with pytest.raises(ValueError, match=said) as error:
        load_rollouts(file, 2)
    assert str(error.value).startswith(f"rollouts='{tmp_path}/rows.jsonl'")


MESSAGES = {
    r"`messages` has \{'type': 'web_search_call', .* an item of OpenAI's": {"type": "web_search_call", "status": "x"},
    "`messages` has .*LangChain's. Write what its `convert_to_openai_messages`": {
        "type": "ai",
        "data": {"content": "3"},
    },
    "`messages` has .*ShareGPT's. Write `role` and `content`": {"from": "gpt", "value": "3"},
    "`tool_calls` is .*, which is text. Write the list": {**ANSWER, "tool_calls": "guess(3)"},
    r"`tool_calls` has 'guess\(3\)', which is text. Write": {**ANSWER, "tool_calls": ["guess(3)"]},
    "`tool_calls` has 'guess', which is text. Write": {
        **ANSWER,
        "tool_calls": [{"function": "guess", "arguments": "{}"}],
    },
    "`tool_calls` has .* LangChain's. Write what": {
        **ANSWER,
        "tool_calls": [{"name": "guess", "args": {"number": 3}}],
    },
    "`tool_calls` has .* not as OpenAI writes it. Write": {**ANSWER, "tool_calls": [{"function": {"name": "guess"}}]},
    "`tool_calls` has .*None.* not as OpenAI writes it": {
        **ANSWER,
        "tool_calls": [{"function": {"name": None, "arguments": "{}"}}],
    },
    "a message has {'type': 'tool_use'.* is Anthropic's. Write `tool_calls`": {
        **ANSWER,
        "content": [{"type": "tool_use", "input": {}}],
    },
}


@pytest.mark.parametrize("said", MESSAGES)
def test_messages_of_others_are_named_with_what_to_do(tmp_path, said):
    rows = [{"messages": [ASK, ANSWER], "reward": 1.0}, {"messages": [ASK, ANSWER, MESSAGES[said]], "reward": 0.0}]
    file = written(tmp_path, rows)
    with pytest.raises(ValueError, match=rf"rollouts=.*, row 2: {said}"):
        load_rollouts(file, 2)


def test_steps_of_art_do_not_join(tmp_path):
    """openpipe-art 0.5.18 writes a file N.parquet for each step, in which `group_index` begins at 0."""
    for step in (1, 2):
        rows = []
        for place in range(2):
            messages = [{**ASK, "trainable": False}, {**ANSWER, "content": f"{step}{place}"}]
            rows.append({"group_index": 0, "reward": float(step - 1), "tools": None, "messages": messages})
        Dataset.from_list(rows).to_parquet(tmp_path / f"{step:04}.parquet")
    groups = load_rollouts(str(tmp_path), 2)
    answers = []
    for completions in of_completions(groups, "completion"):
        answers.append([turn["content"] for (turn,) in completions])
    assert answers == [["10", "11"], ["20", "21"]]


def test_the_prompt_is_all_before_the_first_turn_that_is_trained(tmp_path):
    """A greeting and a turn that is not to be trained on are part of it, and of its group."""
    example = [{"role": "assistant", "content": "Hello."}, ASK, {**ANSWER, "trainable": False}]
    question = {"role": "user", "content": "2+2="}
    answers = [{"role": "assistant", "content": text} for text in ("4", "5")]
    rows = [{"messages": [*example, question, answer], "reward": 1.0} for answer in answers]
    groups = load_rollouts(written(tmp_path, rows), 2)
    (prompt,) = groups["prompt"]
    assert [turn["content"] for turn in prompt] == ["Hello.", "1+2=", "3", "2+2="]
    assert of_completions(groups, "completion") == [[[answer] for answer in answers]]


def test_conversations_of_a_task_become_one_group(tmp_path):
    turns = [("system", "Play."), ("user", "Game 1."), ("assistant", "3"), ("user", "higher"), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in turns]
    parts = [{"type": "text", "text": text} for text in ("Game ", "1.")]
    with_parts = copy.deepcopy(messages)
    with_parts[1]["content"] = parts
    rows = [{"messages": with_parts, "reward": reward, "solution": "4"} for reward in (0, 1)]
    groups = load_rollouts(written(tmp_path, rows), 2)
    assert groups["prompt"] == [messages[:2]]
    assert groups["solution"] == ["4"]
    assert of_completions(groups, "completion") == [[messages[2:], messages[2:]]]
    assert of_completions(groups, "reward") == [[0, 1]]
    parts[0] = {"type": "image_url", "image_url": {"url": "https://example.org"}}
    with_an_image = written(tmp_path, rows)
    with pytest.raises(ValueError, match=r"rollouts=.*a message has \{'type': 'image_url'.* only text can be"):
        load_rollouts(with_an_image, 2)
    unanswered = written(tmp_path, [{"messages": messages[:2], "reward": 1}])
    with pytest.raises(ValueError, match=r".* the assistant answers nothing \(1, such as row 1\)\. None is"):
        load_rollouts(unanswered, 2)
