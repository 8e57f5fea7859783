"""GGUF adapters for llama.cpp, ``llama-server --lora``, and what is built on them.

The file has ``blk.N.attn_q.weight.lora_a`` [r, in] and ``.lora_b`` [out, r], and one
``adapter.lora.alpha``. llama.cpp multiplies by alpha / r of each tensor
(``src/llama-adapter.cpp``); scales that differ go into lora_b. Written by MLX.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from ..adapters.lora import read_factors
from ..adapters.spec import ModuleSpec
from ..bases.families import FAMILIES, Family, facts_of
from ..bases.gguf.checkpoint import rows_in_mlx
from ..bases.readers import DENSE
from ..files import atomic_folder
from ..packs.manifest import architecture_facts, replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .external import Delta, Tensors, folded, low_rank_delta, unsupported, verify_numerically
from .modelfile import modelfile

ALPHA = "adapter.lora.alpha"
_SUFFIXES = (".weight.lora_a", ".weight.lora_b")
_HEAD_COUNTS = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}  # in a manifest


def write_gguf(pack: Pack, out: Path, start: str | None) -> dict:
    """Write a GGUF file and a Modelfile of Ollama; note the line that starts llama.cpp with it."""
    family = family_of(pack)
    name = f"{out.name}.gguf"
    text, base, notes = modelfile(pack, name, start)
    tensors, alpha = gguf_tensors(pack, family)

    with atomic_folder(out) as partial:
        save_gguf(partial / name, tensors, family.gguf, alpha)
        verified = verify_gguf(pack, partial / name, family)
        (partial / "Modelfile").write_text(text, encoding="utf-8")
    return {
        "tensors": len(tensors),
        "verified": verified,
        "notes": [*_commands(base, family, out / name), *notes],
    }


def _commands(base: str, family: Family, adapter: Path) -> list[str]:
    """Return the command that starts llama.cpp with an adapter, and what its BASE.gguf is."""
    lora = shlex.quote(str(adapter))
    if base.lower().endswith(".gguf"):  # it was trained on this file
        file = base.removeprefix(DENSE)
        return [f"llama-server -m {shlex.quote(file)} --lora {lora}"]

    return [
        f"llama-server -m BASE.gguf --lora {lora}",
        f"BASE.gguf is a GGUF of {base} ({family.gguf})",
    ]


def family_of(pack: Pack) -> Family:
    """Return llama.cpp's names for a pack's base; a PackError says what it has no place for."""
    name = pack.manifest["base"]["model_type"]
    where = pack.name
    family = facts_of(name)
    if not (architecture_facts(pack.manifest).in_mlx_lm and family.gguf):
        known = ", ".join(name for name, facts in FAMILIES.items() if facts.gguf)
        raise unsupported(
            where,
            f"GGUF adapters of {name} are not known here. Known are {known}. "
            "Merge the pack and convert the whole model.",
        )

    if names := list(replaced_of(pack.manifest))[:3]:
        raise unsupported(
            where,
            f"stores {', '.join(names)} in full, and a GGUF adapter has only low-rank "
            "factors. Merge the pack and convert the whole model.",
        )

    for path, spec in pack.specs.items():
        _tensor_name(path, spec, family, where)
    return family


def _tensor_name(path: str, spec: ModuleSpec, family: Family, where: str) -> str:
    """Return the name of a base's tensor in GGUF: ``blk.3.attn_q``."""
    reason = None
    match = re.fullmatch(r".*?\.(\d+)\.(.+)", path)
    if spec.kind != "lora":
        reason = f"is {spec.kind}, and llama.cpp adds LoRA only to linears"
    elif spec.experts is not None:
        reason = "adapts all experts of a mixture"
    elif match is None or match[2] not in family.gguf_names:
        reason = "has no name there"

    if reason or match is None:
        raise unsupported(
            where,
            f"{path}: {reason}, so it cannot go into a GGUF adapter. Merge the pack and "
            "convert the whole model.",
        )

    return f"blk.{match[1]}.{family.gguf_names[match[2]]}"


def gguf_tensors(pack: Pack, family: Family) -> tuple[Tensors, float]:
    """Return the tensors of a GGUF adapter in float32, and its alpha."""
    alpha = max(s.scale * spec.rank for spec in pack.specs.values() for s in spec.slices if s.rank)
    result: Tensors = {}

    for path, spec in pack.specs.items():
        a, b = (factor.astype(mx.float32) for factor in read_factors(spec, pack.load_tensors()))
        b = folded(spec, b, alpha / spec.rank).T
        if heads := _permuted_heads(path, pack, family):
            b = b[mx.array(np.argsort(rows_in_mlx(len(b), heads)))]

        name = _tensor_name(path, spec, family, pack.name)
        for suffix, factor in zip(_SUFFIXES, (a.T, b), strict=True):
            result[name + suffix] = mx.contiguous(factor)

    return result, alpha


def _permuted_heads(path: str, pack: Pack, family: Family) -> int:
    """Return how many heads a projection's rows are permuted in; 0 where they are not."""
    key = _HEAD_COUNTS.get(path.rpartition(".")[2])
    if not family.permuted or key is None:
        return 0

    heads = pack.manifest["base"].get(key)
    if not heads:
        raise unsupported(
            pack.name,
            f"its manifest has no {key}, which the order of rows in GGUF depends on. "
            "Merge the pack and convert the whole model.",
        )
    return heads


def save_gguf(file: Path, tensors: Tensors, architecture: str, alpha: float) -> None:
    metadata = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "general.name": file.stem,
        "adapter.type": "lora",
        ALPHA: mx.array(alpha, mx.float32),
    }

    mx.eval(tensors)
    mx.save_gguf(str(file), tensors, metadata)


def verify_gguf(pack: Pack, file: Path, family: Family) -> dict[str, Any]:
    """Compare what a GGUF adapter adds, as it was read back, with what the pack adds."""
    tensors, metadata = mx.load(str(file), return_metadata=True)
    alpha = float(np.array(metadata[ALPHA]))
    deltas: dict[str, Delta] = {}

    for path, spec in pack.specs.items():
        name = _tensor_name(path, spec, family, pack.name)
        a, b = (tensors[name + suffix] for suffix in _SUFFIXES)
        if heads := _permuted_heads(path, pack, family):
            b = b[mx.array(rows_in_mlx(len(b), heads))]
        deltas[path] = low_rank_delta(a.T, b.T, alpha / b.shape[1])

    verified = verify_numerically(pack.specs, pack.load_tensors(), deltas, file)
    return {"tensors": len(tensors), **verified}
