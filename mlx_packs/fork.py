"""Processes that `os.fork` creates after MLX was used, which lack MLX's threads.

Computation there would wait for the threads forever, so MLX's functions raise an error. What needs
no MLX works: workers that read data with NumPy, or a program that is started. A process that is
forked before anything was computed starts threads of its own, and is left alone.
"""

import os

import mlx.core as mx

_MESSAGE = (
    "MLX cannot compute in a process that os.fork() made after MLX was used: its threads are "
    "missing there. Start processes by spawn: multiprocessing.get_context('spawn'), "
    "DataLoader(..., multiprocessing_context='spawn')."
)
_READ_ONLY = ("get_", "set_", "default_", "device_", "is_", "reset_", "__")
_OF_ARRAYS = (  # beside the public methods: those that create an array, or read a number out of one
    "add sub mul truediv floordiv mod pow matmul neg abs invert and or xor lshift rshift eq ne lt "
    "le gt ge getitem setitem iter bool int float complex index repr str format array dlpack copy "
    "deepcopy"
).split()

_used_before_fork = False
_in_fork = False


def in_fork() -> bool:
    """Return whether this process was forked from one that had used MLX."""
    return _in_fork


def was_used() -> bool:
    """Return whether MLX has allocated arrays in this process."""
    return bool(mx.get_peak_memory() or mx.get_active_memory() or mx.get_cache_memory())


def guard() -> None:
    """Let MLX's functions raise a RuntimeError in processes that are forked after MLX was used."""
    os.register_at_fork(before=_before, after_in_child=_after_in_child)


def _before() -> None:
    global _used_before_fork
    _used_before_fork = _in_fork or was_used()


def _after_in_child() -> None:
    global _in_fork
    if not _used_before_fork or _in_fork:
        return

    _in_fork = True
    for module in (mx, mx.fast, mx.fft, mx.linalg, mx.random):
        for name, value in vars(module).items():
            if type(value).__name__ == "nb_func" and not name.startswith(_READ_ONLY):
                setattr(module, name, _rejected)

    for name in vars(mx.array):
        operator = name.strip("_").removeprefix("r").removeprefix("i")
        special = {name.strip("_"), operator} & set(_OF_ARRAYS)
        if special or (not name.startswith("_") and callable(getattr(mx.array, name))):
            setattr(mx.array, name, _rejected)


def _rejected(*args: object, **kwargs: object) -> None:
    raise RuntimeError(_MESSAGE)
