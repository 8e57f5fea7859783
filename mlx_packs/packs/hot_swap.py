"""Hot-swap: what `Base.applied` and `Base.swap_pack` do, in milliseconds.

Adapters of the same targets, ranks and scales are replaced in place, arrays alone. For others the
modules around them are swapped; the last few such frames are kept, without their adapters, so
that going back and forth builds nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.nn as nn

from ..adapters.lora import Attached
from ..bases.loading import Base
from ..errors import PackError
from ..nn.quantized import apply_matmul_path, replace_modules
from ..runtime import mx
from .pack import Pack

_FRAMES = 4


@dataclass(frozen=True, eq=False)
class Frame:
    """Modules that hold adapters of one shape, and the base's own in their places.

    beyond_lora: what else they hold, as `Pack.beyond_lora`; such a frame serves one pack only.
    """

    beyond_lora: str
    attached: Attached
    own: list[tuple[str, nn.Module]]
    modules: list[tuple[str, nn.Module]]

    def fits(self, pack: Pack) -> bool:
        """Whether it is made for the pack's targets, ranks and scales."""
        if self.beyond_lora or pack.beyond_lora:
            return False
        return self.attached.specs == pack.specs


@dataclass(frozen=True, eq=False)
class Carried:
    """What a base carries."""

    pack: Pack
    frame: Frame
    matmul_path: str

    @property
    def attached(self) -> Attached:
        return self.frame.attached

    @property
    def is_light(self) -> bool:
        """Whether nothing of the base was copied: what is taken off can be kept."""
        if self.frame.beyond_lora or self.attached.notes:
            return False
        return self.matmul_path == "quantized"


def swap_in(base: Base, pack: Pack | None, matmul_path: str = "quantized") -> None:
    """Make a base carry this pack, or none. Raises: PackError, and then nothing has changed."""
    before = base.carried
    if pack is not None:
        pack.check_base(base.name, base.fingerprint, base.config, base.quantization)
        pack.check_reading(base)
        tensors = pack.load_tensors()
        if before and before.matmul_path == matmul_path and before.frame.fits(pack):
            before.attached.load(tensors, pack.name)
            base.carried = Carried(pack, before.frame, matmul_path)
            return
    _take_off(base)
    if pack is None:
        return
    try:
        _put_on(base, pack, matmul_path)
    except BaseException:
        if before:
            _put_on(base, before.pack, before.matmul_path)
        raise


def hold_bare(base: Base) -> None:
    """Raises: PackError if a base carries a pack: it could not be measured alone."""
    if base.carried:
        raise PackError(f"{base.name}: carries a pack already; leave `applied` first.")


@contextmanager
def carrying(base: Base, pack: Pack | None, matmul_path: str = "quantized") -> Iterator[None]:
    """The base with a pack, or alone, its frozen weights multiplied by ``matmul_path``."""
    if pack is not None:
        with base.applied(pack, matmul_path):
            yield
        return
    originals = apply_matmul_path(base.model, matmul_path)
    try:
        yield
    finally:
        replace_modules(base.model, originals)


def _put_on(base: Base, pack: Pack, matmul_path: str) -> None:
    frame = next((f for f in base.frames if f.fits(pack)), None)
    if frame is None or matmul_path != "quantized":
        attached = pack.attach(base, matmul_path)
        frame = Frame(pack.beyond_lora, attached, *attached.standing())
        mx.eval([module.parameters() for _, module in frame.modules])  # DoRA's norms
    else:
        frame.attached.load(pack.load_tensors(), pack.name)
        base.frames.remove(frame)
        replace_modules(base.model, frame.modules)
        if base.model.training:
            base.model.eval()
    base.carried = Carried(pack, frame, matmul_path)


def _take_off(base: Base) -> None:
    """Put the base's own modules back; keep those taken off, if they are light."""
    carried, base.carried = base.carried, None
    if carried is None:
        return
    if not carried.is_light:
        carried.attached.detach()
        return
    if base.model.training:
        base.model.eval()  # as detaching does; what is kept must not come back in training
    replace_modules(base.model, carried.frame.own)
    _let_go(carried.attached)
    base.frames.insert(0, carried.frame)
    del base.frames[_FRAMES:]


def _let_go(attached: Attached) -> None:
    """Drop the adapters of modules that are kept; `Attached.load` sets them all."""
    nothing = mx.zeros(())
    for slot in attached.slots.values():
        slot.lora.lora_a[:] = [nothing] * len(slot.lora.lora_a)
        slot.lora.lora_b[:] = [nothing] * len(slot.lora.lora_b)
