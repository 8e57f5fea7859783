"""Fine-tune LLMs with LoRA and QLoRA on MLX; each run produces a pack.

    import mlx_packs as mp
    base = mp.load_base("mlx-community/Qwen3-4B-Instruct-2507-4bit")
    run = mp.train_pack(base, data="data/", lora=mp.LoRAConfig(rank=16))

The public names are listed in ``__init__.pyi``, one import per line. Each loads when it is first
used, so that importing the package costs next to nothing.
"""

import importlib as _importlib
import os as _os

# macOS kills GPU work that delays the display; this extends the limit (ml-explore/mlx#3267). It has
# to be there before MLX is, and this file is read before any other of the package.
_os.environ.setdefault("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1")
# As mlx-lm does: transformers advises at its import that there is no torch, which is no news here.
_os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"


def _read_stub() -> dict[str, str]:
    """Return the module of each public name, by the lines ``from .module import name as name``."""
    with open(__file__.removesuffix("c") + "i", encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from .")]
    return {words[3]: words[1] for words in imports}


_MODULE_OF = _read_stub()
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlx_packs' has no attribute {name!r}")
    if _MODULE_OF[name] == ".":  # a module itself
        return _importlib.import_module(f".{name}", __name__)
    value = getattr(_importlib.import_module(_MODULE_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
