"""Check that as many processes run as a launcher was asked for."""

import psutil


def check_processes(world_size: int) -> None:
    """
    Check that `accelerate launch` has not started one process in place of several. On a CPU, and with a configuration
    for one device, it does: it gives the process an address for the others, and starts none.

    Raises:
        `ValueError`: says how to start them.
    """
    if world_size > 1:
        return
    try:
        process = psutil.Process()
        launcher = process.parent()
        if launcher is None:
            return
        command = launcher.cmdline()
        environment = process.environ()
        environment_of_launcher = launcher.environ()
    except psutil.Error:  # Another user's processes cannot be read.
        return
    # An address that the launcher had itself, as in a Slurm job, says nothing.
    addresses = ("MASTER_ADDR", "MASTER_PORT")
    got_address = any(environment.get(name) != environment_of_launcher.get(name) for name in addresses)
    if got_address and any("accelerate" in word for word in command):
        raise ValueError(
            "num_processes is above 1, but `accelerate launch` has started one process, as it does with `--cpu` and "
            "on a single device. Start all with `torchrun --nproc_per_node NUMBER SCRIPT`, or "
            "`opo-trl train --num_processes NUMBER`."
        )
