"""Items of OpenAI's Responses API as messages, and the rollouts of NeMo Gym, which has them."""

import json
from pathlib import Path

import pytest
from recording_trainers import logged, trained

from opo_trl.checks.files import write_lines
from opo_trl.reuse.reading import RECORDED, load_conversations, load_rollouts
from opo_trl.reuse.response_items import UnreadableError, messages_of, tools_of


def called(number: int) -> dict:
    return {
        "type": "function_call",
        "call_id": f"c{number}",
        "name": "guess",
        "arguments": "{}",
        "status": "completed",
    }


def returned(number: int) -> dict:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"}


def thought(text: str) -> dict:
    return {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": text}], "content": None}


def wrote(text: str, **more) -> dict:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
    return {"type": "message", "role": "assistant", "content": [part], **more}


REQUEST = {"input": [{"role": "user", "content": "Guess!"}], "tools": [{"type": "function", "name": "guess"}]}
ANSWER = [thought("hm"), wrote("I guess."), called(0), called(1), returned(0), returned(1), called(2), returned(2)]


def rollout(output: list[dict], task: int = 0, reward: float = 1.0, **more) -> dict:
    response = {"object": "response", "output": output}
    return {"responses_create_params": REQUEST, "response": response, "reward": reward, "_ng_task_index": task, **more}


def written(folder: Path, rows: list[dict]) -> str:
    file = folder / "rows.jsonl"
    write_lines(file, rows)
    return str(file)


def test_items_that_a_model_has_written_at_once_are_one_message():
    messages = messages_of([*ANSWER, thought("so"), wrote("Done.")])
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "assistant", "tool", "assistant"]
    first, result, _, second, _, last = messages
    assert (first["reasoning_content"], first["content"]) == ("hm", "I guess.")
    assert [call["id"] for call in first["tool_calls"]] == ["c0", "c1"]
    assert first["tool_calls"][0]["function"] == {"name": "guess", "arguments": "{}"}
    assert result == {"role": "tool", "tool_call_id": "c0", "content": "result 0"}
    assert second.keys() == {"role", "tool_calls"}
    assert last == {"role": "assistant", "reasoning_content": "so", "content": "Done."}
    assert messages_of("Guess!") == REQUEST["input"]


def test_what_is_no_text_and_no_function_is_an_error():
    image = {"type": "input_image", "image_url": "https://example.org"}
    unreadable = {
        "an item is of type 'web_search_call'": {"type": "web_search_call", "status": "completed"},
        "only text can be trained on": {"role": "user", "content": [image]},
        "'function_call' lacks 'name'": {"type": "function_call", "call_id": "c0", "arguments": "{}"},
    }
    for reason, item in unreadable.items():
        with pytest.raises(UnreadableError, match=reason):
            messages_of([item])
    with pytest.raises(UnreadableError, match="which is no function"):
        tools_of([{"type": "web_search"}])


def test_rollouts_of_nemo_gym(tmp_path, caplog):
    rows = [
        rollout([*ANSWER, wrote("right")]),
        rollout([*ANSWER, wrote("wrong")], reward=0.0),
        rollout([{"type": "web_search_call"}]),
        rollout([wrote("slow")], mask_sample=True),
        rollout([{**thought(""), "summary": []}, wrote("hidden")], task=1),
    ]
    file = written(tmp_path, rows)
    (group,) = load_rollouts(file, 2)[RECORDED]
    last_turns = {row["reward"]: row["completion"][-1] for row in group}
    assert {reward: turn["content"] for reward, turn in last_turns.items()} == {1.0: "right", 0.0: "wrong"}
    assert group[0]["tools"] == [{"type": "function", "function": {"name": "guess"}}]
    assert (
        "2 of its 5 conversations are left out: an item is of type 'web_search_call' (1, such as row 3)" in caplog.text
    )
    assert "`mask_sample` says that it is not to be trained on (1, such as row 4)" in caplog.text
    assert "1 of its 5 conversations have thoughts whose text their server has kept" in caplog.text


def test_tokens_of_nemo_gym_are_rows_where_they_continue_each_other(tmp_path):
    """nemo-gym 0.4.0: the last item of each call of the model has the tokens of the whole call."""

    def tokens(prompt: list[int], ids: list[int]) -> dict:
        logps = [-0.5] * len(ids)
        return {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": logps}

    output = [
        {**called(0), **tokens([1, 2], [3, 4])},
        returned(0),
        {**called(1), **tokens([1, 2, 3, 4, 5], [6])},
        returned(1),
        wrote("right", **tokens([1, 2, 9], [7])),
    ]
    (group,) = load_rollouts(written(tmp_path, [rollout(output)]), 2)[RECORDED]
    longer, shorter = sorted(group, key=lambda row: row["prompt_ids"])
    assert (longer["prompt_ids"], longer["completion_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert (longer["completion_mask"], longer["logprobs"]) == ([1, 1, 0, 1], [-0.5, -0.5, 0, -0.5])
    assert (shorter["prompt_ids"], shorter["completion_ids"]) == ([1, 2, 9], [7])
    # The text that their tokens have to contain, or they are of another tokenizer: a call has none.
    assert (longer["completion"], shorter["completion"]) == ("", "right")
    for last in (1, 2):  # It ends with a call, or with what that returned.
        (row,) = load_conversations(written(tmp_path, [rollout(output[:last])]))
        assert (row["completion_ids"], row["completion"]) == ([3, 4], "")


def test_a_rollout_of_nemo_gym_without_tokens_is_left_out_beside_others_with_them(tmp_path):
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    outputs = [[wrote("right", **tokens)], [wrote("wrong")]]
    rows = load_conversations(written(tmp_path, [rollout(output) for output in outputs]))
    assert [row["completion_ids"] for row in rows] == [[3]]


def test_tasks_of_nemo_gym_with_the_same_request_are_groups_of_their_own(tmp_path):
    rows = [rollout([wrote("so")], task=task, reward=float(task)) for task in (0, 1, 0, 1)]
    groups = load_rollouts(written(tmp_path, rows), 2)
    rewards = [[row["reward"] for row in group] for group in groups[RECORDED]]
    assert sorted(rewards) == [[0.0, 0.0], [1.0, 1.0]]


def test_items_in_place_of_messages_and_an_input_with_its_output(tmp_path):
    rows = [{"input": "Guess!", "output": ANSWER, "instructions": "Play.", "reward": 1.0}]
    (row,) = load_conversations(written(tmp_path, rows))
    assert row["prompt"] == [{"role": "system", "content": "Play."}, *REQUEST["input"]]
    rows = [{"messages": [*REQUEST["input"], *ANSWER], "tools": json.dumps(REQUEST["tools"]), "reward": 1.0}]
    (of_items,) = load_conversations(written(tmp_path, rows))
    assert of_items["completion"] == row["completion"]
    assert of_items["tools"] == [{"type": "function", "function": {"name": "guess"}}]


def test_the_rollouts_of_nemo_gym_are_read(shared_data):
    """85 rollouts of 17 environments, of nemo-gym 0.4.0."""
    folder = shared_data / "nemo_gym"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/nemo_gym")
    n_rows = 0
    for file in sorted(folder.glob("*/example_rollouts*.jsonl")):
        rows = load_conversations(str(file))
        assert all(row["reward"] is not None for row in rows)
        for row in rows:
            roles = {turn["role"] for turn in row["completion"]}
            assert "assistant" in roles
        n_rows += len(rows)
    assert n_rows == 85
    tasks = str(folder / "swe_pivot" / "example.jsonl")
    with pytest.raises(ValueError, match="row 1, is a task of NeMo Gym, without a response"):
        load_conversations(tasks)


# Tokens without text, under the names of other programs


def test_tokens_under_other_names_need_no_text(tiny_model, tmp_path, caplog):
    rows = []
    for number in range(8):
        ids = [40 + number, 2]
        tokens = {"prompt_token_ids": [50, 51], "response_ids": ids, "response_mask": [1, 1]}
        rows.append({**tokens, "inference_logprobs": [-2.0, -1.0], "token_scores": [0], "reward": float(number % 2)})
    file = written(tmp_path, rows)
    nothing = dict.fromkeys(("rollout_func", "reward_funcs", "train_dataset"))
    options = {"num_generations": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1, "max_steps": 1}
    options |= {"per_device_train_batch_size": 8, "max_completion_length": 2}
    run = trained(tiny_model, tmp_path / "run", trainer_arguments=nothing, rollouts=file, **options)
    assert run.rollouts[0].prompt_ids.tolist() == [[50, 51]] * 8
    assert sorted(run.rollouts[0].completion_ids.tolist()) == [row["response_ids"] for row in rows]
    assert logged(run)
    assert "the columns ['token_scores'] are not used" in caplog.text
