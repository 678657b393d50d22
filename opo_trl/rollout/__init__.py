"""From TRL's generation to micro-batches, and back after a kill."""
