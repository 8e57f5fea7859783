"""Merge fidelity of causal models: KL of the next token between attached and merged."""

import dataclasses
from functools import partial

import mlx.nn as nn

from ..adapters.imported import full_tensor_modules
from ..bases.model import BaseModel
from ..nn.lora import is_switch_linear
from ..nn.quantized import LINEARS
from ..ops.profile import profile
from ..packs.base import load_base_for
from ..packs.manifest import replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .fidelity import (
    Fidelity,
    FidelityMeter,
    Modules,
    Outcome,
    drift_limit,
    first_that_passes,
)
from .merge_plan import Change, MergeRequest, dtype_of, plan_changes

# What is tried where a merge is too far off, the cheapest first: after any other format both.
_FINER = {"none": (), "affine8": ("none",)}


def compare_next_tokens(request: MergeRequest) -> Outcome:
    """Return the fidelity of a merge, and the cheapest setting within the limit."""
    pack = request.pack
    planned = plan_changes(request)
    base = load_base_for(pack, request.model, request.trust_remote_code)
    meter = FidelityMeter(base, pack, request.columns, request.rows, request.display)
    attached = meter.with_pack(pack)

    def fidelity_of(changes: list[Change]) -> Fidelity:
        return meter.compare(attached, meter.with_modules(dense_modules(base, changes, pack)))

    def kl_of(requantize: str, dtype: str) -> float:
        other = dataclasses.replace(request, requantize=requantize, dtype=dtype)
        return fidelity_of(plan_changes(other).changes).kl_mean

    fidelity = fidelity_of(planned.changes)
    finer = _FINER.get(request.requantize, ("affine8", "none"))
    others = {requantize: partial(kl_of, requantize, request.dtype) for requantize in finer}
    if any(change.weight.dtype != mx.float32 for change in planned.changes):
        others["none --dtype float32"] = partial(kl_of, "none", "float32")
    limit = drift_limit(request.max_drift, fidelity.kl_of_pack)
    tried, passes = first_that_passes(request.requantize, fidelity.kl_mean, limit, others)

    return Outcome(
        scores=dataclasses.asdict(fidelity),
        recorded=("kl_mean", "ppl_ratio"),
        limit=limit,
        tried=tried,
        passes=passes,
    )


def dense_modules(base: BaseModel, changes: list[Change], pack: Pack | None = None) -> Modules:
    """Return dense modules that compute what the written ones will, for a base that is loaded."""
    modules = dict(base.model.named_modules())
    replaced = []
    for change in changes:
        module = modules[change.path]
        if is_switch_linear(module):
            from mlx_lm.models.switch_layers import SwitchLinear

            dense = SwitchLinear(1, 1, 1, bias="bias" in module)
        elif isinstance(module, (nn.Linear, *LINEARS)):
            dense = nn.Linear(1, 1, bias="bias" in module)
        else:
            dense = nn.Embedding(1, 1)
        dense.weight = _as_loaded(change, profile().dtype or dtype_of(module))
        if "bias" in module:
            dense.bias = module.bias
        dense.freeze()
        mx.eval(dense.parameters())
        replaced.append((change.path, dense))

    if pack is not None:
        paths = {path for path, _ in replaced}
        names = [n for n in replaced_of(pack.manifest) if n.rpartition(".")[0] not in paths]
        if names:
            tensors = pack.load_tensors()
            replaced += full_tensor_modules(base.model, names, tensors, str(pack.path))
    return replaced


def _as_loaded(change: Change, dtype: mx.Dtype) -> mx.array:
    """Return the weight that the written tensors represent, in the dtype of its products."""
    if change.weight_format is None:
        return change.weight.astype(dtype)
    tensors = change.weight_format.quantize(f"{change.path}.weight", change.weight)
    return change.weight_format.dequantize(tensors, dtype)
