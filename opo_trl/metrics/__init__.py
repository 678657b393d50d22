"""What is measured in a step, the bounds of what is healthy, and the plan of a run."""
