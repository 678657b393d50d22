"""What a process runs in: variables that libraries read as numbers, some while imported, and installed packages."""

import re
from collections.abc import Mapping
from importlib.util import find_spec


_INTEGERS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT"),
    *("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    *("MV2_COMM_WORLD_SIZE", "OMP_NUM_THREADS", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"),
    *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "FSDP_VERSION"),
    *("FSDP_MIN_NUM_PARAMS", "GRADIO_SERVER_PORT", "GRADIO_NUM_PORTS"),
)


def check_numbers(environment: Mapping[str, str]) -> None:
    """Check the variables that must be integers."""
    for name in _INTEGERS:
        value = environment.get(name)
        if value is not None and not re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", value):
            raise ValueError(f"The variable {name}={value!r} is not a whole number. `unset {name}`, or set it to one.")
    rank, processes = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    if not 0 <= rank < processes:
        raise ValueError(
            f"The variable RANK={rank} does not fit WORLD_SIZE={processes}: it must be from 0 to {processes - 1}. "
            "Unset both, or start with `opo-trl train` or `accelerate launch`, which set them."
        )


def check_installed(asked: str, *packages: str, install: str, otherwise: str = "") -> None:
    """Check that the packages are installed that what is `asked` for needs; otherwise raise an `ImportError`."""
    if missing := [package for package in packages if find_spec(package) is None]:
        are = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{asked} needs {', '.join(missing)}, which {are} not installed. `pip install {install}`{otherwise}."
        )
