"""What the processes of a launch import, in the server that they are forked from."""

import importlib.util

import helpers  # noqa: F401
import peft  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401


if importlib.util.find_spec("deepspeed"):
    import deepspeed  # noqa: F401
