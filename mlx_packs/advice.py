"""`packs plan`: which way of training fits into a memory, the best first, and the next command."""

import shlex
from dataclasses import dataclass, replace

from .config import LoRAConfig, TrainConfig
from .errors import PackError
from .plan import ERROR, Checkpoint, MemoryPlan, activation_bytes, estimate, is_packed

SMALL_WEIGHTS = 1e9  # a base of fewer weights is better left unquantized, if that fits
_LENGTHS, _BATCHES = (2048, 1024, 512, 256), (4, 2, 1)
_SMALL = "small: full precision fits, and quantizing would cost accuracy for memory not needed"


@dataclass(frozen=True)
class Option:
    """One way of training a base. ``method``: lora, qlora, lora-fp32, or full (as information)."""

    method: str
    quantize: str
    lora: LoRAConfig
    train: TrainConfig
    plan: MemoryPlan
    fits: bool
    why: str
    path_asked: bool = False

    def to_json(self) -> dict:
        """Sizes of ``parts`` are in bytes; ``error`` is the share by which peak_gb may be off."""
        return {
            "method": self.method,
            "quantize": self.quantize,
            "base_path": self.plan.base_path,
            "rank": self.lora.rank,
            "batch_size": self.train.batch_size,
            "max_seq_length": self.train.max_seq_length,
            "grad_checkpoint": self.train.grad_checkpoint,
            "optimizer": self.train.optimizer,
            "peak_gb": self.plan.peak_gb,
            "error": ERROR,
            "fits": self.fits,
            "why": self.why,
            "moment": self.plan.moment,
            "parts": self.plan.parts(),
            "adapter_weights": self.plan.adapter_weights,
            "base_weights": self.plan.base_weights,
        }

    def command(self, model: str) -> str:
        """The `packs train` that does this."""
        words = ["packs train", "--model", shlex.quote(model)]
        words += ["--batch-size", str(self.train.batch_size)]
        words += ["--max-seq-length", str(self.train.max_seq_length)]
        words += ["--rank", str(self.lora.rank)]
        if self.quantize != "none":
            words += ["--quantize", self.quantize]
            words += ["--no-double-quant"] * (not self.train.double_quant)
        if self.method == "lora-fp32":
            words += ["--compute-dtype", "float32"]
        if self.path_asked:  # else training measures the paths, and minds the memory
            words += ["--base-path", self.plan.base_path]
        words += ["--grad-checkpoint"] * self.train.grad_checkpoint
        words += ["--num-layers", str(self.lora.num_layers)] * (self.lora.num_layers > 0)
        if self.lora.target_modules:
            words += ["--target-modules", ",".join(self.lora.target_modules)]
        if self.train.optimizer != TrainConfig.optimizer:
            words += ["--optimizer", self.train.optimizer]
        return " ".join(words)


def advise(
    checkpoint: Checkpoint,
    memory: int,
    lora: LoRAConfig | None = None,
    train: TrainConfig | None = None,
    asked: frozenset[str] = frozenset(),
) -> list[Option]:
    """Ways of training ``checkpoint`` within ``memory`` bytes, the best first.

    Args:
        asked: names of settings of ``train`` that stand; the rest (batch_size, max_seq_length,
            grad_checkpoint, quantize, base_path) is searched.
    Raises: PackError where no plan is possible.
    """
    if memory <= 0:
        raise PackError(f"--memory must be positive, but got {memory / 1e9:g} GB.")
    lora, train = lora or LoRAConfig(), train or TrainConfig()
    ways = _ways(checkpoint, train, asked)
    found = [_option(checkpoint, memory, lora, train, asked, *way) for way in ways]
    found = [replace(option, path_asked="base_path" in asked) for option in found]
    small = found[0].plan.base_weights < SMALL_WEIGHTS
    order = ("lora-fp32", "lora", "qlora") if small else ("lora", "qlora", "lora-fp32")
    found.sort(key=lambda o: (not o.fits, order.index(o.method)))
    if small:
        found = [replace(o, why=_SMALL) if o.fits and o.method == "lora-fp32" else o for o in found]
    return [*found, _full(found[0], memory)]


def _ways(checkpoint: Checkpoint, train: TrainConfig, asked: frozenset[str]) -> list[tuple]:
    """(method, quantize, base path, bytes of an activation) to try."""
    paths = [train.base_path] if train.base_path != "auto" else ["quantized", "transient", "dense"]
    if is_packed(checkpoint.tensors):
        return [("qlora", "none", path, None) for path in paths]
    wanted = [train.quantize] if "quantize" in asked else ["none", "nf4", "affine4"]
    ways = []
    for quantize in wanted:
        if quantize == "none":
            ways += [("lora-fp32", "none", "dense", 4)]
            if activation_bytes(checkpoint.config, train) == 2:
                ways += [("lora", "none", "dense", None)]
        else:
            searched = "transient" if quantize == "nf4" else "quantized"
            ways += [("qlora", quantize, paths[0] if len(paths) == 1 else searched, None)]
    return ways


def _option(checkpoint, memory, lora, train, asked, method, quantize, path, itemsize) -> Option:
    """The largest batch and length that fit this way; the smallest tried if none does."""
    lengths = [train.max_seq_length] if "max_seq_length" in asked else _LENGTHS
    batches = [train.batch_size] if "batch_size" in asked else _BATCHES
    recomputed = [train.grad_checkpoint] if "grad_checkpoint" in asked else [False, True]
    for length in lengths:
        for batch in batches:
            for recompute in recomputed:
                tried = replace(
                    train, quantize=quantize, base_path=path, batch_size=batch,
                    max_seq_length=length, grad_checkpoint=recompute,
                    keep=train.keep if quantize != "none" else (),
                    double_quant=train.double_quant or quantize != "nf4",
                )  # fmt: skip
                plan = estimate(
                    checkpoint.config, checkpoint.tensors, lora, tried, path, itemsize=itemsize
                )
                if plan.peak_gb * (1 + ERROR) <= memory / 1e9:
                    return Option(method, quantize, lora, tried, plan, True, _why(plan, memory))
    return Option(method, quantize, lora, tried, plan, False, _why(plan, memory))


def _why(plan: MemoryPlan, memory: int) -> str:
    """What takes most, in one line."""
    name, size = max(plan.parts().items(), key=lambda item: item[1])
    share = f"{name} {size / 1e9:.2g} GB is the largest part"
    if plan.peak_gb * (1 + ERROR) <= memory / 1e9:
        return share
    return f"does not fit with {ERROR:.0%} to spare: {share}"


def _full(best: Option, memory: int) -> Option:
    """Full fine-tuning, as information: weights, gradients and two moments in float32."""
    weights = best.plan.base_weights
    plan = replace(
        best.plan, base=0, adapters=4 * weights, gradients=4 * weights, optimizer=8 * weights,
        base_path="dense",
    )  # fmt: skip
    fits = plan.peak_gb * (1 + ERROR) <= memory / 1e9
    why = "for information: 16 bytes a weight with AdamW; packs trains adapters only"
    return Option("full", "none", best.lora, best.train, plan, fits, why)


def table(options: list[Option], model: str, memory: int) -> list[str]:
    """Options for people, and the next command."""
    best = options[0]
    lines = [
        f"base    {model} · {best.plan.base_weights / 1e9:.2f} B weights · "
        f"memory {memory / 1e9:.1f} GB",
        f"        {'method':<10} {'base':<9} {'path':<10} batch length recompute  peak GB  fits",
    ]
    for o in options:
        kind = o.quantize if o.quantize != "none" else "as it is"
        lines.append(
            f"        {o.method:<10} {kind:<9} {o.plan.base_path:<10} {o.train.batch_size:>5} "
            f"{o.train.max_seq_length:>6} {'yes' if o.train.grad_checkpoint else 'no':>9} "
            f"{o.plan.peak_gb:>8.2f}  {'yes' if o.fits else 'no'}"
        )
    parts = [f"{name} {size / 1e9:.3g}" for name, size in best.plan.parts().items() if size]
    lines.append(f"parts   {' · '.join(parts)} GB, worst at {best.plan.moment}")
    lines.append(f"why     {best.method}: {best.why}")
    lines.append(
        f"error   ± {ERROR:.0%} against runs on a CPU (benchmarks/plan_accuracy.py); on a GPU the "
        "formula is not measured; every token is taken as a target"
    )
    if best.fits:
        lines.append(f"try:    {best.command(model)}")
    else:
        lines.append("try:    packs plan with --grad-checkpoint, a smaller base or more --memory")
    return lines
