"""What a run will do and take, before it starts: the plan that a trainer prints, and its peak memory."""
