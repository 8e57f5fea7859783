"""Train a pack: rows in, adapters on a frozen base, a folder out.

`_train_into` reads from top to bottom: rows, matmul path, attach, measure, learn, measure, save.
`_learn` walks the phases of the run (phases.py), of which there is one where no phases are said.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .. import runtime
from ..adapters.lora import Attached, attach
from ..adapters.method import METHODS, Trainable
from ..bases.files import TINY, stored_config
from ..config.parse import read_yaml
from ..config.recipe import Recipe, check_method, resolve
from ..config.schema import DataConfig, LoRAConfig, TrainConfig
from ..data import rows as rows_of
from ..data.batches import Batch, prefetched
from ..data.encoding import Examples, token_format
from ..display import QUIET, VERBOSE, Display
from ..errors import PackError
from ..evaluation.perplexity import Score, Scorer
from ..files import TINY_FOLDER, make_folder
from ..gates import Gates, evaluate_gates, gate_limits
from ..inference.generate import complete
from ..inference.throughput import answering_path, prompts_of, race
from ..memory.matmul_path import choose_matmul_path
from ..nn.quantized import count_weights
from ..objectives.causal_lm import Arrays, Head, loss_sum, split_head
from ..objectives.frozen_activations import open_frozen_activations
from ..objectives.projection_stack import TRANSFORMER, graph_of
from ..objectives.sequence_packing import prepare_packing
from ..ops import _backend
from ..optim import carry_state, unused_learning_rate
from ..packs.base import Base, load_base
from ..packs.pack import Pack, round_adapters, versions_line
from ..runtime import mx
from .checkpoint import TrainingState, load_checkpoint, read_training_state
from .loop import Loop, interrupted
from .observers.observer import ObservedRun, Observer
from .observers.registry import make_observers
from .observers.trackers import check_report_to
from .phases import PhasedDataset, RunPhase, pack_name, phase_reports, resolve_phases
from .run_folder import (
    check_resumable,
    clear_run,
    latest_checkpoint,
    read_metrics,
    write_identity,
)
from .setup import (
    check_resume,
    choose_path,
    describe,
    encode_phases,
    fingerprints,
    load_adapters,
    matmul_paths_by_name,
    output_folders,
    plan_paths,
    public_recipe,
    refuse_from_headers,
    show_plan,
    started_from,
)
from .step import Stepper

_SAMPLE_TOKENS, _SAMPLE_TEMPERATURE = 40, 0.7
_PROMPT_TOKENS = 64  # of the prompt that the gate on speed answers


@dataclass
class TrainRun:
    """What a run gave: the pack, the run folder, what was measured, and the loss curve."""

    pack: Pack
    run: Path
    report: dict
    curve: list[dict] = field(default_factory=list)

    def plot(self, ax=None):
        """Draw the loss curve (needs matplotlib) and return its axes."""
        import matplotlib.pyplot as plt

        ax = ax or plt.gca()
        for key, style in (("loss", "-"), ("valid_loss", "o-")):
            points = [(line["batch"], line[key]) for line in self.curve if key in line]
            if points:
                ax.plot(*zip(*points, strict=True), style, label=key.replace("_", " "))
        ax.set_xlabel("batch")
        ax.set_ylabel("loss" if "loss" in self.report else "loss (nats a token)")
        ax.legend()
        return ax

    def to_json(self) -> dict:
        return self.report


def tiny_recipe() -> dict:
    """Options that suit the tiny base; they apply where it is trained and nothing else is said."""
    return read_yaml(TINY_FOLDER / "recipe.yaml")


@runtime.memory_limits()
def train_pack(
    base: Base | str | Path = TINY,
    data: str | Path | None = None,
    lora: LoRAConfig | None = None,
    train: TrainConfig | None = None,
    out: str | Path | None = None,
    columns: DataConfig | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    resume_adapter_file: str | None = None,
    report_to: str | None = None,
    project_name: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    display: Display | None = None,
) -> TrainRun:
    """Teach a base something and save it as a pack.

    Args:
        base: a loaded base, or what `load_base` takes.
        data: folder, file, data set id, or ``tiny``; ``columns`` has more to say about its rows.
        lora, train: how; each by default what suits real 4-bit bases, or the tiny base's recipe.
        out: the pack's folder, by default ``packs/<data>``, numbered so that none is overwritten.
            The run folder with checkpoints and metrics stands beside it as ``<out>-run``.
        resume: continue the run of ``out`` from its last checkpoint, as if never interrupted; all
            other arguments must be those that it began with.
        resume_adapter_file: start from these adapters (mlx-lm's names) instead of fresh ones.
        report_to: wandb, swanlab or both (comma), with ``project_name``.
        force: train even if the estimate says that it takes more memory than there is.
    Raises: PackError for anything that a user can mend; nothing half-written stays.
    """
    display = display or Display(QUIET)
    columns = columns or DataConfig(data=str(data or "tiny"))
    tiny = str(getattr(base, "name", base)) == TINY
    suited = resolve(tiny_recipe()) if tiny else Recipe()
    train = train or suited.train
    lora = lora or (LoRAConfig() if train.method == "full" else suited.lora)
    check_method(lora, train)
    _backend.start_record()
    phases = resolve_phases(train, columns)
    if data is not None and train.phases and all(phase.data for phase in train.phases):
        raise PackError(f"data {data}: every phase has rows of its own; say them there alone.")
    check_report_to(report_to, project_name)
    with output_folders(out, pack_name(phases), overwrite, resume) as (folder, run):
        return _train_into(
            folder,
            run,
            base,
            lora,
            train,
            phases,
            columns,
            display,
            overwrite,
            resume,
            resume_adapter_file,
            report_to,
            project_name,
            trust_remote_code,
            force,
        )


def _train_into(
    folder: Path,
    run: Path,
    base: Base | str | Path,
    lora: LoRAConfig,
    train: TrainConfig,
    phases: tuple[RunPhase, ...],
    columns: DataConfig,
    display: Display,
    overwrite: bool,
    resume: bool,
    resume_adapter_file: str | None,
    report_to: str | None,
    project_name: str | None,
    trust_remote_code: bool,
    force: bool,
) -> TrainRun:
    """`train_pack` once everything is said and the folders are its own."""
    earlier = check_resumable(run) if resume else None
    started = started_from(resume_adapter_file, earlier)
    from .tasks.embedding import check_task, train_embeddings

    splits = [phase.load_rows() for phase in phases]
    if not isinstance(base, Base):
        check_task(str(base), stored_config(base)["model_type"], lora, train, columns)
    base = _loaded(base, lora, train, trust_remote_code, force, display)
    check_task(base.name, base.config["model_type"], lora, train, columns)
    method = METHODS[train.method]
    method.check(base, train.matmul_path)
    display.line("base", base.summary())
    if unused := unused_learning_rate(train):
        display.line("note", unused)
    if base.is_encoder:
        return train_embeddings(
            folder,
            run,
            base,
            lora,
            phases[0],
            splits[0],
            display,
            overwrite or resume,
            earlier,
            started,
            resume_adapter_file,
            report_to,
            project_name,
            force,
        )
    graph = graph_of(base, lora, train)
    for line in graph.lines():
        display.line("graph", line)
    recipe = Recipe(lora, train, columns, {"model": base.name, "resume_adapter_file": started})
    dataset = encode_phases(phases, splits, base, train, display)
    identity = {
        "recipe": recipe.to_json(),
        "base": base.fingerprint,
        "data": fingerprints(dataset, splits),
    }
    if earlier is not None:
        check_resume(run, identity, earlier)
    goal = phases[-1]  # what a pack is judged by are the rows of what it learned last
    held_out, rows = dataset.held_out(goal)
    sample = SamplePrompt.of(splits[-1].rows[held_out][0], base, goal.sources[0])
    sources = [phase.public_source(read) for phase, read in zip(phases, splits, strict=True)]
    splits.clear()  # from here on only their tokens are needed
    plans = plan_paths(base, lora, train, dataset.batch_shapes(), display, force)
    choice = choose_path(graph.base, train, dataset.train, plans, display)
    plan = plans.get(choice.matmul_path)
    plan_peak_gb = plan.peak_gb if plan else None
    if plan:
        show_plan(base, lora, plan, display, method.trains_base)
    base_weights = count_weights(base.model)
    attached = method.attach(graph.base, graph.lora, train, choice.matmul_path)
    prefix = None
    try:
        describe(attached, display, base_weights)
        at_work = matmul_paths_by_name(attached, choice)
        if resume_adapter_file is not None:
            load_adapters(attached, Path(resume_adapter_file))
        policy = train.recomputes
        if policy == "auto":
            policy = plan.recompute if plan else "selective"  # what it needs is not known then
        policy = "none" if graph.is_proxy else policy
        attached.recompute(policy)
        head = graph.head()
        if train.packing and not graph.is_proxy:  # no token of a proxy sees another
            prepare_packing(attached, head, train.max_seq_length, base.vocab_size)
        if not graph.is_proxy:
            prefix = open_frozen_activations(
                attached,
                head,
                replace(train, iters=dataset.iters),
                dataset.train,
                choice.matmul_path,
                plan.peak_bytes if plan else None,
                display,
            )
        scorer = Scorer(attached.model, head, graph.arrays)
        before = _score_base(attached, scorer, dataset, display)
        texts = {} if graph.is_proxy else {"before": sample.complete(base)}
        observed = ObservedRun(
            run,
            train,
            display,
            recipe=recipe.to_json(),
            report_to=report_to,
            project_name=project_name,
        )
        observers = make_observers(observed)
        start_run_folder(run, identity, resume)
        arrays = prefix.arrays if prefix else graph.arrays
        ahead = prefix.prefetch if prefix else iter
        learned = _learn(
            attached, head, scorer, arrays, ahead, dataset, resume, observed, observers
        )
        if _backend.detect() != "reference":
            display.line("kernels", _backend.summary())
        round_adapters(attached, train.pack_dtype)
        scores = [before, *learned.scores, _score_phases(scorer, dataset, display)]
        ends = before[goal.name], scores[-1][goal.name]
        objective = graph.facts
        if graph.is_proxy:
            own = {"ppl_before": ends[0].ppl, "ppl_after": ends[1].ppl}
            objective = objective | own
            *ends, texts = _by_transformer(
                base, attached, dataset.judged(goal), sample, train.train_fp16_fallback, display
            )
        else:
            texts["after"] = sample.complete(base)
        result = _result(held_out, *ends)
        reports = phase_reports(dataset, sources, scores, learned.curve)
        pack = Pack.of(
            attached,
            train.pack_dtype,
            objective={"loss_on": dataset.loss_on, "ce_last_k": train.ce_last_k, **objective},
            data={
                "source": ", ".join(dict.fromkeys(sources)),
                "fingerprint": identity["data"],
                "rows": {
                    phase.named(split): len(e)
                    for phase, found in zip(phases, dataset.splits, strict=True)
                    for split, e in found.items()
                },
            },
            recipe=public_recipe(recipe, base),
            **({"phases": reports} if reports else {}),
            versions=versions_line(),
            eval=result,
            measured={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **learned.measured,
                "plan_peak_gb": plan_peak_gb,
                "matmul_path": choice.matmul_path,
                "matmul_path_ms": choice.step_ms,
                "ops": _backend.record(),
            },
        ).save(folder, overwrite=overwrite or resume)
    finally:
        if prefix is not None:
            prefix.close()
        attached.detach()
    gates = _gates(train, base, pack, result, rows, choice.matmul_path, display)
    report = {
        "pack": str(folder),
        "run": str(run),
        "steps": learned.cursor.updates,
        "batches": learned.cursor.batches,
        **{k: v for k, v in result.items() if k.startswith(("ppl", "accuracy"))},
        "held_out": {k: result[k] for k in ("split", "rows", "targets")},
        "trained_tokens": learned.cursor.trained_tokens,
        "phases": reports,
        **learned.measured,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "pack_mb": pack.size_mb,
        "objective": objective,
        "matmul_path": choice.matmul_path,
        "matmul_paths": at_work,
        "recompute": policy,
        "method": attached.method,
        "learned_weights": pack.manifest["adapters"]["parameters"],
        "base_weights": base_weights,
        "ops": _backend.record(),
        "plan_peak_gb": plan_peak_gb,
        "batch_shapes": learned.batch_shapes,
        "traces": learned.traces,
        "eval_traces": scorer.traces,
        "cache_frozen": prefix.to_json() if prefix else None,
        "sample": {"prompt": sample.shown, **texts},
        "gates": gates,
    }
    for observer in observers:
        observer.on_end(report)
    return TrainRun(pack, run, report, learned.curve)


def _loaded(
    base: Base | str | Path,
    lora: LoRAConfig,
    train: TrainConfig,
    trust_remote_code: bool,
    force: bool,
    display: Display,
) -> Base:
    """The base, quantized as the run wants it; refused before it is read where it cannot fit."""
    if isinstance(base, Base):
        if train.quantize != "none":
            raise PackError("quantize: this base is loaded already; give it to load_base instead.")
        return base
    refuse_from_headers(base, lora, train, force)
    with display.working("base", f"loading {base}"):
        return load_base(
            base,
            train.quantize,
            trust_remote_code,
            double_quant=train.double_quant,
            keep=train.keep,
            compute_dtype=train.compute_dtype,
            lazy=train.objective != TRANSFORMER,
        )


def start_run_folder(run: Path, identity: dict, resume: bool) -> None:
    make_folder(run)
    if not resume:
        clear_run(run)
    write_identity(run, identity)


@dataclass(frozen=True)
class _Learned:
    """What the walk left behind besides the adapters; ``scores``: after each phase but the last."""

    cursor: TrainingState
    curve: list[dict]
    scores: list[dict[str, Score]]
    measured: dict
    batch_shapes: int
    traces: int


def _learn(
    attached: Trainable,
    head: Head | None,
    scorer: Scorer,
    arrays: Callable[[Batch], Arrays],
    ahead: Callable[[Iterator[Batch]], Iterator[Batch]],
    dataset: PhasedDataset,
    resume: bool,
    observed: ObservedRun,
    observers: Sequence[Observer],
) -> _Learned:
    """Walk the phases from the start or from the last checkpoint; checkpoint the end of each."""
    model, goal = attached.model, dataset.phases[-1]
    mx.random.seed(goal.train.seed)
    run, display, curve = observed.folder, observed.display, observed.curve
    cursor, optimizer = TrainingState(), None
    reached = latest_checkpoint(run) if resume else None
    if reached is not None:
        cursor = read_training_state(reached)
        curve.extend(read_metrics(run, cursor.batches))
        display.line("resume", f"{run}: batch {cursor.batches} of {dataset.iters}")

    def judge(batch: Batch) -> Score:
        return scorer.score([batch])

    scores, shapes, traces = [], set(), 0
    mx.reset_peak_memory()
    for phase in dataset.phases:
        if cursor.batches > phase.stop and phase is not goal:  # it was all taken before
            scores.append(_noted_scores(curve, phase))
            continue
        before, optimizer = optimizer, phase.optimizer()
        optimizer.init(model.trainable_parameters())
        if reached is not None:
            cursor, reached = load_checkpoint(reached, attached, optimizer), None
        elif before is not None and phase.carries:
            carry_state(before, optimizer)
        if phase.name:
            display.line("phase", f"{phase.name}: batches {phase.first + 1} to {phase.stop}")
        valid = dataset.valid(phase)
        config = phase.train

        def loss(*arrays, config=config):
            total = loss_sum(
                model,
                head,
                *arrays,
                z_loss=config.z_loss,
                label_smoothing=config.label_smoothing,
            )
            return total, arrays[3].sum()  # of the weights

        stepper = Stepper(model, loss, optimizer, config.max_grad_norm)
        loop = Loop(
            attached,
            stepper,
            phase,
            phase is goal,
            run,
            cursor,
            arrays,
            judge,
            (lambda valid=valid: scorer.score(valid)) if valid else None,
            observers,
        )
        batches = dataset.batches(phase, cursor.batches - phase.first)
        model.train()
        limits = runtime.memory_limits(config.clear_cache_threshold or 0)
        with closing(prefetched(ahead(batches))) as made, limits:
            loop.learn(made)
        shapes |= stepper.shapes
        traces += stepper.traces
        if phase is not goal:
            if not (found := _noted_scores(curve, phase)):
                try:
                    found = _score_phases(scorer, dataset, display)
                except KeyboardInterrupt:
                    raise interrupted(latest_checkpoint(run)) from None
                noted = {name: asdict(held) for name, held in found.items()}
                line = {"batch": cursor.batches, "held_out": noted, "phase": phase.name}
                for observer in observers:
                    observer.on_held_out(line)
            scores.append(found)
    display.line("shapes", f"{len(shapes)} of batches, {traces} compiled traces", VERBOSE)
    measured = {
        "train_s": cursor.train_s,
        "tokens_per_s": cursor.trained_tokens / cursor.train_s,
        "peak_gb": mx.get_peak_memory() / 1e9,
    }
    return _Learned(cursor, curve, scores, measured, len(shapes), traces)


def _noted_scores(curve: list[dict], phase: RunPhase) -> dict[str, Score]:
    """What was measured after a phase, from the run's metrics; empty if it is not there."""
    for line in curve:
        if "held_out" in line and line["batch"] == phase.stop:
            with suppress(TypeError, AttributeError):  # not as it was written
                return {name: Score(**held) for name, held in line["held_out"].items()}
    return {}


def _score_base(
    attached: Trainable, scorer: Scorer, dataset: PhasedDataset, display: Display
) -> dict[str, Score]:
    """The scores of the base alone, whatever the run starts from."""
    with attached.disabled():
        return _score_phases(scorer, dataset, display)


def _score_phases(scorer: Scorer, dataset: PhasedDataset, display: Display) -> dict[str, Score]:
    """The scores on the held-out rows of each phase, by its name."""
    judged = {phase.name: dataset.judged(phase) for phase in dataset.phases}
    with display.task("eval", sum(map(len, judged.values())), "held-out batches") as bar:
        return {name: scorer.score(batches, bar.advance) for name, batches in judged.items()}


def _by_transformer(
    base: Base,
    proxy: Attached,
    judged: list,
    sample: "SamplePrompt",
    fp16_fallback: bool,
    display: Display,
) -> tuple[Score, Score, dict[str, str]]:
    """What adapters that a proxy has trained are worth: the base's own forward without and with
    them, and what it answers."""
    with display.working("eval", "reading the whole base"):
        matmul_path = choose_matmul_path(base.model, judged[-1].tokens.size).matmul_path
    attached = attach(base, specs=proxy.specs, matmul_path=matmul_path, fp16_fallback=fp16_fallback)
    try:
        head = split_head(base.model)
        scores, texts = [], {}
        with display.task("eval", 2 * len(judged), "held-out batches, whole base") as bar:
            for when, tensors in (("before", attached.tensors()), ("after", proxy.tensors())):
                attached.load(tensors, when)
                scores.append(Scorer(base.model, head).score(judged, bar.advance))
                texts[when] = sample.complete(base)
    finally:
        attached.detach()
    return scores[0], scores[1], texts


def _result(held_out: str, before: Score, after: Score) -> dict:
    result = {"split": held_out, "rows": after.rows, "targets": after.targets}
    for key in ("ppl", "ppl_se", "accuracy"):
        name, _, tail = key.partition("_")
        for when, found in (("before", before), ("after", after)):
            result["_".join(p for p in (name, when, tail) if p)] = getattr(found, key)
    return result


def _gates(
    train: TrainConfig,
    base: Base,
    pack: Pack,
    result: dict,
    held_out: Examples,
    matmul_path: str,
    display: Display,
) -> Gates:
    """Hold the saved pack against its gates; their results go into its manifest."""
    held = gate_limits(**train.gates)
    if not held:
        return {}
    found = {"max_ppl_ratio": result["ppl_after"] / result["ppl_before"]}
    if "min_tps_ratio" in held:
        prompts = prompts_of([e.tokens for e in held_out.items], 1, _PROMPT_TOKENS)
        with display.working("gates", "measuring the speed of answers"):
            speeds = race(
                base, [None, pack], prompts, _SAMPLE_TOKENS, matmul_path=answering_path(matmul_path)
            )
        found["min_tps_ratio"] = speeds[1].tps_ratio
    for _ in range(2):  # the manifest, which has the result, is part of the size
        gates = evaluate_gates(held, {**found, "max_pack_mb": pack.size_mb})
        pack.note(gates=gates)
    return gates


@dataclass(frozen=True)
class SamplePrompt:
    """One held-out prompt that is completed before and after, so that people see the change."""

    shown: str
    tokens: list[int]

    @classmethod
    def of(cls, row: rows_of.Row, base: Base, columns: DataConfig) -> "SamplePrompt":
        return cls(*token_format(row, columns).prompt(row, columns, base.tokenizer))

    def complete(self, base: Base) -> str:
        """What the model says to it now, sampled with a fixed seed."""
        text = complete(base, self.tokens, _SAMPLE_TOKENS, temperature=_SAMPLE_TEMPERATURE)
        return " ".join(text.split())
