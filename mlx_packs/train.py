"""Train a pack: rows in, adapters on a frozen base, a folder out.

``train_pack`` reads from top to bottom: rows, base path, attach, measure, learn, measure, save.
One step: hidden states → loss on target rows only → gradients of A and B → clip → update.
"""

import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from . import data as rows_of
from . import runtime
from .adapters import Attached, attach
from .base_path import BasePathChoice, choose_base_path
from .checkpoint import Cursor, latest_checkpoint, load_checkpoint, save_checkpoint
from .config import DataConfig, LoRAConfig, Recipe, TrainConfig, read_yaml, resolve
from .display import NORMAL, QUIET, VERBOSE, Display, clock
from .errors import PackError
from .evaluation import Score, score
from .files import to_json, write_whole
from .generate import chat_prompt, complete
from .loading import TINY, Base, load_base
from .loop import Loop
from .loss import Head, split_head
from .optim import make_optimizer
from .pack import Pack, check_output, versions_line
from .runtime import mx
from .step import Stepper

_SAMPLE_TOKENS = 40
# What may differ when a run is resumed: none of it changes a step that was taken.
_MAY_CHANGE = ("iters", "steps_per_report", "steps_per_eval", "save_every", "val_batches",
               "test_batches", "max_pack_mb", "clear_cache_threshold", "base_path", "resume",
               "report_to", "project_name", "overwrite")  # fmt: skip


@dataclass
class TrainRun:
    """What a run gave: the pack, where it is, what was measured, and the loss curve."""

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
    Raises: PackError for anything that a user can mend; nothing half-written stays.
    """
    display = display or Display(QUIET)
    columns = columns or DataConfig(data=str(data or "tiny"))
    if lora is None and train is None and str(getattr(base, "name", base)) == TINY:
        tiny = resolve(tiny_recipe())
        lora, train = tiny.lora, tiny.train
    lora, train = lora or LoRAConfig(), train or TrainConfig()
    folder, run = _output(out, columns, overwrite, resume)
    if not isinstance(base, Base):
        base = load_base(base, quantize=train.quantize)
    display.line("base", base.summary())
    recipe = Recipe(lora, train, columns, {"model": base.name})
    splits = rows_of.load_rows(columns)
    examples = _encode_splits(splits, base, columns, train, display)
    held_out = "test" if "test" in examples else "valid"
    fingerprints = {s: rows_of.fingerprint(splits.rows[s]) for s in examples}
    identity = {"recipe": recipe.to_json(), "base": base.fingerprint, "data": fingerprints}
    _check_resume(run, identity, resume)

    batches = rows_of.evaluation_batches(
        examples[held_out], train.batch_size, train.max_seq_length, train.test_batches
    )
    sample = _SamplePrompt.of(splits.rows[held_out][0], base, columns)
    choice = _base_path(base, train, examples["train"])
    display.line("path", choice.line())
    attached = attach(base, lora, base_path=choice.base_path, seed=train.seed,
                      fp16_fallback=train.train_fp16_fallback)  # fmt: skip
    try:
        _describe(attached, display)
        if resume_adapter_file is not None:
            _load_adapters(attached, Path(resume_adapter_file))
        if train.grad_checkpoint:
            attached.recompute_blocks()
        head = split_head(base.model)
        mx.random.seed(train.seed)
        optimizer = make_optimizer(train)
        optimizer.init(base.model.trainable_parameters())

        with display.task("eval", len(batches), "held-out batches") as bar:
            before = _before(attached, head, batches, bar.advance)
        text_before = sample.complete(base)
        cursor = Cursor()
        if resume:
            cursor = load_checkpoint(latest_checkpoint(run), attached, optimizer)
            display.line("resume", f"{run}: batch {cursor.batches} of {train.iters}")
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / "config.json", to_json(identity))
        if not resume:
            (run / "metrics.jsonl").unlink(missing_ok=True)

        validate = None
        if "valid" in examples and train.val_batches:
            valid = rows_of.evaluation_batches(
                examples["valid"], train.batch_size, train.max_seq_length, train.val_batches
            )
            validate = lambda: score(base.model, head, valid)  # noqa: E731
        stepper = Stepper(base.model, head, optimizer, train.max_grad_norm)
        loop = Loop(attached, stepper, train, run, cursor, validate, display,
                    _callback(report_to, project_name, run, recipe), [])  # fmt: skip
        base.model.train()
        mx.reset_peak_memory()
        try:
            loop.learn(
                rows_of.training_batches(
                    examples["train"], train.batch_size, train.max_seq_length, train.seed,
                    cursor.batches,
                )
            )  # fmt: skip
        except KeyboardInterrupt:
            if not stepper.pending:
                kept = save_checkpoint(run, attached, optimizer, cursor)
                raise PackError(f"interrupted; kept {kept}. Continue with --resume.") from None
            raise
        peak_gb = mx.get_peak_memory() / 1e9
        save_checkpoint(run, attached, optimizer, cursor)

        with display.task("eval", len(batches), "held-out batches") as bar:
            after = score(base.model, head, batches, bar.advance)
        text_after = sample.complete(base)
        result = {
            "split": held_out,
            "rows": after.rows,
            "targets": after.targets,
            "ppl_before": before.ppl,
            "ppl_before_se": before.ppl_se,
            "ppl_after": after.ppl,
            "ppl_after_se": after.ppl_se,
            "accuracy_before": before.accuracy,
            "accuracy_after": after.accuracy,
        }
        pack = Pack.of(
            attached,
            objective={"loss_on": examples["train"].loss_on, "ce_last_k": train.ce_last_k},
            data={"source": splits.source, "fingerprint": fingerprints,
                  "rows": {s: len(e) for s, e in examples.items()}},
            recipe=recipe.to_json(),
            versions=versions_line(),
            eval=result,
            measured={
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "train_s": cursor.train_s,
                "tokens_per_s": cursor.trained_tokens / cursor.train_s,
                "peak_gb": peak_gb,
                "base_path": choice.base_path,
                "base_path_ms": choice.step_ms,
            },
        ).save(folder, overwrite=overwrite)  # fmt: skip
    finally:
        attached.detach()
    report = {
        "pack": str(folder),
        "run": str(run),
        "steps": cursor.updates,
        "batches": cursor.batches,
        **{k: v for k, v in result.items() if k.startswith("ppl")},
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "held_out": {"split": held_out, "rows": after.rows, "targets": after.targets},
        "trained_tokens": cursor.trained_tokens,
        "tokens_per_s": cursor.trained_tokens / cursor.train_s,
        "train_s": cursor.train_s,
        "peak_gb": peak_gb,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "pack_mb": pack.size_mb,
        "base_path": choice.base_path,
        "plan_peak_gb": None,
        "traces": len(stepper.shapes),
        "sample": {"prompt": sample.shown, "before": text_before, "after": text_after},
        "gates": _gates(train, pack),
    }
    return TrainRun(pack, run, report, loop.curve)


def _output(
    out: str | Path | None, columns: DataConfig, overwrite: bool, resume: bool
) -> tuple[Path, Path]:
    """The folders of pack and run; refuses what would lose something."""

    def run_of(folder: Path) -> Path:
        return folder.with_name(folder.name + "-run")

    if out is None:
        if resume:
            raise PackError("--resume: name the run's pack with --out.")
        name = Path(columns.data).stem or "pack"
        folder, n = Path("packs") / name, 1
        while folder.exists() or run_of(folder).exists():
            n += 1
            folder = Path("packs") / f"{name}-{n}"
        return folder, run_of(folder)
    folder = Path(out).expanduser()
    run = run_of(folder)
    check_output(folder, overwrite or resume)
    if resume and latest_checkpoint(run) is None:
        raise PackError(f"--resume: {run} has no checkpoint to continue from.")
    if run.exists() and not (overwrite or resume) and latest_checkpoint(run):
        raise PackError(
            f"{run}: holds checkpoints of an earlier run; continue it with --resume, replace it "
            "with --overwrite, or choose another --out."
        )
    return folder, run


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
    now = json.loads(json.dumps(identity["recipe"]))
    for key in sorted(set(now) | set(earlier["recipe"])):
        if key not in _MAY_CHANGE and now.get(key) != earlier["recipe"].get(key):
            raise PackError(
                f"--resume: {key} was {earlier['recipe'].get(key)!r} and is {now.get(key)!r} now; "
                "a resumed run must go on as it began."
            )


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
    cut = sum(e.cut for e in examples.values())
    dropped = sum(e.dropped for e in examples.values())
    first = examples["train"]
    text = f"{splits.source} · {counts} rows · {first.format} · {first.targets:,} supervised tokens"
    text += f" (loss on {first.loss_on})"
    if cut:
        text += f" · {cut} rows longer than {train.max_seq_length} tokens, cut"
    if dropped:
        text += f", {dropped} of them dropped: no target left"
    display.line("data", text)
    for note in splits.notes:
        display.line("data", note)
    return examples


def _base_path(base: Base, train: TrainConfig, examples: rows_of.Examples) -> BasePathChoice:
    if train.base_path != "auto":
        return BasePathChoice(train.base_path, {}, "as asked")
    lengths = sorted(len(e.tokens) for e in examples.items)
    typical = rows_of.padded_length(lengths[len(lengths) // 2], train.max_seq_length)
    return choose_base_path(base.model, train.batch_size * typical)


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


def _before(attached: Attached, head: Head | None, batches: list, advance) -> Score:
    """The score of the base alone: with every B at zero, whatever the run starts from."""
    started = attached.tensors()
    zero = {n: mx.zeros_like(t) if n.endswith("lora_b") else t for n, t in started.items()}
    attached.load(zero, "base")
    found = score(attached.model, head, batches, advance)
    attached.load(started, "start")
    return found


def _callback(report_to: str | None, project: str | None, run: Path, recipe: Recipe):
    if report_to is None:
        return None
    from mlx_lm.tuner.callbacks import get_reporting_callbacks

    try:
        return get_reporting_callbacks(report_to, project_name=project or run.name,
                                       log_dir=str(run), config=recipe.to_json())  # fmt: skip
    except (ImportError, ValueError) as error:
        raise PackError(f"--report-to {report_to}: {error}") from None


def _gates(train: TrainConfig, pack: Pack) -> dict:
    if train.max_pack_mb is None:
        return {}
    size = pack.size_mb
    passed = size <= train.max_pack_mb
    return {"max_pack_mb": {"limit": train.max_pack_mb, "value": size, "passed": passed}}


@dataclass(frozen=True)
class _SamplePrompt:
    """One held-out prompt that is completed before and after, so that people see the change."""

    shown: str
    tokens: list[int]

    @classmethod
    def of(cls, row: rows_of.Row, base: Base, columns: DataConfig) -> "_SamplePrompt":
        kind = rows_of.row_format(row, columns)
        if kind == "text":
            tokens = base.tokenizer.encode(row.value[columns.text_feature])
            tokens = tokens[: max(1, min(32, len(tokens) // 2))]
            return cls(base.tokenizer.decode(tokens), tokens)
        if kind == "completion":
            messages = [{"role": "user", "content": row.value[columns.prompt_feature]}]
        else:
            messages = list(row.value[columns.chat_feature])
            while len(messages) > 1 and messages[-1]["role"] == "assistant":
                messages.pop()
        return cls(messages[-1].get("content") or "", chat_prompt(base, messages))

    def complete(self, base: Base) -> str:
        """What the model says to it now, greedily."""
        return " ".join(complete(base, self.tokens, _SAMPLE_TOKENS).split())


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def _config_option(f: dataclasses.Field):
    """A click option from a field of a config; its value is typed by `config.build`."""
    name = "--" + f.name.replace("_", "-")
    sentence = f.metadata["help"]
    if f.default not in (None, (), dataclasses.MISSING):
        sentence += f" [{f.default}]"
    if f.metadata["choices"]:
        return click.option(
            name, metavar="{" + ",".join(f.metadata["choices"]) + "}", help=sentence
        )
    if isinstance(f.default, bool):
        return click.option(f"{name}/--no-{name[2:]}", default=None, help=sentence)
    return click.option(name, metavar=f.name.split("_")[-1].upper(), help=sentence)


def _config_options(command):
    """Every field of the configs that a flag can say; mappings are for YAML."""
    for cls in (TrainConfig, LoRAConfig, DataConfig):
        for f in reversed(dataclasses.fields(cls)):
            if f.name not in ("optimizer_config", "rank_pattern", "alpha_pattern", "hf_dataset"):
                command = _config_option(f)(command)
    return command


@click.command()
@click.option("--model", metavar="M", help="Base: a folder, a hub id, or 'tiny'. [tiny]")
@click.option("-c", "--config", metavar="FILE", help="YAML with any of these options.")
@click.option("--out", "--adapter-path", metavar="DIR", help="Folder of the pack. [packs/<data>]")
@_config_options
@click.option("--mask-prompt", is_flag=True, default=None, help="mlx-lm: --loss-on completion.")
@click.option("--fine-tune-type", metavar="{lora}", help="mlx-lm; only lora is trained here.")
@click.option("--train", is_flag=True, default=None, help="mlx-lm; training is what this does.")
@click.option("--test", is_flag=True, default=None, help="mlx-lm; held-out rows are always scored.")
@click.option("--resume", is_flag=True, default=None, help="Continue the run of --out.")
@click.option("--resume-adapter-file", metavar="FILE", help="Start from these adapters.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace the pack and run of --out.")
@click.option("--report-to", metavar="NAMES", help="wandb, swanlab or both (comma).")
@click.option("--project-name", metavar="NAME", help="Project for --report-to.")
@click.option("--trust-remote-code", is_flag=True, default=None, help="Run code of the checkpoint.")
@click.option("--show-mask", is_flag=True, help="Show what of some rows is learned, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Explain decisions.")
@click.option("-q", "--quiet", is_flag=True, help="Print the result line only.")
def command(config, show_mask, as_json, verbose, quiet, **flags):
    """Train a pack. Without arguments: the embedded tiny Qwen3 on the embedded data, in a minute.

    Rows: train.jsonl, valid.jsonl, test.jsonl with {"messages": [{"role", "content"}]}, {"prompt",
    "completion"} or {"text"}. Every flag and YAML key of mlx_lm.lora is understood.
    """
    flags = {k: v for k, v in flags.items() if v is not None}
    values = read_yaml(config) if config else {}
    resolve(values, str(config))  # so that a fault names the file that it stands in
    if (flags.get("model") or values.get("model") or TINY) == TINY:
        values = {**tiny_recipe(), **values}
    recipe = resolve({**values, **_given(flags, values)})
    run = recipe.run
    display = Display(QUIET if quiet else VERBOSE if verbose else NORMAL)
    base = load_base(
        run.get("model", TINY),
        quantize=recipe.train.quantize,
        trust_remote_code=bool(run.get("trust_remote_code")),
    )
    if show_mask:
        _show_mask(base, recipe, display)
        return
    result = train_pack(
        base,
        lora=recipe.lora,
        train=recipe.train,
        out=run.get("out"),
        columns=recipe.data,
        display=display,
        **{k: run[k] for k in _RUN_ARGUMENTS if k in run},
    )
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_result(result.report, base.name, quiet)
    failed = [name for name, gate in result.report["gates"].items() if not gate["passed"]]
    for name in failed:
        gate = result.report["gates"][name]
        flag = "--" + name.replace("_", "-")
        click.echo(f"packs: gate {flag} failed: {gate['value']:.3f} > {gate['limit']}", err=True)
    if failed:
        sys.exit(1)


_RUN_ARGUMENTS = ("overwrite", "resume", "resume_adapter_file", "report_to", "project_name")


def _given(flags: dict, values: dict) -> dict:
    """Flags over a file: a flag also overrides what the file says under mlx-lm's nested name."""
    nested = values.get("lora_parameters")
    if isinstance(nested, dict) and {"rank", "alpha"} & set(flags) and "scale" in nested:
        flags = {"alpha": float(nested["scale"]) * int(flags.get("rank", nested.get("rank", 8))),
                 **flags}  # fmt: skip
    return flags


def _print_result(report: dict, model: str, quiet: bool) -> None:
    drop = 1 - report["ppl_after"] / report["ppl_before"]
    gates = "".join(
        f" · {name} {g['value']:.2f} of {g['limit']} {'ok' if g['passed'] else 'FAILED'}"
        for name, g in report["gates"].items()
    )
    held = report["held_out"]
    click.echo(
        f"done    held-out PPL {report['ppl_before']:.2f} ± {report['ppl_before_se']:.2f} → "
        f"{report['ppl_after']:.2f} ± {report['ppl_after_se']:.2f} ({-drop:+.0%}) on "
        f"{held['rows']} {held['split']} rows{gates}"
    )
    if quiet:
        return
    click.echo(
        f"speed   {report['tokens_per_s']:,.0f} supervised tokens/s · {clock(report['train_s'])} "
        f"for {report['steps']} updates · peak {report['peak_gb']:.2f} GB of arrays, "
        f"{report['process_peak_gb']:.2f} GB of process"
    )
    sample = report["sample"]
    click.echo(f"sample  {_shortened(sample['prompt'])}")
    click.echo(f"before  {_shortened(sample['before'])}")
    click.echo(f"after   {_shortened(sample['after'])}")
    click.echo(
        f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try: packs generate "
        f'--model {model} --pack {report["pack"]} --prompt "…"'
    )


def _shortened(text: str, width: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def _show_mask(base: Base, recipe: Recipe, display: Display, rows: int = 5) -> None:
    """Print some training rows; what is learned is green, or between ⟦ and ⟧ without colour."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    splits = rows_of.load_rows(recipe.data)
    train = recipe.train
    examples = rows_of.encode(
        splits.rows["train"][:rows], base.tokenizer, recipe.data,
        loss_on=train.loss_on, max_seq_length=train.max_seq_length,
        vocab_size=base.vocab_size, ce_last_k=train.ce_last_k,
    )  # fmt: skip
    colour = console.is_terminal and not console.no_color
    for example in examples.items:
        learned, total = int(example.target.sum()), len(example.tokens)
        console.print(Text(f"{example.where}: {learned} of {total} tokens are learned", "bold"))
        edges = [0, *(i for i in range(1, total) if example.target[i] != example.target[i - 1])]
        text = Text()
        for start, end in zip(edges, [*edges[1:], total], strict=True):
            part = base.tokenizer.decode(example.tokens[start:end].tolist())
            if colour:
                text.append(part, "green" if example.target[start] else "dim")
            else:
                text.append(f"⟦{part}⟧" if example.target[start] else part)
        console.print(text)
    display.line("mask", f"loss on {examples.loss_on}; --loss-on all, completion or assistant")


def main() -> None:
    """`python -m mlx_packs.train` is `packs train`."""
    from .cli import run_command

    run_command(command)


if __name__ == "__main__":
    main()
