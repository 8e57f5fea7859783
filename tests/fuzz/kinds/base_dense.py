"""The shards and the index of a dense base."""

import json
from pathlib import Path

import mlx.core as mx

from tests.fuzz.checkpoints import CheckpointKind
from tests.fuzz.kind import Case
from tests.fuzz.subjects import write_base

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class BaseDense(CheckpointKind):
    """A dense checkpoint of two shards."""

    name = "base-dense"
    words = (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.2.mlp.up_proj.weight",
        SHARDS[0],
    )

    def make(self, folder: Path) -> None:
        """Write a base in bfloat16, its tensors in two shards."""
        write_base(folder, mx.bfloat16)
        file = folder / "model.safetensors"
        tensors = sorted(mx.load(str(file)).items())
        parts = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        for name, part in zip(SHARDS, parts, strict=True):
            mx.save_safetensors(str(folder / name), dict(part), {"format": "mlx"})
        file.unlink()
        places = {
            name: shard for shard, part in zip(SHARDS, parts, strict=True) for name, _ in part
        }
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    def mutate(self, case: Case) -> None:
        """Change a shard or the index."""
        name = case.rng.choices((*SHARDS, INDEX), (4, 4, 2))[0]
        if case.rng.random() < 0.03:
            case.replace(name)
        else:
            case.edit(name, case.mutator.json if name == INDEX else case.mutator.safetensors)
