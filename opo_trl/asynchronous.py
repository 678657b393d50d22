"""The place of asynchronous training, which waits for a port."""

from . import WAITS_FOR_A_PORT


raise ImportError(f"{__name__} {WAITS_FOR_A_PORT}")
