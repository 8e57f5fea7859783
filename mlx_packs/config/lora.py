"""Settings of the adapters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .fields import Fault, Settings, option

ALL_LINEAR = "all-linear"  # PEFT's name of the default targets
_adapter = partial(option, section="Adapter", method="lora")


@dataclass(frozen=True, repr=False)
class LoRAConfig(Settings):
    """Targets, ranks and scales of the adapters.

    LoRA: https://arxiv.org/abs/2106.09685. rsLoRA: https://arxiv.org/abs/2312.03732
    """

    rank: int = _adapter(16, "Rank of the adapters.", at_least=1, memory=True, own_layers="adapter")
    alpha: float | None = _adapter(
        None,
        "LoRA alpha, which scales the adapter's output by alpha / rank (mlx-lm's scale).",
        shown_default="2 x rank",
        metavar="ALPHA",
        above=0,
        own_layers="adapter",
    )
    dropout: float = _adapter(
        0.0,
        "Dropout probability on the adapter input.",
        metavar="P",
        at_least=0,
        below=1,
        own_layers="adapter",
    )
    target_modules: tuple[str, ...] = _adapter(
        (),
        "Layers to adapt, names or paths separated by commas (q_proj,v_proj); embeddings and the "
        "head too (embed_tokens,lm_head). all-linear is the default, as in PEFT.",
        shown_default="all linear layers except MoE routers and experts",
        memory=True,
    )
    num_layers: int = _adapter(
        -1,
        "Train only the last N blocks; -1 trains all.",
        method=None,
        at_least=0,
        or_all=True,
        memory=True,
    )
    rank_pattern: dict[str, int] = _adapter(
        {},
        "Per-module rank: NAME is a module path, its end or a regular expression (v_proj=8); "
        "slices of fused layers have names too (c_attn.q=8,c_attn.v=2). In YAML it is a mapping.",
        metavar="NAME=N,...",
        at_least=1,
        memory=True,
    )
    alpha_pattern: dict[str, float] = _adapter(
        {}, "Per-module alpha; same syntax as --rank-pattern.", metavar="NAME=ALPHA,...", above=0
    )
    rslora: bool = _adapter(
        False,
        "Scale the adapter's output by alpha / sqrt(rank), so that large ranks learn as fast "
        "(rsLoRA).",
    )
    modules_to_save: tuple[str, ...] = _adapter(
        (),
        "Modules to train in full in addition to the adapters, in float32, and to store in the "
        "pack: names or paths of embeddings, the head, norms or linear layers (embed_tokens,norm).",
        metavar="NAMES",
        memory=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_modules == (ALL_LINEAR,):
            object.__setattr__(self, "target_modules", LoRAConfig.target_modules)

    def _conflicts(self) -> Iterator[Fault]:
        if ALL_LINEAR in self.target_modules and len(self.target_modules) > 1:
            yield Fault(
                "target_modules",
                f"'{ALL_LINEAR}' stands for all linear layers. Write only that, or list the names "
                "of the modules.",
                "conflict",
            )

        for name in ("rank_pattern", "alpha_pattern"):
            for key in getattr(self, name):
                try:
                    re.compile(key)
                except re.error:
                    yield Fault(name, f"'{key}' must be a module path or a regular expression.")
