"""Train a pack: rows in, adapters on a frozen base, a folder out.

`_train_into` reads from top to bottom: rows, base path, attach, measure, learn, measure, save.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from . import data as rows_of
from . import runtime
from .adapters import Attached, attach
from .batches import Batch, evaluation_batches, prefetched, training_batches
from .checkpoint import (
    Cursor,
    check_resumable,
    clear_run,
    kept_metrics,
    latest_checkpoint,
    load_checkpoint,
    write_identity,
)
from .config import DataConfig, LoRAConfig, Recipe, TrainConfig, read_yaml, resolve
from .display import QUIET, VERBOSE, Display
from .encoding import Examples
from .errors import PackError
from .evaluation import Score, score
from .files import make_folder
from .gates import Gates, judge, limits
from .generate import chat_prompt, complete
from .loading import TINY, Base, load_base, public_name, stored_config
from .loop import Loop
from .loss import Head, as_arrays, split_head
from .ops import _backend
from .optim import make_optimizer, unused_learning_rate
from .pack import Pack, versions_line
from .packable import prepare_packing
from .prefix import PrefixCache, open_prefix
from .prepare import (
    base_paths_at_work,
    check_resume,
    choose_path,
    compiled_shapes,
    describe,
    encode_splits,
    load_adapters,
    output_folders,
    plan_paths,
    refuse_from_headers,
    show_plan,
    started_from,
)
from .runtime import mx
from .speed import answering_path, prompts_of, race
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
    return read_yaml(Path(__file__).parent / "tiny" / "recipe.yaml")


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
    lora, train = lora or suited.lora, train or suited.train
    _backend.start_record()
    make_optimizer(train)  # a wrong argument shows before anything is loaded
    _check_report_to(report_to, project_name)
    with output_folders(out, columns, overwrite, resume) as (folder, run):
        return _train_into(
            folder, run, base, lora, train, columns, display, overwrite, resume,
            resume_adapter_file, report_to, project_name, trust_remote_code, force,
        )  # fmt: skip


def _train_into(
    folder: Path,
    run: Path,
    base: Base | str | Path,
    lora: LoRAConfig,
    train: TrainConfig,
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
    from .embedding_training import check_task, train_embeddings

    if not isinstance(base, Base):
        refuse_from_headers(base, lora, train, force)
        check_task(str(base), stored_config(base)["model_type"], train, columns)
        with display.working("base", f"loading {base}"):
            base = load_base(
                base, train.quantize, trust_remote_code, double_quant=train.double_quant,
                keep=train.keep, compute_dtype=train.compute_dtype,
            )  # fmt: skip
    elif train.quantize != "none":
        raise PackError("quantize: this base is loaded already; give it to load_base instead.")
    check_task(base.name, base.config["model_type"], train, columns)
    display.line("base", base.summary())
    if unused := unused_learning_rate(train):
        display.line("note", unused)
    if base.is_encoder:
        return train_embeddings(
            folder, run, base, lora, train, columns, display, overwrite or resume, earlier, started,
            resume_adapter_file, report_to, project_name, force,
        )  # fmt: skip
    recipe = Recipe(lora, train, columns, {"model": base.name, "resume_adapter_file": started})
    splits = rows_of.load_rows(columns)
    examples = encode_splits(splits, base, columns, train, display)
    identity = {
        "recipe": recipe.to_json(),
        "base": base.fingerprint,
        "data": {split: rows_of.fingerprint(splits.rows[split]) for split in examples},
    }
    if earlier is not None:
        check_resume(run, identity, earlier)
    held_out = "test" if "test" in examples else "valid"
    judged = evaluation_batches(
        examples[held_out], train.batch_size, train.max_seq_length, train.test_batches
    )
    sample = SamplePrompt.of(splits.rows[held_out][0], base, columns)
    splits.rows.clear()  # from here on only their tokens are needed
    plans = plan_paths(base, lora, train, examples["train"], display, force)
    choice = choose_path(base, train, examples["train"], plans, display)
    plan = plans.get(choice.base_path)
    plan_peak_gb = plan.peak_gb if plan else None
    if plan:
        show_plan(base, lora, plan, display)
    attached = attach(base, lora, None, choice.base_path, train.seed, train.train_fp16_fallback)
    prefix = None
    try:
        describe(attached, display)
        at_work = base_paths_at_work(attached, choice)
        if resume_adapter_file is not None:
            load_adapters(attached, Path(resume_adapter_file))
        policy = train.recomputes
        if policy == "auto":
            policy = plan.recompute if plan else "selective"  # what it needs is not known then
        attached.recompute(policy)
        head = split_head(base.model)
        if train.packing:
            prepare_packing(attached, head, train.max_seq_length, base.vocab_size)
        prefix = open_prefix(
            attached, head, train, examples["train"], choice.base_path,
            plan.peak_bytes if plan else None, display,
        )  # fmt: skip
        with display.task("eval", len(judged), "held-out batches") as bar:
            before = _score_base(attached, head, judged, bar.advance)
        texts = {"before": sample.complete(base)}
        callback = reporters(report_to, project_name, run, recipe)
        start_run_folder(run, identity, resume)
        learned = _learn(attached, head, prefix, train, examples, run, resume, display, callback)
        if _backend.detect() != "reference":
            display.line("kernels", _backend.summary())
        with display.task("eval", len(judged), "held-out batches") as bar:
            after = score(base.model, head, judged, bar.advance)
        texts["after"] = sample.complete(base)
        result = _result(held_out, before, after)
        pack = Pack.of(
            attached,
            objective={"loss_on": examples["train"].loss_on, "ce_last_k": train.ce_last_k},
            data={
                "source": public_name(splits.source),
                "fingerprint": identity["data"],
                "rows": {split: len(e) for split, e in examples.items()},
            },
            recipe={
                **recipe.to_json(),
                "model": base.public_name,
                "data": public_name(columns.data),
            },
            versions=versions_line(),
            eval=result,
            measured={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **learned.measured,
                "plan_peak_gb": plan_peak_gb,
                "base_path": choice.base_path,
                "base_path_ms": choice.step_ms,
                "ops": _backend.record(),
            },
        ).save(folder, overwrite=overwrite or resume)
    finally:
        if prefix is not None:
            prefix.close()
        attached.detach()
    gates = _gates(train, base, pack, result, examples[held_out], choice.base_path, display)
    report = {
        "pack": str(folder),
        "run": str(run),
        "steps": learned.cursor.updates,
        "batches": learned.cursor.batches,
        **{k: v for k, v in result.items() if k.startswith(("ppl", "accuracy"))},
        "held_out": {k: result[k] for k in ("split", "rows", "targets")},
        "trained_tokens": learned.cursor.trained_tokens,
        **learned.measured,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "pack_mb": pack.size_mb,
        "base_path": choice.base_path,
        "base_paths_at_work": at_work,
        "recompute": policy,
        "ops": _backend.record(),
        "plan_peak_gb": plan_peak_gb,
        "batch_shapes": learned.batch_shapes,
        "traces": learned.traces,
        "cache_prefix": prefix.to_json() if prefix else None,
        "sample": {"prompt": sample.shown, **texts},
        "gates": gates,
    }
    return TrainRun(pack, run, report, learned.curve)


# ── learning ─────────────────────────────────────────────────────────────────────────────────────


def start_run_folder(run: Path, identity: dict, resume: bool) -> None:
    make_folder(run)
    if not resume:
        clear_run(run)
    write_identity(run, identity)


@dataclass(frozen=True)
class _Learned:
    """What the loop left behind besides the adapters."""

    cursor: Cursor
    curve: list[dict]
    measured: dict
    batch_shapes: int
    traces: int


def _learn(
    attached: Attached,
    head: Head | None,
    prefix: PrefixCache | None,
    train: TrainConfig,
    examples: dict[str, Examples],
    run: Path,
    resume: bool,
    display: Display,
    callback: object | None,
) -> _Learned:
    """Run the loop from the start or from the last checkpoint; checkpoint its end."""
    model = attached.model
    mx.random.seed(train.seed)
    optimizer = make_optimizer(train)
    optimizer.init(model.trainable_parameters())
    cursor, curve = Cursor(), []
    if resume:
        cursor = load_checkpoint(latest_checkpoint(run), attached, optimizer)
        curve = kept_metrics(run, cursor.batches)
        display.line("resume", f"{run}: batch {cursor.batches} of {train.iters}")
    validate = None
    if "valid" in examples and train.val_batches:
        valid = evaluation_batches(
            examples["valid"], train.batch_size, train.max_seq_length, train.val_batches
        )

        def validate() -> Score:
            return score(model, head, valid)

    stepper = Stepper(
        model, head, optimizer, train.max_grad_norm, train.z_loss, train.label_smoothing
    )

    def judge(batch: Batch) -> Score:
        return score(model, head, [batch])

    loop = Loop(
        attached, stepper, train, run, cursor, prefix.arrays if prefix else as_arrays, judge,
        validate, display, callback, curve,
    )  # fmt: skip
    batches = training_batches(
        examples["train"], train.batch_size, train.max_seq_length, train.seed, cursor.batches,
        train.packing, compiled_shapes(train, examples["train"]),
    )  # fmt: skip
    model.train()
    mx.reset_peak_memory()
    limits = runtime.memory_limits(train.clear_cache_threshold or 0)
    with closing(prefetched(prefix.ahead(batches) if prefix else batches)) as ahead, limits:
        loop.learn(ahead)
    shapes, traces = len(stepper.shapes), stepper.traces
    display.line("shapes", f"{shapes} of batches, {traces} compiled traces", VERBOSE)
    measured = {
        "train_s": cursor.train_s,
        "tokens_per_s": cursor.trained_tokens / cursor.train_s,
        "peak_gb": mx.get_peak_memory() / 1e9,
    }
    return _Learned(cursor, loop.curve, measured, shapes, traces)


def _check_report_to(report_to: str | None, project: str | None) -> None:
    """The services must be known and installed before anything is loaded."""
    if project is not None and not report_to:
        raise PackError("--project-name: is the project of a --report-to; name that too.")
    if report_to is None:
        return
    from mlx_lm.tuner import callbacks

    for name in (part.strip().lower() for part in report_to.split(",") if part.strip()):
        if name not in callbacks.SUPPORT_CALLBACK:
            known = ", ".join(callbacks.SUPPORT_CALLBACK)
            raise PackError(f"--report-to {report_to}: must be of {known}, but got '{name}'.")
        if getattr(callbacks, name) is None:
            raise PackError(f"--report-to {report_to}: is not installed; pip install {name}.")


def reporters(report_to: str | None, project: str | None, run: Path, recipe: Recipe):
    """mlx-lm's own reporters for wandb and swanlab."""
    if report_to is None:
        return None
    from mlx_lm.tuner.callbacks import get_reporting_callbacks

    try:
        return get_reporting_callbacks(
            report_to, project_name=project or run.name, log_dir=str(run), config=recipe.to_json()
        )
    except (ImportError, ValueError) as error:
        raise PackError(f"--report-to {report_to}: {error}") from None


# ── after: results, gates, a sample ──────────────────────────────────────────────────────────────


def _score_base(attached: Attached, head: Head | None, judged: list, advance) -> Score:
    """The score of the base alone: with every B at zero, whatever the run starts from."""
    started = attached.tensors()
    zero = {n: mx.zeros_like(t) if n.endswith("lora_b") else t for n, t in started.items()}
    attached.load(zero, "base")
    found = score(attached.model, head, judged, advance)
    attached.load(started, "start")
    return found


def _result(held_out: str, before: Score, after: Score) -> dict:
    result = {"split": held_out, "rows": after.rows, "targets": after.targets}
    for key in ("ppl", "ppl_se", "accuracy"):
        name, _, tail = key.partition("_")
        for when, found in (("before", before), ("after", after)):
            result["_".join(p for p in (name, when, tail) if p)] = getattr(found, key)
    return result


def _gates(
    train: TrainConfig, base: Base, pack: Pack, result: dict, held_out: Examples, base_path: str,
    display: Display,
) -> Gates:  # fmt: skip
    """Hold the saved pack against its gates; their results go into its manifest."""
    held = limits(**train.gates)
    if not held:
        return {}
    found = {"max_ppl_ratio": result["ppl_after"] / result["ppl_before"]}
    if "min_tps_ratio" in held:
        prompts = prompts_of([e.tokens for e in held_out.items], 1, _PROMPT_TOKENS)
        with display.working("gates", "measuring the speed of answers"):
            speeds = race(
                base, [None, pack], prompts, _SAMPLE_TOKENS, base_path=answering_path(base_path)
            )
        found["min_tps_ratio"] = speeds[1].tps_ratio
    for _ in range(2):  # the manifest, which has the result, is part of the size
        gates = judge(held, {**found, "max_pack_mb": pack.size_mb})
        pack.note(gates=gates)
    return gates


@dataclass(frozen=True)
class SamplePrompt:
    """One held-out prompt that is completed before and after, so that people see the change."""

    shown: str
    tokens: list[int]

    @classmethod
    def of(cls, row: rows_of.Row, base: Base, columns: DataConfig) -> "SamplePrompt":
        kind = rows_of.row_format(row, columns)
        if kind == "text":
            tokens = base.tokenizer.encode(row.value[columns.text_feature])
            tokens = tokens[: max(1, min(32, len(tokens) // 2))]
            return cls(base.tokenizer.decode(tokens), tokens)
        if kind == "completion":
            messages = [{"role": "user", "content": row.value[columns.prompt_feature]}]
        else:
            messages = list(row.value[columns.chat_feature])
            first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), 0)
            messages = messages[: max(1, first)]
        tokens = chat_prompt(base, messages, row.value.get("tools"))
        return cls(messages[-1].get("content") or "", tokens)

    def complete(self, base: Base) -> str:
        """What the model says to it now, sampled with a fixed seed."""
        text = complete(base, self.tokens, _SAMPLE_TOKENS, temperature=_SAMPLE_TEMPERATURE)
        return " ".join(text.split())
