"""From a command line to a trainer: recipe, preflight, signals, and comparisons of runs."""
