"""Train LoRA adapters on a frozen 4-bit base and carry them as packs.

    import mlx_packs as mp
    base = mp.load_base("mlx-community/Qwen3-4B-4bit")
    run = mp.train_pack(base, data="data/", lora=mp.LoRAConfig(rank=16))

Names load when they are used, so that importing the package costs next to nothing.
"""

import importlib
import os

# macOS kills GPU work that delays the display; this asks for patience (ml-explore/mlx#3267). It has
# to be there before MLX is, and this file is read before any other of the package.
os.environ.setdefault("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")

__version__ = "0.1.0"

_PUBLIC = {
    "Base": "bases.loading",
    "load_base": "bases.loading",
    "LoRAConfig": "config.schema",
    "TrainConfig": "config.schema",
    "DataConfig": "config.schema",
    "Phase": "config.schema",
    "PackError": "errors",
    "backend": "ops._backend",
    "Pack": "packs.pack",
    "EvalReport": "evaluation.evaluate",
    "evaluate": "evaluation.evaluate",
    "Compared": "evaluation.compare",
    "evaluate_batch": "evaluation.compare",
    "weighted_sum": "packs.weighted_sum",
    "evaluate_tasks": "evaluation.lm_eval",
    "TrainRun": "training.run",
    "train_pack": "training.run",
    "LayerTrainer": "training.layer_trainer",
    "diff": "packs.diff",
    "list_packs": "packs.listing",
    "pull": "packs.hub",
    "push": "packs.push",
    "merge_pack": "convert.merge",
    "combine_packs": "convert.combine",
    "export_pack": "convert.interop",
    "import_adapter": "convert.interop",
}
_MODULES = ("data",)
__all__ = [*sorted(_PUBLIC), *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mlx_packs' has no attribute {name!r}")
    module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
