"""Loads the pretend device of `../shared` in every process that `pytest --on-device` starts, with what it lacks."""

import os


try:
    import fakecuda  # noqa: F401  (before torch)
    import torch

    torch._C._cuda_getCurrentRawStream = lambda device: 0  # bitsandbytes asks for it when it is imported
    if "RANK" in os.environ:
        import cuda_for_sharding  # noqa: F401
except Exception as error:
    # Python only prints what goes wrong here, and the tests would run on the CPU.
    os.write(2, f"The pretend device does not start: {error!r}\n".encode())
    os._exit(1)
