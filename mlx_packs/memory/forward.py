"""Estimate the peak memory of a decoder's forward pass alone, as `packs logits` computes it."""

from ..bases.precision import activation_bytes
from ..config.choices import POLICIES
from ..config.schema import TrainConfig
from .decoder import base_bytes
from .decoder_sizes import sizes_of
from .headers import Headers
from .plan import Shape
from .step import Level, Pass, Step

_LOGIT_ARRAYS = 15  # of the size of a slice of logits, with it, while its largest are found; CPU


def forward_bytes(
    headers: Headers, train: TrainConfig, shape: Shape, slice_bytes: int, pack_bytes: int
) -> int:
    """Return the peak bytes of logits of batches of a shape, whose slices have ``slice_bytes``.

    Raises a PackError for a family that the formula does not know.
    """
    headers.check_formats()
    sizes = sizes_of(headers.config, headers.tensors)
    itemsize = activation_bytes(headers.config, train.compute_dtype)
    batch = Pass((Level(train.batch_size, shape[0]),))

    step = Step(
        sizes,
        passes=(batch,),
        targets=shape[1],
        kept=[],
        policy=POLICIES["none"],
        waiting=0,
        waiting_at_loss=0,
        unpacks=False,
        custom=False,
        evaluated=batch.levels[0],
    )
    in_blocks = sum(step.moments(itemsize)["evaluation"].values())
    logits = _LOGIT_ARRAYS * min(slice_bytes, 4 * shape[1] * sizes.vocab)
    states = itemsize * 2 * sizes.hidden * batch.tokens

    weights = base_bytes(sizes, headers, train, itemsize) + pack_bytes
    return weights + max(in_blocks, states + logits)
