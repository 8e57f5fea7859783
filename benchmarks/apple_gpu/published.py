"""Seconds of training steps on Macs that others have published, beside what is predicted of them.

The steps are those of mlx-train-perf 0.9.1 on an M1 Max of 32 GB (its README), with rank 8 on all
projections, blocks recomputed, and MLX 0.32.0. They are laid out as mlx-lm's, which has the same
attention and loss but another loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..history import Environment, Record, record
from ..workloads import LLAMA3_8B, QWEN3_4B
from .capture import MLX_LM, StepJob
from .seconds import STEP_S
from .step import Step, lay_out
from .tables import aligned, predicted

QWEN3_8B = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
LLAMA3_2_3B = LLAMA3_8B | {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "tie_word_embeddings": True,
}
TASK = "graph published"


@dataclass(frozen=True)
class Published:
    """A step of one row of ``length`` inputs that took so many seconds on a chip."""

    name: str
    config: dict
    length: int
    seconds: float
    chip: str = "M1 Max"
    rank: int = 8


STEPS = (
    Published("Qwen3-8B 4-bit, 1 x 2048", QWEN3_8B, 2048, 2048 / 97.8),
    Published("Qwen3-8B 4-bit, 1 x 8192", QWEN3_8B, 8192, 8192 / 78.1),
    Published("Qwen3-8B 4-bit, packed to 1 x 4096", QWEN3_8B, 4096, 40.4),
    Published("Qwen3-8B 4-bit, 1 x 84", QWEN3_8B, 84, 2.5),
    Published("Llama-3.2-3B 4-bit, packed to 1 x 4096", LLAMA3_2_3B, 4096, 4096 / 226.3),
    Published("Llama-3.2-3B 4-bit, 1 x 84", LLAMA3_2_3B, 84, 84 / 76.7),
)
LEGEND = """\
Seconds a step on an M1 Max as published, and as predicted. Rows of 84 tokens take 0.6 to 1.4 s
longer than is predicted: something takes a fixed time there that no graph shows."""

Compared = tuple[Published, Step]


def compare(fixed_s: float = STEP_S) -> list[Compared]:
    """Return the published steps with their graphs, of which each takes ``fixed_s`` besides."""
    jobs = [
        (MLX_LM, StepJob(each.config, 1, each.length, rank=each.rank, recompute="block"))
        for each in STEPS
    ]
    chips = list(dict.fromkeys(each.chip for each in STEPS))
    return list(zip(STEPS, lay_out(jobs, chips, fixed_s), strict=True))


def predicted_s(each: Published, step: Step) -> float:
    """Return the seconds that are predicted of a published step."""
    return step.whole.seconds[each.chip]


def table(compared: Sequence[Compared]) -> str:
    """Return published and predicted seconds."""
    rows = [["", "chip", "published s", "predicted s", "predicted / published"]]
    for each, step in compared:
        own = predicted_s(each, step)
        share = f"{own / each.seconds:.2f}"
        rows.append([each.name, each.chip, f"{each.seconds:.2f}", f"{own:.2f}", share])
    return aligned(rows)


def records(here: Environment, compared: Sequence[Compared]) -> list[Record]:
    """Return what the table shows."""
    result = []
    for each, step in compared:
        nowhere = replace(here, device=f"{each.chip}, predicted (published by others, not timed)")
        own = predicted_s(each, step)
        values = {
            ("published", "s"): each.seconds,
            ("predicted", "s"): own,
            ("predicted over published", ""): own / each.seconds,
        }
        for (metric, unit), value in values.items():
            entry = record(
                nowhere,
                TASK,
                f"{MLX_LM} --grad-checkpoint",
                f"{each.name}, rank {each.rank}",
                metric,
                unit,
                [value],
                dtype="bfloat16",
                note=predicted([each.chip]),
            )
            result.append(replace(entry, blas="none", blas_threads=None))
    return result
