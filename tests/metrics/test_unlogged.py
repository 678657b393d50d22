"""What TRL has collected for the log, over the end of one process and the beginning of another."""

from collections import defaultdict, deque

from opo_trl.metrics import unlogged


def test_what_is_not_logged_yet_goes_on_in_a_resumed_run():
    rewards = defaultdict(deque, {"right": deque([1.0, 0.0])})
    tables = {"prompt": deque(["a", "b"]), "rewards": rewards, "images": deque([object()])}
    state = unlogged.state_of({"train": {"entropy": [0.5]}, "eval": {}}, tables)
    metrics = {"train": {}, "eval": {}}
    restored = {"prompt": deque(), "rewards": defaultdict(deque), "images": deque()}
    unlogged.load(state, metrics, restored)
    assert metrics == {"train": {"entropy": [0.5]}, "eval": {}}
    assert restored == {**tables, "images": deque()}  # images cannot be saved
