"""The estimate of `packs plan` against the measured peak of `packs train`, run by run.

    python -m benchmarks.plan_accuracy
    python -m benchmarks.plan_accuracy --models MODELS      # and real models on real data
    python -m benchmarks.plan_accuracy --whole              # and whole models of random weights: for a GPU

Each case is a process of its own: a few steps on rows of random words, long enough to fill
``max_seq_length``, or a fifth of it where rows are packed. The estimate is the one that the run
printed before its first step. MODELS is a folder with ``SmolLM2-135M-Instruct.Q4_1.gguf``,
``all-MiniLM-L6-v2`` and the data sets in ``data``.
"""

import argparse
import dataclasses
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_packs import runtime
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.runtime import mx

from . import history, stock
from .history import Environment, Record
from .real import jobs

LIMIT = 0.15
_CHECKOUT = Path(__file__).parent.parent
_MEASURED, _PLAN = "measured", "plan"
_COMPLETIONS = ("--reward", "exact", "--num-generations", "8", "--max-completion-length", "64")


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        base: ``tiny``; ``qwen3_4b_block`` (one block, vocabulary 8,192); ``qwen3-4b`` and others of
            examples/random_checkpoint.py, whole; ``llama_BxD`` (B blocks of width D with random
            weights); or the name of a model in the folder of real models. A Qwen3 is affine 4-bit,
            or dense where it is quantized on loading.
        data: A data set in the folder of real models; by default rows of random words.
        common: Words that all these rows begin with, which ``--share-prefix`` computes once.
        options: Further options of `packs train`.
    """

    base: str
    matmul_path: str
    batch_size: int
    length: int
    rank: int = 16
    recompute: str = "none"
    iters: int = 3
    quantize: str = "none"
    packing: bool = False
    method: str = "lora"
    task: str = "lm"
    data: str = ""
    common: int = 0
    options: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        parts = [
            self.base,
            *[self.quantize] * (self.quantize != "none"),
            *[self.data] * bool(self.data),
            *[self.task] * (self.task != "lm"),
            *[self.method] * (self.method != "lora"),
        ]
        recomputed = "" if self.recompute == "none" else f", recompute {self.recompute}"
        packed = ", packed" if self.packing else ""
        options = f", {' '.join(self.options)}" if self.options else ""
        if self.common:
            options += f", {self.common} words in common"
        return (
            f"{' '.join(parts)} {self.matmul_path}, {self.batch_size} x {self.length}, "
            f"rank {self.rank}{recomputed}{packed}{options}"
        )


CASES = (
    Case("tiny", "dense", 4, 256),
    Case("tiny", "dense", 4, 256, recompute="selective"),
    Case("tiny", "dense", 4, 256, recompute="block"),
    Case("tiny", "dense", 2, 512, rank=64),
    Case("tiny", "transient", 8, 128, recompute="selective"),
    Case("tiny", "transient", 4, 128, recompute="block"),
    Case("tiny", "quantized", 2, 64, iters=2),
    Case("qwen3_4b_block", "dense", 2, 128),
    Case("qwen3_4b_block", "dense", 4, 128, rank=8, recompute="block"),
    Case("qwen3_4b_block", "transient", 4, 128),
    Case("qwen3_4b_block", "transient", 1, 256, rank=32, recompute="selective"),
    Case("qwen3_4b_block", "quantized", 1, 32, iters=2),
    Case("tiny", "dense", 4, 256, packing=True),
    Case("tiny", "transient", 2, 512, recompute="block", packing=True),
    Case("qwen3_4b_block", "transient", 2, 128, packing=True, recompute="selective"),
    Case("qwen3_4b_block", "dense", 2, 128, quantize="nf4"),
    Case("qwen3_4b_block", "transient", 4, 128, quantize="nf4"),
    Case("qwen3_4b_block", "quantized", 1, 256, rank=32, recompute="block", quantize="nf4"),
    Case("tiny", "dense", 1, 64, rank=8),
    Case("tiny", "dense", 4, 256, options=("--num-layers", "4")),
    Case("tiny", "transient", 1, 64, rank=8, recompute="block"),
    Case("tiny", "dense", 2, 256, method="dora"),
    Case("tiny", "dense", 2, 128, task="dpo"),
    Case("llama_4x256", "dense", 4, 256),
    Case("llama_4x256", "dense", 1, 64, rank=8),
    Case("llama_4x256", "dense", 4, 128, method="full"),
    Case("llama_2x512", "dense", 8, 64),
    Case("llama_2x512", "dense", 4, 256, method="dora"),
    Case("llama_2x512", "dense", 2, 128, task="orpo"),
    Case("llama_8x256", "dense", 8, 512, recompute="block"),
    Case("llama_8x256", "dense", 2, 512, recompute="selective"),
    Case("llama_2x1024", "dense", 2, 256),
    Case("llama_2x1024", "dense", 1, 128, method="full", recompute="block"),
    *(
        Case(*size, common=common, options=("--share-prefix", "on"))
        for size, common in (
            (("tiny", "dense", 8, 576), 480),
            (("tiny", "dense", 8, 256, 16, "block"), 128),
            (("tiny", "transient", 4, 512, 16, "selective"), 400),
            (("llama_4x256", "dense", 8, 320), 256),
            (("llama_2x512", "dense", 4, 512, 16, "block"), 300),
        )
    ),
    Case("tiny", "transient", 4, 256, options=("--num-layers", "4")),
    Case("tiny", "transient", 4, 128, options=("--num-layers", "1")),
    Case("llama_2x512", "transient", 4, 128, quantize="affine4"),
    *(Case("tiny", "dense", pairs, 128, rank=8, task="embedding") for pairs in (4, 8, 16, 24)),
    Case("tiny", "dense", 16, 128, rank=8, recompute="block", task="embedding"),
    *(Case("tiny", "dense", rows, 128, rank=8, task="classify") for rows in (4, 16, 32)),
    # A base of random weights does not end its completions, so that all of them are the longest.
    *(
        Case(*size, task="grpo", options=(*_COMPLETIONS, *options))
        for size in (("llama_4x256", "dense", 1, 576), ("llama_2x512", "dense", 1, 256))
        for options in ((), ("--share-prefix", "off"))
    ),
)
_SMOLLM2, _MINILM = "SmolLM2-135M-Instruct.Q4_1.gguf", "all-MiniLM-L6-v2"
REAL_CASES = (
    Case(_SMOLLM2, "dense", 4, 2048, iters=1, data="banking77"),
    Case(_SMOLLM2, "dense", 8, 2048, iters=1, data="banking77"),
    Case(_SMOLLM2, "dense", 4, 2048, iters=1, data="tldr"),
    Case(_SMOLLM2, "transient", 4, 2048, iters=10, data="tldr", recompute="block"),
    Case(_MINILM, "dense", 32, 256, iters=1, data="banking77", task="embedding"),
    *(Case(_MINILM, "dense", pairs, 128, rank=8, task="embedding") for pairs in (4, 8, 16, 24)),
    Case(_MINILM, "dense", 4, 256, rank=8, task="embedding"),
    Case(_MINILM, "dense", 16, 64, rank=8, recompute="block", task="embedding"),
)
WHOLE_CASES = (
    Case("qwen3-0.6b", "quantized", 8, 1024),
    Case("qwen3-0.6b", "dense", 8, 1024),
    Case("qwen3-0.6b", "transient", 8, 1024, recompute="selective"),
    Case("qwen3-4b", "quantized", 4, 2048, recompute="block"),
    Case("qwen3-4b", "transient", 4, 2048, recompute="block"),
    Case("qwen3-4b", "quantized", 2, 1024, recompute="selective"),
    Case("qwen3-4b", "dense", 2, 1024),
)


@dataclass(frozen=True)
class Result:
    """Peak of one case in GB, estimated and measured."""

    case: Case
    plan_gb: float
    measured_gb: float

    @property
    def error(self) -> float:
        return self.plan_gb / self.measured_gb - 1


def write_rows(folder: Path, words: int, task: str = "lm", common: int = 0) -> None:
    """Write examples of random words; every token of a completion or text is supervised.

    So many words are common to all examples, before their own.
    """
    draw = random.Random(0)
    vocabulary = "the and of to unto him that he said lord in all shall king house day".split()
    keys = {
        "lm": ("text",),
        "classify": ("text",),
        "embedding": ("anchor", "positive"),
        "grpo": ("prompt", "completion"),
    }
    beginning = " ".join(draw.choices(vocabulary, k=common))

    for split, count in (("train", 120), ("valid", 2), ("test", 2)):
        rows = []
        for _ in range(count):
            texts = {
                key: " ".join([beginning, *draw.choices(vocabulary, k=words)]).strip()
                for key in keys.get(task, ("chosen", "rejected"))
            }
            if task == "classify":
                texts["label"] = draw.choice(vocabulary)
            rows.append(texts if task in keys else {"prompt": "and", **texts})

        jobs.write_rows(folder / f"{split}.jsonl", rows)


def write_pairs(folder: Path, data: Path) -> None:
    """Write pairs of texts of one class, of a data set of chats that name the class."""
    by_class: dict[str, list[str]] = {}
    with gzip.open(data / "train.jsonl.gz", "rt") as lines:
        for line in lines:
            question, answer = json.loads(line)["messages"][-2:]
            by_class.setdefault(answer["content"], []).append(question["content"])

    pairs = [
        {"anchor": anchor, "positive": positive}
        for texts in by_class.values()
        for anchor, positive in zip(texts[::2], texts[1::2], strict=False)
    ]

    for split, rows in (("train", pairs[4:]), ("valid", pairs[:2]), ("test", pairs[2:4])):
        jobs.write_rows(folder / f"{split}.jsonl", rows)


def _base(case: Case, folder: Path, models: Path | None) -> str:
    """Return the base of a case, which is written on its first use unless it is there."""
    if case.base == "tiny":
        return "tiny"
    if case.base == "qwen3_4b_block":
        return str(_block(folder, case.quantize != "none"))
    if case.base.startswith("qwen3-"):
        return str(_random(folder / case.base, "--geometry", case.base, "--vocab", "151936"))
    if case.base.startswith("llama_"):
        return str(_small(folder / case.base, *map(int, case.base.split("_")[1].split("x"))))
    return str(models / case.base)


def _rows(case: Case, folder: Path, models: Path | None) -> Path:
    """Return the data of a case, which are written on their first use unless they are there."""
    if case.data and case.task != "embedding":
        return models / "data" / case.data

    words = 2 * case.length
    if case.packing:
        words = case.length // 5
    elif case.task == "grpo":  # which leaves room for completions
        words = case.length // 2
    elif case.task == "classify":  # whose rows must not be cut
        words = case.length * 3 // 4

    rows = folder / f"rows-{case.task}-{case.data or words}-{case.common}"
    if rows.exists():
        return rows
    if case.data:
        write_pairs(rows, models / "data" / case.data)
    else:
        write_rows(rows, words, case.task, case.common)
    return rows


def run(case: Case, folder: Path, models: Path | None = None) -> Result:
    """Train in a process of its own. Raises: CalledProcessError if that fails."""
    settings = {
        "--model": _base(case, folder, models),
        "--data": _rows(case, folder, models),
        "--out": folder / "pack",
        "--iters": case.iters,
        "--batch-size": case.batch_size,
        "--max-seq-length": case.length,
        "--method": case.method,
        "--task": case.task,
        "--quantize": case.quantize,
        "--test-batches": 1,
        "--val-batches": 0,
        "--recompute": case.recompute,
    }
    if case.method != "full":
        settings["--rank"] = case.rank
        if case.base != _MINILM:
            settings["--matmul-path"] = case.matmul_path

    command = [sys.executable, "-m", "mlx_packs.train", "--json", "--quiet", "--overwrite"]
    command += [str(part) for pair in settings.items() for part in pair]
    command += ["--packing"] * case.packing + list(case.options)

    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_CHECKOUT)
    report = json.loads(done.stdout)
    return Result(case, report["plan_peak_gb"], report["peak_gb"])


def _small(out: Path, blocks: int, hidden: int) -> Path:
    """Return a Llama of some blocks in bfloat16 with random weights, written once."""
    if out.exists():
        return out

    heads = hidden // 64
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)

    out.mkdir()
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_checkpoint() / name, out / name)
    return out


def _block(folder: Path, dense: bool) -> Path:
    """One block at the geometry of Qwen3-4B, created once; 4-bit or dense."""
    if dense:
        return _random(folder / "qwen3-4b-block-dense", "--blocks", "1", "--dense")
    return _random(folder / "qwen3-4b-block", "--blocks", "1")


def _random(out: Path, *options: str) -> Path:
    """A checkpoint of random weights, written on its first use."""
    if not out.exists():
        script = _CHECKOUT / "examples" / "random_checkpoint.py"
        subprocess.run(
            [sys.executable, str(script), *options, "--out", str(out)],
            check=True,
            capture_output=True,
            cwd=_CHECKOUT,
        )
    return out


def table(results: list[Result]) -> str:
    """Estimate, measured peak and error of each case, in markdown."""
    lines = ["| run | estimate, GB | measured, GB | error |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {r.case.shape} | {r.plan_gb:.3f} | {r.measured_gb:.3f} | {r.error:+.1%} |"
        for r in results
    ]
    return "\n".join(lines)


def records(results: list[Result], where: Environment) -> list[Record]:
    """Two records for each case, in GB; ratio is estimate over measured."""
    here = dataclasses.asdict(where)
    dtype = "float32" if runtime.on_cpu() else "bfloat16"
    new_records = []
    for r in results:
        for name, value in ((_MEASURED, r.measured_gb), (_PLAN, r.plan_gb)):
            each = float(f"{value:.4g}")
            new_records.append(
                Record(
                    task="plan_accuracy",
                    implementation=name,
                    shape=r.case.shape,
                    dtype=dtype,
                    metric="peak",
                    unit="GB",
                    p20=each,
                    p50=each,
                    p80=each,
                    samples=1,
                    baseline=_MEASURED,
                    ratio=float(f"{value / r.measured_gb:.4g}"),
                    peak_mb=None,
                    blas=stock.blas_name(),
                    blas_threads=runtime.BLAS.threads,
                    note="ratio is the estimate over the measured peak.",
                    **here,
                )
            )
    return new_records


def main(arguments: list[str] | None = None) -> int:
    asked = argparse.ArgumentParser("python -m benchmarks.plan_accuracy", allow_abbrev=False)
    asked.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this")
    asked.add_argument(
        "--history",
        type=Path,
        default=history.HISTORY,
        metavar="FILE",
        help="where records are appended [benchmarks/history.jsonl]",
    )
    asked.add_argument("--models", type=Path, metavar="DIR", help="run the real cases, too")
    asked.add_argument("--whole", action="store_true", help="run whole models: for a GPU")
    options = asked.parse_args(arguments)
    every = CASES + REAL_CASES * bool(options.models) + WHOLE_CASES * options.whole
    cases = [case for case in every if options.only in case.shape]
    if not cases:
        asked.error(f"--only {options.only}: no such case")
    results, here = [], Environment.here()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(case.shape, file=sys.stderr)
            try:
                result = run(case, Path(folder), options.models)
            except subprocess.CalledProcessError as error:
                print(f"benchmarks: {case.shape}: {error.stderr.strip()}", file=sys.stderr)
                return 2
            results.append(result)
            history.append(records([result], here), options.history)
    print(table(results))
    return 1 if any(abs(r.error) > LIMIT for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
