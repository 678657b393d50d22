"""
Every option of TRL that affects the loss does in OPOTrainer what its documentation says.

`test_config.py` lists these options and the test of each. Gradients are compared with `float64_reference.Reference`,
an independent float64 computation.
"""

import copy
import functools
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from device_fields import CONTINUOUS
from float64_reference import EXACT, Reference, assert_step_equals
from named_tensors import distance, in_float64, norm, relative_error, snapshot
from peft import LoraConfig, get_peft_model
from recording_trainers import logged, make_trainer, trained, without_times
from scripted_rollouts import PROMPTS, Script, even_tokens
from tiny import make_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from opo_trl.evaluate import evaluate
from opo_trl.generation import sampling


OFF_POLICY = {"steps_per_generation": 4, "max_steps": 2}  # the second optimizer step is off-policy

EVALUATED = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[:4]})}


def assert_steps_equal(trainer, script, **options):
    reference = Reference(trainer, script)
    for k, record in enumerate(trainer.steps):
        assert_step_equals(record, reference.step(k, **options))


# KL to a reference


@pytest.mark.parametrize(("reduction", "corrected"), [("sum", False), ("mean", True)])
def test_kl_to_the_reference(tiny_model, tmp_path, reduction, corrected):
    rewards = [0.4, 1.0, None, 2.0, 0.0, 0.3, 1.5, 0.9]  # an unscored sample has no KL term either
    script = Script(rewards, truncated=(3,), tool_tokens={6: (1, 2)})
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        beta=0.5,
        use_bias_correction_kl=corrected,
        mask_truncated_completions=True,
        log_ratio_reduction=reduction,
        learning_rate=0.05 if reduction == "sum" else 0.1,
        **OFF_POLICY,
    )
    assert_steps_equal(trainer, script)
    # Negative controls, in the step where the policy has left the reference: no KL term, or the other estimate of it.
    reference = Reference(trainer, script)
    gradient = trainer.steps[1].gradient
    for name, value in (("use_bias_correction_kl", not corrected), ("beta", 0.0)):
        setattr(trainer.args, name, value)
        altered = reference.step(1)
        assert relative_error(gradient, altered.gradient) > 0.005
    _, second = logged(trainer)
    assert second["kl"] > 0


def test_reference_model_follows_the_policy(tiny_model, tmp_path):
    """Synced after every step with mixup 0.5, the reference of the third step is a mean of the policies so far."""
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        beta=0.5,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.5,
        learning_rate=0.05,
        max_steps=3,
    )
    mixed = trainer.initial
    for k, step in enumerate(trainer.steps[1:], start=1):
        mixed = {name: (mixed[name] + step.policy[name]) / 2 for name in mixed}
        expected = Reference(trainer, script).step(k, reference_policy=mixed)
        assert_step_equals(step, expected)
    assert distance(mixed, trainer.initial) > 0.01


@pytest.mark.parametrize("named", [True, False])
def test_reference_is_the_model_that_is_given(tiny_model, tmp_path, named):
    """Not the files of its name, which may hold another one or none."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(1)
    config = model.config
    if not named:
        config = type(config)(**config.to_dict())
    model = type(model)(config)
    arguments = {"processing_class": make_tokenizer()}
    trainer = trained(model, tmp_path, beta=0.5, max_steps=2, learning_rate=0.2, trainer_arguments=arguments)
    first, second = logged(trainer)
    assert first["kl"] == 0 < second["kl"]
    assert distance(snapshot(trainer.ref_model), trainer.initial) == 0
    assert not trainer.ref_model.training


# Entropy


def test_entropy_bonus_is_of_tokens_with_high_entropy(tiny_model, tmp_path):
    quantile = 0.4
    # The third group has nothing but the bonus, so it may not be left out.
    script = Script([0.4, 1.0, None, 2.0, 0.0, 0.3, 1.5, 0.9, *[0.5] * 4], tool_tokens={1: (0, 3)})
    options = {"entropy_coef": 2.0, "top_entropy_quantile": quantile, "skip_inert_rows": True, **OFF_POLICY}
    trainer = trained(tiny_model, tmp_path, script=script, **options)
    reference = Reference(trainer, script)
    for k, record in enumerate(trainer.steps):
        steering = high_entropy_tokens(reference, quantile)
        expected = reference.step(k, entropy_coef=2.0, steering_tokens=steering)
        assert_step_equals(record, expected)
        for one_option in ({"steering_tokens": steering}, {"entropy_coef": 2.0}):
            without_the_other = reference.step(k, **one_option)
            assert relative_error(record.gradient, without_the_other.gradient) > 0.01


def high_entropy_tokens(reference: Reference, quantile: float):
    """Valid tokens whose entropy was at least the (1 - quantile) quantile of the rollout when it was generated."""

    @functools.cache
    @torch.no_grad()
    def entropies(k: int, i: int) -> torch.Tensor:
        policy = in_float64(reference.trainer.rollouts[k].policy)
        row = reference.script.calls[k][i]
        _, entropy = reference.logps(policy, row)
        return entropy

    @functools.cache
    def threshold(k: int) -> torch.Tensor:
        of_completions = []
        for i, row in enumerate(reference.script.calls[k]):
            if reference.valid(row):
                own = torch.tensor(row.own).bool()
                of_completions.append(entropies(k, i)[own])
        of_rollout = torch.cat(of_completions)
        return torch.quantile(of_rollout, 1 - quantile)

    return lambda k, i: entropies(k, i) >= threshold(k) - 1e-6


# Samples and tokens that count


@pytest.mark.parametrize("shape", ["sequence", "token"])
def test_importance_sampling_ratio_weights_samples(tiny_model, tmp_path, shape):
    """TRL's ratio is `[B, 1]` in its sequence modes, `[B, T]` in its token modes, and 0 where a `*_mask` mode cuts."""

    def inject(rollout, trainer):
        mask = rollout["completion_mask"]
        generator = torch.Generator().manual_seed(len(mask))
        columns = 1 if shape == "sequence" else mask.shape[1]
        ratio = 3 * torch.rand(len(mask), columns, generator=generator)
        ratio[[2, 11]] = 0
        rollout["importance_sampling_ratio"] = ratio

    script = Script()
    trainer = trained(tiny_model, tmp_path, script=script, inject=inject, learning_rate=0.05, **OFF_POLICY)
    ratios = trainer.rollouts[0].importance_sampling_ratio

    def weight(k, i):
        row = script.calls[k][i]
        length = 1 if shape == "sequence" else len(row.completion)
        of_completion = ratios[i, :length].double()
        return of_completion.mean().item()

    assert_steps_equal(trainer, script, row_weight=weight)
    unweighted = Reference(trainer, script).step(0)
    assert relative_error(trainer.steps[0].gradient, unweighted.gradient) > 0.1
    masked = [entry["opo/frac_masked"] for entry in logged(trainer)]
    assert sum(masked) / 2 == pytest.approx(2 / 16)


@pytest.mark.parametrize(("value", "where"), [(math.nan, "tokens"), (math.inf, "rows")])
def test_masked_values_have_no_effect_even_if_not_finite(tiny_model, tmp_path, value, where):
    """Padding, a tool's tokens, truncated and unscored completions: the gradient is bitwise the same."""

    poisoned_logps = []

    def takes_part(rows):
        mask = rows["completion_mask"].bool() & rows["tool_mask"].bool()
        return mask & rows["opo_valid"][:, None] if where == "rows" else mask

    def inject(fill):
        def poison(rollout, trainer):
            masked = ~takes_part(rollout)
            policy_logps = trainer._policy_logps
            rollout["importance_sampling_ratio"] = torch.ones(masked.shape, device=masked.device)
            rollout["sampling_per_token_logps"], _ = policy_logps(rollout)
            for name in ("ref_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps"):
                rollout[name] = rollout[name].masked_fill(masked, fill)

            def poisoned_policy_logps(part):
                logps, entropies = policy_logps(part)
                poisoned = logps.masked_fill(~takes_part(part), fill)
                poisoned_logps.append(poisoned)
                return poisoned, entropies

            trainer._policy_logps = poisoned_policy_logps

        poisoned_logps.clear()
        return poison

    def trained_with(fill):
        rewards = [0.4, 1.0, None, 2.0, 0.0, 0.3, 1.5, 0.9]
        return trained(
            tiny_model,
            tmp_path,
            script=Script(rewards, truncated=(3,), tool_tokens={5: (1, 2)}),
            inject=inject(fill),
            mask_truncated_completions=True,
            beta=0.1,
            use_bias_correction_kl=True,
            entropy_coef=0.1,
            off_policy_mask_threshold=0.5,
            learning_rate=0.025,
            **OFF_POLICY,
        )

    clean = trained_with(0.0)
    poisoned = trained_with(value)
    assert poisoned_logps
    for logps in poisoned_logps:
        assert not logps.isfinite().all()
    for clean_step, poisoned_step in zip(clean.steps, poisoned.steps, strict=True):
        assert norm(clean_step.gradient) > 0.1
        for name, gradient in clean_step.gradient.items():
            assert torch.equal(poisoned_step.gradient[name], gradient)
    _, clean_entry = logged(clean)
    _, poisoned_entry = logged(poisoned)
    for name, value_logged in without_times(poisoned_entry).items():
        if name.startswith("opo/") or name in ("entropy", "kl"):
            assert value_logged == pytest.approx(clean_entry[name])


# Off-policy steps


def test_a_completion_ends_where_its_generation_did(tiny_model, tmp_path):
    """At a token that only `generation_kwargs` names: TRL would count the padding after it as completion."""
    lengths = []
    ends = [*range(35, 75)]

    def reward(completion_ids, **kwargs):
        lengths.extend(map(len, completion_ids))
        return [float(i) for i in range(len(completion_ids))]

    trainer = trained(
        tiny_model,
        tmp_path,
        trainer_arguments={"reward_funcs": reward, "rollout_func": None},
        generation_kwargs={"eos_token_id": ends},
        max_completion_length=40,
        mask_truncated_completions=True,
    )
    (rollout,) = trainer.rollouts
    is_end = torch.isin(rollout.completion_ids, torch.tensor(ends))
    finished = is_end.any(dim=1)
    assert finished.any()
    first_end = is_end.int().argmax(dim=1)
    generated = torch.where(finished, first_end + 1, 40)
    assert lengths == generated.tolist()
    counted = rollout.completion_mask.sum(dim=1)
    assert torch.equal(counted, generated * finished)  # the others are truncated
    (entry,) = logged(trainer)
    assert entry["completions/clipped_ratio"] == 1 - finished.float().mean()


# Of a model's generation_config.json; each by itself changes what Transformers generates, or how much of it.
ASKED_FOR = {
    "min_p": 0.3,
    "top_h": 0.3,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[token] for token in range(60, 110)],
    "sequence_bias": [[[80], 9.0]],
    "min_length": 90,
    "min_new_tokens": 12,
    "exponential_decay_length_penalty": [2, 1.9],
    "guidance_scale": 1.6,
    "watermarking_config": {"bias": 5.0},
    "num_beams": 2,
    "num_return_sequences": 2,
    "prompt_lookup_num_tokens": 3,
    "max_time": 1e-6,
    "stop_strings": ["a"],
    "return_dict_in_generate": True,
}
OVERRULED = {"do_sample": False, "temperature": 0.3, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.8}


def sampled(folder: str, path: Path, asked_for: dict, **options):
    """A trainer that has sampled one rollout with a model whose generation_config.json asks for something more."""
    model = path / "model"
    shutil.copytree(folder, model, dirs_exist_ok=True)
    file = model / "generation_config.json"
    of_model = json.loads(file.read_text())
    file.write_text(json.dumps(of_model | asked_for))
    arguments = {"reward_funcs": no_reward, "rollout_func": None, **options.pop("trainer_arguments", {})}
    return trained(str(model), path, trainer_arguments=arguments, **options)


def no_reward(completions, **columns):
    return [0.0] * len(completions)


def sampled_ids(*arguments, **options) -> torch.Tensor:
    trainer = sampled(*arguments, **options)
    return trainer.rollouts[0].completion_ids


def message_on_generation_config(caplog) -> str:
    (message,) = [record.message for record in caplog.records if "generation_config" in record.message]
    return message


@pytest.mark.parametrize("kind", ["generate", "continuous batching", "adapter"])
def test_nothing_of_the_models_generation_config_changes_what_is_sampled(tiny_model, tmp_path, kind, caplog):
    options = {
        "generate": {},
        "continuous batching": CONTINUOUS,
        "adapter": {"trainer_arguments": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}},
    }[kind]
    trainer = sampled(tiny_model, tmp_path, ASKED_FOR | OVERRULED, **options)
    plain = sampled_ids(tiny_model, tmp_path, {}, **options)
    assert torch.equal(trainer.rollouts[0].completion_ids, plain)
    message = message_on_generation_config(caplog)
    assert "min_p=0.3" in message
    for name in ASKED_FOR:
        assert name in message
    for name in OVERRULED:
        assert f" {name}=" not in message
    assert trainer.model.generation_config.min_p == 0.3  # and is saved with the model


@pytest.mark.parametrize("rollouts_per_step", [1, 2])
def test_continuous_batching_leaves_the_weights_in_float32(tiny_model, tmp_path, rollouts_per_step):
    """
    With `bf16`, TRL casts the model to generate. Trained on in bfloat16, most weights would not move by 1e-6. With two
    rollouts in a step, there is a gradient while the second one is generated.
    """
    arguments = {"rollout_func": None, "reward_funcs": even_tokens}
    steps = {"max_steps": 1, "learning_rate": 1e-6, "optim": "adamw_torch", **CONTINUOUS}
    steps |= {"steps_per_generation": 1, "gradient_accumulation_steps": rollouts_per_step}
    trainer = make_trainer(tiny_model, tmp_path, bf16=True, trainer_arguments=arguments, **steps)
    before = snapshot(trainer.model)
    trainer.train()
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
    moved = [(before[name] != weight).flatten() for name, weight in trainer.model.named_parameters()]
    assert torch.cat(moved).float().mean() > 0.5
    trained_weights = snapshot(trainer.model)
    evaluate(trainer, Dataset.from_dict({"prompt": PROMPTS[:2]}))
    assert distance(snapshot(trainer.model), trained_weights) == 0


def test_a_cast_for_generation_leaves_a_pending_gradient_and_buffers_to_the_bit(tiny_model):
    """Cast to bfloat16 and back, the gradient of a step that is not finished would lose 16 bits of 24."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    buffers_before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers_before
    with sampling.same_tensors_afterwards(model):
        model.to(torch.bfloat16)
        assert model.lm_head.weight.grad.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], rtol=0, atol=0)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers_before[name], rtol=0, atol=0)


@pytest.mark.parametrize("decoding", ["sampled", "greedy"])
def test_nothing_of_the_models_generation_config_changes_an_evaluation(tiny_model, tmp_path, decoding):
    """Each field by itself, edited in Python after the trainer was made."""
    problems = Dataset.from_dict({"prompt": PROMPTS[:4]})
    trainer = sampled(tiny_model, tmp_path, {"eos_token_id": [2, *range(60, 75)]})
    expected = evaluate(trainer, problems, decoding=decoding).samples
    of_model = trainer.model.generation_config
    for name, value in (ASKED_FOR | OVERRULED).items():
        edited = copy.deepcopy(of_model)
        setattr(edited, name, value)
        trainer.model.generation_config = edited
        assert evaluate(trainer, problems, decoding=decoding).samples == expected, name


def test_tokens_that_the_models_generation_config_ends_forces_or_suppresses(tiny_model, tmp_path, caplog):
    suppressed = torch.arange(50, 150)
    ends = [2, 40]
    asked_for = {"eos_token_id": ends, "suppress_tokens": suppressed.tolist(), "forced_eos_token_id": 2}
    ids = sampled_ids(tiny_model, tmp_path, asked_for)
    assert not torch.isin(ids, suppressed).any()
    has_end = torch.isin(ids, torch.tensor(ends)).any(dim=1)
    assert has_end.all()
    message = message_on_generation_config(caplog)
    for name in asked_for:
        assert name in message
    overridden = sampled_ids(tiny_model, tmp_path, asked_for, generation_kwargs={"suppress_tokens": [7]})
    assert torch.isin(overridden, suppressed).any()
    batched = sampled_ids(tiny_model, tmp_path, asked_for, **CONTINUOUS)
    assert not torch.isin(batched, suppressed).any()


def test_tokens_that_trl_suppresses_are_suppressed_beside_those_of_the_model():
    """TRL suppresses the token of an image."""
    model = SimpleNamespace(generation_config=GenerationConfig(suppress_tokens=[5, 3]))
    config = sampling.closed(GenerationConfig(suppress_tokens=[9]), model)
    assert config.suppress_tokens == [3, 5, 9]


def test_what_the_user_sets_is_what_samples(tiny_model, tmp_path):
    def ids(asked_for=None, **options):
        return sampled_ids(tiny_model, tmp_path, asked_for or {}, **options)

    plain = ids()
    restricted = ids(generation_kwargs={"typical_p": 0.1})
    assert not torch.equal(restricted, plain)
    assert torch.equal(restricted, ids({"typical_p": 0.5}, generation_kwargs={"typical_p": 0.1}))
    assert torch.equal(ids(min_p=0.3), ids({"min_p": 0.1}, min_p=0.3))
    assert torch.equal(ids(temperature=2), ids(temperature=2.0))
    unset = {"top_k": None, "top_p": None, "repetition_penalty": None}
    assert torch.equal(plain, ids(OVERRULED, **unset))
    all_unset = {**unset, "temperature": None, "max_new_tokens": None}
    assert torch.equal(plain, ids(OVERRULED, generation_kwargs=all_unset))


def test_tokens_that_stop_vllm_end_completions_too(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda engine: setattr(engine, "llm", None))
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
    trainer = make_trainer(tiny_model, tmp_path, generation_kwargs={"stop_token_ids": [40, 41]}, **options)
    assert trainer.eos_token_ids == [trainer.processing_class.eos_token_id, 40, 41]
    trainer._last_loaded_step = 0  # as an earlier call of `train` leaves it, of one step
    trainer._begin()
    assert trainer._last_loaded_step == -1


# Models


def test_only_the_adapter_is_trained(tiny_model, tmp_path):
    """LoRA; with a KL term the reference is the model without its adapter."""
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        beta=0.3,
        learning_rate=0.25,
        trainer_arguments={"peft_config": lora},
        steps_per_generation=4,
        max_steps=3,
    )
    adapter = {name for name in trainer.initial if "lora_" in name}
    changed = set()
    for name, tensor in snapshot(trainer.model).items():
        if not torch.equal(tensor, trainer.initial[name]):
            changed.add(name)
    assert changed == adapter
    assert trainer.steps[0].gradient.keys() == adapter
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    reference = Reference(trainer, script, model=get_peft_model(base, lora))
    for k, record in enumerate(trainer.steps):
        # A new adapter adds nothing (its B is 0), so the initial policy is the model without it.
        expected = reference.step(k).gradient
        of_adapter = {name: expected[name] for name in adapter}
        assert relative_error(record.gradient, of_adapter) < EXACT
        assert norm(record.gradient) > 0.01


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory) -> str:
    """Folder of a small random mixture of four experts."""
    folder = str(tmp_path_factory.mktemp("moe"))
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_router_auxiliary_loss(tiny_moe, tmp_path):
    """Adds the coefficient times the mean over micro-batches of the model's own load-balancing loss."""
    coefficient = 20.0
    script = Script([0.5] * 4 + [0.4, 1.0, 2.0, 0.0])  # the first group has nothing but this loss
    trainer = trained(tiny_moe, tmp_path, script=script, router_aux_loss_coef=coefficient, skip_inert_rows=True)
    assert not trainer.planner.shares_prompts  # that loss would count a prompt once
    # The default implementation of the experts does not support float64.
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, experts_implementation="eager")
    objective = Reference(trainer, script, model=model).step(0).gradient
    losses = []
    for batch in trainer.steps[0].batches:
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        output = model(input_ids=tokens, attention_mask=mask, output_router_logits=True)
        losses.append(output.aux_loss)
    balance = sum(losses) / len(losses)
    parameters = dict(model.named_parameters())
    of_balance = torch.autograd.grad(
        coefficient * balance, list(parameters.values()), allow_unused=True, materialize_grads=True
    )
    expected = {name: objective[name] + term for name, term in zip(parameters, of_balance, strict=True)}
    gradient = trainer.steps[0].gradient
    assert relative_error(gradient, expected) < EXACT
    assert relative_error(gradient, objective) > 0.01
    (entry,) = logged(trainer)
    assert entry["aux_loss"] == pytest.approx(balance.item(), rel=1e-4)


def test_prompts_are_not_shared_if_the_model_itself_returns_its_router_auxiliary_loss(tiny_moe, tmp_path):
    """TRL computes it, whatever its coefficient, with a mask of the tokens, which shared prompts do not have."""
    prompts = Dataset.from_dict({"prompt": ["long " * 8 + str(number) for number in range(8)]})
    options = {"per_device_train_batch_size": 8, "trainer_arguments": {"train_dataset": prompts}}
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, output_router_logits=True)
    trainer = trained(model, tmp_path, router_aux_loss_coef=0.0, **options)
    assert not trainer.planner.shares_prompts
    assert norm(trainer.steps[0].gradient) > 0


def test_prompts_are_computed_once_without_the_router_auxiliary_loss(tiny_moe, tmp_path):
    script = Script()
    prompts = Dataset.from_dict({"prompt": ["long " * 8 + str(number) for number in range(8)]})
    options = {"per_device_train_batch_size": 8, "trainer_arguments": {"train_dataset": prompts}}
    trainer = trained(tiny_moe, tmp_path, script=script, router_aux_loss_coef=0.0, **options)
    (step,) = trainer.steps
    assert all("opo_source" in batch for batch in step.batches)
    model = AutoModelForCausalLM.from_pretrained(tiny_moe, experts_implementation="eager")
    expected = Reference(trainer, script, model=model).step(0).gradient
    assert relative_error(step.gradient, expected) < EXACT


def test_gradient_of_a_bfloat16_model_is_the_definitions(tiny_model, tmp_path):
    """In bfloat16, with a float32 head: the gradient is the definition's, up to bfloat16's 8 bits."""
    script = Script()
    trainer = trained(
        tiny_model,
        tmp_path,
        script=script,
        model_init_kwargs={"dtype": "bfloat16"},
        cast_lm_head_to_fp32=True,
        **OFF_POLICY,
    )
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.rollouts[0].opo_target.dtype == torch.float32
    expected = Reference(trainer, script).step(0)
    assert relative_error(trainer.steps[0].gradient, expected.gradient) < 0.05


# Prompts and evaluation


@pytest.mark.parametrize(
    ("generations", "options"),
    [(1, {}), (None, {"anchor_correction": "length_normalized", "adaptive_temperature": True})],
)
def test_evaluation_logs_metrics_and_leaves_training_as_it_is(tiny_model, tmp_path, generations, options):
    trainer = trained(
        tiny_model,
        tmp_path,
        num_generations_eval=generations,
        eval_strategy="steps",
        eval_steps=1,
        beta=0.1,
        trainer_arguments=EVALUATED,
        **options,
        **OFF_POLICY,
    )
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluated) == 2
    for entry in evaluated:
        assert math.isfinite(entry["eval_loss"])
        for name in ("escort/ess", "chi2", "mu", "temperature", "work", "frac_masked", "off_policy_steps"):
            assert math.isfinite(entry[f"eval_opo/{name}"])
        assert "opo/chi2" not in entry
        # In an evaluation, the policy is the behaviour policy.
        assert entry["eval_opo/chi2"] == pytest.approx(0, abs=1e-9)
        assert entry["eval_opo/off_policy_steps"] == 0
        assert 1 <= entry["eval_opo/escort/ess"] <= (generations or 4)
        assert (entry["eval_opo/frac_zero_drive"] == 1) == (generations == 1)
    # Training continues as if there had been no evaluation.
    plain = trained(tiny_model, tmp_path, beta=0.1, **options, **OFF_POLICY)
    assert [entry["opo/off_policy_steps"] for entry in logged(trainer)] == [0, 1]
    assert relative_error(trainer.steps[1].gradient, plain.steps[1].gradient) < EXACT


def test_loss_of_an_evaluation_is_its_own_mean(tiny_model, tmp_path):
    """Not divided by the accumulation steps of training. The policy is the behaviour policy, so only KL is left."""
    script = Script()
    trainer = trained(tiny_model, tmp_path, script=script, beta=0.5, max_steps=2)
    # One batch: with several, Transformers weighs the last one by the dataset's length before TRL repeats the prompts.
    metrics = trainer.evaluate(Dataset.from_dict({"prompt": PROMPTS[:2]}))
    policy = in_float64(snapshot(trainer.model))
    initial_policy = in_float64(trainer.initial)
    reference = Reference(trainer, script)
    completions = [*itertools.chain.from_iterable(script.calls[2:])]
    sum_of_kl = 0.0
    n_tokens = 0
    with torch.no_grad():
        for completion in completions:
            logps, _ = reference.logps(policy, completion)
            initial_logps, _ = reference.logps(initial_policy, completion)
            difference = initial_logps - logps
            kl = difference.exp() - difference - 1
            sum_of_kl += kl.sum().item()
            n_tokens += len(completion.completion)
    assert len(completions) == 8
    assert metrics["eval_loss"] == pytest.approx(0.5 * sum_of_kl / n_tokens, rel=1e-3)
    assert metrics["eval_loss"] > 0.01
