"""Processes that are forked: MLX works if it was not used before, and NumPy always."""

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


def test_a_fork_before_mlx_was_used_computes():
    code = FORK + "print(forked(compute), forked(compute), compute(), sep='; ')"
    assert run_python(code) == "262144.0; 262144.0; 262144.0"


def test_workers_by_fork_read_data_with_numpy_after_mlx_was_used():
    code = (
        FORK
        + """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def by_numpy(i):  # what a worker of a DataLoader does
    return int(np.arange(i).sum())

compute()
print(forked(lambda: by_numpy(4)))
with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
    print(list(pool.map(by_numpy, range(4))))
"""
    )
    assert run_python(code).splitlines() == ["6", "[0, 0, 1, 3]"]
