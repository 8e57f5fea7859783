"""The adapters of a pack on a base."""

from typing import TYPE_CHECKING

from ..adapters.attach import attach
from ..adapters.imported import attach_inference_only, is_inference_only
from ..adapters.lora import Attached
from ..adapters.spec import check_shapes
from ..errors import PackError
from ..late import load
from .compatibility import check_base
from .manifest import ADAPTERS, replaced_of, shapes_of
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def attach_pack(base: "BaseModel", pack: Pack, matmul_path: str = "quantized") -> Attached:
    check_base(pack, base)

    tensors = pack.load_tensors()
    fallback = bool(pack._part("recipe").get("train_fp16_fallback"))
    where = "pack"
    if pack.path:
        where = str(pack.path / ADAPTERS)
    check_shapes(shapes_of(pack.manifest), {n: t.shape for n, t in tensors.items()}, where)

    if pack.for_merge != "none":
        attach_merged = load("adapters.merged:attach_merged")
        return attach_merged(base, pack.specs, tensors, pack.for_merge, matmul_path)

    inference_only = {p: spec for p, spec in pack.specs.items() if is_inference_only(spec)}
    trainable = {p: spec for p, spec in pack.specs.items() if p not in inference_only}
    replaced = replaced_of(pack.manifest)
    attached = attach(base, specs=trainable, matmul_path=matmul_path, fp16_fallback=fallback)

    try:
        factors = {n: tensors[n] for spec in trainable.values() for n in spec.shapes}
        attached.load(factors, where)
        attach_inference_only(attached, inference_only, replaced, tensors, where)
    except PackError:
        attached.detach()
        raise

    base.model.eval()
    return attached
