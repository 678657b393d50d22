"""The worked example of an agent with a tool, `recipes/arithmetic/async/agent.py`: it learns from what it wrote."""

import importlib.util
import statistics
from pathlib import Path

import pytest
from trl.chat_template_utils import parse_response

from opo_trl.data.arithmetic import base_model_path


EXAMPLE = Path(__file__).resolve().parents[2] / "recipes" / "arithmetic" / "async" / "agent.py"


@pytest.fixture(scope="module")
def agent():
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_conversation_has_the_tokens_that_were_written(agent, tmp_path):
    """Otherwise a conversation would be forked into several rows, and the rows trained apart."""
    agent.build_base(tmp_path, steps=1, share=1.0)
    tokenizer = agent.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(agent.AutoTokenizer.from_pretrained(base_model_path())) + 4
    messages = [{"role": "user", "content": "12+34-5="}]
    asked = tokenizer.apply_chat_template(messages, tools=[agent.calculate], return_dict=False)
    written = tokenizer(f"{agent.CALL}12+34-5{agent.END_OF_CALL}<eos>")["input_ids"]
    assert len(written) == 3 + len("12+34-5")
    call = parse_response(tokenizer, written, prefix=asked, tools=[agent.calculate])
    ((function,),) = [[each["function"] for each in call["tool_calls"]]]
    assert function == {"name": "calculate", "arguments": {"expression": "12+34-5"}}
    messages += [call, {"role": "tool", "name": "calculate", "content": agent.calculate("12+34-5")}]
    heard = tokenizer.apply_chat_template(messages, tools=[agent.calculate], return_dict=False)
    assert heard[: len(asked) + len(written)] == asked + written
    assert tokenizer.decode(heard[len(asked) + len(written) :]) == "<tool_response>41</tool_response>"
    answer = parse_response(tokenizer, tokenizer("41<eos>")["input_ids"], prefix=heard)
    assert answer == {"role": "assistant", "content": "41"}


@pytest.mark.slow
def test_agent_learns_to_use_its_tool(agent, tmp_path):
    agent.set_seed(0)
    agent.build_base(tmp_path / "base", steps=250, share=0.5)
    log = agent.train(tmp_path / "base", tmp_path, steps=40)
    for metric, least in (("rollout/turns_mean", 0.3), ("reward", 0.1)):
        values = [entry[metric] for entry in log]
        assert statistics.fmean(values[-5:]) > statistics.fmean(values[:5]) + least, metric
    # Each conversation is one row, and the tool's tokens have no part in it.
    assert {entry["rollout/samples_per_rollout"] for entry in log} == {1.0}
    assert all(entry["batch/masked_token_frac"] > 0.4 for entry in log[-5:])
