"""The plan for writing a checkpoint: the tensors of its source, their formats, and their files."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import runtime
from ..runtime import dtype_name, mx
from .quantization import QuantizeOptions
from .weight_formats import WeightFormat


@dataclass(frozen=True)
class Item:
    """One tensor of the source, its format (None: left as it is), and what it becomes."""

    name: str
    size: int
    dtype: str
    weight_format: WeightFormat | None
    outline: dict[str, mx.array]

    @classmethod
    def of(
        cls,
        name: str,
        w: mx.array,
        weight_format: WeightFormat | None,
        size: int | None = None,
    ) -> "Item":
        """``size`` is the number of weights that a tensor stores, if not one each."""
        outline = {name: mx.zeros(w.shape, w.dtype)}
        if weight_format is not None:
            outline = weight_format.outline(name, w)
        if size is None:
            size = w.size
        return cls(name, size, dtype_name(w.dtype), weight_format, outline)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outline.values())


@dataclass(frozen=True)
class WritePlan:
    """The plan that `write` executes."""

    options: QuantizeOptions
    tensors: dict[str, mx.array]  # of the source, lazy
    shards: dict[str, list[Item]]  # by file
    config: dict  # the new config.json
    fingerprint: str  # of the source
    left_dense: dict[str, str]  # modules that could be quantized, and why they are not
    quantization: dict | None  # of the whole model, for the record
    merged: dict | None = None  # the pack that was merged into it, if any
    ends: tuple[int, ...] = ()  # what ends an answer, for eos_token_id in addition to its own
    texts: Mapping[str, str] = field(default_factory=dict)  # other files, by their path in it

    @property
    def items(self) -> list[Item]:
        return [item for items in self.shards.values() for item in items]

    def request(self) -> dict:
        """The start of a record: the options that a later run needs to continue this one.

        Another version of this package or of MLX may quantize other tensors to other bits.
        """
        request = {
            "version": 1,
            "source": self.fingerprint,
            "recipe": self.options.to_json(),
            "versions": dict(runtime.versions()),
        }
        if self.merged:
            request["merged"] = self.merged
        return request


def in_shards(items: list[Item], max_shard_gb: float) -> dict[str, list[Item]]:
    """Items by file, in their order; tensors of one module stay together."""
    shards = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > max_shard_gb * 1e9:
            shards.append([])
            size = 0

        shards[-1].append(item)
        size += item.nbytes

    if len(shards) == 1:
        return {"model.safetensors": items}

    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
