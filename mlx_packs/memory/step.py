"""A training step of adapters on a decoder, followed by hand: what is in memory at its moments.

The forward pass keeps values for the backward pass, and temporaries are in flight. MLX allocates
ahead of what it computes, so "in flight" is about one block's worth of temporaries, not one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .. import runtime
from ..config.choices import PolicyFacts
from ..data.shapes import TreeShape
from ..ops.linear_cross_entropy import GATHERED_BYTES
from ..ops.linear_cross_entropy import columns as loss_columns
from ..ops.profile import profile
from .decoder_sizes import Sizes
from .plan import Shape, moment_parts

WHOLE_LOGITS = 15  # arrays of the size of all logits, where the head is trainable
_OUTPUTS = 3  # arrays of the size of the logits of a score head
_TEACHER_ARRAYS = 12  # arrays of the probabilities of a teacher's tokens
_HEAD_SLICE = 1.25  # arrays of the size of a slice of the head that is dequantized


@dataclass(frozen=True)
class Factors:
    """How many arrays of a size a device has in flight."""

    logits: float  # slices of logits that are computed at a time
    two_slices: float  # the same, of two: one for each stream, and no later one ahead
    states: float  # hidden states of the targets, in float32
    swiglu: float  # pieces of SwiGLU's gradient, where it is computed by pieces
    two_pieces: float  # the same, where two are almost all: no later one is ahead


# Of a CPU read off measured peaks (benchmarks/LOG.md), which `benchmarks/plan_accuracy.py` checks;
# of a GPU counted, and not measured there.
_FACTORS = {
    "cpu": Factors(logits=10.5, two_slices=8.5, states=3, swiglu=13, two_pieces=10),
    "gpu": Factors(logits=3, two_slices=3, states=6, swiglu=0, two_pieces=0),
}


def factors() -> Factors:
    return _FACTORS["cpu" if runtime.on_cpu() else "gpu"]


class Level(NamedTuple):
    """Rows that attend alike: a batch's rows, prefixes, or what follows these."""

    rows: int
    length: float  # inputs of a row, the mean of packed examples
    before: int = 0  # inputs of the prefix that each row reads

    @property
    def tokens(self) -> int:
        return round(self.rows * self.length)

    @property
    def keys(self) -> float:
        """The keys that attention of a row has."""
        return self.before + self.length


class Pass(NamedTuple):
    """What goes through the blocks at once: levels of a tree, one after the other."""

    levels: tuple[Level, ...]

    @property
    def tokens(self) -> int:
        return sum(level.tokens for level in self.levels)

    @property
    def repeated(self) -> int:
        """Inputs of prefixes, once for each row that reads them."""
        return sum(level.rows * level.before for level in self.levels)


def passes_of(shape: Shape, sequences: int, at_once: bool = False) -> tuple[Pass, ...]:
    """Return the passes of a batch; ``at_once`` is whether all levels of a tree are one."""
    if not isinstance(shape, TreeShape):
        return (Pass((Level(sequences, shape[0]),)),)

    groups = shape.groups(sequences)
    levels = [Level(groups, shape.prefix - shape.root, shape.root)]
    if shape.root:
        levels.insert(0, Level(1, shape.root))

    following = shape.computed(sequences) - sum(level.tokens for level in levels)
    levels.append(Level(sequences, following / sequences, shape.prefix))
    if at_once:
        return (Pass(tuple(levels)),)
    return tuple(Pass((level,)) for level in levels)


@dataclass(frozen=True)
class Step:
    """A training step of adapters on a batch, with blocks as in the Llama family.

    A tree takes one pass, or one for each of its levels (nn/prefix.py), and each column of texts of
    a batch of pairs takes one.
    """

    trees_at_once = True  # whether its attention is grouped

    sizes: Sizes
    passes: tuple[Pass, ...]
    targets: int
    kept: list[dict[str, int]]  # as of `PlannedAdapters`
    policy: PolicyFacts
    waiting: int  # bytes of gradients that wait for the update in the backward pass
    waiting_at_loss: int
    unpacks: bool  # whether weights are dequantized by slices, which wait for each other
    custom: bool  # whether they are quantized in a format that MLX lacks
    head: bool = False  # whether the head is trained or adapted, and all logits are made
    logits: bool = True  # whether there are any; a reward model reads states of targets alone
    teacher_tokens: int = 0  # of a target, whose logits the loss reads
    outputs: int = 0  # whole logits of each target, by the LM head or a score head
    evaluated: Level | None = None  # of more rows than a pass, where these are by parts

    def moments(self, itemsize: int) -> dict[str, dict[str, int]]:
        """Return the parts at the moments of the forward and backward pass, in bytes."""
        moments: dict[str, dict[str, int]] = {}
        states = 2 * self.sizes.hidden * sum(level.tokens for level in self.passes)

        for of_pass, before in self._before():
            if of_pass is self.passes[-1]:
                saved = itemsize * (before + states)
                logits = itemsize * self.loss_numbers() + self.teacher_bytes()
                moments["loss"] = moment_parts(self.waiting_at_loss, saved, logits)

            # the largest block keeps its activations while it is computed again
            if self.policy.blocks:
                before += max(self._kept(of_pass), default=0)

            for name, (working, gone) in self._in_blocks(of_pass, itemsize).items():
                saved = itemsize * (before - gone * of_pass.tokens)
                parts = moment_parts(self.waiting, saved, working=working)
                earlier = moments.get(name, parts)
                moments[name] = max(parts, earlier, key=lambda each: sum(each.values()))

        if self.evaluated is not None:
            working, _ = self._in_blocks(Pass((self.evaluated,)), itemsize)["mlp"]
            moments["evaluation"] = moment_parts(0, working=working)
        return moments

    def _before(self) -> Iterator[tuple[Pass, float]]:
        """Yield each pass, and the numbers that are kept when its backward pass begins."""
        read = 0  # keys and values of prefixes
        if not self.independent:
            prefixes = sum(of_pass.tokens for of_pass in self.passes[:-1])
            read = len(self.kept) * 2 * self.sizes.keys * prefixes
        kept = [sum(self._kept(of_pass)) for of_pass in self.passes]
        if self.policy.blocks:
            kept = [self.block_inputs(of_pass) for of_pass in self.passes]

        for of_pass in self.passes:
            yield of_pass, sum(kept) + read * self.policy.blocks

    def block_inputs(self, own: Pass) -> int:
        """Return the numbers of the inputs of the adapted blocks."""
        return len(self.kept) * self.sizes.hidden * own.tokens

    @property
    def independent(self) -> bool:
        """Whether no pass reads another: they are columns of texts."""
        return not self.passes[-1].repeated

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again in the backward pass."""
        return self.policy.operations or self.policy.blocks

    def loss_numbers(self) -> float:
        """Return the numbers in flight in the loss: slices of logits and head, states [M, D]."""
        vocab = self.sizes.vocab
        states = self.targets * self.sizes.hidden
        if not self.logits:  # hidden states in float32, and their gradients
            return 6 * states + _OUTPUTS * self.targets * self.outputs
        if self.head:
            return WHOLE_LOGITS * self.targets * vocab + 3 * states

        streams = profile().streams
        slice_columns = loss_columns(self.targets, self.sizes.hidden)
        columns = min(streams * slice_columns, vocab)
        in_flight = factors()
        of_logits = in_flight.logits
        if math.ceil(vocab / slice_columns) == streams == 2:
            of_logits = in_flight.two_slices
        numbers = of_logits * self.targets * columns + in_flight.states * states
        if self.unpacks:
            numbers += _HEAD_SLICE * columns * self.sizes.hidden
        return numbers

    def teacher_bytes(self) -> float:
        """Return the bytes in flight for a teacher's tokens: rows of the head, probabilities."""
        tokens = self.targets * self.teacher_tokens
        rows = min(4 * tokens * self.sizes.hidden, GATHERED_BYTES)
        return 2 * rows + 4 * _TEACHER_ARRAYS * tokens

    def dense_slices(self) -> float:
        """Return the dense weights in flight while products dequantize theirs."""
        if not self.unpacks or self.recomputes:  # what is recomputed waits for each
            return 0
        at_once = profile().slice_weights
        weights = [math.prod(shape) for shape in self.sizes.projections.values()]
        slices = 10 if self.custom else 5
        if runtime.on_cpu():  # a weight of one slice is not dequantized ahead
            weights = [count for count in weights if count > at_once]
            slices = 6 if self.custom else 3
        return min(slices * at_once, sum(weights) // self.sizes.blocks)

    def _swiglu_pieces(self, count: int) -> float:
        """Return the numbers in flight in SwiGLU's gradient of so many elements."""
        elements = profile().elements
        streams = profile().streams
        arrays = factors().swiglu
        if streams == 2 and 1 < count / elements < 3:
            arrays = factors().two_pieces
        return arrays * min(count, streams * elements)

    def _kept(self, own: Pass) -> list[float]:
        """Return the numbers that each adapted block keeps of a pass."""
        joined = 0  # keys and values of prefixes, before each row's
        if not self.policy.operations:
            joined = 2 * self.sizes.keys * own.repeated

        kept = []
        for block, adapters in enumerate(self.kept):
            of_levels = (
                level.tokens * self._block_numbers(level, block, adapters) for level in own.levels
            )
            kept.append(joined + sum(of_levels))
        return kept

    def _block_numbers(self, own: Level, block: int, adapters: Mapping[str, int]) -> float:
        d = self.sizes.hidden
        f = self.sizes.ffn
        q = self.sizes.queries
        k = self.sizes.keys
        adapted = {path.rpartition(".")[2] for path in adapters}
        qkv = bool(adapted & {"q_proj", "k_proj", "v_proj"})
        gate_up = bool(adapted & {"gate_proj", "up_proj"})

        # two residual streams, and what the gradients of A are made of
        saved = d * (2 + qkv + gate_up) + q * ("o_proj" in adapted) + sum(adapters.values())
        if self.recomputes and runtime.on_cpu():
            return saved + q + 2 * k + 2 * f  # outputs of the frozen products

        # attention probabilities are saved if they are one piece
        of_token = self.sizes.heads * own.keys
        one_piece = own.tokens * of_token <= _scores_at_once()
        scores = of_token if one_piece and runtime.on_cpu() else 0
        # q and k after RoPE, v, attended; gate, up; the input of down, unless it is recomputed
        down = "down_proj" in adapted and not self.policy.operations
        saved += 2 * q + 2 * k + scores + 2 * f + f * down
        return saved + (q + k) * self.sizes.head_norms  # what q_norm and k_norm read

    def _in_blocks(self, own: Pass, itemsize: int) -> dict[str, tuple[float, float]]:
        """Return, by moment, bytes in flight and the numbers per token of a block that are gone."""
        d = self.sizes.hidden
        f = self.sizes.ffn
        q = self.sizes.queries
        if runtime.on_cpu():  # SwiGLU by pieces
            mlp = 4 * d + 5 * f if self.recomputes else 4 * d + 4 * f + 2 * q
            pieces = self._swiglu_pieces(own.tokens * f)
        else:
            mlp = 4 * d + (4 + self.policy.operations) * f + 2 * q
            pieces = 0

        # no column waits for another, so that a block of each is computed again at the same time
        tokens = own.tokens
        if self.independent and self.policy.blocks:
            tokens = sum(each.tokens for each in self.passes)

        attention = 2 * (q + self.sizes.keys)
        joined = 2 * self.sizes.keys * own.repeated
        most = max(level.tokens * level.keys for level in own.levels)
        scores = 9 * min(_scores_at_once(), most * self.sizes.heads)

        in_mlp = itemsize * (tokens * mlp + self.dense_slices() + pieces)
        in_attention = itemsize * (tokens * attention + joined + scores)
        return {
            "mlp": (in_mlp, 0),
            "attention": (in_attention, f),  # gate or up
        }


def _scores_at_once() -> float:
    return profile().streams * (profile().score_bytes / 4)
