"""Compare a base with packs: quality on the same examples, speed at several batch sizes, gates.

The base is loaded once; packs are swapped. Examples are scored once for each model; speeds are of
answers to a whole batch of prompts (throughput.py).
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..bases.files import context_of
from ..config.arguments import checked_arguments
from ..config.data import Columns
from ..config.schema import TrainConfig
from ..data.batches import evaluation_batches
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions
from ..data.in_memory import Data
from ..display import Display, display_of
from ..errors import PackError, flag_of
from ..gates import Gates, evaluate_gates, failures, gate_limits
from ..memory.matmul_path import generation_path
from ..objectives.causal_lm import split_head
from ..packs.base import Base, activated, check_no_pack, loaded_base
from ..packs.compatibility import agreed_records, check_base, check_generates, check_same_use
from ..packs.pack import Pack
from ..packs.weighted_sum import OnePack, as_pack, check_distinct
from .images import encode_shown
from .perplexity import Difference, ExampleScores, Scorer
from .rows import check_limit, columns_of, evaluation_rows
from .scores import scoring_path
from .throughput import Speed, cut_prompts, measure_throughput

BATCH_SIZES = (1, 4, 8)
BASE = "base"


@dataclass(frozen=True)
class BatchReport:
    """Figures of one model at one batch size; speeds are medians over the rounds.

    Attributes:
        name: ``base``, or the name of the pack.
        batch_size: Number of prompts that were completed together.
        sequence_length: Maximum number of tokens per example, and length of the prompts.
        rows: Number of examples.
        targets: Number of target tokens.
        ppl: Perplexity.
        ppl_se: Its standard error; None for a single example.
        ppl_ratio: Perplexity divided by the base model's.
        ppl_ratio_se: Its standard error, paired by example.
        accuracy: Share of the targets that the model ranks first.
        prompt_tps: Tokens of all prompts per second, until each has its first token.
        decode_tps: Tokens of all completions per second, after their first tokens.
        tps_ratio: ``decode_tps`` divided by the base model's in the same round.
        first_token_ms: Milliseconds until each prompt has its first token.
        peak_gb: MLX peak in GB, including the weights.
        pack_mb: Size of the pack in MB; 0 for the base model.
        scoring_path: Matmul path of scoring.
        generation_path: Matmul path of generation.
        gates: Limit, value and result of each gate; empty for the base model.
    """

    name: str
    batch_size: int
    sequence_length: int
    rows: int
    targets: int
    ppl: float
    ppl_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    accuracy: float
    prompt_tps: float
    decode_tps: float
    tps_ratio: float
    first_token_ms: float
    peak_gb: float
    pack_mb: float
    scoring_path: str
    generation_path: str
    gates: Gates

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a mapping."""
        return asdict(self)


@checked_arguments
def evaluate_batch(  # noqa: PLR0913 - a public facade
    base: Base | str | Path,
    packs: OnePack | Sequence[OnePack] | Mapping[str, OnePack] = (),
    data: Data = "tiny",
    split: str = "test",
    batch_sizes: Sequence[int] = BATCH_SIZES,
    sequence_length: int | None = None,
    loss_on: str | None = None,
    limit: int = -1,
    max_tokens: int = 32,
    rounds: int = 3,
    matmul_path: str = "auto",
    columns: Columns | None = None,
    max_ppl_ratio: float | None = None,
    min_tps_ratio: float | None = None,
    max_pack_mb: float | None = None,
    progress: bool | Display = True,
) -> list[BatchReport]:
    """Return figures of a base model and of packs on the same examples, at each batch size.

    Args:
        base: A base model without an active pack: a loaded one, or a name as in `load_base`.
        packs: Packs or their folders; a mapping gives them names.
        data: Examples, as in `evaluate`.
        split: Split of a folder, as in `evaluate`.
        batch_sizes: Numbers of prompts that are completed together.
        sequence_length: Maximum number of tokens per example, and length of the timed prompts. None
            is the longest that a pack was trained with, or 2048.
        loss_on: Tokens to evaluate, as in `evaluate`; None is as all packs were trained.
        limit: Maximum number of examples; -1 uses all.
        max_tokens: Number of tokens to generate per prompt.
        rounds: Number of timing rounds after a warm-up.
        matmul_path: How frozen weights are used. ``"auto"`` is the fastest path for scoring,
            and the path of `packs generate` for generation.
        columns: Names of the columns, as in `evaluate`; None is as all packs were trained.
        max_ppl_ratio: Gate: the largest perplexity, as a multiple of the base model's.
        min_tps_ratio: Gate: the smallest decoding speed, as a multiple of the base model's.
        max_pack_mb: Gate: the largest size of a pack, in MB.
        progress: Whether to show the progress, as in `train_pack`.

    Raises:
        PackError: If examples cannot be used, a pack has another base model, or a size is invalid.
    """
    display = display_of(progress)
    limits = gate_limits(
        max_ppl_ratio=max_ppl_ratio, min_tps_ratio=min_tps_ratio, max_pack_mb=max_pack_mb
    )
    named = [(BASE, None), *named_packs(packs)]
    models = [pack for _, pack in named]
    _check_sizes(batch_sizes, limit, rounds, max_tokens)
    common = _common(models[1:])
    base, _ = loaded_base(base, common)
    _check_models(base, models[1:], limits)
    length = _sequence_length(sequence_length, models[1:], base, max_tokens)
    columns = columns or columns_of(common, data)
    loss_on = loss_on or (common and common._part("objective").get("loss_on"))
    options = EncodingOptions(loss_on, length, base.vocab_size)
    examples = encode_shown(evaluation_rows(columns, split, limit), base, columns, options, display)
    batches = evaluation_batches(examples, max(batch_sizes), length)
    score_path = scoring_path(base, batches * len(models), matmul_path)
    text_path = generation_path(base.model) if matmul_path == "auto" else matmul_path

    with display.task("score", len(models) * len(batches), "batches") as bar:
        scores = _score_all(base, models[1:], batches, score_path, bar.advance)

    tokens = [example.tokens for example in examples.items]
    with display.task("speed", len(batch_sizes) * len(models) * (rounds + 1), "runs") as bar:
        prompts = [cut_prompts(tokens, size, length) for size in batch_sizes]
        speeds = [
            measure_throughput(base, models, each, max_tokens, rounds, text_path, bar.advance)
            for each in prompts
        ]

    paths = {"scoring_path": score_path, "generation_path": text_path}
    conditions = {"sequence_length": length, **paths}
    return [
        _compared(name, pack, (scores[0], scores[i]), by_model[i], limits, conditions)
        for i, (name, pack) in enumerate(named)
        for by_model in speeds
    ]


def named_packs(packs: OnePack | Sequence | Mapping) -> list[tuple[str, Pack]]:
    """Return packs with names for people: short ones, or the whole path where two have the same.

    Raises a PackError if a pack comes twice, or a name is another model's too.
    """
    if isinstance(packs, (str, Path, Pack)):
        packs = [packs]
    if isinstance(packs, Mapping):
        names = list(packs)
        opened = [as_pack(pack) for pack in packs.values()]
    else:
        opened = [as_pack(pack) for pack in packs]
        short = Counter([BASE, *(pack.short_name for pack in opened)])
        names = [p.name if short[p.short_name] > 1 else p.short_name for p in opened]

    check_distinct(opened)
    if shared := [name for name, count in Counter([BASE, *names]).items() if count > 1]:
        raise PackError(
            f"packs: '{shared[0]}' is the name of two models ('{BASE}' is the base model's). "
            "Rename a folder, or in Python pass a mapping from names to packs.",
            "conflict",
            "pack",
        )
    return list(zip(names, opened, strict=True))


def _common(packs: Sequence[Pack]) -> Pack | None:
    """Return a pack that records what all of them do; None without packs."""
    if not packs:
        return None
    check_same_use(packs)
    return replace(packs[0], manifest={**packs[0].manifest, **agreed_records(packs)})


def _check_sizes(batch_sizes: Sequence[int], limit: int, rounds: int, max_tokens: int) -> None:
    shown = ",".join(map(str, batch_sizes))
    if not batch_sizes or any(size < 1 for size in batch_sizes):
        raise PackError(f"--batch-size {shown}: must be numbers above 0, as in 1,4,8.")
    if len(set(batch_sizes)) < len(batch_sizes):
        raise PackError(f"--batch-size {shown}: has a number twice.")
    check_limit(limit)
    for flag, value, least in (("--rounds", rounds, 1), ("--max-tokens", max_tokens, 2)):
        if value < least:
            raise PackError(f"{flag} {value}: must be {least} or more.")


def _check_models(base: Base, packs: Sequence[Pack], limits: Mapping[str, float]) -> None:
    if limits and not packs:
        flag = flag_of(next(iter(limits)))
        raise PackError(f"{flag}: is a gate for packs, but there is no pack.", "conflict")
    check_no_pack(base)
    base.check_architecture("eval-batch", "decoder")
    for pack in packs:
        check_generates(pack)
        check_base(pack, base)


def _sequence_length(wanted: int | None, packs: Sequence[Pack], base: Base, max_tokens: int) -> int:
    """Return the wanted length, else the longest of the packs' that leaves room for answers."""
    if wanted is not None and wanted < 2:
        raise PackError(f"--sequence-length {wanted}: must be 2 or more.")

    trained = [n for pack in packs if (n := pack._part("recipe").get("max_seq_length"))]
    length = wanted or max(trained, default=TrainConfig.max_seq_length)

    positions = context_of(base.config)
    if length + max_tokens > positions:
        if wanted:
            raise PackError(
                f"--sequence-length {wanted}: with --max-tokens {max_tokens} it is "
                f"longer than the {positions} positions of {base.name}."
            )
        length = max(2, positions - max_tokens)
    return length


def _score_all(
    base: Base,
    packs: Sequence[Pack],
    batches: list[Batch],
    matmul_path: str,
    advance: Callable[[], None],
) -> list[ExampleScores]:
    """Score the base and every pack; packs of one shape share the traces of the first."""
    with activated(base, None, matmul_path):
        scorer = Scorer(base.model, split_head(base.model))
        scores = [scorer.examples(batches, advance)]

    attached = None
    try:
        for pack in packs:
            base.attach(pack, matmul_path)
            if base.active.attached is not attached:
                attached = base.active.attached
                scorer = Scorer(base.model, split_head(base.model))
            scores.append(scorer.examples(batches, advance))
    finally:
        base.detach()
    return scores


def _compared(
    name: str,
    pack: Pack | None,
    scores: tuple[ExampleScores, ExampleScores],
    speed: Speed,
    limits: Mapping[str, float],
    conditions: Mapping[str, Any],
) -> BatchReport:
    """Return the figures of a model; ``scores`` are the scores of the base, and of the model."""
    score = scores[1].score
    difference = Difference.between(*scores)
    pack_mb = 0.0
    if pack and pack.path:
        pack_mb = pack.size_mb
    elif pack:  # it was never saved
        pack_mb = sum(tensor.nbytes for tensor in pack.load_tensors().values()) / 1e6

    values = {
        "max_ppl_ratio": difference.ppl_ratio,
        "min_tps_ratio": speed.tps_ratio,
        "max_pack_mb": pack_mb,
    }

    return BatchReport(
        name=name,
        rows=score.rows,
        targets=score.targets,
        ppl=score.ppl,
        ppl_se=score.ppl_se,
        accuracy=score.accuracy,
        ppl_ratio=difference.ppl_ratio,
        ppl_ratio_se=difference.ppl_ratio_se,
        pack_mb=pack_mb,
        gates=evaluate_gates(limits, values) if pack else {},
        **asdict(speed),
        **conditions,
    )


def failed(compared: Sequence[BatchReport]) -> list[str]:
    """Return a line for each gate that a pack failed; the speed gate has one by batch size."""
    lines = []
    for each in compared:
        for name, gate in each.gates.items():
            where = each.name
            if name == "min_tps_ratio":
                where += f", batch {each.batch_size}"
            lines += failures({name: gate}, where)
    return list(dict.fromkeys(lines))


def as_csv(compared: Sequence[BatchReport]) -> str:
    """Return a line for each model and batch size; gates as ``NAME_passed``."""
    rows = []
    for each in compared:
        row = each.to_json()
        gates = row.pop("gates")
        rows.append(row | {f"{name}_passed": gate["passed"] for name, gate in gates.items()})

    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
