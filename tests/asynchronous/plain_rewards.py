"""Rewards, some of which fail, for the worker's own process; without imports, for processes of their own."""


def fine(completions, **named):
    return [float(i) for i, _ in enumerate(completions)]


def exits(completions, **named):
    raise SystemExit(0)


def scores_nothing(completions, **named):
    return [None] * len(completions)
