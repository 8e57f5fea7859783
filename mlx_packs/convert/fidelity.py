"""How far one way of applying adapters lies from another: KL of the next token, and perplexity.

A delta that is small beside the steps of a packed weight vanishes when it is rounded to them. How
much of it is left cannot be told from the weights; it is measured on rows.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.nn as nn

from ..bases.model import BaseModel
from ..config.schema import DataConfig, TrainConfig
from ..data.batches import Batch, evaluation_batches
from ..data.encoding import EncodingOptions, encode
from ..errors import PackError
from ..evaluation.perplexity import perplexity
from ..evaluation.rows import evaluation_rows
from ..memory.matmul_path import choose_matmul_path
from ..nn.quantized import apply_matmul_path, replace_modules
from ..objectives.causal_lm import Head, as_arrays, forward, split_head
from ..packs.pack import Pack
from ..runtime import mx

# The default limit, in nats a token. Without a share a small pack could be rounded away whole.
MAX_DRIFT = 0.02
MAX_SHARE = 0.1  # of what the pack itself moves the base by
_NOISE = 2e-5  # of float32 products in another order, and of bf16 weights
ROWS = 32
_KEPT_BYTES = 1 << 28  # of logits that wait for their counterpart

Put = Callable[[], Callable[[], None]]  # puts modules in place; gives what takes them off


@dataclass(frozen=True)
class Drift:
    """Two models on the targets of the same rows.

    kl_mean: of the first from the second, nats a target.   kl_of_pack: of the first from the base
    without a pack.   same_token: share of targets where both rank the
    same token first.   ppl_ratio: ppl_after / ppl_before, second over first.
    """

    kl_mean: float
    kl_of_pack: float
    same_token: float
    ppl_before: float
    ppl_after: float
    ppl_ratio: float
    rows: int
    targets: int

    def to_json(self) -> dict:
        return asdict(self)

    def limit(self, max_drift: float | None) -> float:
        """What was asked for; None is a tenth of what the pack does, and 0.02 nats at most."""
        if max_drift is not None:
            return max_drift
        return max(_NOISE, min(MAX_DRIFT, MAX_SHARE * self.kl_of_pack))


def drift_batches(
    base: BaseModel, pack: Pack, columns: DataConfig, split: str = "test", rows: int = ROWS
) -> list[Batch]:
    """Batches of at most so many rows, read and cut as the pack was trained."""
    loss_on = pack.part("objective").get("loss_on") if columns.data != "tiny" else None
    examples = encode(
        evaluation_rows(columns, split, rows),
        base.tokenizer,
        columns,
        EncodingOptions(loss_on, length := _length_of(pack), base.vocab_size),
    )
    batches = evaluation_batches(examples, 4, length, -1)
    if not batches:
        raise PackError(f"--data {columns.data}: no row has a target, so no drift can be measured.")
    return batches


def _length_of(pack: Pack) -> int:
    return pack.part("recipe").get("max_seq_length") or TrainConfig.max_seq_length


def fastest_path(base: BaseModel, batches: list[Batch]) -> str:
    """The matmul path that is fastest for these batches."""
    return choose_matmul_path(base.model, batches[-1].tokens.size).matmul_path


def put_pack(pack: Pack, base: BaseModel, matmul_path: str) -> Put:
    """What attaches a pack."""

    def put() -> Callable[[], None]:
        return pack.attach(base, matmul_path=matmul_path).detach

    return put


def put_base(base: BaseModel, matmul_path: str) -> Put:
    """What leaves a base without a pack."""

    def put() -> Callable[[], None]:
        originals = apply_matmul_path(base.model, matmul_path)
        return lambda: replace_modules(base.model, originals)

    return put


def put_modules(base: BaseModel, modules: list[tuple[str, nn.Module]]) -> Put:
    """What puts modules in the place of those of a base."""
    found = dict(base.model.named_modules())
    originals = [(path, found[path]) for path, _ in modules]

    def put() -> Callable[[], None]:
        replace_modules(base.model, modules)
        return lambda: replace_modules(base.model, originals)

    return put


def measure(
    base: BaseModel, first: Put, second: Put, plain: Put, batches: list[Batch], advance=None
) -> Drift:
    """KL and perplexity of a base with ``second`` against the same base with ``first``.

    Args:
        plain: the base alone; its KL from ``first`` is what there is to lose.
    """
    base.model.eval()
    kl = kl_base = same = nll_before = nll_after = 0.0
    targets = rows = 0
    for some in _portions(batches, base.vocab_size):
        before = _log_probabilities(base.model, some, first)
        after = _log_probabilities(base.model, some, second)
        alone = _log_probabilities(base.model, some, plain)
        for batch, p, q, r in zip(some, before, after, alone, strict=True):
            wanted = mx.array(batch.targets[batch.owners >= 0])[:, None]
            kl += _kl(p, q)
            kl_base += _kl(p, r)
            same += (mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)).sum().item()
            nll_before -= mx.take_along_axis(p, wanted, axis=-1).sum().item()
            nll_after -= mx.take_along_axis(q, wanted, axis=-1).sum().item()
            targets += len(wanted)
            rows += len(batch.rows)
            if advance is not None:
                advance()
    ppl_before, ppl_after = perplexity(nll_before, targets), perplexity(nll_after, targets)
    ratio = math.exp(max(-700.0, min((nll_after - nll_before) / targets, 700.0)))
    return Drift(
        _not_negative(kl / targets),
        _not_negative(kl_base / targets),
        same / targets,
        ppl_before,
        ppl_after,
        ratio,
        rows,
        targets,
    )


def _not_negative(kl: float) -> float:
    """KL is not; its rounding errors are. NaN stays."""
    return 0.0 if kl < 0 else kl


def _portions(batches: list[Batch], vocab_size: int):
    """Batches, as many at a time as their logits may wait for."""
    portion, size = [], 0
    for batch in batches:
        size += 4 * vocab_size * batch.count
        portion.append(batch)
        if size >= _KEPT_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _log_probabilities(model: nn.Module, batches: list[Batch], put: Put) -> list[mx.array]:
    """Log-probabilities [targets, V] float32 at each batch's targets."""
    take_off = put()
    try:
        head = split_head(model)
        found = [_at_targets(model, head, batch) for batch in batches]
        mx.eval(found)
        return found
    finally:
        take_off()


def _at_targets(model: nn.Module, head: Head | None, batch: Batch) -> mx.array:
    tokens, *_ = as_arrays(batch)
    positions = mx.array(batch.positions[batch.owners >= 0])
    outputs = forward(model, model if head is None else head.hidden, tokens)
    rows = outputs.reshape(-1, outputs.shape[-1])[positions]
    logits = (rows if head is None else head.logits(rows)).astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _kl(p: mx.array, q: mx.array) -> float:
    """Sum over rows of KL(p || q), of log-probabilities [n, V]."""
    return mx.where(mx.isneginf(p), 0, mx.exp(p) * (p - q)).sum().item()
