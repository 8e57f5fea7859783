"""A large split encoded part by part, by several processes; a killed run continues where it was.

A part is some MB of consecutive rows. Its tokens go to a file of the token cache as soon as they
are complete, and parts are joined in their order: tokens, targets and fingerprint do not depend on
the number of processes, which resuming and caching rely on. The processes are programs of their own
(`work`): rendering and collecting hold Python's lock, so that threads would wait.
"""

import os
import pickle
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIG_IGN, SIGINT, Signals, signal
from typing import IO, Any, NamedTuple

from ..cache import read_arrays, write_arrays
from ..config.data import DataConfig
from ..errors import PackError
from .encoding import Encoder, EncodingOptions, Examples
from .formats import TOKEN_FORMATS
from .sources import Rows

PART_BYTES = 4 << 20  # of text; a few seconds of encoding
SUFFIX = ".part.npy"
MOST_PROCESSES = 8  # by default; each has about 160 MB
_LEAST_PARTS = 2  # of a process, which takes some seconds to start
# Without the current folder on the path, whose files may be called as modules.
_CODE = (
    f"import sys; sys.path = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
    "from mlx_packs.data.encoding_parts import work; work()"
)
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


class Part(NamedTuple):
    file: Path
    key: str
    start: int
    stop: int


@dataclass(frozen=True)
class EncodingJob:
    """What a process must know to encode any part of a split: the arguments of `Encoder`."""

    rows: Rows
    tokenizer: Any
    columns: DataConfig
    options: EncodingOptions
    format: str  # the name of the rows' format
    first: str  # the place of a row of it

    def encoder(self, is_part: bool = False) -> Encoder:
        formats = {each.name: each for each in TOKEN_FORMATS}
        args = self.rows, self.tokenizer, self.columns, self.options, formats[self.format]
        return Encoder(*args, self.first, is_part)

    def encode(self, part: Part) -> None:
        """Write the file of a part, unless it has an error."""
        encoder = self.encoder(is_part=True)
        with suppress(PackError, OSError):  # who joins the parts encodes it again, and raises it
            encoder.encode(part.start, part.stop)
            write_arrays(part.file, part.key, encoder.part())


def part_count(rows: Rows) -> int:
    return max(1, min(len(rows), round(rows.nbytes() / PART_BYTES)))


def parts_of(rows: Rows, folder: Path, key: str) -> list[Part]:
    """Return the parts of a split, the same each time; ``key`` is the key of its tokens."""
    count = part_count(rows)
    edges = [len(rows) * i // count for i in range(count + 1)]
    return [
        Part(folder / f"{key}-{i:05d}{SUFFIX}", f"{key} {start}:{stop}", start, stop)
        for i, (start, stop) in enumerate(zip(edges, edges[1:], strict=False))
    ]


def default_processes() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_PROCESSES)


def process_count(rows: Rows, parts: int, num_proc: int | None) -> int:
    """Return how many processes encode ``parts`` parts; 1 is this process."""
    if not rows.is_in_files():
        return 1
    wanted = default_processes() if num_proc is None else num_proc
    return min(wanted, max(1, parts // _LEAST_PARTS))


def encode_parts(
    job: EncodingJob, parts: list[Part], num_proc: int | None, advance: Callable[[], None]
) -> Examples:
    """Return the examples of all parts; a part whose file is missing is encoded.

    ``num_proc`` limits the processes (None: `default_processes`); ``advance`` is called after each
    part. A row that cannot be used, or a process that was killed, is a PackError.
    """
    missing = [part for part in parts if not part.file.exists()]
    encoder = job.encoder()

    with _encoding(job, missing, process_count(job.rows, len(missing), num_proc)) as futures:
        for part in parts:
            if part in futures:
                futures[part].result()
            elif part in missing:
                job.encode(part)

            if (arrays := read_arrays(part.file, part.key)) is not None:
                encoder.add_part(arrays)
            else:  # it has an error, or its file cannot be written or is damaged
                encoder.encode(part.start, part.stop)
            advance()

    return encoder.examples()


@contextmanager
def _encoding(job: EncodingJob, parts: list[Part], count: int) -> Iterator[dict[Part, Future]]:
    """Encode parts in ``count`` processes, and yield their futures; one process has none."""
    if count == 1:
        yield {}
        return

    stored = pickle.dumps(job)
    workers: list[_Worker] = []
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def encode(part: Part) -> None:
        worker = idle.get()
        try:
            worker.encode(part)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(count, "encoding") as threads:
        try:
            for _ in range(count):
                workers.append(_Worker(stored))
                idle.put(workers[-1])
            yield {part: threads.submit(encode, part) for part in parts}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.end()


class _Worker:
    def __init__(self, job: bytes) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ONE_THREAD},
        )
        self._job: bytes | None = job

    def encode(self, part: Part) -> None:
        """Wait until the process has encoded a part; a PackError if it has ended."""
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None and stdout is not None

        with suppress(BrokenPipeError):
            if self._job is not None:
                stdin.write(self._job)
                self._job = None
            stdin.write(pickle.dumps(part))
            stdin.flush()

        if not stdout.read(1):
            raise self._ended()

    def _ended(self) -> PackError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        reason = f"by {Signals(-code).name}" if code < 0 else f"with code {code}: {last:.200}"
        return PackError(
            f"--num-proc: a process that tokenizes ended {reason}. Start again, with a smaller "
            "--num-proc if memory was short; what is done is not tokenized again.",
            "interrupted",
        )

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):  # what was not sent is not needed
                if pipe is not None:
                    pipe.close()


def work() -> None:
    """Encode the parts that stdin has after the job, and write a byte to stdout after each.

    The process ends with its stdin, and so with the process that started it.
    """
    signal(SIGINT, SIG_IGN)  # Ctrl-C is for who started it
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
