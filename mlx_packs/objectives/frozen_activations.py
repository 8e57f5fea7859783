"""The frozen prefix: what enters the first adapted block is computed once for each row, and kept.

Below the adapters all is frozen, so these states are a function of the base and the row. Each row
is computed in the batch that has it in the first epoch, which costs what a run without a cache
costs; whenever and wherever a state is made again, the batch and so its bits are the same.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import mlx.nn as nn
import numpy as np

from .. import runtime
from ..adapters.lora import Attached
from ..bases.files import weight_files
from ..bases.geometry import block_prefixes
from ..config.schema import TrainConfig
from ..data.batches import Batch, lay_out
from ..data.encoding import Examples
from ..data.sampler import Sampler
from ..data.token_cache import cache_folder
from ..display import VERBOSE, Display, size
from ..errors import PackError
from ..nn.prefix import Feed, FrozenBlock, states_of
from ..nn.quantized import replace_modules
from ..ops.lanes import lanes
from ..runtime import mx
from .causal_lm import Arrays, Head, as_arrays, forward
from .sequence_packing import TOLERANCE, relative_error
from .state_store import StateStore

_FORMAT = 1
_WORTHWHILE = 0.1  # of the time of a step, counting blocks
_MEMORY_SHARE = 0.5  # of what the plan leaves
_DISK_SHARE = 0.25  # of what is free
_PROBE = (2, 16)
_PROBE_PADDING = 8
_PROBE_STD = 0.02  # of the adapters' B


class PrefixCache:
    """States of the rows of a run by row; `arrays` stands in the place of `as_arrays`."""

    def __init__(
        self,
        attached: Attached,
        head: Head | None,
        train: TrainConfig,
        examples: Examples,
        states: mx.array,
        memory_limit: int,
        file: Path | None,
        key: str,
        display: Display,
    ):
        self.blocks = frozen_blocks(attached)
        self.computed = 0
        self._model = attached.model
        self._part = head.hidden if head is not None else attached.model
        self._examples = examples
        self._dtype = states.dtype
        self.token_bytes = states.shape[-1] * states.dtype.size
        self._inputs = examples.lengths - 1
        self._sampler = _sampler_of(examples, train)
        self._order = self._sampler.epoch(0)
        self._group_of = np.empty(len(examples), np.int64)
        for number, rows in enumerate(self._order):
            self._group_of[np.concatenate(rows) if train.packing else rows] = number
        self.store = StateStore(
            self._inputs * self.token_bytes,
            memory_limit,
            file,
            key,
            lambda note: display.line("prefix", f"states are {note}"),
        )
        self.found = len(self.store.kept())

    @property
    def total_bytes(self) -> int:
        """Bytes of the states of all rows."""
        return int(self._inputs.sum()) * self.token_bytes

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, with their states where all of them are there already."""
        for batch in batches:
            found = {row: self.store.get(row) for row in batch.rows}
            if all(states is not None for states in found.values()):
                batch = dataclasses.replace(batch, states=self._laid_out(batch, found))
            yield batch

    def arrays(self, batch: Batch) -> Arrays:
        """What the step takes of a batch, states [B, T, D] in the place of tokens.

        What is not there is computed, with the batch that has it in the first epoch; a batch whose
        states could not be kept stays as it is.
        """
        laid_out = batch.states
        if laid_out is None:
            found = {row: self.store.get(row) for row in batch.rows}
            missing = [row for row, states in found.items() if states is None]
            if not self.store.has_room(missing):
                return as_arrays(batch)
            for group in sorted({int(self._group_of[row]) for row in missing}):
                made = self.compute(group)
                for row, states in made.items():
                    self.store.put(row, states)
                found |= {row: made[row] for row in missing if row in made}
            laid_out = self._laid_out(batch, found)
        return mx.array(laid_out).view(self._dtype), *as_arrays(batch)[1:]

    def compute(self, group: int) -> dict[int, np.ndarray]:
        """Bytes of the states of each row in a batch of the first epoch."""
        batch = lay_out(self._examples, self._sampler, self._order[group])
        tokens, *_ = as_arrays(batch)
        segments = None if batch.segments is None else mx.array(batch.segments)
        states = states_of(self._model, lambda: forward(self._model, self._part, tokens, segments))
        flat = np.array(states.view(mx.uint8)).reshape(-1, self.token_bytes)
        self.computed += len(batch.rows)
        return {
            row: flat[start : start + self._inputs[row]].reshape(-1)
            for row, start in zip(batch.rows, batch.starts, strict=True)
        }

    def to_json(self) -> dict:
        """What a run's report says of it."""
        return {
            "blocks": self.blocks,
            "gb": self.total_bytes / 1e9,
            "memory_gb": self.store.memory_bytes / 1e9,
            "on_disk": self.store.is_on_disk,
            "rows_computed": self.computed,
            "rows_found": self.found,
        }

    def close(self) -> None:
        """Let go of file and memory."""
        self.store.close()

    def drop_if_foreign(self) -> None:
        """Compute some rows of an earlier run again; forget all if one is not what was kept."""
        row = next((int(r) for r in self.store.kept() if self.store.get(int(r)) is not None), None)
        if row is None:
            self.found = 0
            return
        for other, made in self.compute(int(self._group_of[row])).items():
            kept = self.store.get(other)
            if kept is not None and not self._is_same(made, kept):
                self.store.forget()
                self.found = 0
                break
        self.computed = 0

    def _is_same(self, made: np.ndarray, kept: np.ndarray) -> bool:
        """Whether the bytes of a row's states are those that were kept, to float error."""
        found, wanted = (
            mx.array(np.ascontiguousarray(states).reshape(-1, self.token_bytes)).view(self._dtype)
            for states in (made, kept)
        )
        return relative_error(found, wanted) <= TOLERANCE[self._dtype]

    def _laid_out(self, batch: Batch, found: dict[int, np.ndarray]) -> np.ndarray:
        """uint8 [B, T, bytes] of a batch; zero where it holds no row."""
        B, T = batch.tokens.shape
        out = np.zeros((B * T, self.token_bytes), np.uint8)
        for row, start in zip(batch.rows, batch.starts, strict=True):
            here = slice(start, start + self._inputs[row])
            out[here] = found[row].reshape(-1, self.token_bytes)
        return out.reshape(B, T, -1)


def open_prefix(
    attached: Attached,
    head: Head | None,
    train: TrainConfig,
    examples: Examples,
    matmul_path: str,
    plan_bytes: int | None,
    display: Display,
) -> PrefixCache | None:
    """The cache as ``train.cache_frozen`` asks for it; None if there is none.

    Args:
        matmul_path: how the frozen weights are multiplied.   plan_bytes: peak of the memory plan.
    Raises: PackError if it is asked for and cannot be.
    """
    if train.cache_frozen == "off" or train.method == "full":
        return None
    opened = _opened_or_reason(attached, head, train, examples, matmul_path, plan_bytes, display)
    if isinstance(opened, str):
        if train.cache_frozen == "on":
            raise PackError(f"--cache-frozen on: {opened}; leave it out, or say off.")
        display.line("prefix", f"not cached: {opened}", VERBOSE)
        return None
    store = opened.store
    held = held_bytes(examples, opened.token_bytes, plan_bytes)
    shown = "all" if held == opened.total_bytes else size(held)
    place = ", kept on disk" if store.is_on_disk else f", {store.note}" if store.note else ""
    again = f", {opened.found:,} rows from an earlier run" if opened.found else ""
    display.line(
        "prefix",
        f"{opened.blocks} of {len(attached.model.layers)} blocks lie below the adapters: computed "
        f"once for each row · {size(opened.total_bytes)}, {shown} in memory{place}{again}",
    )
    return opened


def frozen_blocks(attached: Attached) -> int:
    """How many blocks lie below the first one that carries an adapter."""
    prefixes = block_prefixes(attached.model)
    adapted = (
        i
        for i, prefix in enumerate(prefixes)
        if any(path.startswith(prefix + ".") for path in attached.specs)
    )
    return next(adapted, len(prefixes))


def memory_budget(plan_bytes: int | None) -> int:
    """Bytes of states that may be held in memory, beside a run that peaks at ``plan_bytes``."""
    total = runtime.host_memory()
    return max(0, int(_MEMORY_SHARE * (total - (total // 2 if plan_bytes is None else plan_bytes))))


def held_bytes(examples: Examples, token_bytes: int, plan_bytes: int | None) -> int:
    """Bytes that the part in memory will hold; they are the process's, not MLX's.

    Args:
        token_bytes: of one state: the hidden size times the bytes of the activations' dtype.
    """
    return min(int((examples.lengths - 1).sum()) * token_bytes, memory_budget(plan_bytes))


def _opened_or_reason(
    attached: Attached,
    head: Head | None,
    train: TrainConfig,
    examples: Examples,
    matmul_path: str,
    plan_bytes: int | None,
    display: Display,
) -> PrefixCache | str:
    """The cache, or why there is none."""
    blocks, frozen = len(attached.model.layers), frozen_blocks(attached)
    if not frozen:
        return "the first block carries adapters, so nothing below them is frozen"
    if train.cache_frozen == "auto":
        # forward is one, with a backward three
        if frozen < _WORTHWHILE * (3 * blocks - 2 * frozen):
            return f"only {frozen} of {blocks} blocks lie below the adapters"
        if train.iters <= (batches := len(_sampler_of(examples, train).epoch(0))):
            return f"{train.iters} batches take no row twice (an epoch has {batches})"
    stand_ins = _stand_ins(attached.model, frozen)
    states = _example_or_reason(attached, head, stand_ins)
    if isinstance(states, str):
        return states
    needed = int((examples.lengths - 1).sum()) * states.shape[-1] * states.dtype.size
    memory, folder = memory_budget(plan_bytes), cache_folder("prefix")
    key = _key(attached, train, examples, matmul_path, frozen, states)
    file = None if folder is None else folder / f"{key}.states"
    room = 0 if file is None else _disk_budget(file)
    if needed > room:
        file = None
    if needed > max(memory, room):
        return (
            f"the states of all rows take {size(needed)}, but there is room for {size(memory)} in "
            f"memory and {size(room)} on disk"
        )
    cache = PrefixCache(attached, head, train, examples, states, memory, file, key, display)
    if needed > memory and not cache.store.is_on_disk:
        cache.close()
        return f"the states of all rows take {size(needed)} and are {cache.store.note}"
    try:
        attached.swap(stand_ins)
        attached.model.train(attached.model.training)  # new modules join the mode of the rest
        cache.drop_if_foreign()
    except BaseException:  # an interruption too: the file must be free for the next run
        cache.close()
        raise
    return cache


def _sampler_of(examples: Examples, train: TrainConfig) -> Sampler:
    """The sampler of a run of one phase, in whose first epoch each row is computed."""
    inputs = train.max_seq_length - 1
    return Sampler(examples.lengths, train.batch_size, inputs, train.seed, train.packing)


def _stand_ins(model: nn.Module, frozen: int) -> list[tuple[str, FrozenBlock]]:
    """What stands at the paths of the frozen blocks while their states are cached."""
    feed, paths = Feed(), block_prefixes(model)[:frozen]
    return [
        (path, FrozenBlock(block, feed, path == paths[-1]))
        for path, block in zip(paths, model.layers, strict=False)
    ]


def _example_or_reason(
    attached: Attached, head: Head | None, stand_ins: list[tuple[str, FrozenBlock]]
) -> mx.array | str:
    """States of some tokens, or why the model cannot take states."""
    model, training = attached.model, attached.model.training
    blocks = [(path, stand_in["block"]) for path, stand_in in stand_ins]
    replace_modules(model, stand_ins)
    model.eval()
    try:
        return _probed(attached, head)
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as fault:
        return f"its blocks do not take states: {' '.join(str(fault).split())}"
    finally:
        replace_modules(model, blocks)
        model.train(training)


def _probed(attached: Attached, head: Head | None) -> mx.array | str:
    """Two rows with adapters that are not zero must come out as they do without a cache."""
    model = attached.model
    part = head.hidden if head is not None else model
    tokens = np.random.default_rng(0).integers(0, attached.base.vocab_size, _PROBE)
    tokens = mx.array(tokens)
    padded = mx.pad(tokens, ((0, 0), (0, _PROBE_PADDING)))
    states = states_of(model, lambda: forward(model, part, padded))
    if not isinstance(states, mx.array) or states.ndim != 3 or states.shape[:2] != padded.shape:
        return "its blocks give more than the states of each token"
    states = states[:, : tokens.shape[1]]
    loras = {id(slot.lora): slot.lora for slot in attached.slots.values()}.values()
    before = [list(lora.lora_b) for lora in loras]
    try:
        for lora in loras:  # with B at zero, it would not show where an adapter reaches the states
            lora.lora_b[:] = [
                b + _PROBE_STD * mx.random.normal(b.shape, key=mx.random.key(i))
                for i, b in enumerate(lora.lora_b)
            ]
        error = relative_error(forward(model, part, states), forward(model, part, tokens))
    finally:
        for lora, b in zip(loras, before, strict=True):
            lora.lora_b[:] = b
    if not error <= TOLERANCE[states.dtype]:
        return f"given these states, the model computes something else (off by {error:.1e})"
    return states


def _disk_budget(file: Path) -> int:
    """Bytes that a file may have: what it takes already, and a share of what is free."""
    folder = next(p for p in file.parents if p.exists())
    taken = file.stat().st_blocks * 512 if file.is_file() else 0
    return taken + int(_DISK_SHARE * shutil.disk_usage(folder).free)


def _key(
    attached: Attached,
    train: TrainConfig,
    examples: Examples,
    matmul_path: str,
    frozen: int,
    states: mx.array,
) -> str:
    """A hash of all that the bits of the states depend on."""
    base = attached.base
    known = {
        "format": _FORMAT,
        "base": [
            base.fingerprint,
            [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in weight_files(base.path)],
            base.config,
            base.quantization,
            train.quantize,
            train.double_quant,
            train.keep,
        ],
        "blocks": frozen,
        "states": [str(states.dtype), states.shape[-1], train.compute_dtype, matmul_path],
        "batches": [train.batch_size, train.max_seq_length, train.packing, train.seed],
        "device": [runtime.device_name(), runtime.BLAS.name, runtime.BLAS.threads, lanes()],
        "versions": [version(name) for name in ("mlx", "mlx-lm")],
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode())
    digest.update(examples.lengths.astype(np.int64).tobytes())
    for example in examples.items:
        digest.update(np.ascontiguousarray(example.tokens).data)
    return digest.hexdigest()
