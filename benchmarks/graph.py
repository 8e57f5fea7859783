"""Primitives, bytes and predicted seconds of training on Apple GPUs, from lazy graphs.

`apple_gpu` builds the graph of the step and the batches that an Apple GPU would get, and evaluates
nothing. No Mac is timed.

    python -m benchmarks graph                   # steps, and batches of one epoch
    python -m benchmarks graph steps --model qwen3-4b --batch 4 --length 512 --supervised 0.3
"""

from .apple_gpu.command import main as main
