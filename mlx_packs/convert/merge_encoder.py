"""Merge fidelity of encoders: the angle between embeddings of attached and merged.

What is to be written is loaded as an encoder of its own first.
"""

import dataclasses

import numpy as np

from ..bases.encoder import Encoder, embedded, make_encoder, tensor_name
from ..bases.tokenizer import tokens_of
from ..bases.write_plan import WritePlan
from ..data.formats import PAIR_FORMATS, TOKEN_FORMATS, format_of
from ..errors import PackError
from ..evaluation.rows import evaluation_rows
from ..packs.base import Base, load_base_for
from ..runtime import mx
from .merge_plan import MergeRequest, plan_merge
from .merger import Outcome, first_that_passes

_BATCH = 32
# Of 1 - cosine: the largest limit, the share of what the pack moves, and rounding itself.
_MOST, _SHARE, _ROUNDING = 1e-3, 0.1, 1e-6


class EncoderMerger:
    """Compares embeddings; what is written stays dense."""

    def check(self, request: MergeRequest) -> None:
        """Check that the weights stay dense.

        Raises:
            PackError: they are to be quantized.
        """
        if request.requantize != "none":
            raise PackError(
                f"--requantize {request.requantize}: an encoder is written dense, as transformers "
                "reads it.",
                "unsupported",
            )

    def compare(self, request: MergeRequest) -> Outcome:
        """Return the mean of 1 - cosine of the embeddings.

        The default limit is a tenth of what the pack itself moves them by, and 0.001 at most.
        """
        texts = _texts(request)
        base = load_base_for(request.pack, request.model, request.trust_remote_code)
        with request.display.working("drift", f"{len(texts)} texts"):
            plain = base.encode(texts, _BATCH)
            with base.applied(request.pack):
                attached = base.encode(texts, _BATCH)

            def distance_of(dtype: str) -> float:
                plan = plan_merge(dataclasses.replace(request, dtype=dtype))
                return _distance(attached, _embeddings(_as_written(plan, base), base, texts))

            moved, distance = _distance(plain, attached), distance_of(request.dtype)
            limit = request.max_drift
            if limit is None:
                limit = max(min(_MOST, _SHARE * moved), _ROUNDING)
            others = {}
            if request.dtype != "float32":
                others["none --dtype float32"] = lambda: distance_of("float32")
            tried, passes = first_that_passes("none", distance, limit, others)
        return Outcome(
            scores={"drift_mean": distance, "drift_of_pack": moved, "texts": len(texts)},
            recorded=("drift_mean",),
            distance=distance,
            limit=limit,
            tried=tried,
            passes=passes,
        )


def _texts(request: MergeRequest) -> list[str]:
    """Return the texts of at most ``request.rows`` examples, of pairs or of anything else."""
    columns, formats = request.columns, (*PAIR_FORMATS, *TOKEN_FORMATS)
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
    """Return the encoder that the tensors of a plan make."""
    model = make_encoder(base.path, base.config)
    named = [(tensor_name(stored), tensor) for stored, tensor in plan.tensors.items()]
    model.load_weights([(name, tensor.astype(mx.float32)) for name, tensor in named if name])
    model.eval()
    return model


def _embeddings(model: Encoder, base: Base, texts: list[str]) -> np.ndarray:
    return embedded(model, tokens_of(base.tokenizer, texts, model.longest), _BATCH)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean of 1 - cosine of rows."""
    one, other = (x.astype(np.float64) for x in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(norms, 1e-24)
    return float(max(0.0, 1 - cosines.mean()))
