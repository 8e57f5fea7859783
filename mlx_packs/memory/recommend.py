"""`packs plan`: which way of training fits into a memory, the best first, and the next command.

What is given up to fit, the least harm first: rows of a batch (more of them can be accumulated),
time (recomputed blocks), length of rows, rank. Ways are compared by the same scale from its other
end, with the precision of the base between what is learned (rank, length) and what it costs.
"""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import runtime
from ..config.choices import ENCODERS, POLICIES
from ..config.schema import MEMORY_SETTINGS, OF_ADAPTERS, LoRAConfig, Recipe, TrainConfig
from ..display import shown_count, size
from ..errors import PackError
from .encoder import for_encoder, why_not_quantized
from .plan import (
    ERROR,
    LEAST_RANK,
    SHORTEST,
    Checkpoint,
    MemoryPlan,
    activation_bytes,
    check_stored,
    estimate,
    fit,
    is_packed,
    matmul_paths,
    policies,
    remedies,
)

SMALL_WEIGHTS = 1e9  # a base of fewer weights is better left unquantized, if that fits
_SMALL = "small base: full precision fits, quantizing would cost accuracy for memory not needed"
_METHODS = {True: ("lora-fp32", "lora", "qlora"), False: ("lora", "lora-fp32", "qlora")}  # if small
_RECOMPUTED = {"selective": "what is cheap recomputed", "block": "blocks recomputed"}
_ALWAYS = ("batch_size", "max_seq_length", "rank", "matmul_path")  # named in every command


@dataclass(frozen=True)
class Option:
    """One way of training a base. ``method``: lora, qlora, lora-fp32, or full (the baseline).

    quantize: what is done to the base on loading.   fit: as of `plan.fit`.
    """

    method: str
    quantize: str
    lora: LoRAConfig
    train: TrainConfig
    plan: MemoryPlan
    fit: str
    why: str

    @property
    def fits(self) -> bool:
        return self.fit == "fits"

    def to_json(self) -> dict:
        """Sizes of ``parts`` are in bytes; ``error`` is the share by which peak_gb may be off.

        ``parts`` add up to the peak; ``parts_max`` is each when it is largest.
        """
        return {
            "method": self.method,
            "quantize": self.quantize,
            "matmul_path": self.plan.matmul_path,
            "rank": self.lora.rank,
            "batch_size": self.train.batch_size,
            "max_seq_length": self.train.max_seq_length,
            "recompute": self.train.recomputes,
            "optimizer": self.train.optimizer,
            "peak_gb": self.plan.peak_gb,
            "error": ERROR,
            "fits": self.fits,
            "fit": self.fit,
            "why": self.why,
            "moment": self.plan.moment,
            "parts": self.plan.parts(),
            "parts_max": self.plan.most(),
            "adapter_weights": self.plan.adapter_weights,
            "base_weights": self.plan.base_weights,
        }

    def command(self, model: str, configs: Sequence[str] = (), under: Recipe | None = None) -> str:
        """The `packs train` whose peak this is.

        The matmul path is always named: left to `auto`, the run would choose, and peak, by the
        machine that it is on.
        Args:
            under: what that run is told without these flags, by ``configs`` and defaults.
        """
        words = ["packs", "train", *(w for file in configs for w in ("-c", str(file)))]
        words += ["--model", model]
        under = under or Recipe()
        told = {**vars(under.train), **vars(under.lora)}
        wanted = {**vars(self.train), **vars(self.lora)}
        full = self.method == "full"
        for name in MEMORY_SETTINGS:
            if full and name in OF_ADAPTERS:
                continue
            if name in _ALWAYS or wanted[name] != told[name]:
                words += _flag(name, wanted[name])
        return shlex.join(words)


def _flag(name: str, value) -> list[str]:
    spelled = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    if isinstance(value, dict):
        value = tuple(f"{key}={number}" for key, number in value.items())
    return [f"--{spelled}", ",".join(value) if isinstance(value, tuple) else str(value)]


def advise(
    checkpoint: Checkpoint,
    memory: int,
    lora: LoRAConfig | None = None,
    train: TrainConfig | None = None,
    asked: frozenset[str] = frozenset(),
) -> list[Option]:
    """Ways of training ``checkpoint`` within ``memory`` bytes, the best first.

    Args:
        lora, train: what is wanted.
        asked: names of settings that stand. Of batch_size, recompute, max_seq_length and
            rank, the rest give way in this order until it fits; matmul_path and quantize are tried.
    Raises: PackError where no plan is possible.
    """
    if memory <= 0:
        raise PackError(f"--memory must be positive, but got {memory / 1e9:g} GB.")
    lora, train = lora or LoRAConfig(), train or TrainConfig()
    encoder = checkpoint.config.get("model_type") in ENCODERS
    if encoder:
        train = for_encoder(checkpoint, train, asked)
    elif train.task == "embedding":
        raise PackError(
            f"--task embedding: {checkpoint.name} is no encoder ({', '.join(ENCODERS)}); a causal "
            "base is planned for without it."
        )
    check_stored(checkpoint, train)
    if train.method == "full":
        return [_full(checkpoint, lora, train, memory, asked)]
    ways = _ways(checkpoint, train, asked)
    found = [_option(checkpoint, memory, lora, train, asked, *way) for way in ways]
    small = found[0].plan.base_weights < SMALL_WEIGHTS
    found.sort(key=lambda option: _harm(option, small))
    best = found[0]
    if small and best.method == "lora-fp32" and best.fits and not is_packed(checkpoint.tensors):
        reason = why_not_quantized(checkpoint.config, best.plan) if encoder else _SMALL
        found[0] = replace(best, why=f"{reason}; {best.why}")
    return [*found, _full(checkpoint, best.lora, best.train, memory, asked)]


def _harm(option: Option, small: bool) -> tuple:
    """What makes an option worse than another, the weightiest first."""
    if option.fit == "no":
        return 2, option.plan.peak_bytes
    path, train = option.plan.matmul_path, option.train
    # MLX's packed products on a CPU take ten times as long as dense ones (README, "Measured")
    slow = runtime.on_cpu() and path == "quantized"
    paths = ("dense", "transient", "quantized")
    return (
        option.fit == "tight",
        -option.lora.rank,
        -train.max_seq_length,
        slow,
        _METHODS[small].index(option.method),
        -train.batch_size,
        POLICIES.index(train.recomputes),
        paths.index(path) if runtime.on_cpu() else -paths.index(path),
        option.quantize != "nf4",
    )


def _ways(checkpoint: Checkpoint, train: TrainConfig, asked: frozenset[str]) -> list[tuple]:
    """(method, quantize, matmul path, compute dtype) to try."""
    dtype = train.compute_dtype
    if train.task == "embedding":
        return [("lora-fp32", "none", "dense", dtype)]
    if is_packed(checkpoint.tensors):
        return [("qlora", "none", path, dtype) for path in matmul_paths(checkpoint.tensors, train)]
    ways = []
    for quantize in [train.quantize] if "quantize" in asked else ["none", "nf4", "affine4"]:
        if quantize != "none":
            # of NF4 both packed paths are one; affine is slow packed on a CPU
            packed = "transient" if quantize == "nf4" or runtime.on_cpu() else "quantized"
            path = packed if train.matmul_path == "auto" else train.matmul_path
            ways.append(("qlora", quantize, path, dtype))
            continue
        half = activation_bytes(checkpoint.config, train) == 2
        if half:
            ways.append(("lora", "none", "dense", dtype))
        if not half or dtype == "auto":
            ways.append(("lora-fp32", "none", "dense", "float32" if dtype == "auto" else dtype))
    return ways


def _option(checkpoint, memory, lora, train, asked, method, quantize, path, dtype) -> Option:
    """What gives up least of what is wanted and fits this way; the smallest where nothing does."""
    stored = is_packed(checkpoint.tensors)
    tried = []
    for rank, length, recompute, batch in _search(checkpoint, lora, train, asked):
        less_lora = replace(lora, rank=rank)
        less = replace(
            train,
            quantize=train.quantize if stored else quantize,
            matmul_path=path,
            compute_dtype=dtype,
            batch_size=batch,
            max_seq_length=length,
            recompute=recompute,
        )
        plan = estimate(checkpoint.config, checkpoint.tensors, less_lora, less, path)
        tried.append((less_lora, less, plan, fit(plan, memory)))
        if tried[-1][-1] == "fits":
            break
    else:  # a smaller rank frees little: it goes only where nothing else is tight
        tried.sort(key=lambda t: (t[3] == "no", t[3] == "tight" and -t[0].rank, t[2].peak_bytes))
        tried = tried[:1]
    less_lora, less, plan, found = tried[-1]
    why = _why(plan, found, (lora, less_lora), (train, less))
    return Option(method, quantize, less_lora, less, plan, found, why)


def _search(checkpoint, lora, train, asked) -> list[tuple[int, int, str, int]]:
    """(rank, length, recompute, batch), what gives up least first."""
    longest = checkpoint.config.get("max_position_embeddings") or train.max_seq_length
    ranks = [lora.rank, *(r for r in (8, LEAST_RANK) if r < lora.rank)]
    lengths = _halved(min(train.max_seq_length, longest), SHORTEST)
    if "rank" in asked:
        ranks = [lora.rank]
    if "max_seq_length" in asked:
        lengths = [train.max_seq_length]
    least = 2 if train.task == "embedding" else 1
    batches = [train.batch_size] if "batch_size" in asked else _halved(train.batch_size, least)
    if train.task == "embedding":  # rows are each other's negatives: rather recompute
        return [
            (r, t, c, b) for r in ranks for t in lengths for b in batches for c in policies(train)
        ]
    return [(r, t, c, b) for r in ranks for t in lengths for c in policies(train) for b in batches]


def _halved(largest: int, least: int) -> list[int]:
    """``largest`` and its halves down to ``least``."""
    sizes = [largest]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def _why(
    plan: MemoryPlan,
    found: str,
    lora: tuple[LoRAConfig, LoRAConfig],
    train: tuple[TrainConfig, TrainConfig],
) -> str:
    """What was given up between (wanted, taken), and what takes most, in one line."""
    gave = []
    for name, (wanted, taken) in (
        ("rank", [which.rank for which in lora]),
        ("length", [which.max_seq_length for which in train]),
        ("batch", [which.batch_size for which in train]),
    ):
        if taken != wanted:
            gave.append(f"{name} {taken} instead of {wanted}")
    if train[1].recomputes not in ("none", train[0].recomputes):
        gave.append(_RECOMPUTED[train[1].recomputes])
    name, largest = max(plan.parts().items(), key=lambda item: item[1])
    share = f"{name} {size(largest)} is the largest part"
    if found == "no":
        asked = f" with {', '.join(gave)}" if gave else ""
        return f"does not fit{asked}: {share}"
    told = "; ".join([", ".join(gave), share] if gave else [share])
    return told if found == "fits" else f"tight, {ERROR:.0%} more would not fit: {told}"


def _full(
    checkpoint: Checkpoint,
    lora: LoRAConfig,
    wanted: TrainConfig,
    memory: int,
    asked: frozenset[str],
) -> Option:
    """Full fine-tuning, the baseline: the least that it takes at the length that is wanted.

    Weights, gradients and both moments of AdamW in float32 beside the base; float32 activations of
    the smallest batch with recomputed blocks, where nothing else is asked for. The rows of an
    encoder's batch are each other's negatives: theirs is the one that is wanted.
    """
    smallest = wanted.task != "embedding" and "batch_size" not in asked
    train = replace(
        wanted,
        method="full",
        quantize="none",
        keep=(),
        double_quant=True,
        matmul_path="dense",
        batch_size=1 if smallest else wanted.batch_size,
        compute_dtype="auto",
        recompute=wanted.recompute if "recompute" in asked else "block",
        cache_frozen="off",
        grad_checkpoint=False if "recompute" not in asked else wanted.grad_checkpoint,
        train_fp16_fallback=False,
    )
    layers = LoRAConfig(num_layers=lora.num_layers)
    plan = estimate(checkpoint.config, checkpoint.tensors, layers, train, "dense")
    each = (4 * 2 * plan.adapter_weights + plan.optimizer) / plan.adapter_weights
    why = (
        f"the baseline: {each:.3g} bytes a weight that learns (float32 weights, gradients, "
        f"{train.optimizer}) beside the base's own, float32 activations of batch {train.batch_size}"
    )
    return Option("full", "none", layers, train, plan, fit(plan, memory), why)


def table(
    options: list[Option],
    checkpoint: Checkpoint,
    memory: int,
    configs: Sequence[str] = (),
    under: Recipe | None = None,
    width: int = 100,
) -> list[str]:
    """Options for people in lines of ``width`` columns, and the next command in one line."""
    best = options[0]
    kinds = [" ".join([o.method, *[o.quantize] * (o.quantize != "none")]) for o in options]
    lines = [
        f"base    {checkpoint.name} · {shown_count(best.plan.base_weights)} weights · "
        f"memory {size(memory)}",
        "",
        f"{'method':<13} {'path':<9}{'rank':>4} {'batch':>8} {'recompute':>9} {'peak':>8} fits",
    ]
    for o, kind in zip(options, kinds, strict=True):
        full = o.method == "full"
        batch = f"{o.train.batch_size} x {o.train.max_seq_length}"
        lines.append(
            f"{kind:<13} {o.plan.matmul_path:<9}{'-' if full else o.lora.rank:>4} {batch:>8} "
            f"{o.train.recomputes:>9} {size(o.plan.peak_bytes):>8} {_ANSWERS[o.fit]}"
        )
    lines += ["", f"{'parts of ' + kinds[0]:<24} {'at the peak':>12} {'at most':>9}"]
    most = best.plan.most()
    for name, now in best.plan.parts().items():
        lines.append(f"  {name:<22} {_part(now):>12} {_part(most[name]):>9}")
    lines += [f"  {'peak, at ' + best.plan.moment:<22} {size(best.plan.peak_bytes):>12}", ""]
    told = [
        ("why", f"{kinds[0]}: {best.why}"),
        (
            "error",
            f"± {ERROR:.0%} against runs on a CPU (benchmarks/plan_accuracy.py); on a GPU "
            f"the formula is not measured. {_TAKEN[best.train.task]}",
        ),
        (
            "cache",
            "not counted: the buffers that MLX has freed and keeps; it gives them back when "
            "memory is short.",
        ),
    ]
    for label, text in told:
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"{label:<8}",
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    if best.fit == "no":

        def peak(lora: LoRAConfig, train: TrainConfig) -> int:
            path = train.matmul_path
            return estimate(checkpoint.config, checkpoint.tensors, lora, train, path).peak_bytes

        dense = not is_packed(checkpoint.tensors)
        ways = [*remedies(peak, best.lora, best.train, dense), "more memory"]
        lines.append(f"try:    {', '.join(ways[:-1])} or {ways[-1]}")
    else:
        lines.append(f"try:    {best.command(checkpoint.name, configs, under)}")
    return lines


_TAKEN = {
    "lm": "Every token is taken as a target.",
    "embedding": "Every text is taken as long as it may be. Blocks that are recomputed for small "
    "batches took up to twice the estimate.",
}
_ANSWERS = {"fits": "yes", "tight": "tight", "no": "no"}


def _part(count: int) -> str:
    return size(count) if count else "0"
