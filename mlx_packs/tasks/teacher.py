"""A teacher: a base model that predicts the next tokens of a run's examples, in a cache or live."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path

import numpy as np

from ..bases.chat_template import reads_clock
from ..bases.turns import images_of
from ..config.choices import architecture_of
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data.batches import evaluation_set
from ..data.dataset import Batch
from ..data.encoding import Examples
from ..data.teacher_cache import (
    FACTS,
    CacheFacts,
    TeacherCache,
    split_facts,
    tokenizer_key,
)
from ..display import Display, size
from ..distributed.group import group
from ..errors import PackError
from ..files import exclusive_writer, free_bytes, make_folder
from ..memory.matmul_path import choose_matmul_path, generation_path
from ..nn.quantized import apply_matmul_path
from ..objectives.causal_lm import Head, split_head, target_states
from ..objectives.objective import Inputs, arrays_of
from ..ops.profile import profile
from ..packs.base import Base, load_base
from ..runtime import mx
from .phases import resolve_phases
from .tokens import encode_splits

_LOGIT_BYTES = 64 << 20  # of the logits that are computed at a time


@dataclass(frozen=True)
class Teacher:
    """A frozen base model that predicts the next tokens of examples.

    Attributes:
        base: the model.
        top_k: how many of its most likely tokens are compared.
        known: tokens of a student's vocabulary, of which these are; None for all of the teacher's.
    """

    base: Base
    top_k: int
    known: int | None = None

    @classmethod
    def load(cls, train: TrainConfig, display: Display) -> "Teacher":
        """Load the teacher of a run; a PackError if it cannot be one."""
        flag = f"--teacher {train.teacher}"
        with display.working("teacher", f"loading {train.teacher}"):
            try:
                base = load_base(train.teacher)
            except PackError as error:
                text = error.message.replace("--model", "--teacher", 1)
                raise PackError(text, error.code, "teacher") from None

        if architecture_of(base.config.get("model_type")) != "decoder":
            raise PackError(f"{flag}: is an encoder, which predicts no next token.", "unsupported")
        if images_of(base.tokenizer) is not None:
            raise PackError(f"{flag}: takes images. Name a model of texts.", "unsupported")

        base.model.eval()
        return cls(base, train.teacher_top_k).of_vocabulary(base.vocab_size)

    def of_vocabulary(self, known: int) -> "Teacher":
        """Return the teacher of the first tokens of its vocabulary; a PackError if they are few."""
        if self.top_k > known:
            raise PackError(
                f"--teacher-top-k {self.top_k:,}: is larger than the vocabulary that teacher and "
                f"student share, which has {known:,} tokens. Name a number up to that.",
            )
        return replace(self, known=known)

    def beside(self, student: Base) -> "Teacher":
        """Return the teacher of a student, used by the matmul path that suits this device."""
        base = self.base
        if tokenizer_key(base.tokenizer) != tokenizer_key(student.tokenizer):
            raise PackError(
                f"--teacher {base.name}: has another tokenizer than {student.name}. Name a teacher "
                "of the same family.",
                "mismatch",
            )
        apply_matmul_path(base.model, generation_path(base.model))
        return self.of_vocabulary(min(base.vocab_size, student.vocab_size))

    @property
    def name(self) -> str:
        return self.base.public_name

    @cached_property
    def head(self) -> Head | None:
        return split_head(self.base.model)

    def having(self, batch: Batch) -> Batch:
        """Return a batch of tokens with `TEACHER_ARRAYS`, as a cache of the teacher has them."""
        inputs = arrays_of(batch)
        inputs.pop("states", None)  # of the student
        predicted = self.predictions(inputs)
        return batch.having(**{f"teacher_{name}": values for name, values in predicted.items()})

    def predictions(self, inputs: Inputs) -> dict[str, mx.array]:
        """Return `most_likely` of every target of a batch, computed; ``inputs`` are its arrays.

        Logits exist for some targets at a time.
        """
        head = self.head
        states = target_states(self.base.model, head, inputs)
        step = max(1, _LOGIT_BYTES // (4 * self.base.vocab_size))
        parts = []

        for start in range(0, len(states), step):
            logits = states[start : start + step]
            if head is not None:
                logits = head.logits(logits)
            parts.append(most_likely(logits, self.top_k, self.known))
            mx.eval(parts[-1])

        return {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}

    def facts(self, examples: dict[str, Examples], max_seq_length: int) -> CacheFacts:
        """Return what the cache of some splits depends on."""
        base = self.base
        weights = hashlib.sha256(f"{base.fingerprint} {base.quantization}".encode())

        splits = {}
        for name, split in examples.items():
            splits[name] = split_facts(split, self.top_k, base.vocab_size)

        return CacheFacts(
            self.name,
            weights.hexdigest(),
            tokenizer_key(base.tokenizer),
            base.vocab_size,
            self.top_k,
            max_seq_length,
            splits,
        )


def with_cached_teacher(recipe: Recipe, display: Display) -> Recipe:
    """Return a recipe whose teacher is its cache, after the teacher has written what it lacks."""
    train = recipe.train
    if group().size > 1:
        text = "--teacher-cache: is written by one machine. Write it first, without --hosts."
        raise PackError(text, "conflict", "teacher_cache")

    teacher = Teacher.load(train, display)
    display.line("teacher", teacher.base.summary())
    write_teacher_cache(teacher, recipe, display)
    defaults = {name: getattr(TrainConfig, name) for name in ("teacher", "teacher_top_k")}
    return replace(recipe, train=replace(train, **defaults))


def write_teacher_cache(teacher: Teacher, recipe: Recipe, display: Display) -> None:
    """Write the log-probabilities of a teacher at the targets of all splits.

    A run on ``recipe`` reads them: the examples are encoded as its own, and known by their tokens.
    A cache that is not complete is continued.
    """
    out = Path(recipe.train.teacher_cache).expanduser()
    if out.exists() and not out.is_dir():
        raise PackError(f"--teacher-cache {out}: is a file. Name a folder.", "exists")

    if recipe.train.phases:
        raise PackError(
            "phases: --teacher-cache is written for a run without phases. Train each phase as a "
            "run of its own, with --resume-adapter-file.",
            "conflict",
            "phases",
        )

    (phase,) = resolve_phases(recipe.train, recipe.data)
    columns = phase.columns
    base = teacher.base.with_chat_template(columns.chat_template)
    if columns.template_date is None and reads_clock(base.tokenizer):
        today = replace(columns, template_date=date.today().isoformat())
        phase = replace(phase, columns=today)

    train = phase.train
    examples = encode_splits(phase.load_rows(), base, phase.columns, train, display)
    cache = TeacherCache(out, teacher.facts(examples, train.max_seq_length))
    facts = cache.facts
    total = size(facts.targets * facts.target_bytes)
    shown = f"{facts.targets:,} target tokens, {facts.target_bytes:,} bytes each: {total}"
    display.line("teacher", f"the {facts.top_k} most likely of {facts.vocab_size:,} · {shown}")

    make_folder(out)
    with exclusive_writer(out / FACTS):
        missing = {split: cache.missing(split) for split in facts.splits}
        _check_disk(cache, missing)
        _begin(cache)
        path = choose_matmul_path(base.model, train.batch_size * train.max_seq_length).matmul_path
        apply_matmul_path(base.model, path)
        _write(teacher, cache, examples, missing, train, display)


def _begin(cache: TeacherCache) -> None:
    """Write cache.json, unless the folder has the same; then its shards are continued."""
    out = cache.folder
    if not (out / FACTS).exists():
        if any(not file.name.startswith(".") for file in out.iterdir()):
            text = f"--teacher-cache {out}: has other files. Name a new folder."
            raise PackError(text, "exists")
        cache.create()
    elif TeacherCache.at(out).facts != cache.facts:
        raise PackError(
            f"--teacher-cache {out}: has a cache of another teacher, of other data or settings. "
            "Remove it, or name another folder.",
            "exists",
        )


def _check_disk(cache: TeacherCache, missing: dict[str, list[int]]) -> None:
    """Raise a PackError if the shards that are missing do not fit on the disk."""
    facts = cache.facts
    shards = sum(len(split["edges"]) - 1 for split in facts.splits.values())
    share = sum(map(len, missing.values())) / shards
    needed = int(facts.targets * facts.target_bytes * share)

    free = free_bytes(cache.folder)
    if free is not None and needed > free:
        raise PackError(
            f"--teacher-cache {cache.folder}: {size(needed)} are to be written, but {size(free)} "
            "are free. Make room, or pass a smaller --teacher-top-k.",
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
    length = train.max_seq_length
    batch_size = train.batch_size
    shards = [
        (split, shard, np.arange(*cache.facts.splits[split]["edges"][shard : shard + 2]))
        for split, numbers in missing.items()
        for shard in numbers
    ]
    steps = sum(-(-len(own) // batch_size) for _, _, own in shards)

    with display.task("teacher", steps, "batches") as bar:
        for split, shard, own in shards:
            batches = evaluation_set(examples[split], batch_size, length, own).once()
            counts = examples[split].target_counts[own]
            cache.write(split, shard, _shard(teacher, batches, counts, bar.advance))


def _shard(
    teacher: Teacher,
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
        values = teacher.predictions(inputs)
        for name, value in values.items():
            arrays[name][places] = np.array(value)
        advance()

    return arrays


def most_likely(logits: mx.array, top_k: int, known: int | None = None) -> dict[str, mx.array]:
    """Return the most likely tokens of logits [n, V].

    With ``known`` they are among this number of first tokens of the vocabulary.

    The result has ``tokens`` [n, K], their ``logprobs`` float32 [n, K] in no order, and ``rest``
    float32 [n], the logarithm of the probability of all other tokens together; -inf if there are
    none.
    """
    logits = logits.astype(mx.float32)
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
