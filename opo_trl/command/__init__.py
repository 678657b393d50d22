"""From a command line to a trainer: recipe, data, rewards, checks, signals, and the folder of a run."""
