"""What a divergence by a teacher's K most likely tokens misses; writes the table of docs/distillation.md.

    python -m benchmarks.teacher_top_k PACK [--model tiny] [--data DIR] [--rows 32] [--write]

The teacher is the base model with the pack, the student the base model alone. The figures do not
depend on the machine, but for the order of float32 sums.
"""

import argparse
from collections import Counter
from pathlib import Path

import mlx.nn as nn

from mlx_packs import Pack
from mlx_packs.data.batches import evaluation_batches
from mlx_packs.data.dataset import Batch
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.rows import load_rows
from mlx_packs.data.teacher_cache import target_bytes
from mlx_packs.evaluation.rows import columns_of
from mlx_packs.objectives.causal_lm import split_head, target_states
from mlx_packs.objectives.distillation import Distillation, target_losses
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.packs.base import Base, activated, load_base_for
from mlx_packs.packs.making import versions_line
from mlx_packs.runtime import mx
from mlx_packs.tasks.teacher import most_likely

DOC = Path(__file__).parents[1] / "docs" / "distillation.md"
BEGIN, END = "<!-- teacher top-k -->", "<!-- end of teacher top-k -->"
LOSSES = ("forward-kl", "reverse-kl", "jsd")
SIZES = (1, 4, 16, 64, 256, 1024)
_LENGTH = 512


def batches_of(base: Base, pack: Pack, data: str, rows: int) -> list[Batch]:
    columns = columns_of(pack, data)
    own = load_rows(columns).rows["train"][:rows]
    examples = encode(own, base.tokenizer, columns, EncodingOptions(None, _LENGTH))
    return evaluation_batches(examples, 1, _LENGTH)


def logits_of(model: nn.Module, batches: list[Batch]) -> list[mx.array]:
    """The logits [M, V] of the targets of each batch, which has few."""
    head = split_head(model)
    logits_by_batch = []
    for batch in batches:
        logits = target_states(model, head, arrays_of(batch))[: batch.targets]
        if head is not None:
            logits = head.logits(logits)
        mx.eval(logits)
        logits_by_batch.append(logits)
    return logits_by_batch


def sums_of(student: mx.array, teacher: mx.array, top_k: int) -> dict[str, float]:
    """The sum of each divergence over targets, and of what the teacher gives to other tokens."""
    top = most_likely(teacher, top_k)
    at = mx.arange(len(teacher))
    inputs = {f"teacher_{name}": value for name, value in top.items()}
    inputs |= {"tokens": at[None], "positions": at, "targets": mx.zeros_like(at)}
    sums = {"rest": mx.exp(top["rest"]).sum().item()}
    for loss in LOSSES:
        losses = target_losses(lambda tokens: student, None, inputs, (), Distillation(loss), False)
        sums[loss] = losses.divergence.sum().item()
    return sums


def table(student: list[mx.array], teacher: list[mx.array]) -> list[str]:
    """A row for each number of tokens, and one for the whole vocabulary."""
    targets = sum(map(len, teacher))
    vocab_size = teacher[0].shape[-1]
    means = {}
    for top_k in (*SIZES, vocab_size):
        total: Counter[str] = Counter()
        for own, theirs in zip(student, teacher, strict=True):
            total.update(sums_of(own, theirs, top_k))
        means[top_k] = {name: value / targets for name, value in total.items()}

    lines = [
        "| K | bytes per token | left to other tokens | forward KL | reverse KL | JSD |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for top_k, mean in means.items():
        cells = [f"{target_bytes(top_k, vocab_size):,}", f"{mean['rest']:.2%}"]
        for loss in LOSSES:
            share = mean[loss] / means[vocab_size][loss]
            cells.append(f"{mean[loss]:.4f} ({share:.1%})")
        lines.append(f"| {top_k:,} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="tiny")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    options = parser.parse_args()

    pack = Pack.open(options.pack)
    base = load_base_for(pack, options.model)
    batches = batches_of(base, pack, options.data, options.rows)
    with activated(base, pack, "dense"):
        teacher = logits_of(base.model, batches)
    with activated(base, None, "dense"):
        student = logits_of(base.model, batches)
    lines = table(student, teacher)

    targets = sum(batch.targets for batch in batches)
    versions = " · ".join(f"{k} {v}" for k, v in versions_line().items())
    model = Path(options.model).name
    data = Path(options.data).name
    text = f"{len(batches)} examples of {data}, {targets:,} targets, base `{model}`. {versions}."
    results = [*lines, "", text]
    print("\n".join(results))
    if options.write:
        page = DOC.read_text(encoding="utf-8")
        before, others = page.split(BEGIN)
        after = others.split(END)[1]
        DOC.write_text(before + "\n".join([BEGIN, "", *results, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
