"""Architectures and families of mlx-lm and mlx-vlm that cannot be trained.

Every other one can; docs/families.md lists them all, and tests/bases/test_families.py trains each.
"""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import mlx.nn as nn

from ..config.choices import ARCHITECTURES, TASKS, architecture_of, package_of
from ..errors import PackError, any_of, warn_once
from ..nn.lora import is_switch_linear
from ..runtime import mx

# By the name of the module in mlx_lm.models, or in mlx_vlm.models where mlx-lm has none.
UNTRAINABLE = {
    "bitnet": "its projections (BitLinear) are a kernel for Metal that has no gradient",
    "dbrx": "its experts are chosen on the host, which a compiled step cannot do",
    "deepseek_v41": "its router lets gradients into indices, which MLX rejects",
    "limite": "its attention multiplies by weights of its projections that it scales before",
    "llada2_moe": "it makes text by diffusion, not one token after the other",
    "longcat_flash_sparse": "its router lets gradients into indices, which MLX rejects",
    "muse_spark": "its attention and norms are kernels for Metal that have no gradient",
    "nemotron_labs_diffusion": "it makes text by diffusion, not one token after the other",
    "olmo": "mlx-lm needs the package ai2-olmo for it and ends the program without",
    "prism_hadamard_qwen35": "its projections are HadamardQuantizedLinear, which carry no adapters",
    "recurrent_gemma": "mlx-lm's Model is not set up as a module and cannot be frozen",
}
# Of mlx-vlm, those whose steps tests/bases/test_mlx_vlm.py compares with plain LoRA.
COMPARED = frozenset(
    "cohere2_moe deepseek_v4 glm5_next hy_v4 k2_horizon kolibri1 mimo_v2 minimax_m3 "
    "mistral_large3 qwen4_exp step3p7 xing4_0 z1t".split()
)
UNTRAINABLE_ON_METAL = {"rwkv7": "its kernel for Metal (the recurrence) has no gradient"}
# Families whose texts in a batch of mlx-lm differ from each alone: a mask without a batch axis, or
# a recurrent state that padding runs through. tests/inference/test_families.py compares every one.
ONE_BY_ONE = frozenset(
    "afm7 baichuan_m1 bailing_moe_linear gear gemma2 gpt_bigcode jamba longcat_flash_ngram mamba "
    "nemotron-nas nemotron_h olmo_hybrid phi3small qwen4_exp rwkv7 z1t".split()
)
# Its windows show a key more than its caches keep: other logits if a prompt is read in parts.
READ_WHOLE = frozenset({"plamo3"})
CACHE_DIFFERS = frozenset({"deepseek_v4", "gemma3n"})  # other logits with a cache than without
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
    return family_of(model) not in READ_WHOLE


def is_batchable(name: str, model: nn.Module) -> bool:
    """Whether texts in a batch equal each alone; if they do not, this is logged once."""
    if (family := family_of(model)) not in ONE_BY_ONE:
        return True
    warn_once(
        "%s: a %s gives other texts in a batch than alone, so texts are generated one at a time.",
        name,
        family,
    )
    return False


def why_untrainable(family: str) -> str | None:
    """The reason on this device; None if it can be trained."""
    on_metal = mx.default_device() == mx.gpu and mx.metal.is_available()
    if on_metal and family in UNTRAINABLE_ON_METAL:
        return f"{UNTRAINABLE_ON_METAL[family]}. A CPU or CUDA trains it"
    return UNTRAINABLE.get(family)


def check_trainable(name: str, model: nn.Module) -> None:
    family = family_of(model)
    if family in CACHE_DIFFERS:
        warn_once(
            "%s: a %s computes other logits with a cache than without. Training uses none and "
            "generation uses one, so texts can be worse than the loss suggests.",
            name,
            family,
        )
    if "language_model" in model and package_of(family) == "mlx-vlm" and family not in COMPARED:
        warn_once(
            "%s: a %s of mlx-vlm, which was not tested here: its steps may differ from plain LoRA.",
            name,
            family,
        )

    reason = why_untrainable(family)

    is_old = version_of_mlx_lm() < MIXTURES_SINCE
    if reason is None and is_old and any(is_switch_linear(m) for m in model.modules()):
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
