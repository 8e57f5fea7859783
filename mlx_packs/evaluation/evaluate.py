"""Evaluate a base, and the base with a pack, on the same held-out examples."""

from pathlib import Path
from typing import Any, Protocol

from ..config.arguments import checked_arguments
from ..config.choices import ARCHITECTURES, registered
from ..config.data import Columns
from ..config.schema import TrainConfig
from ..data.in_memory import Data
from ..display import Display, display_of
from ..packs.base import Base, activated, check_no_pack, loaded_base, scoring
from ..packs.manifest import has_score_head, task_code
from ..packs.pack import Pack
from .embeddings import EmbeddingEvaluator
from .metrics import MetricFunction, own_metric_of
from .perplexity import EvalReport, PerplexityEvaluator
from .rows import EvalSettings, check_limit, columns_of, evaluation_rows
from .scores import MetricReport

Report = EvalReport | MetricReport


class Evaluator(Protocol):
    """The measurements of one architecture or task on some examples.

    It is made of a base, examples, and an `EvalSettings`; it raises a PackError where a setting has
    no meaning for the architecture, or an example cannot be used.
    """

    matmul_path: str

    def score(self) -> Any:
        """Score the base as it is now, with its active pack if it has one."""

    def report(self, base: Any | None, pack: Any | None) -> Report:
        """Return the combined report of the scores of the base, and of the base with the pack.

        A base has no score if the pack has a head.
        """


# By architecture: makes the evaluator of a base, rows and settings.
EVALUATORS = registered(
    ARCHITECTURES, {"decoder": PerplexityEvaluator, "encoder": EmbeddingEvaluator}
)


@checked_arguments
def evaluate(  # noqa: PLR0913 - a public facade
    base: Base | str | Path,
    pack: str | Path | Pack | None = None,
    data: Data = "tiny",
    split: str = "test",
    batch_size: int = 4,
    max_seq_length: int | None = None,
    loss_on: str | None = None,
    limit: int = -1,
    matmul_path: str = "auto",
    columns: Columns | None = None,
    metric: MetricFunction | str | None = None,
    share_prefix: str = "auto",
    progress: bool | Display = True,
) -> Report:
    """Return perplexity and token accuracy of a base model, without and with a pack.

    Both see the same examples. Embeddings have correlations, retrieval metrics or triplet accuracy,
    by their columns; a reward model has preference accuracy and reward margin; and a classifier has
    accuracy, macro F1, log loss and calibration error.

    Args:
        base: A base model without an active pack: a loaded one, or a name as in `load_base`.
        pack: A pack or its folder; None evaluates only the base model.
        data: A folder, a file, a Hugging Face dataset id, ``"tiny"``, or examples in memory.
        split: Split of a folder; if there is no ``"test"``, that is ``"valid"``.
        batch_size: Examples per batch.
        max_seq_length: Length at which examples are truncated; None is the pack's, or 2048.
        loss_on: Tokens to evaluate: ``"all"``, ``"completion"`` or ``"assistant"``. None is as the
            pack was trained, or the default of the examples' format.
        limit: Maximum number of examples; -1 uses all.
        matmul_path: How frozen weights are used; ``"auto"`` measures and uses the fastest.
        columns: Names of the columns, as in `train_pack`, and, in place of ``data``, the source of
            the examples; None is as the pack was trained.
        metric: When a generated answer is right: ``"exact"``, ``"contains"``, ``"json"``,
            ``"none"`` to generate nothing, or a function, which may be ``"FILE.py:NAME"``: the
            answer and the expected one in, a number from 0 to 1 out. None is ``"exact"`` for
            ``"tiny"``, else ``"none"``.
        share_prefix: Whether the common prefix of examples is computed once for each batch:
            ``"on"``, ``"off"``, or ``"auto"`` if it is exact and saves 15 % of the inputs.
        progress: Whether to show the progress, as in `train_pack`.

    Raises:
        PackError: If examples cannot be used, the pack has another base model, or a pack is active.
    """
    check_limit(limit)
    named = metric if isinstance(metric, str) else None
    TrainConfig(metric=named, share_prefix=share_prefix)
    own_metric = own_metric_of(metric)
    base, pack = loaded_base(base, pack)
    check_no_pack(base)

    recipe = {}
    evaluator = EVALUATORS[base.architecture]
    if pack is not None:
        recipe = pack._part("recipe")
        evaluator = task_code(pack.manifest, "evaluator") or evaluator
        if not has_score_head(pack.manifest):
            loss_on = loss_on or pack._part("objective").get("loss_on")
    columns = columns or columns_of(pack, data)
    base = base.with_chat_template(columns.chat_template)
    settings = EvalSettings(
        columns,
        batch_size,
        max_seq_length or recipe.get("max_seq_length") or TrainConfig.max_seq_length,
        loss_on or None,
        matmul_path,
        None if own_metric else named,
        own_metric,
        share_prefix,
        display_of(progress),
        pack,
    )

    rows = evaluation_rows(columns, split, limit)
    return _report(base, pack, evaluator(base, rows, settings))


def _report(base: Base, pack: Pack | None, evaluator: Evaluator) -> Report:
    base_score = None
    if pack is None or not has_score_head(pack.manifest):  # which gives the pack's numbers
        with activated(base, None, evaluator.matmul_path):
            base_score = evaluator.score()

    pack_score = None
    if pack:
        with scoring(base, pack, evaluator.matmul_path):
            pack_score = evaluator.score()
    return evaluator.report(base_score, pack_score)
