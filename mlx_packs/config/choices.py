"""Names that settings accept, where a name stands for code elsewhere.

Configuration is read without MLX, so it cannot import the code itself. Each name stands here once;
the module that implements it builds its registry with `registered`, which fails at import unless
every name has its code and all code has a name. To add a method, an optimizer, a weight format or a
loss: write it, add it to its registry, add its name here. To add a task, write its class and add it
here. Schedules are not here: their registry (`mlx_packs.schedules`) does not load MLX, so that it
is read directly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MethodFacts:
    """What is known of a method without MLX."""

    # Whether the base's own weights are trained, dense and in float32, rather than adapters beside
    # frozen weights.
    trains_base: bool = False


@dataclass(frozen=True)
class LossFacts:
    """What is true of an embedding loss, beside its formula."""

    scored: bool = False  # whether it needs the scores of the examples
    in_batch: bool = False  # whether the other examples of a batch are its negatives
    compares_all: bool = False  # whether it compares each example with every other, [B, B]
    by_parts: bool = False  # whether the batch is embedded in mini-batches


# The class of each task, found when a run of it begins.
TASKS = {
    "lm": "mlx_packs.training.tasks.causal_lm:CausalLMTask",
    "embedding": "mlx_packs.training.tasks.embedding:EmbeddingTask",
}
METHODS = {"lora": MethodFacts(), "full": MethodFacts(trains_base=True)}
OBJECTIVES = ("transformer", "projection-stack")
OPTIMIZERS = ("adamw", "adamw_8bit", "adam", "adafactor", "sgd", "muon", "lion")
WEIGHT_FORMATS = ("affine4", "affine8", "nf4")  # that --quantize makes
WEIGHT_MODES = ("nf4", "affine")  # kinds of formats, of `packs quantize --mode`
MATMUL_PATHS = ("quantized", "transient", "dense")
POLICIES = ("none", "selective", "block")  # of activation checkpointing
ADAPTER_FORMATS = ("mlx-lm", "peft")  # that packs export writes and packs import reads
ENCODERS = ("bert",)  # model types that --task embedding trains
LOSSES: dict[str, LossFacts] = {
    "cosine": LossFacts(scored=True),
    "mnrl": LossFacts(in_batch=True, compares_all=True),
    "cached-mnrl": LossFacts(in_batch=True, compares_all=True, by_parts=True),
    "cosent": LossFacts(scored=True, compares_all=True),
    "triplet": LossFacts(),
}
DISTANCES = ("euclidean", "cosine", "manhattan")


def registered(names: Iterable[str], code: Mapping[str, T]) -> dict[str, T]:
    """Registry with the code of every name, in the order of the names.

    Args:
        names: one of the listings of this module.
        code: what each name stands for.

    Raises:
        RuntimeError: a name has no code, or code has no name.
    """
    if faulty := set(names) ^ set(code):
        raise RuntimeError(f"registered in one place only: {', '.join(sorted(faulty))}")
    return {name: code[name] for name in names}
