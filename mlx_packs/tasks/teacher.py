"""The log-probabilities of a teacher at every target of a data set, which a run reads."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ..bases.chat_template import reads_clock
from ..bases.turns import images_of
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data.batches import evaluation_set
from ..data.dataset import Batch
from ..data.encoding import Examples
from ..data.teacher_cache import FACTS, CacheFacts, TeacherCache, split_facts, tokenizer_key
from ..display import Display, size
from ..distributed.group import group
from ..errors import PackError
from ..files import exclusive_writer, free_bytes, make_folder
from ..memory.matmul_path import choose_matmul_path
from ..objectives.causal_lm import Head, split_head, target_states
from ..objectives.objective import Inputs, arrays_of
from ..ops.profile import profile
from ..packs.base import Base, activated, load_base
from ..packs.pack import Pack
from ..runtime import mx
from .phases import resolve_phases
from .tokens import encode_splits

_LOGIT_BYTES = 64 << 20  # of the logits that are computed at a time


@dataclass(frozen=True)
class Teacher:
    """A base model, maybe with a pack, that scores the next tokens of examples."""

    base: Base
    pack: Pack | None
    top_k: int
    temperature: float

    @property
    def name(self) -> str:
        if self.pack is None:
            return self.base.public_name
        return f"{self.base.public_name} with {self.pack.short_name}"

    @property
    def weights(self) -> str:
        """A hash of the weights of the base and of its pack."""
        digest = hashlib.sha256(f"{self.base.fingerprint} {self.base.quantization}".encode())
        if self.pack is not None:
            digest.update(json.dumps(self.pack.manifest["adapters"], sort_keys=True).encode())
            for name, tensor in sorted(self.pack.load_tensors().items()):
                digest.update(name.encode())
                digest.update(np.array(tensor.astype(mx.float32)).tobytes())

        return digest.hexdigest()

    def facts(self, examples: dict[str, Examples], max_seq_length: int) -> CacheFacts:
        """Return what the cache of some splits depends on; a PackError if it cannot be one."""
        vocab_size = self.base.vocab_size

        if self.top_k > vocab_size:
            raise PackError(
                f"--top-k {self.top_k:,}: is larger than the vocabulary of {self.base.name}, "
                f"which has {vocab_size:,} tokens. Name a number up to that.",
            )

        if images_of(self.base.tokenizer) is not None:
            raise PackError(
                f"--model {self.base.name}: takes images, which teachers are not cached for. Name "
                "a model of texts.",
                "unsupported",
            )

        splits = {
            split: split_facts(own, self.top_k, vocab_size) for split, own in examples.items()
        }
        return CacheFacts(
            self.name,
            self.weights,
            tokenizer_key(self.base.tokenizer),
            vocab_size,
            self.top_k,
            self.temperature,
            max_seq_length,
            splits,
        )


def with_cached_teacher(recipe: Recipe, display: Display) -> Recipe:
    """Return a recipe whose teacher is its cache, after the teacher has written what it lacks."""
    train = recipe.train
    if group().size > 1:
        text = "--teacher-cache: is written by one machine. Write it first, without --hosts."
        raise PackError(text, "conflict", "teacher_cache")

    with display.working("teacher", f"loading {train.teacher}"):
        base = load_base(train.teacher)
    display.line("teacher", base.summary())
    teacher = Teacher(base, None, train.teacher_top_k, temperature=1.0)

    out = Path(train.teacher_cache).expanduser()
    write_teacher_cache(teacher, recipe, out, False, display, "--teacher-cache")
    defaults = {name: getattr(TrainConfig, name) for name in ("teacher", "teacher_top_k")}
    return replace(recipe, train=replace(train, **defaults))


def write_teacher_cache(
    teacher: Teacher,
    recipe: Recipe,
    out: Path,
    overwrite: bool,
    display: Display,
    flag: str = "--out",
) -> dict[str, Any]:
    """Write the log-probabilities of a teacher at the targets of all splits; return a report.

    A run on ``recipe`` reads them: the examples are encoded as its own, and known by their tokens.
    A cache that is not complete is continued. Errors call the folder ``flag``.

    Raises:
        PackError: the folder has something else, or examples cannot be used.
    """
    base = teacher.base
    base.check_architecture("logits", "decoder")
    _check_folder(out, flag)

    if recipe.train.phases:
        raise PackError(
            "phases: --teacher-cache is written for a run without phases. Train each phase as a "
            "run of its own, with --resume-adapter-file.",
            "conflict",
            "phases",
        )

    (phase,) = resolve_phases(recipe.train, recipe.data)
    columns = phase.columns
    base = base.with_chat_template(columns.chat_template)
    if columns.template_date is None and reads_clock(base.tokenizer):
        today = replace(columns, template_date=date.today().isoformat())
        phase = replace(phase, columns=today)

    examples = encode_splits(phase.load_rows(), base, phase.columns, phase.train, display)
    facts = teacher.facts(examples, phase.train.max_seq_length)
    per_target = facts.target_bytes
    total = size(facts.targets * per_target)
    shown = f"{facts.targets:,} target tokens, {per_target:,} bytes each: {total}"
    display.line("logits", f"the {facts.top_k} most likely of {facts.vocab_size:,} · {shown}")

    train = phase.train
    cache = TeacherCache(out, facts)
    make_folder(out)
    with exclusive_writer(out / FACTS):
        missing = {split: cache.missing(split) for split in facts.splits}
        _check_disk(cache, missing, flag)
        _begin(cache, overwrite, flag)
        path = choose_matmul_path(base.model, train.batch_size * train.max_seq_length).matmul_path
        train = replace(train, matmul_path=path)
        _write(teacher, cache, examples, missing, train, display)

    return {
        "out": str(out),
        "teacher": facts.teacher,
        "top_k": facts.top_k,
        "temperature": facts.temperature,
        "vocab_size": facts.vocab_size,
        "max_seq_length": facts.max_seq_length,
        "bytes_per_target": per_target,
        "bytes": facts.targets * per_target,
        "targets": {split: own["targets"] for split, own in facts.splits.items()},
        "shards": sum(len(own["edges"]) - 1 for own in facts.splits.values()),
        "written": sum(map(len, missing.values())),
    }


def _check_folder(out: Path, flag: str) -> None:
    """Check that nothing but a cache is in the folder."""
    if out.exists() and not out.is_dir():
        raise PackError(f"{flag} {out}: is a file. Name a folder.", "exists")
    if not out.is_dir() or (out / FACTS).exists():
        return

    if any(not file.name.startswith(".") for file in out.iterdir()):
        raise PackError(f"{flag} {out}: has other files. Name a new folder.", "exists")


def _begin(cache: TeacherCache, overwrite: bool, flag: str) -> None:
    """Write cache.json, unless the folder has the same; then its shards are continued."""
    out = cache.folder
    if (out / FACTS).exists() and not overwrite:
        if TeacherCache.at(out).facts == cache.facts:
            return
        raise PackError(
            f"{flag} {out}: has a cache of another teacher, of other data or settings. Remove it, "
            "or name another folder.",
            "exists",
        )

    for file in out.glob("*-*.npy"):
        file.unlink()
    cache.create()


def _check_disk(cache: TeacherCache, missing: dict[str, list[int]], flag: str) -> None:
    """Raise a PackError if the shards that are missing do not fit on the disk."""
    facts = cache.facts
    shards = sum(len(split["edges"]) - 1 for split in facts.splits.values())
    share = sum(map(len, missing.values())) / shards
    needed = int(facts.targets * facts.target_bytes * share)

    free = free_bytes(cache.folder)
    if free is not None and needed > free:
        raise PackError(
            f"{flag} {cache.folder}: {size(needed)} are to be written, but {size(free)} are free. "
            "Make room, or pass a smaller --top-k.",
            "unwritable",
        )


def _write(
    teacher: Teacher,
    cache: TeacherCache,
    examples: dict[str, Examples],
    missing: dict[str, list[int]],
    train: TrainConfig,
    display: Display,
) -> None:
    """Write the shards that are missing, each in one piece."""
    base = teacher.base
    length = train.max_seq_length
    batch_size = train.batch_size
    shards = [
        (split, shard, np.arange(*cache.facts.splits[split]["edges"][shard : shard + 2]))
        for split, numbers in missing.items()
        for shard in numbers
    ]
    steps = sum(-(-len(own) // batch_size) for _, _, own in shards)

    with activated(base, teacher.pack, train.matmul_path):
        base.model.eval()
        head = split_head(base.model)
        with display.task("logits", steps, "batches") as bar:
            for split, shard, own in shards:
                batches = evaluation_set(examples[split], batch_size, length, own).once()
                counts = examples[split].target_counts[own]
                cache.write(split, shard, _shard(teacher, head, batches, counts, bar.advance))


def _shard(
    teacher: Teacher,
    head: Head | None,
    batches: list[Batch],
    counts: np.ndarray,
    advance: Callable[[], None],
) -> dict[str, np.ndarray]:
    """Return the arrays of a shard, whose examples have so many targets, from its batches."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    first = min(min(batch.examples) for batch in batches)

    arrays = {
        "logprobs": np.empty((starts[-1], teacher.top_k), np.float32),
        "rest": np.empty(starts[-1], np.float32),
        "tokens": np.empty((starts[-1], teacher.top_k), np.int32),
    }

    for batch in batches:
        at = [starts[i - first] + np.arange(counts[i - first]) for i in batch.examples]
        places = np.concatenate(at)
        inputs = arrays_of(batch)
        inputs["positions"] = inputs["positions"][: batch.targets]
        values = predictions(teacher.base, head, inputs, teacher.top_k, teacher.temperature)
        for name, value in values.items():
            arrays[name][places] = np.array(value)
        advance()

    return arrays


def predictions(
    base: Base,
    head: Head | None,
    inputs: Inputs,
    top_k: int,
    temperature: float,
    known: int | None = None,
) -> dict[str, mx.array]:
    """Return `most_likely` of every target of a batch, computed; ``inputs`` are its arrays.

    Logits exist for some targets at a time.
    """
    states = target_states(base.model, head, inputs)
    step = max(1, _LOGIT_BYTES // (4 * base.vocab_size))
    parts = []

    for start in range(0, len(states), step):
        logits = states[start : start + step]
        if head is not None:
            logits = head.logits(logits)
        parts.append(most_likely(logits, top_k, temperature, known))
        mx.eval(parts[-1])

    return {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}


def most_likely(
    logits: mx.array, top_k: int, temperature: float = 1.0, known: int | None = None
) -> dict[str, mx.array]:
    """Return the most likely tokens of logits [n, V], divided by the temperature.

    With ``known`` they are among this number of first tokens of the vocabulary.

    The result has ``tokens`` [n, K], their ``logprobs`` float32 [n, K] in no order, and ``rest``
    float32 [n], the logarithm of the probability of all other tokens together; -inf if there are
    none.
    """
    logits = logits.astype(mx.float32) / temperature
    first = logits[:, :known]
    tokens = mx.broadcast_to(mx.arange(first.shape[-1]), first.shape)
    if top_k < first.shape[-1]:
        tokens = mx.argpartition(-first, top_k - 1, axis=-1)[:, :top_k]
        tokens = mx.contiguous(tokens)  # a slice would keep all [n, V] in memory
    largest = logits.max(axis=-1, keepdims=True)
    weights = profile().exp(logits - largest)
    lse = mx.log(weights.sum(axis=-1, keepdims=True)) + largest

    others = mx.put_along_axis(weights, tokens, mx.array(0.0), axis=-1).sum(axis=-1)
    return {
        "tokens": tokens,
        "logprobs": mx.take_along_axis(logits, tokens, axis=-1) - lse,
        "rest": mx.log(others) + (largest - lse)[:, 0],
    }
