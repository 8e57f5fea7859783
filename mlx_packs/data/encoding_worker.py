"""The process that encodes parts of a split: it reads a job and parts from stdin.

After each part it writes a byte to stdout. It ends with its stdin, that is with the process that
started it.
"""

import os
import pickle
import signal
import sys

from .encoding_parts import EncodingJob


def main() -> None:
    """Encode the parts that come, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    done = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no reply
    source = sys.stdin.buffer
    job: EncodingJob = pickle.load(source)
    while True:
        try:
            part = pickle.load(source)
        except EOFError:
            return
        job.encode(part)
        done.write(b".")
