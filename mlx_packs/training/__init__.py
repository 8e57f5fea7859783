"""One run: its setup, phases, loop, steps and checkpoints; tasks and observers plug in."""
