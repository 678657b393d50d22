"""What a run goes on with after an end: checkpoints, skipped steps, interrupts, other numbers of processes."""
