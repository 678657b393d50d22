"""The rollout worker in the training process: versions and log-probabilities."""

import pytest
import scripted
import torch
from datasets import Dataset
from helpers import even_tokens
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from opo_trl.asynchronous.trainer import PackedSamples
from opo_trl.objective import Samples
from opo_trl.objectives import OBJECTIVES


PROMPTS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+1="}], "place": i} for i in range(8)])


def scored_by_length(completion_ids, place, **named):
    """`None` for the completions of the third prompt."""
    return [None if i == 2 else float(len(ids)) for i, ids in zip(place, completion_ids, strict=True)]


def make(model: str, args, reward=scored_by_length, **named):
    return scripted.in_process(model, args, PROMPTS, reward, **named)


@pytest.mark.parametrize("staleness", [0, 2])
def test_completions_are_written_by_the_policy_of_so_many_versions_ago(tiny_model, tmp_path, staleness):
    args = scripted.config(
        tmp_path,
        per_device_train_batch_size=8,
        max_completion_length=6,
        max_steps=5,
        learning_rate=0.5,
        temperature=0.7,
    )
    trainer, worker = make(tiny_model, args, staleness=staleness)
    made, produce, kept = [], worker._produce, {}

    def recorded():
        samples = produce()
        made.append((worker.version, samples))
        kept.update({version: dict(policy) for version, policy in worker.policies.items()})
        return samples

    worker._produce = recorded
    trainer.train()
    assert [{s.model_version for s in samples} for _, samples in made] == [
        {max(1, version - staleness)} for version, _ in made
    ]
    assert len({s.model_version for _, samples in made for s in samples}) >= 3
    # Their log-probabilities are those of that policy, at the temperature.
    policy = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    for _, samples in made:
        policy.load_state_dict(kept[samples[0].model_version])
        sample = samples[0]
        logits = policy(torch.tensor(sample.input_ids)[None]).logits[0, :-1] / args.temperature
        logps = logits.log_softmax(-1).gather(1, torch.tensor(sample.input_ids)[1:, None])[:, 0]
        own = torch.tensor(sample.completion_mask)[1:].bool()
        assert torch.allclose(logps[own], torch.tensor(sample.old_log_probs)[1:][own], atol=1e-4)
    # The group that has no score was left out.
    assert all(sample.group_id % 8 != 2 for _, samples in made for sample in samples)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    unscored = sum(group % 8 == 2 for group in range(2 * (len(made) - 1)))  # the last rollout is not logged yet
    assert sum(entry.get("sample/unscored_total") or 0 for entry in log) == scripted.G * unscored
    # The oldest completion of each step, by what is true: TRL does not count that a micro-batch is fetched ahead.
    versions = [sample.model_version for _, samples in made for sample in samples]
    ages = [1 + step - min(versions[8 * step : 8 * step + 8]) for step in range(5)]
    assert [entry["opo/off_policy_steps"] for entry in log] == ages
    assert max(ages) > max(entry["sample/staleness_max"] for entry in log)
    # On-policy, the log-ratio is 0: what was sampled is what is trained.
    assert log[0]["opo/log_ratio/absmax"] < 1e-4


def test_completions_that_would_all_be_dropped_are_rejected(tiny_model, tmp_path):
    args = scripted.config(tmp_path, max_staleness=2)
    with pytest.raises(ValueError, match=r"max_staleness=2 is not allowed. Set `max_staleness` to at least 3"):
        make(tiny_model, args, staleness=3)


@pytest.mark.parametrize("moved", [0, 1])
def test_equal_rewards_move_nothing_until_a_step_has_moved_the_policy(tiny_model, tmp_path, moved):
    """Log-probabilities of sampling and of training differ by rounding, of which AdamW would make whole steps."""
    fields = {"per_device_train_batch_size": 8, "max_completion_length": 6, "max_steps": 3, "learning_rate": 1e-3}
    args = scripted.config(tmp_path, optim="adamw_torch", num_iterations=2, **fields)
    trainer, worker = make(tiny_model, args)
    worker._loop_kwargs["reward_funcs"] = [lambda completions, **_: [1.0] * len(completions)]
    trainer._skipped.moved_at = moved
    before = scripted.snapshot(trainer.model)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert log[0]["opo/log_ratio/absmax"] > 0
    after = scripted.snapshot(trainer.model)
    assert all(torch.equal(after[name], before[name]) for name in before) is not bool(moved)
    assert [entry["grad_norm"] > 0 for entry in log] == [bool(moved)] * 3


def test_synchronization_leaves_the_base_of_an_adapter_as_it_is(tiny_model, tmp_path):
    args = scripted.config(
        tmp_path,
        per_device_train_batch_size=8,
        max_completion_length=2,
        max_steps=6,
        learning_rate=0.5,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer, worker = make(tiny_model, args, peft_config=adapter)
    base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    sent = []
    worker.destroy = lambda: sent.append(worker.policies[worker.version])
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert name not in base or torch.equal(parameter, base[name]), name
    trainer.model.merge_adapter()
    projection = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert torch.equal(sent[0]["model.layers.0.self_attn.q_proj.weight"], projection.cpu())


def test_losses_of_trl_have_their_targets_and_log_the_clip_ratios_of_every_step(tiny_model, tmp_path):
    entries = {}
    for steps in (1, 2):
        fields = {"objective": "dapo", "epsilon": 0.05, "learning_rate": 0.5, "max_completion_length": 6}
        args = scripted.config(
            tmp_path / str(steps), per_device_train_batch_size=8, max_steps=4, logging_steps=steps, **fields
        )
        trainer, _ = make(tiny_model, args, reward=even_tokens, staleness=2)
        trainer.train()
        entries[steps] = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    clipped = [entry["clip_ratio/region_mean"] for entry in entries[1]]
    assert 0 < clipped[2] != clipped[3]
    assert entries[2][1]["clip_ratio/region_mean"] == pytest.approx(sum(clipped[2:]) / 2)
    assert {entry["opo/mu"] for entry in entries[1]} == {1}
    assert not any("opo/escort/ess" in entry for entry in entries[1])


@pytest.mark.parametrize("word", [*OBJECTIVES])
def test_packed_tokens_have_the_loss_and_gradient_of_padded_ones(tmp_path, word):
    """As both trainers hand them to an objective."""
    args = scripted.config(tmp_path, objective=word)
    objective, random = OBJECTIVES[word](args), torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4], [3]])
    logps, anchor = (-torch.rand((4, 6), generator=random, dtype=torch.float64) for _ in range(2))
    target = torch.tensor([1.2, -0.4, 0.5, -1.3], dtype=torch.float64)
    one = torch.ones_like(target)
    more = {"target": target, "mu": one, "weights": one, "age": 0 * one, "reused": True}
    found = []
    for packed in (False, True):
        own = logps.clone().requires_grad_()
        row = mask.nonzero()[:, 0]
        tokens = {"logps": own, "anchor_logps": anchor, "mask": mask}
        if packed:
            tokens = {
                "logps": own[mask],
                "anchor_logps": anchor[mask],
                "mask": torch.ones_like(row).bool(),
                "row": row,
            }
        loss = objective.loss((PackedSamples if packed else Samples)(**tokens, **more)).total(one < 0)
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), own)[0]))
    assert found[0][1].norm() > 1e-4
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(padded, packed, rtol=1e-12, atol=1e-12)
