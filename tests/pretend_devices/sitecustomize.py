"""Loads the pretend devices of `../shared` where this folder is on PYTHONPATH, with what they lack."""

import os


try:
    import fakecuda  # noqa: F401  (before torch)
    import torch
except Exception as error:
    # Python only prints what goes wrong here, and the tests would run on the CPU.
    os.write(2, f"The pretend device does not start: {error!r}\n".encode())
    os._exit(1)

aten = torch.ops.aten


def on(device: str | torch.device, values):
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def convolution_backward(gradient, *arguments):
    return tuple(on(gradient.device, aten.convolution_backward(*on("cpu", (gradient, *arguments)))))


def depthwise_convolution(rows, weight, size, bias, stride, padding, dilation):
    tensors = on("cpu", (rows, weight, bias))
    return aten.convolution(*tensors, stride, padding, dilation, False, [0, 0], rows.size(1)).to(rows.device)


MISSING = torch.library.Library("aten", "IMPL")
MISSING.impl("convolution_backward", convolution_backward, "CUDA")
MISSING.impl("_conv_depthwise2d", depthwise_convolution, "CUDA")
torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes asks for it when it is imported

if "RANK" in os.environ:
    import cuda_for_sharding  # noqa: F401
