"""Train a pack of an encoder: sentence pairs in, adapters on a frozen float32 base, a folder out.

The loop, its steps, checkpoints and the pack are those of `training`; what differs is said here:
rows are pairs, a loss is over the texts of a batch, and what is measured is no perplexity.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ... import runtime
from ...adapters.method import METHODS, Trainable
from ...config.choices import ENCODERS
from ...config.fields import fields_where
from ...config.recipe import Recipe
from ...config.schema import COLUMN_SETTINGS, DataConfig, LoRAConfig, TrainConfig
from ...data import rows as rows_of
from ...data.batches import prefetched
from ...data.pairs import (
    IN_BATCH,
    PairBatch,
    Pairs,
    PairSampler,
    check_loss_settings,
    choose_loss,
    encode_pairs,
    make_pair_batch,
    pair_batches,
)
from ...display import VERBOSE, Display
from ...errors import PackError
from ...evaluation.embeddings import EmbeddingScore, Metrics, check_scores, mean_loss, score_pairs
from ...gates import Gates, evaluate_gates, gate_limits
from ...memory.estimate import plan_run
from ...memory.headers import Headers
from ...memory.plan import MemoryPlan
from ...nn.quantized import count_weights
from ...objectives.embedding import arrays_of, make_loss
from ...ops import _backend
from ...packs.base import Base
from ...packs.pack import Pack, round_adapters, versions_line
from ...runtime import mx
from ..checkpoint import TrainingState, load_checkpoint
from ..loop import Loop
from ..observers.observer import ObservedRun, Observer
from ..observers.registry import make_observers
from ..phases import RunPhase
from ..run import TrainRun, start_run_folder
from ..run_folder import latest_checkpoint, read_metrics
from ..setup import check_resume, describe, load_adapters, public_recipe, show_plan
from ..step import Stepper


def check_task(
    name: str, model_type: str, lora: LoRAConfig, train: TrainConfig, columns: DataConfig
) -> None:
    """Raises: PackError if base and task do not go together, or a setting has no meaning there."""
    if model_type not in ENCODERS:
        if train.task == "embedding":
            raise PackError(
                f"--task embedding: {name} is a causal {model_type}; "
                f"embeddings are trained on an encoder ({', '.join(ENCODERS)}: all-MiniLM-L6-v2, "
                "bge, e5), and this base by --task lm."
            )
        return
    if train.task != "embedding":
        raise PackError(
            f"{name}: is an encoder ({model_type}) and has no next token to learn; train it with "
            "--task embedding."
        )
    misplaced = train.changed(fields_where(TrainConfig, task="lm"))
    misplaced += [name for name in train.unfit_for_dense() if name not in misplaced]
    misplaced += columns.changed(COLUMN_SETTINGS)
    if misplaced:
        flags = ", ".join("--" + name.replace("_", "-") for name in misplaced)
        raise PackError(
            f"{flags}: not with --task embedding, whose base is dense in float32 and "
            "whose rows are sentence pairs; leave it out."
        )
    if train.method == "full" and lora.num_layers > 0:
        raise PackError("--num-layers: --method full trains all of an encoder; leave it out.")
    if train.recomputes == "selective":
        raise PackError("--recompute selective: an encoder's blocks have only none and block.")


def train_embeddings(
    folder: Path,
    run: Path,
    base: Base,
    lora: LoRAConfig,
    phase: RunPhase,
    splits: rows_of.Splits,
    display: Display,
    replaces: bool,
    earlier: dict | None,
    started: dict | None,
    resume_adapter_file: str | None,
    report_to: str | None,
    project_name: str | None,
    force: bool,
) -> TrainRun:
    """`training.train_pack` of an encoder, from its rows on.

    Args:
        phase: the only one of the run.   splits: its rows.
        replaces: whether what lies in ``folder`` may be replaced.
        earlier: what the run to go on with was; None begins one.
        started: name and hash of the adapters to start from, read from ``resume_adapter_file``.
    """
    train, columns = phase.train, phase.sources[0]
    recipe = Recipe(lora, train, columns, {"model": base.name, "resume_adapter_file": started})
    source = phase.public_source(splits)
    pairs, loss_name = _encoded(splits, base, train, display)
    identity = {
        "recipe": recipe.to_json(),
        "base": base.fingerprint,
        "data": {split: rows_of.fingerprint(splits.rows[split]) for split in pairs},
    }
    if earlier is not None:
        check_resume(run, identity, earlier)
    splits.rows.clear()
    held_out = "test" if "test" in pairs else "valid"
    judged = _first_rows(pairs[held_out], train.test_batches, train.batch_size)
    check_scores(judged, f"--data {splits.source}")
    valid = None
    if "valid" in pairs and train.val_batches:
        valid = _first_rows(pairs["valid"], train.val_batches, train.batch_size)
        check_scores(valid, f"--data {splits.source}: valid")
    plan = _planned(base, lora, train, pairs["train"], loss_name, force)
    method = METHODS[train.method]
    show_plan(base, lora, plan, display, method.trains_base)
    weights = count_weights(base.model)
    attached = method.attach(base, lora, train, "dense")
    try:
        describe(attached, display, weights)
        if resume_adapter_file is not None:
            load_adapters(attached, Path(resume_adapter_file))
        attached.recompute(plan.recompute)
        with display.working("eval", f"{len(judged)} held-out rows"):
            before = _score_base(attached, judged, train.batch_size)
        observed = ObservedRun(
            run, train, display, "pairs", recipe.to_json(), report_to, project_name
        )
        observers = make_observers(observed)
        start_run_folder(run, identity, earlier is not None)
        learned = _learn(
            attached,
            loss_name,
            phase,
            pairs["train"],
            valid,
            earlier is not None,
            observed,
            observers,
        )
        round_adapters(attached, train.pack_dtype)
        with display.working("eval", f"{len(judged)} held-out rows"):
            base.model.eval()
            after = score_pairs(base.model, judged, train.batch_size)
        result = {
            "split": held_out,
            "rows": len(judged),
            **{f"{name}_before": value for name, value in before.items()},
            **{f"{name}_after": value for name, value in after.items()},
        }
        pack = Pack.of(
            attached,
            train.pack_dtype,
            objective={
                "task": "embedding",
                "loss": loss_name,
                **base.model.sentence_config.to_json(),
            },
            data={
                "source": source,
                "fingerprint": identity["data"],
                "rows": {split: len(found) for split, found in pairs.items()},
            },
            recipe=public_recipe(recipe, base),
            versions=versions_line(),
            eval=result,
            measured={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **learned.measured,
                "plan_peak_gb": plan.peak_gb,
                "ops": _backend.record(),
            },
        ).save(folder, overwrite=replaces)
    finally:
        attached.detach()
    report = {
        "pack": str(folder),
        "run": str(run),
        "task": "embedding",
        "loss": loss_name,
        "steps": learned.cursor.updates,
        "batches": learned.cursor.batches,
        **{k: v for k, v in result.items() if k not in ("split", "rows")},
        "held_out": {"split": held_out, "rows": len(judged), "format": judged.format.name},
        "trained_pairs": learned.cursor.trained_tokens,
        "method": attached.method,
        "learned_weights": pack.manifest["adapters"]["parameters"],
        "base_weights": weights,
        **learned.measured,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "pack_mb": pack.size_mb,
        "matmul_path": "dense",
        "recompute": plan.recompute,
        "plan_peak_gb": plan.peak_gb,
        "batch_shapes": learned.batch_shapes,
        "traces": learned.traces,
        "ops": _backend.record(),
        "gates": _gates(train, pack),
    }
    for observer in observers:
        observer.on_end(report)
    return TrainRun(pack, run, report, learned.curve)


def _encoded(
    splits: rows_of.Splits, base: Base, train: TrainConfig, display: Display
) -> tuple[dict[str, Pairs], str]:
    """Pairs of every split that has rows, and the loss; says what was cut."""
    present = splits.present()
    longest = min(train.max_seq_length, base.model.longest)
    pairs = {}
    with display.task("data", len(present), "splits") as bar:
        for split in present:
            pairs[split] = encode_pairs(splits.rows[split], base.tokenizer, longest)
            bar.advance()
    first = pairs["train"]
    loss = choose_loss(train.loss, first, f"--data {splits.source}")
    check_loss_settings(loss, train.changed(fields_where(TrainConfig, task="embedding")))
    if loss in IN_BATCH and not first.format.has_negatives:
        sampler = PairSampler.of(first, train.batch_size, longest, train.seed, True)
        if train.batch_size < 2 or not sampler.epoch(0):
            raise PackError(
                f"--loss {loss}: the other rows of a batch are the negatives, so it needs "
                "--batch-size 2 or more, and rows whose texts differ."
            )
    counts = " / ".join(f"{len(found):,} {split}" for split, found in pairs.items())
    display.line("data", f"{splits.source} · {counts} rows · {first.format.name} · loss {loss}")
    if cut := sum(found.cut for found in pairs.values()):
        display.line(
            "data", f"longer than {longest} tokens and cut: {cut} texts (--max-seq-length)"
        )
    for note in splits.notes:
        display.line("data", note)
    return pairs, loss


def _first_rows(pairs: Pairs, batches: int, batch_size: int) -> Pairs:
    """So many batches' worth of rows; -1 is all."""
    if batches < 0 or batches * batch_size >= len(pairs):
        return pairs
    count = batches * batch_size
    return replace(
        pairs,
        tokens=[column[:count] for column in pairs.tokens],
        texts=pairs.texts[:count],
        scores=None if pairs.scores is None else pairs.scores[:count],
    )


def _planned(
    base: Base, lora: LoRAConfig, train: TrainConfig, pairs: Pairs, loss: str, force: bool
) -> MemoryPlan:
    """Return the peak that the loop over these examples should have, with the policy that fits.

    Raises:
        PackError: It is more than this machine has, unless forced.
    """
    shapes = {(int(pairs.lengths.max()), len(pairs.tokens))}
    plans = plan_run(Headers.of(base), lora, replace(train, loss=loss), shapes, force)
    return plans["dense"]


def _score_base(attached: Trainable, judged: Pairs, batch_size: int) -> Metrics:
    """The score of the base alone, whatever the run starts from."""
    with attached.disabled():
        attached.model.eval()
        return score_pairs(attached.model, judged, batch_size)


@dataclass(frozen=True)
class _Learned:
    """What the loop left behind besides the adapters."""

    cursor: TrainingState
    curve: list[dict]
    measured: dict
    batch_shapes: int
    traces: int


def _learn(
    attached: Trainable,
    loss_name: str,
    phase: RunPhase,
    pairs: Pairs,
    valid: Pairs | None,
    resume: bool,
    observed: ObservedRun,
    observers: Sequence[Observer],
) -> _Learned:
    """Run the loop from the start or from the last checkpoint; checkpoint its end."""
    model, train = attached.model, phase.train
    mx.random.seed(train.seed)
    optimizer = phase.optimizer()
    optimizer.init(model.trainable_parameters())
    cursor, curve = TrainingState(), observed.curve
    run, display = observed.folder, observed.display
    if resume:
        cursor = load_checkpoint(latest_checkpoint(run), attached, optimizer)
        curve.extend(read_metrics(run, cursor.batches))
        display.line("resume", f"{run}: batch {cursor.batches} of {train.iters}")
    loss = make_loss(model, loss_name, train)

    def loss_and_count(*batch):
        return loss(*batch), batch[3].sum()  # of the weights of its rows

    stepper = Stepper(model, loss_and_count, optimizer, train.max_grad_norm)
    longest = min(train.max_seq_length, model.longest)

    def judged(batch: PairBatch) -> EmbeddingScore:
        model.eval()
        return EmbeddingScore(mean_loss(loss, [batch]), {})

    distinct, validate = loss_name in IN_BATCH, None
    if valid is not None:
        one, other = (
            PairSampler.of(valid, train.batch_size, longest, 0, d) for d in (distinct, False)
        )
        order = one.epoch(0) or other.epoch(0)  # one row, or all alike
        batches = [make_pair_batch(valid, rows, train.batch_size, longest) for rows in order]

        def validate() -> EmbeddingScore:
            model.eval()
            metrics = score_pairs(model, valid, train.batch_size)
            return EmbeddingScore(mean_loss(loss, batches), metrics)

    loop = Loop(
        attached,
        stepper,
        phase,
        True,
        run,
        cursor,
        arrays_of,
        judged,
        validate,
        observers,
        unit="pairs",
    )
    sampler = PairSampler.of(pairs, train.batch_size, longest, train.seed, distinct)
    batches_of_run = pair_batches(pairs, sampler, cursor.batches, runtime.COMPILES)
    model.train()
    mx.reset_peak_memory()
    held = runtime.memory_limits(train.clear_cache_threshold or 0)
    with closing(prefetched(batches_of_run)) as ahead, held:
        loop.learn(ahead)
    shapes, traces = len(stepper.shapes), stepper.traces
    display.line("shapes", f"{shapes} of batches, {traces} compiled traces", VERBOSE)
    measured = {
        "train_s": cursor.train_s,
        "pairs_per_s": cursor.trained_tokens / cursor.train_s,
        "peak_gb": mx.get_peak_memory() / 1e9,
    }
    return _Learned(cursor, curve, measured, shapes, traces)


def _gates(train: TrainConfig, pack: Pack) -> Gates:
    """Hold the saved pack against its gate on size; the result goes into its manifest."""
    if not (held := gate_limits(max_pack_mb=train.max_pack_mb)):
        return {}
    for _ in range(2):  # the manifest, which has the result, is part of the size
        gates = evaluate_gates(held, {"max_pack_mb": pack.size_mb})
        pack.note(gates=gates)
    return gates
