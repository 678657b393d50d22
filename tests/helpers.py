"""All names of the parts by use, for scripts outside of the tests; tests import from the parts."""

from device_fields import *  # noqa: F403
from float64_reference import *  # noqa: F403
from named_tensors import *  # noqa: F403
from recording_trainers import *  # noqa: F403
from scripted_rollouts import *  # noqa: F403
from started_programs import *  # noqa: F403
