"""Memory of what a vision-language base has beside its language model; its tower is released."""

from ..bases.families import is_of_projector, projector_paths
from ..bases.geometry import is_named
from ..bases.precision import activation_bytes
from .headers import Headers, Tensors

KEPT_BYTES = 512 << 20  # of the features that were read last, as vision/store.py keeps them


def feature_bytes(text: Headers, headers: Headers, in_batch: int) -> int:
    """Return the bytes of the features of a batch of some tokens, and of those read before.

    ``text`` are the headers of the language model. Where rows are not known, each token of a batch
    is one of an image, and there are no others.
    What enters a projector with adapters is stored in place of features; a batch has both, and what
    is between its linears.
    """
    tokens = headers.image_tokens
    if tokens is None:
        tokens = in_batch

    vision = headers.config.get("vision_config") or {}
    levels = len(vision.get("deepstack_visual_indexes") or ())
    width = text.config["hidden_size"]
    stored = width
    computed = 0
    for name, tensor in text.tensors.items():
        if not is_of_projector(name) or len(tensor["shape"]) < 2:
            continue
        if not computed:
            stored = tensor["shape"][1]
        computed += 2 * tensor["shape"][0]

    of_float = activation_bytes(headers.config, "auto")
    of_batch = of_float * (stored + computed + levels * width)
    of_store = of_float * (stored + levels * width)
    return of_batch * min(tokens, in_batch) + min(of_store * tokens, KEPT_BYTES)


def projector_tensors(headers: Headers) -> Tensors:
    """Return the tensors of the linears of a projector, by the names of a base."""
    tensors = {}
    for here, there in projector_paths(headers.config["model_type"]).items():
        of_linear = there.removeprefix("vision_tower.")
        for part in ("weight", "bias"):
            stored = [name for name in headers.tensors if is_named(name, f"{of_linear}.{part}")]
            tensors |= {f"{here}.{part}": headers.tensors[name] for name in stored}
    return tensors
