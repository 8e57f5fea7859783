"""Perplexity on tldr of the same weights dense, and quantized again in three formats.

The weights of a Q4_1 GGUF lie on an affine 4-bit grid with groups of 32. Quantizing them again with
such groups is still not exact, since MLX moves a grid so that zero is one of its points.
The embedding stays dense in all of them: in the GGUF it has 8 bits.

    python -m benchmarks.real.perplexity DENSE WORK ROWS    # started by `python -m benchmarks real`
"""

import json
import sys
from pathlib import Path

from mlx_packs import DataConfig, load_base
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.weight_formats import MLXFormat, WeightFormat
from mlx_packs.bases.writer import quantize
from mlx_packs.evaluation.evaluate import EvalSettings
from mlx_packs.evaluation.perplexity import Difference, ExampleScores, PerplexityEvaluator
from mlx_packs.evaluation.rows import evaluation_rows
from mlx_packs.packs.base import activated

from .jobs import read_rows, write_rows

DENSE = "dense"
FORMATS: dict[str, WeightFormat] = {
    "affine4, groups of 32": MLXFormat("affine", 4, 32),
    "affine4, groups of 64": MLXFormat("affine", 4, 64),
    "nf4, blocks of 64": NF4Format(64),
}
BATCH, LONGEST = 8, 256


def measure(dense: Path, work: Path, rows: int) -> dict[str, dict[str, float]]:
    """Return perplexity with its error by format, and its ratio to the dense one, paired by row."""
    data = work / "perplexity-data" / "test.jsonl"
    write_rows(data, read_rows("tldr", "test")[:rows])

    reference = _scores(dense, data)
    results = {DENSE: {"ppl": reference.score.ppl, "ppl_se": reference.score.ppl_se}}
    for name, weight_format in FORMATS.items():
        folder = work / f"perplexity-{weight_format.mode}-{weight_format.group_size}"
        if not folder.exists():
            quantize(dense, folder, QuantizeOptions(weight_format, keep=("embed_tokens",)))
        scores = _scores(folder, data)
        difference = Difference.between(reference, scores)
        results[name] = {
            "ppl": scores.score.ppl,
            "ppl_se": scores.score.ppl_se,
            "ratio": difference.ppl_ratio,
            "ratio_se": difference.ppl_ratio_se,
        }
    return results


def _scores(model: Path, data: Path) -> ExampleScores:
    columns = DataConfig(data=str(data))
    settings = EvalSettings(columns, BATCH, LONGEST, None, "dense", "none")
    base = load_base(model)
    evaluator = PerplexityEvaluator(base, evaluation_rows(columns, "test"), settings)
    with activated(base, None, evaluator.matmul_path):  # MLX's quantized product is slow on CPUs
        return evaluator.score().examples


def main(arguments: list[str]) -> int:
    dense, work, rows = arguments
    print(json.dumps(measure(Path(dense), Path(work), int(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
