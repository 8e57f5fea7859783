"""Held-out perplexity and its standard error, token accuracy, and the paired difference of two."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..config.schema import COLUMN_SETTINGS, DataConfig, TrainConfig
from ..data import rows as rows_of
from ..data.batches import Batch, evaluation_batches
from ..data.encoding import EncodingOptions, encode
from ..errors import PackError
from ..memory.matmul_path import choose_matmul_path
from ..nn.lora import GroupedLoRA
from ..nn.quantized import apply_matmul_path, replace_modules
from ..objectives.causal_lm import Arrays, Head, as_arrays, split_head, target_loss
from ..packs.base import Base, check_no_pack
from ..packs.pack import Pack
from ..runtime import is_traced, mx

if TYPE_CHECKING:
    from .embeddings import EmbeddingReport


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

    def log_entry(self) -> dict[str, float]:
        """Entries of the line in a run's metrics for validation examples."""
        return {"valid_loss": self.nll, "valid_ppl": self.ppl}

    def summary(self) -> str:
        """The same in one line for people."""
        return f"loss {self.nll:.3f}, PPL {self.ppl:.2f}"


@dataclass(frozen=True)
class RowScores:
    """Sum of the NLL [R] of each row, its targets [R], and how many of them ranked first [R].

    Rows stand in the order of the data, whatever batches they were scored in.
    """

    nll: np.ndarray
    targets: np.ndarray
    hits: np.ndarray

    @property
    def score(self) -> Score:
        """All rows together. Their error is that of a ratio (tokens of a row depend on each other):

        se = sqrt(R / (R - 1) * sum((nll_r - mean * n_r)^2)) / N, times PPL.
        """
        count = int(self.targets.sum())
        mean, se = _mean_and_error(self.nll, self.targets)
        ppl = perplexity(float(self.nll.sum()), count)
        accuracy = float(self.hits.sum()) / count
        return Score(ppl, None if se is None else ppl * se, accuracy, mean, len(self.nll), count)


@dataclass(frozen=True)
class Difference:
    """NLL a target with a pack less that without, row by row, and its standard error.

    ``ppl_ratio`` is its exponential. What makes a row hard cancels out, so that the error is far
    smaller than the two perplexities' own. One row alone tells nothing of the error: None then.
    """

    nll: float
    nll_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None

    @classmethod
    def between(cls, base: RowScores, pack: RowScores) -> "Difference":
        mean, se = _mean_and_error(pack.nll - base.nll, base.targets)
        ratio = math.exp(min(mean, 700.0))
        return cls(mean, se, ratio, None if se is None else ratio * se)


def _mean_and_error(sums: np.ndarray, targets: np.ndarray) -> tuple[float, float | None]:
    """Mean a target of sums a row, and its standard error with rows as independent."""
    total, rows = int(targets.sum()), len(targets)
    mean = float(sums.sum() / total)
    if rows < 2:
        return mean, None
    spread = float(((sums - mean * targets) ** 2).sum())
    return mean, math.sqrt(spread * rows / (rows - 1)) / total


@dataclass(frozen=True)
class EvalReport:
    """Base and base with pack on the same rows; ``difference`` is the paired one."""

    rows: int
    targets: int
    base: Score
    pack: Score | None
    ppl_ratio: float | None
    difference: Difference | None = None

    def to_json(self) -> dict:
        return asdict(self)


def perplexity(nll_sum: float, count: int) -> float:
    """exp of the mean negative log-likelihood, capped where a float64 would overflow."""
    return math.exp(min(nll_sum / count, 700.0))


class Scorer:
    """Scores batches with what a base carries; one trace for each shape of batch.

    Adapters, and weights that learn, are inputs of the traces: packs that are swapped in place
    (`Base.swap_pack`) are scored by the traces of the first.

    arrays: of a batch, what the forward takes.   traces: that MLX has compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        arrays: Callable[[Batch], Arrays] = as_arrays,
    ):
        self.model = model
        self.traces = 0
        self._arrays = arrays
        learning = tree_flatten(model.trainable_parameters())
        full = any(".lora_" not in name for name, _ in learning)
        held = [model] if full else [m for m in model.modules() if isinstance(m, GroupedLoRA)]

        def forward(tokens, positions, targets, _, *segments):
            self.traces += is_traced(positions)
            return target_loss(model, head, tokens, positions, targets, *segments, gradient=False)

        self._forward = mx.compile(forward, inputs=[m.state for m in held])

    def rows(self, batches: Sequence[Batch], advance=None) -> RowScores:
        """Every row of the batches. Raises: PackError if there is none."""
        if not batches:
            raise PackError("nothing to evaluate: there are no rows.")
        self.model.eval()
        order: list[int] = []
        parts = []
        for batch in batches:
            real = batch.owners >= 0
            owners, rows = batch.owners[real], len(batch.rows)
            scored = self._forward(*self._arrays(batch))
            mx.eval(scored)
            sums = [np.array(values, dtype=np.float64)[real] for values in scored]
            parts.append(
                (
                    np.bincount(owners, sums[0], rows),
                    np.bincount(owners, minlength=rows),
                    np.bincount(owners, sums[1], rows),
                )
            )
            order += batch.rows
            if advance is not None:
                advance()
        by_row = np.argsort(order, kind="stable")
        return RowScores(*(np.concatenate(part)[by_row] for part in zip(*parts, strict=True)))

    def score(self, batches: Sequence[Batch], advance=None) -> Score:
        """All rows of the batches together, by token-weighted negative log-likelihood."""
        return self.rows(batches, advance).score


def evaluate(
    base: Base,
    pack: str | Path | Pack | None = None,
    data: str | Path = "tiny",
    split: str = "test",
    batch_size: int = 4,
    max_seq_length: int | None = None,
    loss_on: str | None = None,
    limit: int = -1,
    matmul_path: str = "auto",
    columns: DataConfig | None = None,
) -> "EvalReport | EmbeddingReport":
    """Perplexity and token accuracy of a base, and of the base with a pack, on the same rows.

    Of an encoder: correlations, retrieval or triplet accuracy, by the rows' columns.

    Args:
        pack: a pack or its folder; None scores the base alone.
        data: a folder (its ``split`` is taken, or ``valid`` where there is none), a file, ``tiny``.
        max_seq_length: longer rows are cut; None is as the pack was trained, else 2048.
        columns: what the rows' columns are called, and in place of ``data`` where they are; None
            is as the pack was trained.
        loss_on: what counts, as in training; None is what the pack was trained on, else the
            default of the format.   limit: at most so many examples.
    Raises: PackError for unusable rows, a pack of another base, or a base that carries one.
    """
    check_no_pack(base)
    if limit == 0 or limit < -1:
        raise PackError(f"--limit must be positive, or -1 for all, but got {limit}.")
    if pack is not None and not isinstance(pack, Pack):
        pack = Pack.open(pack)
    columns = columns or columns_of(pack, data)
    if base.is_encoder:
        from .embeddings import evaluate_embeddings

        if loss_on is not None or matmul_path not in ("auto", "dense"):
            raise PackError(
                f"{base.name}: is an encoder, which has neither --loss-on nor a matmul path."
            )
        return evaluate_embeddings(base, pack, columns, split, batch_size, max_seq_length, limit)
    if pack is not None:
        loss_on = loss_on or pack.part("objective").get("loss_on")
        max_seq_length = max_seq_length or pack.part("recipe").get("max_seq_length")
    max_seq_length = max_seq_length or TrainConfig.max_seq_length
    rows = evaluation_rows(columns, split, limit)
    examples = encode(
        rows,
        base.tokenizer,
        columns,
        EncodingOptions(loss_on, max_seq_length, base.vocab_size),
    )
    batches = evaluation_batches(examples, batch_size, max_seq_length)
    if matmul_path == "auto":
        matmul_path = choose_matmul_path(base.model, batches[-1].tokens.size).matmul_path
    originals = apply_matmul_path(base.model, matmul_path)
    try:
        plain = Scorer(base.model, split_head(base.model)).rows(batches)
    finally:
        replace_modules(base.model, originals)
    found = plain.score
    if pack is None:
        return EvalReport(found.rows, found.targets, found, None, None)
    attached = pack.attach(base, matmul_path=matmul_path)
    try:
        with_pack = Scorer(base.model, split_head(base.model)).rows(batches)
    finally:
        attached.detach()
    difference = Difference.between(plain, with_pack)
    return EvalReport(
        found.rows, found.targets, found, with_pack.score, difference.ppl_ratio, difference
    )


def columns_of(pack: Pack | None, data: str | Path, **given: str) -> DataConfig:
    """Rows in ``data`` with their columns named as ``given``, else as the pack was trained.

    The embedded data set has the default names whatever a pack was trained on.
    """
    recipe = pack.part("recipe") if pack is not None and str(data) != "tiny" else {}
    trained = {name: recipe[name] for name in COLUMN_SETTINGS if recipe.get(name)}
    return DataConfig(data=str(data), **{**trained, **given})


def evaluation_rows(columns: DataConfig, split: str, limit: int = -1) -> list[rows_of.Row]:
    """The rows of a file, or of a folder's ``split`` (``valid`` where it has no ``test``).

    Args:
        columns: where the rows are.
        split: that of a folder.
        limit: takes the first rows; -1 takes all.
    """
    first = slice(None if limit < 0 else limit)
    if Path(columns.data).is_file():
        return rows_of.read_rows(Path(columns.data))[first]
    splits = rows_of.load_rows(columns).rows
    if split == "test" and not splits["test"]:
        split = "valid"
    if not splits.get(split):
        raise PackError(f"--data {columns.data}: has no {split} rows.")
    return splits[split][first]
