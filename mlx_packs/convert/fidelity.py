"""Merge fidelity: how far one way of computing a model is from another, in KL and perplexity.

A delta smaller than the quantization step of a weight is lost in rounding. How much of it remains
cannot be read off the weights; it is measured on examples, as KL of the next token.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..adapters.full_tensors import full_tensor_modules
from ..bases.model import BaseModel
from ..bases.weight_formats import WeightFormat
from ..config.choices import MATMUL_PATHS
from ..config.data import DataConfig
from ..config.schema import TrainConfig
from ..data.batches import evaluation_batches
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions, encode
from ..data.formats import PREFERENCE, format_of
from ..data.preferences import both_completions
from ..display import Display
from ..errors import PackError
from ..evaluation.perplexity import perplexity
from ..evaluation.rows import evaluation_rows
from ..memory.matmul_path import choose_matmul_path
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import is_switch_linear
from ..nn.quantized import LINEARS
from ..nn.surgery import replace_modules
from ..objectives.causal_lm import forward, head_number, part_of, possible_heads
from ..offload.placing import exceeds_memory
from ..ops.profile import profile
from ..packs.base import Base, activated, load_base_for
from ..packs.compatibility import find_base
from ..packs.manifest import replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .merge_plan import MergeRequest, plan_changes

_log = logging.getLogger("mlx_packs")

# The default limit, in nats a token. Without a share a small pack could be rounded away entirely.
MAX_KL = 0.02
MAX_SHARE = 0.1  # of what the pack itself moves the base by
KL_NOISE = 2e-5  # of float32 products in another order, and of bf16 weights
ROWS = 32
# What is tried where a merge is too far off, the cheapest first: after any other format both.
_FINER = {"none": (), "affine8": ("none",)}
_LOGIT_BYTES = 1 << 28  # of logits that wait for their counterpart
_TOKENS = 4096  # of a batch
_LARGE_SHARE = 0.25  # of the memory: the blocks of a larger base stay on disk

Modules = list[tuple[str, nn.Module]]
Formats = Mapping[str, WeightFormat | None]  # of the new weights, by module; None: it stays dense
WeightOf = Callable[[str], mx.array]  # the new dense weight of a module, lazy
Variant = Callable[[], AbstractContextManager[None]]  # installs modules into a base, removes them


@dataclass(frozen=True)
class Outcome:
    """The difference between a merged model and the base with the pack attached."""

    scores: dict[str, float]  # for the report
    recorded: tuple[str, ...]  # the scores that the written folder records
    limit: float  # largest distance that passes
    tried: dict[str, float]  # the distance of every setting that was tried
    passes: str | None  # the cheapest of them within the limit

    def verified(self, setting: str) -> dict[str, Any]:
        """Return the distance of a setting with its limit, name and unit."""
        measure = f"KL in nats per {'document' if 'documents' in self.scores else 'token'}"
        if "texts" in self.scores:
            measure = "1 - cosine"
        return {
            "drift": self.tried[setting],
            "max_drift": self.limit,
            "measure": measure,
            "against": "the base with the pack attached",
        }


@dataclass(frozen=True)
class Fidelity:
    """Two models on the targets of the same examples."""

    kl_mean: float  # of the first from the second, nats per target
    kl_of_pack: float  # of the first from the base without a pack
    same_token: float  # share of targets where both rank the same token first
    ppl_before: float  # perplexity of the first
    ppl_after: float  # perplexity of the second
    ppl_ratio: float
    rows: int  # number of examples
    targets: int


def check_max_drift(max_drift: float | None) -> None:
    """Raise a PackError for a limit that is no finite number of 0 or more; JSON has no infinity."""
    if max_drift is not None and not 0 <= max_drift < math.inf:
        raise PackError(f"--max-drift must be a number of 0 or more, but is {max_drift}.")


def drift_limit(
    max_drift: float | None, moved: float, largest: float = MAX_KL, noise: float = KL_NOISE
) -> float:
    """None means a tenth of what the pack moves the base by, at most ``largest``."""
    if max_drift is not None:
        return max_drift
    return max(noise, min(largest, MAX_SHARE * moved))


def first_that_passes(
    setting: str, distance: float, limit: float, others: Mapping[str, Callable[[], float]]
) -> tuple[dict[str, float], str | None]:
    """Return the distances of the settings tried, and the first within the limit.

    ``others`` are measured in turn only if the specified setting does not pass.
    """
    tried = {setting: distance}
    if distance <= limit:
        return tried, setting

    for other, measure in others.items():
        tried[other] = measure()
        if tried[other] <= limit:
            return tried, other

    return tried, None


class FidelityMeter:
    """Compares variants of a base model on the same examples, cut as the pack was trained."""

    def __init__(
        self, base: Base, pack: Pack, columns: DataConfig, rows: int, display: Display
    ) -> None:
        """Read at most ``rows`` test examples; a PackError if none of them has a target."""
        length = pack._part("recipe").get("max_seq_length") or TrainConfig.max_seq_length
        loss_on = pack._part("objective").get("loss_on") if columns.data != "tiny" else None
        chosen = evaluation_rows(columns, "test", rows)
        if format_of(chosen[0], columns) is PREFERENCE:
            chosen = list(both_completions(chosen, columns))[::2]
        options = EncodingOptions(loss_on, length, base.vocab_size)
        examples = encode(chosen, base.tokenizer, columns, options)
        # few passes, since each makes every merged weight anew
        logits = 4 * base.vocab_size * examples.target_counts.max(initial=1)
        by_memory = min(_TOKENS // examples.lengths.max(initial=1), _LOGIT_BYTES // logits)

        self.base = base
        self.display = display
        self.batches = evaluation_batches(examples, max(4, min(len(examples), by_memory)), length)
        if not self.batches:
            raise PackError(
                f"--data {columns.data}: no example has a target, so nothing can be compared.",
                "data",
            )

        tokens = self.batches[-1].inputs["tokens"].size
        steps = 2 * len(self.batches)
        without_copies = {path for path, facts in MATMUL_PATHS.items() if not facts.keeps_dense}
        choice = choose_matmul_path(base.model, tokens, planned=without_copies, steps=steps)
        self.matmul_path = choice.matmul_path
        self.head_number = head_number(base.model)

    def with_pack(self, pack: Pack | None) -> Variant:
        """Return the base with a pack attached, or alone."""
        return partial(activated, self.base, pack, self.matmul_path)

    def with_modules(self, modules: Modules) -> Variant:
        return partial(replaced, self.base.model, modules)

    def compare(self, first: Variant, second: Variant) -> Fidelity:
        """Return KL and perplexity of the second variant against the first."""
        plain = self.with_pack(None)
        model = self.base.model
        model.eval()
        kl = kl_base = same = nll_before = nll_after = 0.0
        targets = rows = 0

        with self.display.task("drift", len(self.batches), "batches") as bar:
            for portion in _portions(self.batches, self.base.vocab_size):
                before = self._log_probabilities(portion, first)
                after = self._log_probabilities(portion, second)
                alone = self._log_probabilities(portion, plain)

                for batch, p, q, r in zip(portion, before, after, alone, strict=True):
                    inputs = batch.inputs
                    wanted = mx.array(inputs["targets"][inputs["owners"] >= 0])[:, None]
                    kl += _kl(p, q)
                    kl_base += _kl(p, r)
                    same += (mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)).sum().item()
                    nll_before -= mx.take_along_axis(p, wanted, axis=-1).sum().item()
                    nll_after -= mx.take_along_axis(q, wanted, axis=-1).sum().item()
                    targets += len(wanted)
                    rows += len(batch.examples)
                    bar.advance()

        return Fidelity(
            kl_mean=max(kl / targets, 0.0),  # rounding can make it negative; NaN stays
            kl_of_pack=max(kl_base / targets, 0.0),
            same_token=same / targets,
            ppl_before=perplexity(nll_before, targets),
            ppl_after=perplexity(nll_after, targets),
            ppl_ratio=math.exp(max(-700.0, min((nll_after - nll_before) / targets, 700.0))),
            rows=rows,
            targets=targets,
        )

    def _log_probabilities(self, batches: list[Batch], variant: Variant) -> list[mx.array]:
        """Return log-probabilities [targets, V] float32 at each batch's targets."""
        model = self.base.model
        with variant():
            # a check of each variant's head would read its weights twice more
            heads = None if self.head_number is None else list(possible_heads(model))
            head = heads and heads[self.head_number]
            arrays = []
            for batch in batches:
                inputs = batch.inputs
                positions = mx.array(inputs["positions"][inputs["owners"] >= 0])
                tokens = mx.array(inputs["tokens"])

                outputs = forward(model, part_of(model, head), tokens)
                logits = outputs.reshape(-1, outputs.shape[-1])[positions]
                if head is not None:
                    logits = head.logits(logits)
                logits = logits.astype(mx.float32)
                arrays.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
                mx.eval(arrays)

            return arrays


@contextmanager
def replaced(model: nn.Module, modules: Modules) -> Iterator[None]:
    before = dict(model.named_modules())
    originals = [(path, before[path]) for path, _ in modules]
    replace_modules(model, modules)

    try:
        yield
    finally:
        replace_modules(model, originals)


def _portions(batches: list[Batch], vocab_size: int) -> Iterator[list[Batch]]:
    """Yield as many batches at a time as their logits may wait for."""
    portion = []
    size = 0
    for batch in batches:
        size += 4 * vocab_size * batch.targets
        portion.append(batch)
        if size >= _LOGIT_BYTES:
            yield portion
            portion = []
            size = 0

    if portion:
        yield portion


def _kl(p: mx.array, q: mx.array) -> float:
    """Return the sum over rows of KL(p || q), of log-probabilities [n, V]."""
    return mx.where(mx.isneginf(p), 0, mx.exp(p) * (p - q)).sum().item()


def compare_next_tokens(request: MergeRequest) -> Outcome:
    """Return the fidelity of a merge, and the cheapest setting within the limit."""
    pack = request.pack
    base = load_for_comparison(pack, request.model, request.trust_remote_code)
    meter = FidelityMeter(base, pack, request.columns, request.rows, request.display)
    attached = meter.with_pack(pack)

    def fidelity_of(request: MergeRequest) -> Fidelity:
        return meter.compare(attached, meter.with_modules(merged_modules(base, request)))

    fidelity = fidelity_of(request)
    limit = drift_limit(request.max_drift, fidelity.kl_of_pack)
    others = finer_settings(request, lambda other: fidelity_of(other).kl_mean)
    tried, passes = first_that_passes(request.requantize, fidelity.kl_mean, limit, others)
    scores = dataclasses.asdict(fidelity)
    return Outcome(scores, ("kl_mean", "ppl_ratio"), limit, tried, passes)


def load_for_comparison(
    pack: Pack, base: Base | str | Path | None, trust_remote_code: bool
) -> Base:
    """Return a base as `loaded_base`, with its blocks on disk if it is large and they can be."""
    if isinstance(base, Base):
        return base
    model = find_base(pack) if base is None else base
    load = partial(load_base_for, pack, model, trust_remote_code)
    if exceeds_memory(model, _LARGE_SHARE):
        try:
            return load(offload_base="on")
        except PackError as error:
            _log.warning("packs: all of the base is loaded into memory: %s", error)
    return load()


def finer_settings(
    request: MergeRequest, distance_of: Callable[[MergeRequest], float]
) -> dict[str, Callable[[], float]]:
    """Return what is tried where a merge is too far off, by its name; the cheapest first."""

    def distance_with(requantize: str, dtype: str) -> float:
        return distance_of(dataclasses.replace(request, requantize=requantize, dtype=dtype))

    finer = _FINER.get(request.requantize, ("affine8", "none"))
    others = {requantize: partial(distance_with, requantize, request.dtype) for requantize in finer}
    if any(change.weight.dtype != mx.float32 for change in plan_changes(request).changes):
        others["none --dtype float32"] = partial(distance_with, "none", "float32")
    return others


def merged_modules(base: BaseModel, request: MergeRequest) -> Modules:
    """Return modules that compute what the written ones will, for a base that is loaded."""
    changes = plan_changes(request).changes
    formats = {change.path: change.weight_format for change in changes}
    merged = modules_on_call(base, formats, _fresh_weights(request))
    names = [n for n in replaced_of(request.pack.manifest) if n.rpartition(".")[0] not in formats]
    if names:
        tensors = request.pack.load_tensors()
        merged += full_tensor_modules(base.model, names, tensors, str(request.pack.path))
    return merged


def modules_on_call(base: BaseModel, formats: Formats, weight_of: WeightOf) -> Modules:
    """Return a module for each path, whose weight is in memory only while it is called."""
    modules = dict(base.model.named_modules())
    return [
        (path, _ModuleOnCall(modules[path], weight_format, partial(weight_of, path)))
        for path, weight_format in formats.items()
    ]


def _fresh_weights(request: MergeRequest) -> WeightOf:
    """Return a function that plans the new weights from the files again before one is used again.

    An array that was computed would stay in memory for as long as somebody holds it.
    """
    weights: dict[str, mx.array] = {}

    def take(path: str) -> mx.array:
        if path not in weights:
            weights.update((c.path, c.weight) for c in plan_changes(request).changes)
        return weights.pop(path)

    return take


class _ModuleOnCall(nn.Module):
    """A linear, stack of experts or embedding that makes its dense weight for each call."""

    def __init__(
        self,
        module: nn.Module,
        weight_format: WeightFormat | None,
        new_weight: Callable[[], mx.array],
    ) -> None:
        super().__init__()
        if "bias" in module:
            self.bias = module.bias
        self._dense_class = _dense_class(module)
        self._dtype = profile().dtype or frozen_weight(module).dtype
        self._weight_format = weight_format
        self._new_weight = new_weight
        self.freeze()

    @property
    def weight(self) -> mx.array:
        """The weight that the written tensors represent, in the dtype of its products."""
        weight = self._new_weight()
        if self._weight_format is None:
            return weight.astype(self._dtype)
        tensors = self._weight_format.quantize("weight", weight)
        return self._weight_format.dequantize(tensors, self._dtype)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return self._dense(x)(x, *args, **kwargs)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._dense(x).as_linear(x)

    def _dense(self, x: mx.array) -> Any:
        """Return the dense module, after its input was computed and earlier weights are free."""
        mx.eval(x)
        dense = self._dense_class(1, 1)
        dense.clear()
        dict.update(dense, self, weight=self.weight)
        return dense


def _dense_class(module: nn.Module) -> Callable[..., nn.Module]:
    if is_switch_linear(module):
        from mlx_lm.models.switch_layers import SwitchLinear

        return partial(SwitchLinear, 1)
    return nn.Linear if isinstance(module, (nn.Linear, *LINEARS)) else nn.Embedding
