"""Quantize a checkpoint of random bf16 weights: ours against `mlx_lm.convert -q`, in turns.

Every run is a program of its own, so its time has imports in it and its peak is that of a process.

    python -m benchmarks.quantize --blocks 14
"""

import argparse
import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.runtime import mx
from mlx_packs.tensors import write_tensors

from . import history, report
from .history import Environment, Record, percentiles

BASELINE = "mlx_lm.convert -q"
PACKS = [sys.executable, "-m", "mlx_packs", "quantize"]
# implementation -> command; {model} and {out} are filled in
COMMANDS = {
    BASELINE: [
        sys.executable,
        "-m",
        "mlx_lm",
        "convert",
        "-q",
        "--hf-path",
        "{model}",
        "--mlx-path",
        "{out}",
    ],
    "packs quantize --mode affine": [
        *PACKS,
        "--mode",
        "affine",
        "--model",
        "{model}",
        "--out",
        "{out}",
    ],
    "packs quantize --mode nf4": [*PACKS, "--mode", "nf4", "--model", "{model}", "--out", "{out}"],
}
# Linux counts the peak of the program that starts another as the other's; this one is small.
START = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_dense(out: Path, blocks: int, seed: int) -> float:
    """A checkpoint with so many blocks of Qwen3-1.7B and its table, in bf16; gives its GB."""
    from mlx_lm.models import qwen3

    config = {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": blocks,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    shapes = {name: tensor.shape for name, tensor in tree_flatten(model.parameters())}
    outline = {name: mx.zeros(shape, mx.bfloat16) for name, shape in shapes.items()}

    def drawn() -> Iterator[tuple[str, mx.array]]:
        mx.random.seed(seed)
        for name, shape in shapes.items():
            yield name, mx.random.normal(shape, mx.bfloat16, scale=0.02)
            mx.clear_cache()

    out.mkdir(parents=True)
    write_tensors(out / "model.safetensors", outline, drawn())
    (out / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(tiny_checkpoint() / name, out / name)
    return (out / "model.safetensors").stat().st_size / 1e9


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds and peak MB of a program. Raises: CalledProcessError if it fails."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", START, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    seconds = time.perf_counter() - start
    return seconds, int(ran.stdout) * (1 if sys.platform == "darwin" else 1024) / 1e6


def race(model: Path, workload: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and peak MB of each implementation, forth and back ``rounds`` times."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for turn in range(2 * rounds):
        for name in list(COMMANDS)[:: 1 if turn % 2 == 0 else -1]:
            print(f"turn {turn + 1} of {2 * rounds}: {name}", file=sys.stderr)
            out = workload / "out"
            filled = [part.format(model=model, out=out) for part in COMMANDS[name]]
            results[name].append(timed(filled))
            shutil.rmtree(out)
    return results


def records(results: dict[str, list[tuple[float, float]]], shape: str) -> list[Record]:
    here = dataclasses.asdict(Environment.here())
    base = percentiles([seconds for seconds, _ in results[BASELINE]])["p50"]
    new_records = []
    for name, runs in results.items():
        spread = percentiles([seconds for seconds, _ in runs])
        new_records.append(
            Record(
                task="quantize a checkpoint",
                implementation=name,
                shape=shape,
                dtype="bfloat16",
                metric="run",
                unit="s",
                **spread,
                samples=len(runs),
                baseline=BASELINE,
                ratio=float(f"{base / spread['p50']:.4g}"),
                peak_mb=float(f"{max(peak for _, peak in runs):.4g}"),
                blas="none",
                blas_threads=None,
                note="A process of its own, imports included; peak_mb is that of the process.",
                **here,
            )
        )
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quantize", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--blocks", type=int, default=14, help="of Qwen3-1.7B; 14 are 2 GB [14]")
    parser.add_argument("--rounds", type=int, default=2, help="forth and back [2]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", type=Path, help="where the checkpoints lie for a while")
    parser.add_argument(
        "--history",
        type=Path,
        default=history.HISTORY,
        metavar="FILE",
        help="where records are appended [benchmarks/history.jsonl]",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.workload) as folder:
        size = write_dense(Path(folder) / "dense", options.blocks, options.seed)
        results = race(Path(folder) / "dense", Path(folder), options.rounds)
    new_records = records(
        results, f"{size:.2f} GB, {options.blocks} blocks of Qwen3-1.7B and its table"
    )
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
