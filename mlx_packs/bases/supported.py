"""Check that a base can be used: its architecture, its task, and whether its family trains."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import mlx.nn as nn

from ..config.choices import ARCHITECTURES, TASKS, architecture_of
from ..errors import PackError, any_of, warn_once
from ..nn.lora import is_switch_linear
from ..runtime import mx
from .families import facts_of

MIXTURES_SINCE = (0, 32)  # of mlx-lm
# Encoders of other families that people train with sentence-transformers, by model_type.
_UNSUPPORTED_TYPES = (
    "albert camembert deberta deberta-v2 distilbert electra gte_new jina_bert mpnet "
    "new nomic_bert roberta t5 xlm-roberta"
).split()


def check_supported(config: Mapping, where: str | Path = "config.json") -> None:
    if (model_type := config.get("model_type")) in _UNSUPPORTED_TYPES:
        raise PackError(
            f"{where}: has model_type '{model_type}'. Of encoders only "
            f"{', '.join(ARCHITECTURES['encoder'].model_types)} is supported.",
            "unsupported",
        )


def check_architecture(command: str, wanted: str, name: str | Path, model_type: str) -> None:
    if (actual := architecture_of(model_type)) != wanted:
        raise PackError(
            f"{command}: takes {ARCHITECTURES[wanted].described}, but {name} is a {model_type}. "
            f"{ARCHITECTURES[actual].instead}".rstrip(),
            "unsupported",
            "model",
        )


def check_task(task: str, name: str | Path, model_type: str) -> None:
    if not TASKS[task].trains(architecture_of(model_type)):
        wanted = TASKS[task].architecture
        raise PackError(
            f"--task {task}: trains {ARCHITECTURES[wanted].described}, but {name} is a "
            f"{model_type}. Pass --task {any_of(tasks_of(model_type))}.",
            "mismatch",
        )


def tasks_of(model_type: str) -> list[str]:
    """The default task is first."""
    architecture = architecture_of(model_type)
    return [name for name, facts in TASKS.items() if facts.trains(architecture)]


def family_of(model: nn.Module) -> str:
    """The module of a package's models that a model comes from, or where else it is defined."""
    return getattr(model, "family", type(model).__module__.rpartition(".")[2])


def reads_in_parts(model: nn.Module) -> bool:
    """Whether the logits after a prompt are the same if a part of it is read before."""
    return facts_of(family_of(model)).reads_in_parts


def is_batchable(name: str, model: nn.Module) -> bool:
    """Whether texts in a batch equal each alone; if they do not, this is logged once."""
    if not facts_of(family := family_of(model)).one_by_one:
        return True
    warn_once(
        "%s: a %s gives other texts in a batch, so texts are generated one at a time.",
        name,
        family,
    )
    return False


def untrainable(family: str) -> str:
    """Return why no model of a family can be trained here; empty if it can."""
    facts = facts_of(family)
    if facts.untrainable_on_metal and mx.default_device() == mx.gpu and mx.metal.is_available():
        return f"{facts.untrainable_on_metal}. A CPU or CUDA trains it"
    return facts.untrainable


def check_trainable(name: str, model: nn.Module) -> None:
    family = family_of(model)
    if facts_of(family).cache_differs:
        warn_once(
            "%s: a %s computes other logits with a cache than without. Training uses none and "
            "generation uses one, so texts can be worse than the loss suggests.",
            name,
            family,
        )

    reason = untrainable(family)
    is_old = version_of_mlx_lm() < MIXTURES_SINCE
    if not reason and is_old and any(is_switch_linear(m) for m in model.modules()):
        reason = (
            f"in mlx-lm {metadata.version('mlx-lm')} gradients reach the indices of a mixture's "
            "experts, which MLX rejects. Upgrade mlx-lm (0.32 needs Python 3.11)"
        )

    if reason:
        raise PackError(f"{name}: a {family} cannot be trained: {reason}.", "unsupported")


def version_of_mlx_lm() -> tuple[int, int]:
    """Major and minor."""
    major, minor = metadata.version("mlx-lm").split(".")[:2]
    return int(major), int(minor)
