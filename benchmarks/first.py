"""From the start of a command to its first token or batch, beside mlx-lm and llama.cpp.

Each command is a process of its own on files that the system has read before, and ends with its first
answer. Ours read the GGUF file, llama.cpp too, by its Python package. mlx-lm reads the bundled model as
it is. Of others it gets float32 weights, and our BLAS: as it comes, a CPU would compute for minutes.

    python -m benchmarks first --model SmolLM2.gguf --llama-python venv/bin/python
"""

import argparse
import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_packs.bases.files import TINY, resolve_checkpoint
from mlx_packs.errors import PackError

from . import alone, history, report
from .history import Environment, Record, percentiles, record
from .real import jobs
from .serve import free_port

OURS, MLX_LM, LLAMA = "mlx_packs", "mlx-lm", "llama.cpp"
_PROMPT = "Name a colour."
_SECONDS = 300
_WITH_BLAS = "import mlx_packs.runtime; from mlx_lm.cli import main; main()"
_CLASSIFY = ["--task=classify", "--data=labels-data"]
_LLAMA = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, verbose=False)
message = {"role": "user", "content": sys.argv[2]}
print(model.create_chat_completion([message], max_tokens=1)["choices"][0]["message"]["content"])
"""


@dataclass(frozen=True)
class Start:
    """A command, and what shows that it has answered; without that, its end does."""

    command: list[str]
    stdin: str = ""
    answered: Callable[[bytes], bool] | None = None  # by what it printed so far


def _port_answers(port: int, model: str) -> Callable[[bytes], bool]:
    body = {"messages": [{"role": "user", "content": _PROMPT}], "max_tokens": 1, "model": model}

    def answered(_: bytes) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
        try:
            connection.request(
                "POST",
                "/v1/chat/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            return connection.getresponse().status == 200
        except ConnectionError:
            return False
        finally:
            connection.close()

    return answered


def starts(model: str, work: Path, llama_python: str | None) -> dict[tuple[str, str], Start]:
    """Return the commands by what they do and whose they are."""
    data, labels = str(work / "data"), "labels"
    metrics = work / "pack-run" / "metrics.jsonl"
    packs = [sys.executable, "-m", "mlx_packs"]
    mlx_lm, folder = [sys.executable, "-m", "mlx_lm"], str(resolve_checkpoint(model))
    if model != TINY:
        mlx_lm, folder = [sys.executable, "-c", _WITH_BLAS], str(work / "dense")
    ours_port, peer_port = free_port(), free_port()
    one = ["--max-tokens", "1"]
    sizes = ["--iters", "1", "--batch-size", "4"]

    def has_batch(_: bytes) -> bool:
        return metrics.exists() and metrics.stat().st_size > 0

    result = {
        ("generate", OURS): Start(
            [*packs, "generate", "--model", model, "--prompt", _PROMPT, *one]
        ),
        ("generate", MLX_LM): Start(
            [*mlx_lm, "generate", "--model", folder, "--prompt", _PROMPT, *one]
        ),
        ("chat", OURS): Start([*packs, "chat", "--model", model, *one], f"{_PROMPT}\n"),
        ("chat", MLX_LM): Start([*mlx_lm, "chat", "--model", folder, *one], f"{_PROMPT}\nq\n"),
        ("train", OURS): Start(
            [*packs, "train", "--model", model, "--data", data, "--out", str(work / "pack")]
            + [*sizes, "--steps-per-report", "1", "--overwrite"],
            answered=has_batch,
        ),
        ("train", MLX_LM): Start(
            [*mlx_lm, "lora", "--model", folder, "--train", "--data", data, *sizes]
            + ["--num-layers", "-1", "--val-batches", "1", "--steps-per-report", "1"]
            + ["--adapter-path", str(work / "adapter")],
            answered=lambda printed: b"Train loss" in printed,
        ),
        ("eval", OURS): Start([*packs, "eval", "tuned", "--data", data, "--split", "test"]),
        ("eval", MLX_LM): Start(
            [*mlx_lm, "lora", "--model", folder, "--test", "--data", data, "--adapter-path", ""]
        ),
        ("classify", OURS): Start([*packs, "classify", labels], f"{_PROMPT}\n"),
        ("serve", OURS): Start(
            [*packs, "serve", "--model", model, "--port", str(ours_port), "--no-key"],
            answered=_port_answers(ours_port, "base"),
        ),
        ("serve", MLX_LM): Start(
            [*mlx_lm, "server", "--model", folder, "--port", str(peer_port)],
            answered=_port_answers(peer_port, folder),
        ),
    }
    if llama_python and model != TINY:
        result["generate", LLAMA] = Start([llama_python, "-c", _LLAMA, model, _PROMPT])
    return result


def prepare(model: str, work: Path) -> None:
    """Write examples and float32 weights, and train a pack and a classifier for a batch."""
    if model != TINY:
        jobs.write_dense(Path(model), work / "dense")
    rows = [
        {
            "prompt": f"What is {n} plus {n}? Answer in one sentence, please.",
            "completion": f"{n} plus {n} is {2 * n}, since twice {n} is {2 * n}.",
        }
        for n in range(16)
    ]
    labels = [{"text": row["prompt"], "label": str(n % 2)} for n, row in enumerate(rows)]
    for name, examples in (("data", rows), ("labels-data", labels)):
        (work / name).mkdir()
        for split in ("train", "valid", "test"):
            lines = [json.dumps(row) + "\n" for row in examples]
            (work / name / f"{split}.jsonl").write_text("".join(lines))

    for out, settings in (("tuned", ["--data=data"]), ("labels", _CLASSIFY)):
        command = ["-m", "mlx_packs", "train", f"--model={model}", f"--out={out}", "--iters=1"]
        command = [sys.executable, *command, *settings]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise alone.Failed(done.stderr[-2000:])


def timed(start: Start, work: Path) -> tuple[float, float]:
    """Run a command to its first answer; return wall and CPU seconds.

    Raises:
        alone.Failed: it ends with an error, or does not answer.
    """
    for old in (work / "pack-run").glob("metrics.jsonl"):
        old.unlink()
    cpu_before = _cpu_of_children()
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(start.stdin.encode())
        while process.poll() is None and time.perf_counter() - begun < _SECONDS:
            if start.answered and start.answered(os.pread(output.fileno(), 1 << 20, 0)):
                break
            time.sleep(0.005)

        seconds = time.perf_counter() - begun
        has_failed = process.poll() not in (None, 0) or seconds > _SECONDS
        process.kill()
        process.wait()
        if has_failed:
            text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
            raise alone.Failed(f"{' '.join(start.command[2:])}: {text[-2000:]}")
    return seconds, _cpu_of_children() - cpu_before


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(options: argparse.Namespace) -> list[Record]:
    """Time all commands, alternating. Raises: alone.Failed, PackError."""
    here = Environment.here()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(options.model, work)
        commands = starts(options.model, work, options.llama_python)
        samples: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):  # the first fills the caches of the system
            for name in list(commands)[:: 1 if turn % 2 == 0 else -1]:
                print(f"round {turn}: {' '.join(name)}", file=sys.stderr)
                seconds = timed(commands[name], work)
                if turn:
                    samples[name].append(seconds)

    return _records(here, samples, Path(options.model).name)


def _records(
    here: Environment, samples: dict[tuple[str, str], list[tuple[float, float]]], model: str
) -> list[Record]:
    peers = {
        command: percentiles([seconds for seconds, _ in times])["p50"]
        for (command, name), times in samples.items()
        if name == MLX_LM
    }

    task = f"first answer {model}"
    records = []
    for (command, name), times in samples.items():
        seconds, cpu = zip(*times, strict=True)
        ratio = peers[command] / percentiles(seconds)["p50"] if command in peers else None
        about = {"baseline": MLX_LM, "stock_blas": name == MLX_LM and model == TINY}
        records += [
            record(here, task, name, command, "time", "s", seconds, ratio=ratio, **about),
            record(here, task, name, command, "CPU time", "s", cpu, **about),
        ]
    return [
        replace(r, blas="none", blas_threads=None) if r.implementation == LLAMA else r
        for r in records
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks first", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="GGUF file or checkpoint folder [tiny]")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    history.add_option(parser)

    options = parser.parse_args(arguments)
    try:
        records = run(options)
    except (alone.Failed, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    history.append(records, options.history)
    print(report.render(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
