"""The dtype of a run: chosen when it begins, kept when it is resumed, changed after an overflow."""

from collections.abc import Mapping

from ..bases.precision import ComputeDtype, choose_compute_dtype
from ..config.schema import TrainConfig
from ..display import Display
from .checkpoint import has_loss_scale
from .settings import Place


def run_dtype(train: TrainConfig, place: Place, config: Mapping) -> ComputeDtype:
    """Return the dtype of a run on a base that is to be loaded.

    A resumed run stays in float16, or out of it, as its checkpoint is.
    """
    if place.overflow:
        return ComputeDtype("bfloat16", place.overflow, "bfloat16")

    dtype = choose_compute_dtype(config, train.compute_dtype, train.trains_base)
    if place.resume_point is None or dtype.name == "float32":
        return dtype

    checkpoint = place.resume_point.folder
    was_float16 = has_loss_scale(checkpoint)
    if was_float16 == (dtype.name == "float16"):
        return dtype
    name = "float16" if was_float16 else "bfloat16"
    return ComputeDtype(name, f"as of {checkpoint.name}", name)


def show_dtype(display: Display, dtype: ComputeDtype, requested: str) -> None:
    """Show the dtype of a run, unless it is float32 and no other was requested."""
    if dtype.name == "float32" and requested in ("auto", "float32"):
        return

    text = dtype.name
    if requested not in ("auto", dtype.name):
        text += f" instead of {requested}"
    text += f": {dtype.why}"
    if dtype.name == "float16":
        text += " · the loss is scaled"
    display.line("dtype", text)
