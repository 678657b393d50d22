"""From a command line to a trainer: recipe, preflight, signals, and runs side by side."""
