"""Generating with a pack attached, against mlx-lm with the same adapter loaded, alternating.

All implementations must generate the same greedy text before a speed is printed.

    python -m benchmarks.generate
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import mlx_lm

from mlx_packs.adapters.attach import attach
from mlx_packs.bases.files import TINY, resolve_checkpoint
from mlx_packs.bench.implementations import Adapters
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.errors import PackError
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.nn.lora import factors_cast
from mlx_packs.packs.base import load_base
from mlx_packs.packs.making import attach_pack, pack_of
from mlx_packs.packs.pack import Pack
from mlx_packs.runtime import mx

from . import history, report, stock
from .history import Environment, Record, percentiles, record
from .implementations import SAME_BLAS, STOCK

RANK, SCALE = 16, 2.0
QUESTION = "Continue the passage: In the beginning God created the heaven and the earth."


class TextsDiffer(Exception):
    """The implementations do not say the same, so their speeds say nothing."""


def write_pack(model: str, folder: Path, seed: int) -> Path:
    """A pack of random adapters (B is not zero), which mlx-lm can load too."""
    base = load_base(model)
    adapters = Adapters.random(base, RANK, SCALE, seed)
    attached = attach(base, LoRAConfig(rank=RANK, alpha=SCALE * RANK))
    attached.load(adapters.tensors, "benchmark")
    pack_of(attached).save(folder)
    return folder


def spoken(model: nn.Module, tokenizer, prompt: list[int], tokens: int) -> dict:
    """A greedy continuation of so many tokens, and the rates that mlx-lm reports."""
    last, output = None, []
    for last in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=tokens):
        output.append(last.token)
    return {"tokens": output, "prompt": last.prompt_tps, "decode": last.generation_tps}


def race(implementations: dict[str, Callable[[], dict]], rounds: int) -> dict[str, list[dict]]:
    """Rates of each implementation, alternating. Raises: TextsDiffer."""
    first, *others = implementations
    expected = implementations[first]()["tokens"]
    for name in others:
        if (tokens := implementations[name]()["tokens"]) != expected:
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), 0
            )
            raise TextsDiffer(f"{name} says something else than {first} from token {at} on")
    results: dict[str, list[dict]] = {name: [] for name in implementations}
    for turn in range(2 * rounds):
        for name in list(implementations)[:: 1 if turn % 2 == 0 else -1]:
            print(f"turn {turn + 1} of {2 * rounds}: {name}", file=sys.stderr)
            results[name].append(implementations[name]())
    return results


def records(results: dict[str, list[dict]], task: str, shape: str) -> list[Record]:
    """Tokens a second of prompt and decoding; the ratio is of decoding."""
    here = Environment.here()
    base = percentiles([run["decode"] for run in results[STOCK]])["p50"]
    new_records = []
    for name, runs in results.items():
        about = {
            "baseline": STOCK,
            "stock_blas": name == STOCK and stock.blas_is_replaced(),
        }
        for key in ("prompt", "decode"):
            rates = [run[key] for run in runs]
            ratio = percentiles(rates)["p50"] / base if key == "decode" else None
            new_records.append(
                record(here, task, name, shape, key, "tokens/s", rates, ratio=ratio, **about)
            )
    return new_records


def run(options: argparse.Namespace) -> list[Record]:
    """Load both, attach, race. Raises: TextsDiffer, PackError."""
    path = resolve_checkpoint(options.model)
    with tempfile.TemporaryDirectory() as workload:
        folder = write_pack(options.model, Path(workload) / "pack", options.seed)
        baseline, tokenizer = mlx_lm.load(str(path), adapter_path=str(folder))
        pack = Pack.open(folder)
        bases = {p: load_base(options.model) for p in options.matmul_path or ("quantized", "dense")}
        # mlx-lm keeps the checkpoint's dtype; on a CPU ours is float32, and so must the baseline be
        baseline.set_dtype(bases[next(iter(bases))].model.layers[0].input_layernorm.weight.dtype)
        for matmul_path, base in bases.items():
            attach_pack(base, pack, matmul_path)
            base.model.eval()
        mx.eval(baseline.parameters())
    first = next(iter(bases.values()))
    prompt = chat_prompt(first, [{"role": "user", "content": QUESTION * options.repeat}])
    tokens = options.tokens

    def of_baseline(reference_blas: bool) -> Callable[[], dict]:
        def call() -> dict:
            with stock.mlx(reference_blas):
                return spoken(baseline, tokenizer, prompt, tokens)

        return call

    def of_ours(base) -> Callable[[], dict]:
        def call() -> dict:
            with factors_cast(base.model):  # as `inference.generate.stream` does
                return spoken(base.model, base.tokenizer, prompt, tokens)

        return call

    replaced = stock.blas_is_replaced()
    implementations = {STOCK: of_baseline(replaced)} | (
        {SAME_BLAS: of_baseline(False)} if replaced else {}
    )
    implementations |= {f"mlx_packs {path}": of_ours(base) for path, base in bases.items()}
    shape = f"{len(prompt)} tokens of prompt, {tokens} decoded, rank {RANK}"
    return records(
        race(implementations, options.rounds), f"generate {Path(options.model).name}", shape
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.generate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder [tiny]")
    parser.add_argument(
        "--matmul-path",
        action="append",
        choices=MATMUL_PATHS,
        help="our matmul path, repeatable [quantized, dense]",
    )
    parser.add_argument("--tokens", type=int, default=64, help="to decode [64]")
    parser.add_argument("--repeat", type=int, default=8, help="length of the prompt [8]")
    parser.add_argument("--rounds", type=int, default=3, help="forth and back [3]")
    parser.add_argument("--seed", type=int, default=0, help="of the adapters [0]")
    history.add_option(parser)
    options = parser.parse_args(arguments)
    try:
        new_records = run(options)
    except (TextsDiffer, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, TextsDiffer) else 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
