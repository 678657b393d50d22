"""
`opo-trl train`: check the words of a command line, and start the processes of a run through accelerate.

This process imports neither TRL nor Transformers: those that it starts do. The plan of a run alone is made here.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import psutil

from .words import check_words, find_accelerate_config, launch_words, read_words, set_variables


def launch(argv: Sequence[str]) -> int:
    """
    Check a command line and its recipe, and start `command.process` through accelerate as often as this is told to;
    returns the exit status: that of the process, or 128 plus the number of the signal that ended it.
    """
    words = read_words(argv)
    if words.options.help is not None:
        from .recipe import read  # the help is that of the fields' classes

        read(argv)  # prints it and exits
    check_words(words)
    config = find_accelerate_config(words.value("accelerate_config"), words.options.config)
    set_variables(words.env)  # before the launch: OMP_NUM_THREADS and others are read when a process starts
    print("Loading libraries …", file=sys.stderr, flush=True)  # which takes seconds
    from accelerate.commands import launch as accelerate
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = accelerate.launch_command_parser()
    flags: set[str] = set()
    for action in parser._actions:
        if action.nargs == 0:
            flags.update(option.removeprefix("--") for option in action.option_strings)
    of_accelerate = [*launch_words(words.launch, flags), *words.of_accelerate]
    if config:
        of_accelerate = ["--config_file", config, *of_accelerate]
    training = ["-m", "opo_trl.command.process", *words.of_training]
    options = parser.parse_args([*of_accelerate, *training])
    if words.options.plan:
        from .planning import plan_if_elsewhere
        from .recipe import read

        plan = plan_if_elsewhere(words.of_training, read(argv).values, options.num_processes)
        if plan is not None:
            print(plan)
            return 0
    # accelerate's warning about options that are not set is not shown: a run's plan says how many processes there are,
    # and how they share the model.
    accelerate.logger.addFilter(lambda record: "had defaults used instead" not in record.getMessage())
    accelerate.simple_launcher = partial(_start_processes, accelerate.simple_launcher, accelerate.multi_gpu_launcher)
    _pass_on_signals()
    try:
        accelerate.launch_command(options)
    except subprocess.CalledProcessError as error:
        code = error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    else:
        return 0
    if code >= 0:  # the process has said why
        return code
    print(
        f"opo-trl train: error: a training process was ended by {signal.Signals(-code).name}. "
        "Continue with `--resume_from_checkpoint auto`.",
        file=sys.stderr,
    )
    return 128 - code  # as in a shell


def _start_processes(alone: Callable, together: Callable, options: Any) -> None:
    """
    Start as many processes as are asked for, where accelerate would start one: on a CPU, and with a configuration for
    one GPU. `alone` and `together` are accelerate's functions that start one process, and several by PyTorch's
    launcher.
    """
    if options.mpirun_hostfile is None and (options.num_processes or 1) > 1:
        os.environ["ACCELERATE_USE_CPU"] = str(options.cpu or options.use_cpu)
        together(options)
    else:
        alone(options)


def _pass_on_signals() -> None:
    """Pass SIGTERM and Ctrl-C on to the processes that this one starts, and let them end by themselves."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        """
        Send a signal to the processes that were started; without any, exit as the signal would have ended this one.
        """
        if not (started := psutil.Process().children()):
            sys.exit(128 + number)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"  # PyTorch's launcher would kill them after 30 seconds
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
