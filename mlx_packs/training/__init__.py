"""One training run: setup, phases, loop, steps, checkpoints and observers; tasks plug in."""
