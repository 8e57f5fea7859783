"""`packs serve` against `mlx_lm.server`: one adapter, one or many requests at once, and adapters that alternate.

Both are processes of their own on the same base in float32, with the same BLAS and the same packs, and
are measured alternating by the same requests. Before that, both must answer alike. With --url, a
server of the OpenAI API that runs already is measured instead.

    python -m benchmarks serve
    python -m benchmarks serve --url http://127.0.0.1:8080
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mlx_packs.bases.files import TINY, resolve_checkpoint, weight_files
from mlx_packs.errors import PackError
from mlx_packs.runtime import mx

from . import history, report
from .generate import TextsDiffer, write_pack
from .history import Environment, Record, percentiles, record
from .server_load import Load, Target, run_load

OURS, QUANTIZED, PEER = "packs serve", "packs serve quantized", "mlx_lm.server, same BLAS"
NAMES = ("a", "b", "c")
ONE, MANY, ALTERNATING, BASE_TOO = (
    "one pack, 1 at once",
    "one pack, 16 at once",
    "3 packs alternating, 16 at once",
    "3 packs and the base alternating, 16 at once",
)
SECONDS = 120
_PEER_PROGRAM = "import mlx_packs.runtime; from mlx_lm.server import main; main()"


def float32_copy(source: Path, folder: Path) -> Path:
    """A copy of a quantized checkpoint whose scales and norms are float32, as ours are on a CPU."""
    shutil.copytree(source, folder)
    for file in weight_files(folder):
        tensors = mx.load(str(file))
        wide = {
            n: t.astype(mx.float32) if t.dtype == mx.bfloat16 else t for n, t in tensors.items()
        }
        mx.eval(wide)
        mx.save_safetensors(str(file), wide, {"format": "mlx"})
    return folder


@contextmanager
def process(command: list[str], port: int, cache: Path) -> Iterator[None]:
    """A server, from when it answers to the end of the block.

    ``cache`` is a folder for the Hub's: mlx_lm.server lists no models without one.
    """
    log = tempfile.TemporaryFile()
    environment = {**os.environ, "HF_HUB_CACHE": str(cache)}
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        until = time.monotonic() + SECONDS
        while True:
            try:
                Target(f"http://127.0.0.1:{port}", seconds=5).models()
                break
            except PackError:
                if server.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(log.read().decode()[-2000:]) from None
                time.sleep(0.2)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def answer(target: Target, model: str) -> str:
    """The greedy answer to a question."""
    messages = [{"role": "user", "content": "What is a list, and what is it for?"}]
    body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
    connection = target.connect()
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, **target.extra(model)}),
        target.headers,
    )
    content = json.loads(connection.getresponse().read())
    connection.close()
    return content["choices"][0]["message"]["content"]


def workloads(options: argparse.Namespace, turn: int, own: bool) -> dict[str, Load]:
    """What is measured; prompts differ from turn to turn."""

    def load(models: tuple[str, ...], at_once: int, requests: int) -> Load:
        return Load(models, at_once, requests, 16, options.tokens, seed=turn)

    loads = {
        ONE: load(NAMES[:1], 1, options.requests // 4),
        MANY: load(NAMES[:1], 16, options.requests),
        ALTERNATING: load(NAMES, 16, options.requests if own else options.requests // 2),
    }
    return loads | ({BASE_TOO: load((*NAMES, "base"), 16, options.requests)} if own else {})


def run(options: argparse.Namespace) -> list[Record]:
    """Start all servers, compare answers, measure. Raises: TextsDiffer, PackError."""
    results: dict[tuple[str, str], list[dict]] = {}
    with ExitStack() as stack:
        workplace = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        packs = {
            name: write_pack(options.model, workplace / "packs" / name, seed)
            for seed, name in enumerate(NAMES)
        }
        base = float32_copy(resolve_checkpoint(options.model), workplace / "base")
        (cache := workplace / "hub").mkdir()
        targets = {}
        for name in (OURS, QUANTIZED, PEER):
            port = free_port()
            command = [sys.executable, "-m", "mlx_packs", "serve", "--model", options.model]
            command += ["--packs", str(workplace / "packs"), "--port", str(port)]
            extra = {}
            if name == QUANTIZED:
                command += ["--matmul-path", "quantized"]
            if name == PEER:
                command = [sys.executable, "-c", _PEER_PROGRAM, "--model", str(base)]
                command += ["--port", str(port), "--log-level", "ERROR"]
                extra = {"model": str(base)}
            stack.enter_context(process(command, port, cache))

            def body_of(model: str, extra: dict = extra) -> dict:
                return {**extra, "adapters": str(packs[model])} if extra else {}

            targets[name] = Target(f"http://127.0.0.1:{port}", extra=body_of)
        for model in NAMES:
            texts = {name: answer(target, model) for name, target in targets.items()}
            if len(set(texts.values())) > 1:
                raise TextsDiffer(f"with pack {model} the answers differ: {texts}")
        for turn in range(options.rounds):
            for name in list(targets)[:: 1 if turn % 2 == 0 else -1]:
                for workload, load in workloads(options, turn, name != PEER).items():
                    print(f"round {turn + 1}: {name}, {workload}", file=sys.stderr)
                    result = run_load(targets[name], load)
                    if result["errors"] and name != PEER:
                        raise RuntimeError(f"{name}, {workload}: {result['errors']}")
                    results.setdefault((name, workload), []).append(result)
    return records(results, options)


def records(
    results: dict[tuple[str, str], list[dict]], options: argparse.Namespace
) -> list[Record]:
    """Tokens a second and the time to the first token, each as a ratio to the peer's."""
    here = Environment.here()
    lines = []
    for (name, workload), runs in results.items():
        rates = [run["tokens_per_s"] for run in runs]
        peer = results.get((PEER, workload))
        ratio = None
        if peer:
            ratio = (
                percentiles(rates)["p50"] / percentiles([r["tokens_per_s"] for r in peer])["p50"]
            )
        lost = sum(sum(run["errors"].values()) for run in runs)
        note = f"{lost} requests failed" if lost else ""
        about = {"baseline": PEER if peer else "", "dtype": "float32", "note": note}
        task = f"serve {Path(options.model).name}"
        shape = f"{workload}, {options.tokens} tokens of answer"
        lines.append(
            record(here, task, name, shape, "generated", "tokens/s", rates, ratio=ratio, **about)
        )
        first = [run["first_token_ms"]["p50"] for run in runs]
        lines.append(record(here, task, name, shape, "first token", "ms", first, **about))
    return lines


def measure_running(options: argparse.Namespace) -> int:
    """Print the results of a running server: one model and up to four, 1 and 16 requests at once.

    Returns 1 if a request failed. The key is that of ``MLX_PACKS_API_KEY``.
    """
    target = Target(options.url, os.environ.get("MLX_PACKS_API_KEY", ""))
    models = tuple(target.models()[:4])
    failed = 0
    for at_once in (1, 16):
        for turn, mix in enumerate(dict.fromkeys((models[-1:], models))):
            run_load(target, Load(mix, 4, 4, 32, 4, seed=-1))
            load = Load(mix, at_once, options.requests, 32, options.tokens, seed=turn)
            result = run_load(target, load)
            print(json.dumps(result))
            failed += sum(result["errors"].values())
    return min(failed, 1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks serve", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder, quantized [tiny]")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer [32]")
    parser.add_argument("--requests", type=int, default=64, help="of each workload [64]")
    parser.add_argument("--rounds", type=int, default=4, help="of all workloads [4]")
    parser.add_argument("--url", help="measure the server that runs there, and record nothing")
    history.add_option(parser)
    options = parser.parse_args(arguments)
    try:
        if options.url:
            return measure_running(options)
        new_records = run(options)
    except (TextsDiffer, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, TextsDiffer) else 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
