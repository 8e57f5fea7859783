"""Merge fidelity of encoders: the angle between embeddings of attached and merged.

What is to be written is loaded as an encoder of its own first.
"""

import dataclasses
from functools import partial

import numpy as np

from ..bases.encoder import Encoder, embedded, make_encoder, tensor_name
from ..bases.tokenizer import tokens_of
from ..bases.write_plan import WritePlan
from ..data.formats import PAIR_FORMATS, TOKEN_FORMATS, format_of
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..packs.base import Base, load_base_for
from ..runtime import mx
from .fidelity import Outcome, drift_limit, first_that_passes
from .merge_plan import MergeRequest, plan_merge

_BATCH = 32
_LARGEST = 1e-3  # limit of 1 - cosine
_NOISE = 1e-6  # of 1 - cosine, by rounding itself


def compare_embeddings(request: MergeRequest) -> Outcome:
    """Return the mean of 1 - cosine of the embeddings; what is written stays dense."""
    if request.requantize != "none":
        raise PackError(
            f"--requantize {request.requantize}: an encoder is written dense, as transformers "
            "reads it.",
            "unsupported",
        )

    texts = _texts(request)
    base = load_base_for(request.pack, request.model, request.trust_remote_code)
    with request.display.working("drift", f"{len(texts)} texts"):
        plain = base.encode(texts, _BATCH)
        with base.applied(request.pack):
            attached = base.encode(texts, _BATCH)

        def distance_of(dtype: str) -> float:
            model = _as_written(plan_merge(dataclasses.replace(request, dtype=dtype)), base)
            tokens = tokens_of(base.tokenizer, texts, model.longest)
            return _distance(attached, embedded(model, tokens, _BATCH))

        moved = _distance(plain, attached)
        distance = distance_of(request.dtype)
        limit = drift_limit(request.max_drift, moved, _LARGEST, _NOISE)
        others = {}
        if request.dtype != "float32":
            others["none --dtype float32"] = partial(distance_of, "float32")
        tried, passes = first_that_passes("none", distance, limit, others)

    return Outcome(
        scores={"drift_mean": distance, "drift_of_pack": moved, "texts": len(texts)},
        recorded=("drift_mean",),
        limit=limit,
        tried=tried,
        passes=passes,
    )


def _texts(request: MergeRequest) -> list[str]:
    """Return the texts of at most ``request.rows`` examples, of pairs or of anything else."""
    columns = request.columns
    formats = (*PAIR_FORMATS, *TOKEN_FORMATS)
    texts = [
        text
        for row in evaluation_rows(columns, "test", request.rows)
        for text in format_of(row, columns, formats).texts(row, columns)
        if text
    ]

    if not texts:
        raise PackError(f"--data {columns.data}: has no text to compare on.", "data")
    return texts


def _as_written(plan: WritePlan, base: Base) -> Encoder:
    model = make_encoder(base.path, base.config)
    named = [(tensor_name(stored), tensor) for stored, tensor in plan.tensors.items()]
    model.load_weights([(name, tensor.astype(mx.float32)) for name, tensor in named if name])
    model.eval()
    return model


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean of 1 - cosine of rows."""
    one, other = (x.astype(np.float64) for x in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, 1e-24)
    return float(max(0.0, 1 - cosines.mean()))
