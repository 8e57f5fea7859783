"""The estimate of `packs plan` against the measured peak of `packs train`, run by run.

    python -m benchmarks.plan_accuracy

Each case is a process of its own: a few steps on rows of random words, long enough to fill
``max_seq_length``, or a fifth of it where rows are packed. The estimate is the one that the run
printed before its first step.
"""

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx_packs import runtime

from . import history, stock
from .history import Environment, Record

LIMIT = 0.15
_CHECKOUT = Path(__file__).parent.parent
_MEASURED, _PLAN = "measured", "plan"


@dataclass(frozen=True)
class Case:
    """One run: ``base`` is ``tiny`` or ``qwen3_4b_block`` (one block, vocabulary 8192).

    The block is affine 4-bit, or dense where ``quantize`` says what is done to it on loading.
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

    @property
    def shape(self) -> str:
        recomputed = "" if self.recompute == "none" else f", recompute {self.recompute}"
        packed = ", packed" if self.packing else ""
        kind = "" if self.quantize == "none" else f" {self.quantize}"
        return (
            f"{self.base}{kind} {self.matmul_path}, {self.batch_size} x {self.length}, "
            f"rank {self.rank}{recomputed}{packed}"
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


def write_rows(folder: Path, words: int) -> None:
    """Text rows, every token of which is learned."""
    draw = random.Random(0)
    vocabulary = "the and of to unto him that he said lord in all shall king house day".split()
    folder.mkdir()
    for split, count in (("train", 120), ("valid", 2), ("test", 2)):
        rows = [{"text": " ".join(draw.choices(vocabulary, k=words))} for _ in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)


def run(case: Case, folder: Path) -> Result:
    """Train in a process of its own. Raises: CalledProcessError if that fails."""
    base = "tiny" if case.base == "tiny" else str(_block(folder, case.quantize != "none"))
    words = case.length // 5 if case.packing else 2 * case.length
    rows = folder / f"rows-{words}"
    if not rows.exists():
        write_rows(rows, words)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mlx_packs.train",
            "--json",
            "--quiet",
            "--overwrite",
            "--model",
            base,
            "--data",
            str(rows),
            "--out",
            str(folder / "pack"),
            "--iters",
            str(case.iters),
            "--batch-size",
            str(case.batch_size),
            "--max-seq-length",
            str(case.length),
            "--rank",
            str(case.rank),
            "--matmul-path",
            case.matmul_path,
            "--quantize",
            case.quantize,
            "--test-batches",
            "1",
            "--val-batches",
            "0",
            "--recompute",
            case.recompute,
            *["--packing"] * case.packing,
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=_CHECKOUT,
    )
    report = json.loads(done.stdout)
    return Result(case, report["plan_peak_gb"], report["peak_gb"])


def _block(folder: Path, dense: bool) -> Path:
    """One block at the geometry of Qwen3-4B, created once; 4-bit or dense."""
    out = folder / ("qwen3-4b-block-dense" if dense else "qwen3-4b-block")
    if not out.exists():
        script = _CHECKOUT / "examples" / "random_checkpoint.py"
        subprocess.run(
            [sys.executable, str(script), "--blocks", "1", "--out", str(out), *["--dense"] * dense],
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
    new_records = []
    for r in results:
        for name, value in ((_MEASURED, r.measured_gb), (_PLAN, r.plan_gb)):
            each = float(f"{value:.4g}")
            new_records.append(
                Record(
                    task="plan_accuracy",
                    implementation=name,
                    shape=r.case.shape,
                    dtype="float32",
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
    options = asked.parse_args(arguments)
    cases = [case for case in CASES if options.only in case.shape]
    if not cases:
        asked.error(f"--only {options.only}: no such case")
    results, here = [], Environment.here()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            print(case.shape, file=sys.stderr)
            try:
                result = run(case, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"benchmarks: {case.shape}: {error.stderr.strip()}", file=sys.stderr)
                return 2
            results.append(result)
            history.append(records([result], here), options.history)
    print(table(results))
    return 1 if any(abs(r.error) > LIMIT for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
