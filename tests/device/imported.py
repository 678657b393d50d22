"""What tests on devices import, in the server that their processes are forked from, and what pretend devices lack."""

import sys


sys.modules["bitsandbytes"] = None  # what it needs of CUDA, a pretend device does not have

import helpers  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
from asynchronous import scripted  # noqa: E402, F401


def convolution_backward(gradient, *arguments):
    on_host = [value.cpu() if isinstance(value, torch.Tensor) else value for value in (gradient, *arguments)]
    found = torch.ops.aten.convolution_backward(*on_host)
    return tuple(None if value is None else value.to(gradient.device) for value in found)


MISSING = torch.library.Library("aten", "IMPL")
MISSING.impl("convolution_backward", convolution_backward, "CUDA")
