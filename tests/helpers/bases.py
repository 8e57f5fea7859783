"""Bases for runs that need no other: the embedded one with dense weights, and smaller ones."""

import copy
import shutil
from functools import cache
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.model import BaseModel
from mlx_packs.nn.quantized import apply_matmul_path
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_files
from tests.helpers.models import model_of


def first_blocks(count: int) -> Base:
    """Return the embedded base without its other blocks: it writes texts in half the time."""
    base = load_base("tiny")
    base.model.model.layers = base.model.layers[:count]
    return base


@cache
def dense_tiny() -> Base:
    """Return the embedded base, loaded once; tests leave it as it was.

    Runs with the matmul path ``dense`` load nothing and convert no weight, a third of their time.
    """
    base = load_base("tiny")
    apply_matmul_path(base.model, "dense")
    return base


def copied(loaded: BaseModel) -> BaseModel:
    """Return a base with modules and a tokenizer of its own, and arrays of the same content."""
    modules = [*loaded.model.modules()]
    values = [v for module in modules for v in (*module.values(), *vars(module).values())]
    shared = {id(value): value[...] for value in values if isinstance(value, mx.array)}
    return copy.deepcopy(loaded, shared)


def small_base(**changes) -> Base:
    """Return a fresh base of two narrow random blocks, with the tokenizer of the embedded base.

    A run on it takes a fifth of the time of one on the embedded base.
    """
    model, config = model_of("qwen3", **{"vocab_size": 4096, **changes})
    return Base("small", Path("nowhere"), model, dense_tiny().tokenizer, config, "0" * 64)


def copy_tiny(folder: Path) -> Path:
    """Copy the folder of the embedded base; its weights become a link."""
    folder.mkdir()
    for file in tiny_checkpoint().iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    return folder


def saved_base(base: Base, folder: Path) -> str:
    """Write a dense base with the tokenizer of the embedded one; return its folder."""
    return str(write_files(folder, dict(tree_flatten(base.model.parameters())), base.config))
