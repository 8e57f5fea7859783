"""Runs `packs ARGS` in forked processes that can be killed: imports are paid for once.

A process that computed with MLX cannot be forked, so this one only imports it, without the BLAS,
whose binding is checked by a product. Requests and answers are JSON, one a line.
"""

import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALONE = {
    "MLX_PACKS_BLAS": "off",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}

UNUSED = ("mlx_packs.serving.", "mlx_packs.sweeps.", "mlx_packs.bench.")  # by the cases


@dataclass(frozen=True)
class Kill:
    """Where a process is killed: at a file operation (from 1), or after some seconds."""

    at: int = 0
    moment: str = "before"
    after_s: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None  # None if it was killed
    kinds: list[str]  # its file operations; empty if it was killed
    text: str  # what it printed
    seconds: float


class Server:
    """A process that forks one for each command."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.server"],
            cwd=ROOT,
            env={**os.environ, **ALONE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, args: list[str], folder: Path, kill: Kill | None = None, **options) -> Ended:
        """Run `packs ARGS` in a folder; ``options``: ``hub``, ``exchange``, ``largest_file``."""
        request = {"args": args, "folder": str(folder), "kill": asdict(kill or Kill()), **options}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _import_everything() -> None:
    """Import what the commands import while they run."""
    import mlx_packs
    from mlx_packs.bases.files import TINY, check_files, resolve_checkpoint
    from mlx_packs.bases.tokenizer import load_tokenizer
    from mlx_packs.tasks.sample_prompt import SamplePrompt

    for module in pkgutil.walk_packages(mlx_packs.__path__, "mlx_packs."):
        if not module.name.startswith(UNUSED) and not module.name.endswith("__main__"):
            import_module(module.name)
    for name in ("mlx_lm.models.qwen3", "transformers.models.bert.tokenization_bert"):
        import_module(name)
    folder = resolve_checkpoint(TINY)
    load_tokenizer(folder, check_files(folder), False)
    SamplePrompt.complete = lambda *_: ""


def _child(request: dict, log: int, report: int) -> int:
    """Run one command; return its exit code."""
    from huggingface_hub import constants

    from mlx_packs import filesystem
    from mlx_packs.cli.main import main
    from tests.crash.operations import Operations

    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    os.environ["MLX_PACKS_CACHE"] = str(Path("cache").absolute())

    if not request.get("exchange", True):
        filesystem.exchange = lambda *_: False
    if limit := request.get("largest_file"):  # stands for a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if url := request.get("hub"):
        constants.ENDPOINT, constants.HF_HUB_OFFLINE = url, False
        constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"

    kill = request["kill"]
    operations = Operations(kill["at"], kill["moment"]).watch()
    code = 0
    try:
        main(request["args"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 70

    sys.stdout.flush()
    sys.stderr.flush()
    os.write(report, json.dumps(operations.kinds).encode())
    return code


def _run(request: dict) -> dict:
    """Run a request; return the fields of `Ended`."""
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as report:
        answer = _ended(request, log.fileno(), report.fileno())
        for name, file in (("kinds", report), ("text", log)):
            file.seek(0)
            answer[name] = file.read().decode(errors="replace")
    return answer | {"kinds": json.loads(answer["kinds"] or "[]")}


def _ended(request: dict, log: int, report: int) -> dict:
    """Run a request in a process of its own; return how it ended and after which time."""
    start = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 71
        try:
            code = _child(request, log, report)
        finally:
            os._exit(code)

    killer = None
    if after_s := request["kill"]["after_s"]:
        killer = threading.Timer(after_s, os.kill, (process, signal.SIGKILL))
        killer.start()

    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    seconds = time.monotonic() - start
    if killer:
        killer.cancel()
        killer.join()
    return {"code": None if code == -signal.SIGKILL else code, "seconds": seconds}


def main() -> None:
    _import_everything()
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
