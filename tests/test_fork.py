"""Processes that are forked: an error in place of a hang, and nothing in the way of the rest."""

import sys

import pytest

from tests.helpers.interpreter import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
FORK = """
import os, sys, numpy as np
from mlx_packs.runtime import mx

def forked(work):
    "What a child prints, or the error that it ends with."
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        sys.exit(7)  # exit handlers run
    os.close(write)
    text = os.read(read, 10_000).decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    return text

def compute():
    return (mx.ones((64, 64)) @ mx.ones((64, 64))).sum().item()
"""
WITH_ERROR = "RuntimeError: MLX cannot compute in a process that os.fork() made"


def test_a_fork_before_mlx_was_used_computes():
    code = FORK + "print(forked(compute), forked(compute), compute(), sep='; ')"
    assert run_python(code) == "262144.0; 262144.0; 262144.0"


def test_a_fork_after_mlx_was_used_is_an_error_that_names_spawn():
    code = (
        FORK
        + """
compute()
done = mx.arange(3) + 1
mx.eval(done)
lazy = done + 1
works = [
    compute, lambda: mx.eval(lazy), lambda: lazy.item(), lambda: lazy.tolist(), lambda: repr(lazy),
    lambda: f"{lazy}", lambda: lazy + 1, lambda: 2 - lazy, lambda: -lazy, lambda: lazy == 1,
    lambda: bool(lazy[0]), lambda: list(lazy), lambda: float(lazy), lambda: mx.synchronize(),
    lambda: mx.random.normal((2,)), lambda: mx.fast.rms_norm(done, None, 1e-5),
    lambda: mx.async_eval(lazy), lambda: mx.save_safetensors("/nowhere/x", {"a": lazy}),
]

def errors():
    "The errors of all of them, in one process."
    for work in works:
        try:
            yield f"no error: {work()}"
        except BaseException as error:
            yield f"{type(error).__name__}: {error}"

print(forked(lambda: "; ".join(set(errors()))))
print(forked(lambda: (np.array(done), done.shape)), compute())
"""
    )
    error, rest = run_python(code).splitlines()
    assert error.startswith(WITH_ERROR) and "spawn" in error and ";" not in error
    assert rest == "(array([1, 2, 3], dtype=int32), (3,)) 262144.0"


def test_multiprocessing_by_fork_says_what_to_do_and_numpy_works():
    code = (
        FORK
        + """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def by_numpy(i):  # what a worker of a DataLoader does
    return int(np.arange(i).sum())

def by_mlx(i):
    return mx.arange(i).sum().item()

compute()
with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
    print(list(pool.map(by_numpy, range(4))))
    try:
        print(list(pool.map(by_mlx, range(4))))
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}")
"""
    )
    numbers, error = run_python(code).splitlines()
    assert numbers == "[0, 0, 1, 3]" and error.startswith(WITH_ERROR)


@pytest.mark.slow
def test_a_base_cannot_be_used_in_a_fork_but_loaded_in_one():
    code = (
        FORK
        + """
from mlx_packs.packs.base import load_base

print(forked(lambda: load_base("tiny").vocab_size))
base = load_base("tiny")
print(forked(lambda: base.model(mx.array([[1]]))))
"""
    )
    loaded, error = run_python(code).splitlines()
    assert loaded == "4096" and error.startswith(WITH_ERROR)
