"""The order of prompts: TRL's for the data loader, and a stream for dynamic sampling; and their columns."""

import random

import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets
from helpers import USE_CPU
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from trl.trainer.utils import RepeatSampler

from opo_trl import AsyncOPOConfig, AsyncOPOTrainer, OPOConfig, OPOTrainer
from opo_trl.rollout.prompts import RESERVED, EpochSampler, PromptStream, check_datasets, permutations


def test_prompts_have_the_order_of_trl():
    arguments = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 11}
    theirs, ours = RepeatSampler(range(10), **arguments), EpochSampler(range(10), **arguments)
    epochs = [list(theirs) for _ in range(3)]
    for epoch in (2, 0, 1):
        ours.epoch = epoch
        assert list(ours) == epochs[epoch]
    assert epochs[0] != epochs[1]
    plain = {**arguments, "shuffle": False}
    assert list(EpochSampler(range(10), **plain)) == list(RepeatSampler(range(10), **plain))


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_of_the_stream_has_every_prompt_once_even_if_some_are_given_back(shuffle):
    stream, draw = PromptStream(permutations(7, seed=3, shuffle=shuffle)), random.Random(0)
    used = []
    while len(used) < 5 * 7 or stream.returned:
        drawn = stream.draw(draw.randint(1, 5))
        unused = draw.sample(drawn, draw.randint(0, len(drawn) - 1)) if len(used) < 5 * 7 else []
        stream.give_back(unused)
        used += [position for position in drawn if position not in unused]
    assert sorted(used) == list(range(len(used)))
    for epoch in range(5):
        prompts = stream.prompts(list(range(7 * epoch, 7 * epoch + 7)))
        assert sorted(prompts) == list(range(7))
        assert (prompts == list(range(7))) is not shuffle


def test_order_of_the_stream_depends_on_the_seed_and_the_epoch():
    orders = [PromptStream(permutations(50, seed=seed)).prompts(list(range(100))) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:50] != orders[0][50:]


# The columns of a trainer's datasets

GOOD = Dataset.from_dict({"prompt": ["1"] * 8})
TURN = [{"role": "user", "content": "1"}]


def bad(**columns) -> Dataset:
    return Dataset.from_dict({name: [value] * 8 for name, value in columns.items()})


@pytest.mark.parametrize("trainer_class", [OPOTrainer, AsyncOPOTrainer])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            bad(question="1", answer="2"),
            r"no column 'prompt', only \['question', 'answer'\].*'question', 'prompt'",
        ),
        *((bad(prompt="1", **{name: "x"}), rf"a column '{name}'.*my_{name}") for name in RESERVED),
        *((bad(prompt=value), r"column 'prompt' holds") for value in (3, None, {"role": "user"}, [], [1, 2], ["1"])),
        (bad(prompt=3).to_iterable_dataset(), r"column 'prompt' is of type int64"),
    ],
)
def test_columns_are_checked_before_a_model_is_loaded(tmp_path, trainer_class, data, said):
    config_class = AsyncOPOConfig if trainer_class is AsyncOPOTrainer else trainer_class.config_class
    args = config_class(str(tmp_path), max_steps=1, use_cpu=USE_CPU, bf16=False, report_to="none")
    with pytest.raises(ValueError, match=f"train_dataset.*{said}"):
        trainer_class("nowhere", len, args, data)
    if trainer_class is not AsyncOPOTrainer:
        for held_out, name in ((data, "eval_dataset"), ({"good": GOOD, "bad": data}, r"eval_dataset\['bad'\]")):
            with pytest.raises(ValueError, match=f"{name}.*{said}"):
                trainer_class("nowhere", len, args, GOOD, eval_dataset=held_out)


def test_columns_that_can_be_used_pass():
    stream = IterableDataset.from_generator(lambda: iter([{"question": "1"}]))  # its columns are not known
    for data in (GOOD, bad(prompt=TURN), bad(prompt="1", rewards="x", tools="y", completion="z"), stream, None):
        check_datasets(data, {"some": data}, None)
    check_datasets(bad(level="1"), None, dict)
    with pytest.raises(ValueError, match=r"no column 'environment', only \['prompt'\].*chess"):
        check_datasets(GOOD, None, {"chess": dict})


def test_arguments_by_position_are_checked_too(tmp_path):
    """A dataset with images to record, and an asynchronous trainer's tenth argument."""
    fields = {"use_cpu": USE_CPU, "bf16": False, "report_to": "none", "max_steps": 1}
    with_image = GOOD.add_column("image", ["x"] * len(GOOD))
    with pytest.raises(ValueError, match="save_rollouts=True cannot record images"):
        OPOTrainer("nowhere", len, OPOConfig(str(tmp_path), save_rollouts=True, **fields), with_image)
    rest = (None, None, (None, None), None, None, {"chess": dict})
    with pytest.raises(ValueError, match="train_dataset has no column 'environment'"):
        AsyncOPOTrainer("nowhere", len, AsyncOPOConfig(str(tmp_path), **fields), bad(prompt=TURN), *rest)


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "with a first token"])
def test_a_prompt_has_a_token_at_least(tiny_model, tmp_path, begins):
    """TRL would generate from nothing, or from padding alone."""
    args = OPOConfig(str(tmp_path), max_steps=1, use_cpu=USE_CPU, bf16=False, report_to="none")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if begins:
        first = [("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))]
        single = TemplateProcessing(single="<|im_start|> $A", special_tokens=first)
        tokenizer.backend_tokenizer.post_processor = single
    empty = concatenate_datasets([GOOD, bad(prompt="")])
    for data, held_out, name in ((empty, GOOD, "train_dataset"), (GOOD, {"a": empty}, r"eval_dataset\['a'\]")):
        row, more = len(GOOD), {"eval_dataset": held_out, "processing_class": tokenizer}
        if begins:
            OPOTrainer(tiny_model, len, args, data, **more)
            continue
        with pytest.raises(ValueError, match=f"{name}: its column 'prompt' is empty in row {row}. Remove that row"):
            OPOTrainer(tiny_model, len, args, data, **more)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"processing_class has no eos_token, .* Set `tokenizer\.eos_token`"):
        OPOTrainer(tiny_model, len, args, GOOD, processing_class=tokenizer)


def test_images_need_a_model_that_reads_them(tiny_model, tmp_path):
    args = OPOConfig(str(tmp_path), max_steps=1, use_cpu=USE_CPU, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="a column 'image', but the model reads text only"):
        OPOTrainer(tiny_model, len, args, bad(prompt=TURN, image="x"))
