"""Held-out perplexity with its standard error, and token accuracy, of a base and a pack."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.nn as nn
import numpy as np

from . import data as rows_of
from .base_path import choose_base_path
from .batches import Batch, evaluation_batches
from .config import DataConfig, TrainConfig
from .encoding import encode
from .errors import PackError
from .loading import Base
from .loss import Head, as_arrays, split_head, target_loss
from .nn.quantized import apply_base_path, replace_modules
from .pack import Pack
from .runtime import mx

_FEATURES = ("chat_feature", "prompt_feature", "completion_feature", "text_feature")


@dataclass(frozen=True)
class Score:
    """PPL is exp(mean NLL a target); its standard error counts rows, not tokens, as independent.

    One row alone tells nothing of the error: ``ppl_se`` is None then.
    """

    ppl: float
    ppl_se: float | None
    accuracy: float
    nll: float
    rows: int
    targets: int


@dataclass(frozen=True)
class EvalReport:
    """Base and base with pack on the same rows."""

    rows: int
    targets: int
    base: Score
    pack: Score | None
    ppl_ratio: float | None

    def to_json(self) -> dict:
        return asdict(self)


def perplexity(nll_sum: float, count: int) -> float:
    """exp of the mean negative log-likelihood, capped where a float64 would overflow."""
    return math.exp(min(nll_sum / count, 700.0))


def score(model: nn.Module, head: Head | None, batches: list[Batch], advance=None) -> Score:
    """Score batches by token-weighted negative log-likelihood.

    The standard error is that of a ratio estimator over rows (tokens of a row depend on each
    other): se = sqrt(R / (R - 1) * sum((nll_r - mean * n_r)^2)) / N, times PPL.
    """
    if not batches:
        raise PackError("nothing to evaluate: there are no rows.")
    model.eval()

    def forward(*arrays):
        return target_loss(model, head, *arrays, gradient=False)

    compiled = mx.compile(forward)
    nll_rows, count_rows, hits = [], [], 0.0
    for batch in batches:
        tokens, positions, targets, _, *segments = as_arrays(batch)
        nll, hit = compiled(tokens, positions, targets, *segments)
        mx.eval(nll, hit)
        real = batch.owners >= 0
        owners = batch.owners[real]
        values = np.array(nll, dtype=np.float64)[real]
        nll_rows.append(np.bincount(owners, values, minlength=len(batch.rows)))
        count_rows.append(np.bincount(owners, minlength=len(batch.rows)))
        hits += float(np.array(hit)[real].sum())
        if advance is not None:
            advance()
    nlls, counts = np.concatenate(nll_rows), np.concatenate(count_rows)
    total, rows = int(counts.sum()), len(counts)
    mean = nlls.sum() / total
    spread = float(((nlls - mean * counts) ** 2).sum())
    ppl = perplexity(nlls.sum(), total)
    se = ppl * math.sqrt(spread * rows / (rows - 1)) / total if rows > 1 else None
    return Score(ppl, se, hits / total, float(mean), rows, total)


def evaluate(
    base: Base,
    pack: str | Path | Pack | None = None,
    data: str | Path = "tiny",
    split: str = "test",
    batch_size: int = 4,
    max_seq_length: int | None = None,
    loss_on: str | None = None,
    limit: int = -1,
    base_path: str = "auto",
    columns: DataConfig | None = None,
) -> EvalReport:
    """Perplexity and token accuracy of a base, and of the base with a pack, on the same rows.

    Args:
        pack: a pack or its folder; None scores the base alone.
        data: a folder (its ``split`` is taken, or ``valid`` where there is none), a file, ``tiny``.
        max_seq_length: longer rows are cut; None is as the pack was trained, else 2048.
        columns: what the rows' columns are called, and in place of ``data`` where they are; None
            is as the pack was trained.
        loss_on: what counts, as in training; None is what the pack was trained on, else the
            default of the format.   limit: at most so many batches.
    Raises: PackError for unusable rows or a pack of another base.
    """
    if limit == 0 or limit < -1:
        raise PackError(f"--limit must be positive, or -1 for all, but got {limit}.")
    if pack is not None and not isinstance(pack, Pack):
        pack = Pack.open(pack)
    columns = columns or columns_of(pack, data)
    if pack is not None:
        loss_on = loss_on or pack.part("objective").get("loss_on")
        max_seq_length = max_seq_length or pack.part("recipe").get("max_seq_length")
    max_seq_length = max_seq_length or TrainConfig.max_seq_length
    rows = evaluation_rows(columns, split)
    examples = encode(
        rows, base.tokenizer, columns,
        loss_on=loss_on, max_seq_length=max_seq_length, vocab_size=base.vocab_size,
    )  # fmt: skip
    batches = evaluation_batches(examples, batch_size, max_seq_length, limit)
    if base_path == "auto":
        base_path = choose_base_path(base.model, batches[-1].tokens.size).base_path
    originals = apply_base_path(base.model, base_path)
    try:
        plain = score(base.model, split_head(base.model), batches)
    finally:
        replace_modules(base.model, originals)
    if pack is None:
        return EvalReport(plain.rows, plain.targets, plain, None, None)
    attached = pack.attach(base, base_path=base_path)
    try:
        with_pack = score(base.model, split_head(base.model), batches)
    finally:
        attached.detach()
    ratio = with_pack.ppl / plain.ppl
    return EvalReport(plain.rows, plain.targets, plain, with_pack, ratio)


def columns_of(pack: Pack | None, data: str | Path, **given: str) -> DataConfig:
    """Rows in ``data`` with their columns named as ``given``, else as the pack was trained.

    The embedded data set has the default names whatever a pack was trained on.
    """
    recipe = pack.part("recipe") if pack is not None and str(data) != "tiny" else {}
    trained = {name: recipe[name] for name in _FEATURES if recipe.get(name)}
    return DataConfig(data=str(data), **{**trained, **given})


def evaluation_rows(columns: DataConfig, split: str) -> list[rows_of.Row]:
    """The rows of a file, or of a folder's ``split`` (``valid`` where it has no ``test``)."""
    if Path(columns.data).is_file():
        return rows_of.read_rows(Path(columns.data))
    found = rows_of.load_rows(columns).rows
    if split == "test" and not found["test"]:
        split = "valid"
    if not found.get(split):
        raise PackError(f"--data {columns.data}: has no {split} rows.")
    return found[split]
