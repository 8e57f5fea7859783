"""Merge a pack of an encoder into its base: a folder that sentence-transformers opens.

What is to be written is loaded as an encoder of its own first and held against the base with the
pack attached: by the angle between embeddings, where `merge` has the KL of next tokens.
"""

import dataclasses
import time
from pathlib import Path

import numpy as np

from ..bases import files as base_files
from ..bases import writer as quantize
from ..bases.encoder import (
    Encoder,
    embedded,
    make_encoder,
    tensor_name,
)
from ..bases.tokenizer import tokens_of
from ..bases.writer import Plan
from ..config.schema import DataConfig
from ..data.formats import PAIR_FORMATS, TOKEN_FORMATS, format_of
from ..display import Display
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..packs.base import Base, load_base_for
from ..packs.pack import Pack
from ..runtime import mx
from .merge import plan_of

_BATCH = 32
# Of 1 - cosine: what is allowed at most, the share of what the pack moves, and rounding itself.
_MOST, _SHARE, _ROUNDING = 1e-3, 0.1, 1e-6


def merge_encoder(
    pack: Pack,
    model: str | Path,
    out: str | Path,
    requantize: str,
    dtype: str,
    max_drift: float | None,
    columns: DataConfig,
    rows: int,
    max_shard_gb: float,
    overwrite: bool,
    trust_remote_code: bool,
    display: Display,
) -> dict:
    """`merge.merge_pack` of an encoder.

    Args:
        max_drift: largest mean of 1 - cosine between the attached pack's embeddings and the merged
            ones; None is a tenth of what the pack itself moves, and 0.001 at most.
        columns: rows whose texts are measured on, at most ``rows`` of them.
    Raises: PackError if weights are to be packed, or there is no text.
    """
    if requantize != "none":
        raise PackError(
            f"--requantize {requantize}: an encoder is written dense, as transformers reads it."
        )
    started = time.monotonic()
    formats = (*PAIR_FORMATS, *TOKEN_FORMATS)
    texts = [
        text
        for row in evaluation_rows(columns, "test", rows)
        for text in format_of(row, columns, formats).texts(row, columns)
        if text
    ]
    if not texts:
        raise PackError(f"--data {columns.data}: holds no text to measure on.")
    base = load_base_for(pack, model, trust_remote_code)
    with display.working("drift", f"{len(texts)} texts"):
        plain = base.encode(texts, _BATCH)
        with base.applied(pack):
            attached = base.encode(texts, _BATCH)

        def drift_of(plan: Plan) -> float:
            return _apart(attached, _vectors(_as_written(plan, base), base, texts))

        plan = plan_of(pack, model, "none", dtype, max_shard_gb, trust_remote_code)
        moved, drift = _apart(plain, attached), drift_of(plan)
        limit = max(min(_MOST, _SHARE * moved), _ROUNDING) if max_drift is None else max_drift
        passes = "none" if drift <= limit else None
        tried = {"none": drift}
        if passes is None and dtype != "float32":
            other = plan_of(pack, model, "none", "float32", max_shard_gb, trust_remote_code)
            tried["none --dtype float32"] = drift_of(other)
            if tried["none --dtype float32"] <= limit:
                passes = "none --dtype float32"
    report = {
        "out": str(out),
        "model": base_files.public_name(str(model)),
        "requantize": requantize,
        "dtype": dtype,
        "drift_mean": drift,
        "drift_of_pack": moved,
        "texts": len(texts),
        "max_drift": limit,
        "passed": drift <= limit,
        "passes": passes,
        "tried": tried,
    }
    if not report["passed"]:
        return report
    facts = {
        "base": base_files.public_name(str(model)),
        "pack_sha256": pack.adapters_hash,
        "requantize": requantize,
        "dtype": dtype,
        "drift_mean": drift,
    }
    plan = dataclasses.replace(plan, merged={**facts, **plan.merged})
    record, _ = quantize.write(out, base.path, plan, overwrite, display)
    return report | {
        "changed": record["merged"]["changed"],
        "names": record["merged"]["names"],
        "shards": len(plan.shards),
        "gb": sum(file["bytes"] for file in record["files"].values()) / 1e9,
        "seconds": round(time.monotonic() - started, 2),
    }


def _as_written(plan: Plan, base: Base) -> Encoder:
    """The encoder that the tensors of a plan make."""
    model = make_encoder(base.path, base.config)
    named = [(tensor_name(stored), tensor) for stored, tensor in plan.tensors.items()]
    model.load_weights([(name, tensor.astype(mx.float32)) for name, tensor in named if name])
    model.eval()
    return model


def _vectors(model: Encoder, base: Base, texts: list[str]) -> np.ndarray:
    return embedded(model, tokens_of(base.tokenizer, texts, model.longest), _BATCH)


def _apart(one: np.ndarray, other: np.ndarray) -> float:
    """Mean of 1 - cosine of rows."""
    one, other = (x.astype(np.float64) for x in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, 1e-24)
    return float(max(0.0, 1 - cosines.mean()))
