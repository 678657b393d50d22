"""What the processes of a launch import, in the server that they are forked from."""

import gc
import importlib.util

import float64_reference  # noqa: F401
import metadata_read_once  # noqa: F401
import peft  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

import opo_trl.command.train  # noqa: F401


if importlib.util.find_spec("deepspeed"):
    import deepspeed

    # DeepSpeed would compile an all-reduce for CPUs, which needs a compiler and a minute and a half. gloo has one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

gc.freeze()  # for every `train()`, as tests/conftest.py does
