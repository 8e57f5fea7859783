"""The program of a sandbox: it reads calls from stdin, and writes their results to stdout.

A call is a pickle of the process that started this one. A result is JSON and bytes, so that nothing
that a stranger wrote is unpickled there.
"""

import importlib
import json
import math
import os
import pickle
import resource
import signal
import struct
import sys
import time
from typing import BinaryIO

HEADER = struct.Struct("<QQ")  # the lengths of the JSON and of the bytes behind it
_PAGE_BYTES = resource.getpagesize()
_REASON_CHARACTERS = 600


def main(library: str) -> None:
    """Serve the functions of one module of this package, until stdin ends.

    Args:
        library: The name of the module, which is imported before the first call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    calls = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # nothing that a library prints, or the panic of one in Rust, may reach the pipes
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)

    functions = importlib.import_module(f".{library}", __package__)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    while True:
        try:
            name, arguments, cpu_s, memory_bytes = pickle.load(calls)
        except EOFError:
            return

        _limit(cpu_s, memory_bytes)
        _reply(replies, functions, name, arguments)
        _set_soft_limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)  # to read the next call


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """Let the kernel end this process beyond the limits of a call; macOS ignores that of memory.

    The process that waits for the result watches both as well. This limit holds if it is killed.
    """
    end = math.ceil(time.process_time() + cpu_s) + 1
    _set_soft_limit(resource.RLIMIT_CPU, end)

    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * _PAGE_BYTES
        _set_soft_limit(resource.RLIMIT_AS, used + memory_bytes)


def _set_soft_limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and (limit == resource.RLIM_INFINITY or limit > hard):
        limit = hard
    resource.setrlimit(kind, (limit, hard))


def _reply(replies: BinaryIO, functions: object, name: str, arguments: tuple) -> None:
    content = b""
    try:
        result = getattr(functions, name)(*arguments)
        if isinstance(result, tuple):
            result, content = result
        text = json.dumps({"result": result}).encode()
    except BaseException as error:  # the panic of a library in Rust is no Exception
        reason = " ".join(str(error)[:_REASON_CHARACTERS].split())
        text = json.dumps({"error": type(error).__name__, "reason": reason}).encode()
        content = b""

    replies.write(HEADER.pack(len(text), len(content)))
    replies.write(text)
    replies.write(content)
    replies.flush()
