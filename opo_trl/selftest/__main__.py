"""
Started by `opo-trl selftest`, in an environment without cluster and GPUs.

    python -m opo_trl.selftest             # status 1 if anything is wrong
    python -m opo_trl.selftest FOLDER      # the run that kills itself, with the model in this folder
"""

import sys


try:
    from . import runs
except ImportError as error:  # the contract is checked by an import
    print(f"WRONG  names and parameters: {error}")
    sys.exit(1)

if sys.argv[1:]:
    runs.six_steps(sys.argv[1], "killed", runs.Kill()).train()
sys.exit(runs.main())
