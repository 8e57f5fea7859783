"""What a run needs before its first step: folders, rows as tokens, a matmul path, its adapters."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .. import runtime
from ..adapters.method import Trainable
from ..bases.files import public_name
from ..config.recipe import Recipe
from ..config.schema import DataConfig, LoRAConfig, TrainConfig
from ..data import rows as rows_of
from ..data.batches import padded_length
from ..data.encoding import EncodingOptions, Examples
from ..data.fim import FillInTheMiddle
from ..data.formats import RowFormat, Text
from ..data.sampler import Sampler, packing_fill
from ..data.token_cache import encode_cached
from ..display import VERBOSE, Display, shown_count, size
from ..errors import PackError
from ..files import exclusive_writer, make_folder, sha256
from ..memory.estimate import check_least, plan_run
from ..memory.headers import Headers
from ..memory.matmul_path import MatmulPathChoice, choose_matmul_path, weight_kinds
from ..memory.plan import ERROR, MemoryPlan, Shape, fit
from ..memory.read import read_headers
from ..nn.quantized import path_at_work
from ..packs.base import Base
from ..packs.manifest import mlx_lm_config
from ..packs.pack import check_output
from ..runtime import mx
from .phases import PhasedDataset, RunPhase
from .run_folder import checkpoints, is_run, run_folder

# What may differ when a run is resumed: none of it changes a step that was taken.
_MAY_CHANGE = (
    "iters steps_per_report steps_per_eval save_every val_batches test_batches max_pack_mb "
    "max_ppl_ratio min_tps_ratio clear_cache_threshold matmul_path cache_frozen pack_dtype"
).split()

# The same up to float error; dropout would draw other masks.
_MAY_CHANGE_WITHOUT_DROPOUT = ("recompute", "grad_checkpoint")


@contextmanager
def output_folders(
    out: str | Path | None, columns: DataConfig, overwrite: bool, resume: bool
) -> Iterator[tuple[Path, Path]]:
    """The folders of pack and run, this run's alone meanwhile; refuses what would lose something.

    A name that nobody gave is reserved by making the run folder. What is still empty at the end is
    removed.
    """
    if out is None:
        if resume:
            raise PackError("--resume: name the run's pack with --out.")
        folder = Path("packs") / _data_name(columns)
    else:
        folder = Path(out).expanduser()
        run_folder(folder)  # there can be one
        check_output(folder, overwrite or resume)
    parent = next(p for p in folder.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        said = folder if out is None else out
        raise PackError(f"--out {said}: cannot be written ({parent} is no folder to write in).")
    made = [p for p in folder.absolute().parents if not p.exists()]
    try:
        make_folder(folder.parent)
        if out is None:
            folder = _reserved(folder)
            made.insert(0, run_folder(folder).absolute())
        run = run_folder(folder)
        with exclusive_writer(run):
            if out is not None and not resume:
                _check_run(run, overwrite)
            yield folder, run
    finally:
        for path in made:
            with suppress(OSError):  # it holds something
                path.rmdir()


def _reserved(folder: Path) -> Path:
    """This pack, or the first free one with a number, whose run folder was not there and now is."""
    free, n = folder, 1
    while True:
        try:
            if not free.exists():
                run_folder(free).mkdir()
                return free
        except FileExistsError:
            pass
        except OSError as error:
            raise PackError(f"{free}: cannot be made ({error.strerror or error}).") from None
        n += 1
        free = folder.with_name(f"{folder.name}-{n}")


def _check_run(run: Path, overwrite: bool) -> None:
    if run.exists() and not is_run(run):
        raise PackError(f"{run}: is there and holds something else; choose another --out.")
    if checkpoints(run) and not overwrite:
        raise PackError(
            f"{run}: holds checkpoints of an earlier run; continue it with --resume, replace it "
            "with --overwrite, or choose another --out."
        )


def _data_name(columns: DataConfig) -> str:
    """What a pack is called that was given no name: as its data, or the first of several."""
    entries = columns.hf_dataset
    first = entries[0] if isinstance(entries, list) and entries else entries
    if isinstance(first, dict) and isinstance(first.get("path"), str):
        return Path(first["path"]).expanduser().resolve().name or "pack"
    return Path(columns.data).expanduser().resolve().stem or "pack"


def started_from(file: str | None, earlier: dict | None) -> dict | None:
    """Name and hash of the adapters that a run began with, for the manifest."""
    if earlier is not None:
        if file is not None:
            raise PackError(
                "--resume and --resume-adapter-file: a resumed run goes on from its checkpoint; "
                "say one of them."
            )
        return earlier["recipe"].get("resume_adapter_file")
    if file is None:
        return None
    if not Path(file).is_file():
        raise PackError(f"--resume-adapter-file {file}: no such file.")
    return {"name": Path(file).name, "sha256": sha256(Path(file))}


def check_resume(run: Path, identity: dict, earlier: dict) -> None:
    """A resumed run must be the same run: base, data and everything that shapes a step."""
    for key, what in (("base", "another base"), ("data", "other rows")):
        if earlier[key] != identity[key]:
            raise PackError(f"--resume: {run} was trained on {what}.")
    then, now = earlier["recipe"], json.loads(json.dumps(identity["recipe"]))
    # an option that is newer than the run was what it is by default
    newest = json.loads(json.dumps(Recipe().to_json()))
    then, now = newest | then, newest | now
    may_change = {*_MAY_CHANGE, *(() if then["dropout"] else _MAY_CHANGE_WITHOUT_DROPOUT)}
    if "phases" in then:
        may_change.discard("iters")  # where one phase ends, the next begins
    for key in sorted(set(now) | set(then)):
        if key not in may_change and now.get(key) != then.get(key):
            raise PackError(
                f"--resume: {key} was {then.get(key)!r} and is {now.get(key)!r} now; a resumed run "
                "must go on as it began."
            )


def encode_splits(
    splits: rows_of.Splits, base: Base, columns: DataConfig, train: TrainConfig, display: Display
) -> dict[str, Examples]:
    """Tokens of every split that has rows; says what was cut."""
    present = splits.present()
    examples = {}
    with display.task("data", len(present), "splits") as bar:
        for split in present:
            examples[split], file = encode_cached(
                splits.rows[split],
                base.tokenizer,
                columns,
                encoding_options(train, split, splits.format, base.vocab_size),
            )
            if file is not None:
                display.line("data", f"tokens of {split} are in {file}", VERBOSE)
            bar.advance()
    first = examples["train"]
    counts = " / ".join(f"{len(e):,} {s}" for s, e in examples.items()) + " rows"
    if train.packing:
        inputs = train.max_seq_length - 1
        sampler = Sampler(first.lengths, train.batch_size, inputs, train.seed, packing=True)
        number, fill = packing_fill(sampler)
        packed = f"{number:,} packed rows of {train.max_seq_length} ({100 * fill:.1f} % full)"
        held_out = "".join(f" / {len(e):,} {s}" for s, e in examples.items() if s != "train")
        counts = f"{len(first):,} rows → {packed}{held_out}"
    display.line(
        "data",
        f"{splits.source} · {counts} · {first.format} · {first.targets:,} supervised tokens "
        f"(loss on {first.loss_on})",
    )
    if cut := sum(e.cut for e in examples.values()):
        dropped = sum(e.dropped for e in examples.values())
        text = f"longer than {train.max_seq_length} tokens and cut: {cut} rows"
        if first.format == "text" and train.long_rows == "split":
            text = f"longer than {train.max_seq_length} tokens: {first.cut} training rows, split"
            text += f"; {cut - first.cut} held-out rows, cut" if cut > first.cut else ""
        elif first.format == "text" and first.cut:
            text += "; --long-rows split keeps all of them"
        text += f", {dropped} of them dropped, since no target was left" if dropped else ""
        display.line("data", f"{text} (--max-seq-length)")
    for note in splits.notes:
        display.line("data", note)
    return examples


def encoding_options(
    train: TrainConfig, split: str, row_format: RowFormat, vocab_size: int
) -> EncodingOptions:
    """How `encoding.encode` encodes the rows of a split.

    Held-out rows are measured as they are, so that their perplexity does not depend on how the
    training rows are laid out; what is for texts leaves rows of other formats alone.
    """
    options = EncodingOptions(train.loss_on, train.max_seq_length, vocab_size)
    if split != "train":
        return options
    options = dataclasses.replace(options, ce_last_k=train.ce_last_k)
    if not isinstance(row_format, Text):
        return options
    fim = FillInTheMiddle(train.fim_rate, train.fim_spm_rate, train.seed, train.fim_tokens)
    return dataclasses.replace(
        options, long_rows=train.long_rows, fim=fim if train.fim_rate else None
    )


def encode_phases(
    phases: Sequence[RunPhase],
    splits: Sequence[rows_of.Splits],
    base: Base,
    train: TrainConfig,
    display: Display,
) -> PhasedDataset:
    """Tokens of the rows of every phase.

    Raises: PackError where something is asked for that is for texts, and no phase has any.
    """
    wanted = {"--fim-rate": train.fim_rate, "--long-rows split": train.long_rows == "split"}
    formats = {read.format for read in splits}
    if not any(isinstance(row_format, Text) for row_format in formats):
        for option in (name for name, is_wanted in wanted.items() if is_wanted):
            names = ", ".join(row_format.name for row_format in formats)
            raise PackError(f"{option}: is for rows of text, but these are {names}.", "conflict")
    found = []
    for phase, read in zip(phases, splits, strict=True):
        if phase.name:
            replayed = f", {phase.replay:.0%} of its rows from before" if phase.replay else ""
            display.line("phase", f"{phase.name}: {phase.train.iters:,} batches{replayed}")
        found.append(encode_splits(read, base, phase.sources[0], phase.train, display))
    return PhasedDataset(tuple(phases), found)


def fingerprints(dataset: PhasedDataset, splits: Sequence[rows_of.Splits]) -> dict[str, str]:
    """Of the rows of every split of every phase."""
    return {
        phase.named(split): rows_of.fingerprint(read.rows[split])
        for phase, read, found in zip(dataset.phases, splits, dataset.splits, strict=True)
        for split in found
    }


def public_recipe(recipe: Recipe, base: Base) -> dict:
    """A recipe as a manifest has it: folders without their paths."""
    told = {**recipe.to_json(), "model": base.public_name, "data": public_name(recipe.data.data)}
    for phase in told.get("phases", ()):
        if "data" in phase:
            data = phase["data"]
            one = isinstance(data, str)
            phase["data"] = public_name(data) if one else [public_name(source) for source in data]
    return told


def refuse_from_headers(
    name: str | Path, lora: LoRAConfig, train: TrainConfig, force: bool = False
) -> None:
    """Reject a base that cannot fit whatever its examples are, before a weight is read.

    Where headers cannot be read or no plan is possible, loading reports it.

    Raises:
        PackError: The least that a run takes is more than this machine has, unless forced.
    """
    if force:
        return
    try:
        check_least(read_headers(name), lora, train)
    except PackError as error:
        if error.code == "memory":
            raise


def plan_paths(
    base: Base,
    lora: LoRAConfig,
    train: TrainConfig,
    shapes: set[Shape],
    display: Display,
    force: bool = False,
) -> dict[str, MemoryPlan]:
    """Return `plan_run` of batches of these shapes; empty where no plan is possible.

    Raises:
        PackError: Nothing is within what this machine has, unless forced.
    """
    try:
        return plan_run(Headers.of(base), lora, train, shapes, force)
    except PackError as error:
        if error.code == "memory":
            raise
        display.line("plan", f"{error.message} Memory is not checked.")
        return {}


def choose_path(
    base: Base,
    train: TrainConfig,
    examples: Examples,
    plans: dict[str, MemoryPlan],
    display: Display,
) -> MatmulPathChoice:
    """The matmul path as asked, or the fastest for the typical batch of this run among ``plans``."""
    if train.matmul_path != "auto":
        choice = MatmulPathChoice(train.matmul_path, {}, "as asked")
    else:
        lengths = np.sort(examples.lengths)
        typical = int(lengths[len(lengths) // 2])
        width = padded_length(typical, train.max_seq_length)
        rows = train.batch_size * (train.max_seq_length - 1 if train.packing else width)
        head_rows = max(1, rows * examples.targets // int(lengths.sum()))
        with display.task("path", weight_kinds(base.model), "kinds of weights measured") as bar:
            choice = choose_matmul_path(
                base.model, rows, head_rows, bar.advance, frozenset(plans) or None
            )
    display.line("path", choice.line())
    for kind in choice.kinds:
        display.line("", kind.line(), VERBOSE)
    return choice


def matmul_paths_by_name(attached: Trainable, choice: MatmulPathChoice) -> dict[str, dict]:
    """How the frozen weights of each name are multiplied in this run, and the times that decided.

    Returns: last name of the modules → ``paths`` (matmul path → how many; weights that were dense
    already are ``dense`` too) and, where they were measured, ``step_ms`` by path (of all weights
    of this shape, together).
    """
    found: dict[str, dict] = {}
    answered: set[str] = set()
    for path, module in attached.model.named_modules():  # a module comes before those inside it
        if path.rpartition(".")[0] in answered or (at_work := path_at_work(module)) is None:
            continue
        answered.add(path)
        name = path.removesuffix(".linear").rpartition(".")[2]  # .linear: an adapted projection's
        found.setdefault(name, {"paths": Counter()})["paths"][at_work] += 1
    for kind in choice.kinds:
        for name in kind.names:
            if name in found:
                found[name]["step_ms"] = kind.step_ms
    return found


def show_plan(
    base: Base, lora: LoRAConfig, plan: MemoryPlan, display: Display, full: bool = False
) -> None:
    """The estimate of the path that was taken, and a warning if it is tight."""
    memory = runtime.total_memory()
    method = f"{'QLoRA' if base.quantization else 'LoRA'} r{lora.rank}"
    method = "full fine-tuning" if full else method
    display.line(
        "plan",
        f"{method} · {plan.adapter_weights:,} weights · recompute {plan.recompute} · "
        f"{size(plan.peak_bytes)} of {size(memory)} (estimate ± {ERROR:.0%})",
    )
    warnings = {"tight": f"tight: {ERROR:.0%} more would not fit", "no": "does not fit; forced"}
    if warning := warnings.get(fit(plan, memory)):
        display.line("plan", warning)


def describe(attached: Trainable, display: Display, base_weights: int) -> None:
    """Show what is trained, and which share of the base's weights that is."""
    count = attached.parameter_count()
    share = f"{100 * count / base_weights:.3g} % of {shown_count(base_weights)} weights"
    display.line(attached.method, f"{count:,} trainable parameters, {share} · {attached.details}")
    for note in attached.notes:
        display.line("note", note)
    if attached.specs and mlx_lm_config(attached.specs) is None:
        display.line(
            "note",
            "ranks or scales differ between projections: stock mlx-lm cannot open this pack",
        )
    for group in attached.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)


def load_adapters(attached: Trainable, file: Path) -> None:
    """Start from the tensors of a file; they must be exactly those of this run."""
    try:
        tensors = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise PackError(f"--resume-adapter-file {file}: {error}") from None
    attached.load(tensors, str(file))
