"""One trajectory, any execution: the same run in different forms, as equivalence classes."""
