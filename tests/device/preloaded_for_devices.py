"""What tests on devices import, in the server that their processes are forked from."""

import gc

import float64_reference  # noqa: F401
import metadata_read_once  # noqa: F401
import peft  # noqa: F401
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import opo_trl.command.train  # noqa: F401


gc.freeze()  # for every `train()`, as tests/conftest.py does
