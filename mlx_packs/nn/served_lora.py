"""Adapters of many packs in one projection group, for batches whose sequences use different packs.

Each pack has a slot. Before a forward pass the `Selection` is told the slot of every sequence. If
all have the same one, the group computes what `GroupedLoRA` does with that pack, with its kernels
for decoding; otherwise `ops.multi_lora` adds to each sequence the delta of its own pack.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..ops.multi_lora import multi_lora
from .lora import GroupedLoRA

BASE = -1  # the slot of a sequence without a pack
_IN_PLACE = 8  # numbers of an index that kernels read in place

Place = tuple[str, int]  # the path of a projection and the number of a slice
# By place A [D, R] and B [R, O], its scale multiplied into B; a pack may leave slices alone.
PackFactors = dict[Place, tuple[mx.array, mx.array]]


class Selection:
    """The slot of each sequence of the forward pass that is being built; `BASE` is none.

    Attributes:
        count: number of sequences.
        only: the slot that all of them have; None if they differ.
        index: int32, the slots, at least `_IN_PLACE` numbers; None unless they differ.
    """

    def __init__(self) -> None:
        self.set((BASE,))

    def set(self, slots: Sequence[int]) -> None:
        self.count = len(slots)
        self.only: int | None = None
        self.index: mx.array | None = None
        if all(slot == slots[0] for slot in slots):
            self.only = slots[0]
        else:
            padding = [BASE] * (_IN_PLACE - len(slots))
            self.index = mx.array([*slots, *padding], dtype=mx.int32)


class ServedLoRA(GroupedLoRA):
    """A projection group with the adapters of every pack that is served, in the place of ``lora``.

    ``places`` are the places of its adapters. All groups of a model share one ``selection``.
    """

    def __init__(self, lora: GroupedLoRA, places: Sequence[Place], selection: Selection) -> None:
        super().__init__(lora._adapted, (), (), ())
        self._selection = selection
        self._places = list(places)
        self._sizes = [
            (a.shape[0], b.shape[-1]) for a, b in zip(lora.lora_a, lora.lora_b, strict=True)
        ]

        # Factors of all packs, [P, D, R_i] and [P, R_i, O_i], and by slot a group of the pack.
        self._stacked_a: list[mx.array] = []
        self._stacked_b: list[mx.array] = []
        self._ones: mx.array | None = None  # [P] or longer, the scales
        self._views: list[GroupedLoRA | None] = []

    def install(self, packs: Sequence[PackFactors], dtype: mx.Dtype) -> None:
        """Replace the adapters of all slots by the adapters of ``packs``, by slot.

        The factors in ``packs`` become parts of the arrays that are in memory now.
        """
        self._stacked_a = []
        self._stacked_b = []
        for place, (inputs, outputs) in zip(self._places, self._sizes, strict=True):
            empty = mx.zeros((inputs, 0), dtype), mx.zeros((0, outputs), dtype)
            factors = [pack.get(place, empty) for pack in packs]
            rank = max((a.shape[1] for a, _ in factors), default=0)
            a = [mx.pad(a.astype(dtype), ((0, 0), (0, rank - a.shape[1]))) for a, _ in factors]
            b = [mx.pad(b.astype(dtype), ((0, rank - b.shape[0]), (0, 0))) for _, b in factors]
            self._stacked_a.append(mx.stack(a))
            self._stacked_b.append(mx.stack(b))

        self._ones = mx.ones((max(len(packs), _IN_PLACE),))
        mx.eval(self._stacked_a, self._stacked_b, self._ones)
        self._views = [self._view(slot, pack) for slot, pack in enumerate(packs)]

        for slot, pack in enumerate(packs):
            for place, a, b in zip(self._places, self._stacked_a, self._stacked_b, strict=True):
                if place in pack:
                    rank = pack[place][0].shape[-1]
                    pack[place] = a[slot][:, :rank], b[slot][:rank]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in (*self._stacked_a, *self._stacked_b))

    def _view(self, slot: int, pack: PackFactors) -> GroupedLoRA | None:
        """Return the group of one pack, whose factors are parts of the stacks; None has none."""
        present = [i for i, place in enumerate(self._places) if place in pack]
        if not present:
            return None

        view = GroupedLoRA(
            [self._adapted[i] for i in present],
            [1.0] * len(present),
            [self._stacked_a[i][slot] for i in present],
            [self._stacked_b[i][slot] for i in present],
        )
        view.eval()
        view.keep_casts()
        return view

    def project(
        self, x: mx.array, projections: Sequence[Callable[[mx.array], mx.array]]
    ) -> list[mx.array]:
        """Return the outputs of x [B, ..., D] with the delta of each sequence's pack."""
        if (view := self._shared_view()) is not None:
            return view.project(x, projections)
        return self(x, [projection(x) for projection in projections])

    def __call__(self, x: mx.array, outputs: Sequence[mx.array]) -> list[mx.array]:
        if (view := self._shared_view()) is not None:
            return view(x, outputs)
        if self._selection.only is not None:
            return list(outputs)

        adapted = [outputs[i] for i in self._adapted]
        return self._replaced(outputs, self._mixed(x, adapted))

    def decoded(
        self,
        x: mx.array,
        projections: Sequence[Callable[[mx.array], mx.array]],
        norms: Sequence[nn.Module | None] = (),
        gated: bool = False,
    ) -> list[mx.array] | None:
        """Return what kernels for decoding compute, if all sequences use one pack; else None."""
        view = self._shared_view()
        if view is None:
            return None
        return view.decoded(x, projections, norms, gated)

    def fused(self, x: mx.array, output: mx.array, widths: Sequence[int]) -> mx.array:
        """Return the output [B, ..., sum(widths)] of one projection of several slices, adapted."""
        if (view := self._shared_view()) is not None:
            return view.fused(x, output, widths)
        if self._selection.only is not None:
            return output

        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        return mx.concatenate(self(x, mx.split(output, ends, axis=-1)), axis=-1)

    def _shared_view(self) -> GroupedLoRA | None:
        """Return the group of the pack that all sequences use; None without one."""
        slot = self._selection.only
        if slot in (None, BASE):
            return None
        return self._views[slot]

    def _mixed(self, x: mx.array, outputs: Sequence[mx.array]) -> list[mx.array]:
        """Return the outputs of adapted slices, each sequence with the delta of its own pack."""
        sequences = self._selection.count

        def by_sequence(y: mx.array) -> mx.array:
            return y.reshape(sequences, -1, y.shape[-1])

        summed = multi_lora(
            by_sequence(x),
            [by_sequence(y) for y in outputs],
            self._stacked_a,
            self._stacked_b,
            [self._ones] * len(outputs),
            self._selection.index,
        )
        return [y.reshape(output.shape) for y, output in zip(summed, outputs, strict=True)]
