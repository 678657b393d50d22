"""Secrets are recognized wherever they stand, and nothing else is taken for one."""

import copy
import dataclasses
import io

import pytest
import torch
from trl import ModelConfig

from opo_trl import OPOConfig
from opo_trl.checks.secrets import lost, mask, mask_words
from opo_trl.checks.text import report_error
from opo_trl.command.arguments import OPOScriptArguments


SECRET = "plainword"
SETTINGS = {
    "hub_token": SECRET,
    "env": {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "SWANLAB_KEY": SECRET, "DB_PASSWORD": 123456},
    "address": f"https://user:{SECRET}@host:8000/path",
    "nested": [{"url": f"http://host/data?x=1&access_token={SECRET}&y=2"}],
    "as_json": f'{{"token": "{SECRET}", "revision": "main"}}',
    "formed": ["hf_abcdefghijklmnopqrstuvwxyz"],
}
HARMLESS = {
    "hub_token": None,
    "pad_token": "<|endoftext|>",
    "importance_sampling_level": "token",
    "max_tokens": 5,
    "env": {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": 1, "PWD": "/tmp", "HF_TOKEN_PATH": "/run/token"},
    "instruction": "Write the key='…' and a token: (0,100). Mail a@b.",
    "dataset_name": "https://host/a@b?page=3",
    "columns": {"solution": "key"},
    "model_name_or_path": "hf-internal-testing/tiny-random-LlamaForCausalLM",
    "output_dir": "runs/hf_with_a_rather_long_name",
}


def test_settings_lose_their_secrets_and_nothing_else():
    shown = mask(SETTINGS)
    for secret in (SECRET, "opqrst", "123456"):
        assert secret not in str(shown)
    assert shown["address"] == "https://<secret>@host:8000/path"
    assert shown["nested"] == [{"url": "http://host/data?x=1&access_token=<secret>&y=2"}]
    assert mask(shown) == shown
    assert all(map(lost, shown.values()))
    assert mask(HARMLESS) == HARMLESS
    assert not any(map(lost, HARMLESS.values()))
    assert not any(map(lost, SETTINGS.values()))


def test_settings_of_a_run_have_one_secret():
    names: set[str] = set()
    for kind in (OPOScriptArguments, OPOConfig, ModelConfig):
        names.update(field.name for field in dataclasses.fields(kind))
    assert [name for name in names if mask("word", name) != "word"] == ["hub_token"]


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", SECRET, "--alpha", "0.3"],
        [f"--hub-token={SECRET}"],
        ["--model_init_kwargs", f"{{token: {SECRET}}}"],
        ["--vllm_server_base_url", f"http://user:{SECRET}@host"],
    ],
)
def test_command_lines_lose_their_secrets(words):
    assert SECRET not in " ".join(mask_words(words))
    harmless = ["train", "--alpha", "0.3", "--levels", "Level 1", "--seed=1"]
    assert mask_words(harmless) == harmless


def test_messages_lose_passwords_and_tokens(capsys):
    error = ValueError(f"http://user:{SECRET}@host does not answer to hf_{SECRET}abcdefghijklmnop")
    assert report_error("opo-trl train", error, debug=True) == 2
    assert SECRET not in capsys.readouterr().err


def test_configuration_shows_no_secret_to_trackers_and_pickles(tmp_path):
    address = f"http://user:{SECRET}@host:8000"
    args = OPOConfig(str(tmp_path), use_cpu=True, bf16=False, hub_token=SECRET, vllm_server_base_url=address)
    file = io.BytesIO()
    torch.save(args, file)
    assert SECRET not in str(args.to_dict())
    assert SECRET not in args.to_json_string()
    assert SECRET.encode() not in file.getvalue()
    file.seek(0)
    assert torch.load(file, weights_only=False).output_dir == str(tmp_path)
    for copied in (copy.copy(args), copy.deepcopy(args), args):
        assert (copied.hub_token, copied.vllm_server_base_url) == (SECRET, address)
