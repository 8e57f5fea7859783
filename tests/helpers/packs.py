"""Packs of random adapters, on a base or without one."""

import json
from collections.abc import Callable
from pathlib import Path

from mlx_packs import LoRAConfig, Pack
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import Attached, delta_of
from mlx_packs.bases.model import BaseModel
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.packs.making import pack_of
from mlx_packs.reading import sealed, sha256
from mlx_packs.runtime import mx

BASE = {
    "id": "mlx-community/Some-4bit",
    "fingerprint": "f" * 64,
    "model_type": "qwen3",
    "quantization": {"group_size": 64, "bits": 4},
    "num_layers": 2,
}
EVAL = {"split": "test", "rows": 3, "ppl_before": 10.0, "ppl_after": 5.0}
TARGETS = ("q_proj", "down_proj")


def random_pack(
    base: BaseModel,
    seed: int = 1,
    rank: int = 2,
    targets: tuple[str, ...] = TARGETS,
    *,
    size: float = 0.1,
    facts: dict | None = None,
    **lora,
) -> Pack:
    """Return a pack whose A and B are normal numbers times ``size``."""
    attached = attach(base, LoRAConfig(rank=rank, target_modules=targets, **lora))
    try:
        adapters = list({id(place.lora): place.lora for place in attached.places.values()}.values())
        keys = mx.random.split(mx.random.key(seed), 2 * len(adapters))
        factors = [f for adapter in adapters for f in (adapter.lora_a, adapter.lora_b)]

        for key, arrays in zip(keys, factors, strict=True):
            parts = mx.random.split(key, len(arrays))
            arrays[:] = [
                mx.random.normal(t.shape, key=k) * size for k, t in zip(parts, arrays, strict=True)
            ]

        pack = pack_of(attached, **(facts or {}))
        mx.eval(pack.tensors)
        return pack
    finally:
        attached.detach()


def write_pack(folder: Path, width: int = 64, rank: int = 2, base: dict = BASE, **facts) -> Pack:
    """Save a pack of random adapters on two projections, without a base."""
    paths = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    slices = [{"name": "q_proj", "width": width, "rank": rank, "alpha": 2.0 * rank}]

    manifest = {
        "format_version": 1,
        "kind": "lora",
        "base": base,
        "adapters": {
            "parameters": 4 * rank * width,
            "groups": [[path] for path in paths],
            "modules": [{"path": p, "in_features": width, "slices": slices} for p in paths],
        },
        **facts,
    }

    tensors = {f"{p}.lora_a": mx.random.normal((width, rank)) for p in paths}
    tensors |= {f"{p}.lora_b": mx.random.normal((rank, width)) for p in paths}
    return Pack(manifest, tensors).save(folder)


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest of a pack in place, as if it had been written so."""
    file = folder / "pack.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(sealed(manifest)))


def record_as_is(folder: Path, name: str = "adapters.safetensors") -> None:
    """Let the manifest of a pack say what a changed file is, so that the pack agrees with itself."""
    file = folder / name
    facts = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: facts}))


def merged_weights(attached: Attached) -> dict[str, mx.array]:
    """Return the weight of every adapted projection with its delta, in float32."""
    tensors = attached.tensors()
    return {
        path: frozen_weight(attached.frozen[path]).dense().astype(mx.float32)
        + delta_of(place.spec, tensors)
        for path, place in attached.places.items()
    }
