"""Train a pack: rows in, adapters on a frozen base, a folder out.

`train_pack` reads from top to bottom: rows, base path, attach, measure, learn, measure, save.
"""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from . import data as rows_of
from . import runtime
from .adapters import Attached, attach
from .base_path import BasePathChoice, choose_base_path, weight_kinds
from .batches import Batch, evaluation_batches, padded_length, training_batches
from .checkpoint import Cursor, clear_run, latest_checkpoint, load_checkpoint, save_checkpoint
from .config import DataConfig, LoRAConfig, Recipe, TrainConfig, read_yaml, resolve
from .display import QUIET, VERBOSE, Display
from .errors import PackError
from .evaluation import Score, score
from .files import make_folder, to_json, write_whole
from .generate import chat_prompt, complete
from .loading import TINY, Base, load_base
from .loop import Loop
from .loss import Head, split_head
from .optim import make_optimizer
from .pack import Pack, check_output, versions_line
from .runtime import mx
from .step import Stepper

_SAMPLE_TOKENS, _SAMPLE_TEMPERATURE = 40, 0.7
# What may differ when a run is resumed: none of it changes a step that was taken.
_MAY_CHANGE = (
    "iters steps_per_report steps_per_eval save_every val_batches test_batches max_pack_mb "
    "clear_cache_threshold base_path"
).split()


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
        ax.set_ylabel("loss (nats a token)")
        ax.legend()
        return ax

    def to_json(self) -> dict:
        return self.report


def tiny_recipe() -> dict:
    """Options that suit the tiny base; they apply where it is trained and nothing else is said."""
    return read_yaml(Path(__file__).parent / "tiny" / "recipe.yaml")


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
    display: Display | None = None,
) -> TrainRun:
    """Teach a base something and save it as a pack.

    Args:
        base: a loaded base, or what `load_base` takes.
        data: folder, file, data set id, or ``tiny``; ``columns`` has more to say about its rows.
        lora, train: how; by default what suits real 4-bit bases, or the tiny base's own recipe.
        out: the pack's folder, by default ``packs/<data>``, numbered so that none is overwritten.
            The run folder with checkpoints and metrics stands beside it as ``<out>-run``.
        resume: continue the run of ``out`` from its last checkpoint, as if never interrupted.
        resume_adapter_file: start from these adapters (mlx-lm's names) instead of fresh ones.
        report_to: wandb, swanlab or both (comma), with ``project_name``.
    Raises: PackError for anything that a user can mend; nothing half-written stays.
    """
    display = display or Display(QUIET)
    columns = columns or DataConfig(data=str(data or "tiny"))
    if lora is None and train is None and str(getattr(base, "name", base)) == TINY:
        tiny = resolve(tiny_recipe())
        lora, train = tiny.lora, tiny.train
    lora, train = lora or LoRAConfig(), train or TrainConfig()
    make_optimizer(train)  # a wrong argument shows before anything is loaded
    folder, run = _output(out, columns, overwrite, resume)
    if not isinstance(base, Base):
        base = load_base(base, train.quantize, trust_remote_code)
    elif train.quantize != "none":
        raise PackError("quantize: this base is loaded already; give it to load_base instead.")
    display.line("base", base.summary())
    recipe = Recipe(lora, train, columns, {"model": base.name})
    splits = rows_of.load_rows(columns)
    examples = _encode_splits(splits, base, columns, train, display)
    identity = {
        "recipe": recipe.to_json(),
        "base": base.fingerprint,
        "data": {split: rows_of.fingerprint(splits.rows[split]) for split in examples},
    }
    _check_resume(run, identity, resume)
    held_out = "test" if "test" in examples else "valid"
    judged = evaluation_batches(
        examples[held_out], train.batch_size, train.max_seq_length, train.test_batches
    )
    sample = SamplePrompt.of(splits.rows[held_out][0], base, columns)
    choice = _choose_path(base, train, examples["train"], display)
    attached = attach(base, lora, None, choice.base_path, train.seed, train.train_fp16_fallback)
    try:
        _describe(attached, display)
        if resume_adapter_file is not None:
            _load_adapters(attached, Path(resume_adapter_file))
        if train.grad_checkpoint:
            attached.recompute_blocks()
        head = split_head(base.model)
        with display.task("eval", len(judged), "held-out batches") as bar:
            before = _score_base(attached, head, judged, bar.advance)
        texts = {"before": sample.complete(base)}
        callback = _callback(report_to, project_name, run, recipe)
        _start_run_folder(run, identity, resume)
        learned = _learn(attached, head, train, examples, run, resume, display, callback)
        with display.task("eval", len(judged), "held-out batches") as bar:
            after = score(base.model, head, judged, bar.advance)
        texts["after"] = sample.complete(base)
        result = _result(held_out, before, after)
        pack = Pack.of(
            attached,
            objective={"loss_on": examples["train"].loss_on, "ce_last_k": train.ce_last_k},
            data={
                "source": splits.source,
                "fingerprint": identity["data"],
                "rows": {split: len(e) for split, e in examples.items()},
            },
            recipe=recipe.to_json(),
            versions=versions_line(),
            eval=result,
            measured={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **learned.measured,
                "base_path": choice.base_path,
                "base_path_ms": choice.step_ms,
            },
        ).save(folder, overwrite=overwrite or resume)
    finally:
        attached.detach()
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
        "plan_peak_gb": None,
        "traces": learned.traces,
        "sample": {"prompt": sample.shown, **texts},
        "gates": _gates(train, pack),
    }
    return TrainRun(pack, run, report, learned.curve)


# ── before: folders, rows, base path ─────────────────────────────────────────────────────────────


def _output(
    out: str | Path | None, columns: DataConfig, overwrite: bool, resume: bool
) -> tuple[Path, Path]:
    """The folders of pack and run; refuses what would lose something."""

    def run_of(folder: Path) -> Path:
        return folder.with_name(folder.name + "-run")

    if out is None:
        if resume:
            raise PackError("--resume: name the run's pack with --out.")
        name = Path(columns.data).expanduser().resolve().stem or "pack"
        folder, n = Path("packs") / name, 1
        while folder.exists() or run_of(folder).exists():
            n += 1
            folder = Path("packs") / f"{name}-{n}"
        return folder, run_of(folder)
    folder = Path(out).expanduser()
    if folder.name in ("", ".."):
        raise PackError(f"--out {out}: must name a folder of its own.")
    run = run_of(folder)
    check_output(folder, overwrite or resume)
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PackError(f"--out {out}: cannot be written ({parent} is no folder to write in).")
    if run.exists() and not (run.is_dir() and _is_run(run)):
        raise PackError(f"{run}: is there and holds something else; choose another --out.")
    if resume and latest_checkpoint(run) is None:
        raise PackError(f"--resume: {run} has no checkpoint to continue from.")
    if latest_checkpoint(run) and not (overwrite or resume):
        raise PackError(
            f"{run}: holds checkpoints of an earlier run; continue it with --resume, replace it "
            "with --overwrite, or choose another --out."
        )
    return folder, run


def _is_run(folder: Path) -> bool:
    return (folder / "config.json").is_file() or not any(folder.iterdir())


def _check_resume(run: Path, identity: dict, resume: bool) -> None:
    """A resumed run must be the same run: base, data and everything that shapes a step."""
    if not resume:
        return
    try:
        earlier = json.loads((run / "config.json").read_text())
    except (OSError, ValueError):
        raise PackError(f"--resume: {run}/config.json cannot be read.") from None
    for what in ("base", "data"):
        if earlier[what] != identity[what]:
            raise PackError(f"--resume: {run} was trained on another {what}.")
    then, now = earlier["recipe"], json.loads(json.dumps(identity["recipe"]))
    for key in sorted(set(now) | set(then)):
        if key not in _MAY_CHANGE and now.get(key) != then.get(key):
            raise PackError(
                f"--resume: {key} was {then.get(key)!r} and is {now.get(key)!r} now; a resumed run "
                "must go on as it began."
            )


def _start_run_folder(run: Path, identity: dict, resume: bool) -> None:
    make_folder(run)
    if not resume:
        clear_run(run)
    write_whole(run / "config.json", to_json(identity))


def _encode_splits(
    splits: rows_of.Splits, base: Base, columns: DataConfig, train: TrainConfig, display: Display
) -> dict[str, rows_of.Examples]:
    """Tokens of every split that has rows; says what was cut."""
    if not splits.rows["train"]:
        raise PackError(f"--data {splits.source}: the train split is empty.")
    present = [s for s in rows_of.SPLITS if splits.rows[s]]
    if present == ["train"]:
        raise PackError(
            f"--data {splits.source}: one row is too few: some must be held out (valid.jsonl)."
        )
    examples = {}
    with display.task("data", len(present), "splits") as bar:
        for split in present:
            examples[split] = rows_of.encode(
                splits.rows[split],
                base.tokenizer,
                columns,
                loss_on=train.loss_on,
                max_seq_length=train.max_seq_length,
                vocab_size=base.vocab_size,
                ce_last_k=train.ce_last_k if split == "train" else None,
            )
            bar.advance()
    counts = " / ".join(f"{len(e):,} {s}" for s, e in examples.items())
    first = examples["train"]
    display.line(
        "data",
        f"{splits.source} · {counts} rows · {first.format} · {first.targets:,} supervised tokens "
        f"(loss on {first.loss_on})",
    )
    if cut := sum(e.cut for e in examples.values()):
        dropped = sum(e.dropped for e in examples.values())
        text = f"longer than {train.max_seq_length} tokens and cut: {cut} rows"
        text += f", {dropped} of them dropped, since no target was left" if dropped else ""
        display.line("data", f"{text} (--max-seq-length)")
    for note in splits.notes:
        display.line("data", note)
    return examples


def _choose_path(
    base: Base, train: TrainConfig, examples: rows_of.Examples, display: Display
) -> BasePathChoice:
    """The base path as asked, or measured for the typical batch of this run."""
    if train.base_path != "auto":
        choice = BasePathChoice(train.base_path, {}, "as asked")
    else:
        lengths = sorted(len(e.tokens) for e in examples.items)
        typical = padded_length(lengths[len(lengths) // 2], train.max_seq_length)
        with display.task("path", weight_kinds(base.model), "kinds of weights measured") as bar:
            choice = choose_base_path(base.model, train.batch_size * typical, bar.advance)
    display.line("path", choice.line())
    return choice


def _describe(attached: Attached, display: Display) -> None:
    ranks = sorted({s.rank for spec in attached.specs.values() for s in spec.slices if s.rank})
    display.line(
        "lora",
        f"rank {', '.join(map(str, ranks))} · {attached.parameter_count():,} weights · geometry "
        f"probed, {len(attached.specs)} projections in {len(attached.groups)} groups",
    )
    for note in attached.notes:
        display.line("note", note)
    for group in attached.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)


def _load_adapters(attached: Attached, file: Path) -> None:
    """Start from the adapters of a file; they must be exactly those of this run."""
    if not file.is_file():
        raise PackError(f"--resume-adapter-file {file}: no such file.")
    try:
        tensors = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise PackError(f"--resume-adapter-file {file}: {error}") from None
    attached.load(tensors, str(file))


# ── learning ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Learned:
    """What the loop left behind besides the adapters."""

    cursor: Cursor
    curve: list[dict]
    measured: dict
    traces: int


def _learn(
    attached: Attached,
    head: Head | None,
    train: TrainConfig,
    examples: dict[str, rows_of.Examples],
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
    cursor = Cursor()
    if resume:
        cursor = load_checkpoint(latest_checkpoint(run), attached, optimizer)
        display.line("resume", f"{run}: batch {cursor.batches} of {train.iters}")
    validate = None
    if "valid" in examples and train.val_batches:
        valid = evaluation_batches(
            examples["valid"], train.batch_size, train.max_seq_length, train.val_batches
        )

        def validate() -> Score:
            return score(model, head, valid)

    stepper = Stepper(model, head, optimizer, train.max_grad_norm)

    def judge(batch: Batch) -> Score:
        return score(model, head, [batch])

    loop = Loop(attached, stepper, train, run, cursor, judge, validate, display, callback, [])
    batches = training_batches(
        examples["train"], train.batch_size, train.max_seq_length, train.seed, cursor.batches
    )
    model.train()
    mx.reset_peak_memory()
    try:
        loop.learn(batches)
    except KeyboardInterrupt:
        if stepper.pending:
            raise
        kept = save_checkpoint(run, attached, optimizer, cursor)
        raise PackError(f"interrupted; kept {kept}. Continue with --resume --out …") from None
    measured = {
        "train_s": cursor.train_s,
        "tokens_per_s": cursor.trained_tokens / cursor.train_s,
        "peak_gb": mx.get_peak_memory() / 1e9,
    }
    return _Learned(cursor, loop.curve, measured, len(stepper.shapes))


def _callback(report_to: str | None, project: str | None, run: Path, recipe: Recipe):
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


def _gates(train: TrainConfig, pack: Pack) -> dict:
    if train.max_pack_mb is None:
        return {}
    passed = pack.size_mb <= train.max_pack_mb
    return {"max_pack_mb": {"limit": train.max_pack_mb, "value": pack.size_mb, "passed": passed}}


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
