"""Bytes, operations and dispatches of each primitive on an Apple GPU.

MLX decides on layouts while it evaluates, so they are followed here, by numpy's views of an array
of one element: a view dispatches nothing, a reshape or a product of an array that is not laid out
as it must be copies it first, and a broadcast axis is read once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .lazy_graph import CONSTANT, LEAF, Node

ITEM_SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
PRODUCTS = ("Matmul", "AddMM", "QuantizedMatmul")
_TILE = 32  # rows and columns of a tile of MLX's products, which are computed whole
_ATTENTION_BLOCK = 1024  # queries and keys of a block of the gradient of fused attention
_HEAVY = (
    *("MM", "Matmul", "Conv", "FFT", "Hadamard", "Attention", "GatedDelta", "Kernel"),
    *("Cholesky", "SVD", "QRF", "Eig", "Inverse", "LUF"),
)


class Unpriced(Exception):
    """A primitive that computes much and has no rule here."""


class Array:
    """One array of a step.

    Args:
        layout: shape and strides, as a view that is never read.
        dtype: as MLX names it.
        buffer: the array whose memory this one has, its own or that which it views.
    """

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        item = np.zeros(1, f"u{ITEM_SIZES[dtype]}")
        strides = np.cumprod([item.itemsize, *reversed(shape[1:])])[::-1] if shape else ()
        self.layout, self.dtype = as_strided(item, tuple(shape), tuple(strides)), dtype
        self.buffer = self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def read_bytes(self) -> int:
        """Return the bytes that reading all of it transfers; broadcast axes count once."""
        pairs = zip(self.shape, self.layout.strides, strict=True)
        return math.prod(n for n, stride in pairs if stride) * self.layout.itemsize

    @property
    def is_row_contiguous(self) -> bool:
        return self.layout.flags.c_contiguous

    @property
    def is_contiguous(self) -> bool:
        """Whether it has no gaps and no broadcast axis, in whatever order its axes are."""
        order = np.argsort([-stride for stride in self.layout.strides], kind="stable")
        return self.layout.transpose(order).flags.c_contiguous


@dataclass
class Op:
    """One primitive and what it costs.

    Args:
        rate: at which its operations are computed (`seconds.rate`).
        rows: of a product; None of what is none.
        dispatches: kernels; 0 is a view.
        donates: whether it may write into an input that is not read afterwards.
    """

    name: str
    inputs: list[Array]
    outputs: list[Array]
    attributes: list | bool | None = None
    bytes: float = 0
    operations: float = 0
    rate: str = ""
    rows: int | None = None
    dispatches: int = 1
    donates: bool = False

    def stream(self) -> None:
        """Read every operand and write every result once."""
        self.bytes = sum(a.read_bytes for a in self.inputs) + sum(a.nbytes for a in self.outputs)

    def view(self, layouts: Sequence[np.ndarray], sources: Sequence[Array]) -> None:
        """Let the outputs be views of some arrays."""
        self.dispatches = 0
        for output, layout, source in zip(self.outputs, layouts, sources, strict=True):
            output.layout, output.buffer = layout, source.buffer


@dataclass
class Graph:
    """The ops of a step, inputs first, and what it computes."""

    ops: list[Op] = field(default_factory=list)
    outputs: list[Array] = field(default_factory=list)


def priced(nodes: Sequence[Node], outputs: Sequence[int]) -> Graph:
    """Return the ops of a graph, with their costs.

    Args:
        nodes: of `lazy_graph.read`.
        outputs: names of the arrays that the step computes.

    Raises: Unpriced.
    """
    arrays: dict[int, Array] = {}
    graph = Graph()
    for node in nodes:
        arrays |= {name: Array(shape, dtype) for name, shape, dtype in node.outputs}
        if node.name in (LEAF, CONSTANT):
            continue
        inputs = [arrays[name] for name in node.inputs]
        op = Op(node.name, inputs, [arrays[n] for n, *_ in node.outputs], node.attributes)
        _own_kernel(op) if node.name.startswith("kernel:") else _RULES.get(op.name, _elementwise)(
            op
        )
        graph.ops.append(op)
    graph.outputs = [arrays[name] for name in outputs]
    return graph


_RULES: dict[str, Callable[[Op], None]] = {}


def _rule(*names: str) -> Callable:
    def add(rule: Callable[[Op], None]) -> Callable[[Op], None]:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


def _elementwise(op: Op) -> None:
    """Elementwise operations, fused or not, and reductions; of others only what is cheap."""
    if any(word in op.name for word in _HEAVY) and op.name != "Compiled":
        raise Unpriced(f"benchmarks/apple_gpu/costs.py has no rule for the primitive {op.name}")
    op.stream()
    if op.name in ("Softmax", "LogSumExp") and not op.inputs[0].is_row_contiguous:
        op.bytes += 2 * op.inputs[0].nbytes
    for output in op.outputs:  # laid out as its inputs, where they agree
        like = [a for a in op.inputs if a.shape == output.shape and all(a.layout.strides)]
        strides = {_element_strides(a) for a in like}
        if len(strides) == 1 and like[0].is_contiguous:
            item = output.layout.itemsize
            output.layout = as_strided(
                output.layout, output.shape, tuple(n * item for n in strides.pop())
            )
            op.donates = True


def _element_strides(array: Array) -> tuple[int, ...]:
    return tuple(stride // array.layout.itemsize for stride in array.layout.strides)


@_rule("Transpose")
def _transpose(op: Op) -> None:
    op.view([op.inputs[0].layout.transpose(op.attributes)], op.inputs)


@_rule("Slice")
def _slice(op: Op) -> None:
    x, output = op.inputs[0].layout, op.outputs[0]
    steps = zip(x.strides, op.attributes, strict=True)
    op.view([as_strided(x, output.shape, tuple(s * step for s, step in steps))], op.inputs)


@_rule("Split", "Copy", "View", "StopGradient", "NumberOfElements")
def _same_strides(op: Op) -> None:
    x = op.inputs[0].layout
    layouts = [
        as_strided(x, o.shape, x.strides)
        if x.ndim == o.layout.ndim and x.itemsize == o.layout.itemsize
        else o.layout
        for o in op.outputs
    ]
    op.view(layouts, [op.inputs[0]] * len(layouts))


@_rule("Depends")
def _depends(op: Op) -> None:
    values = op.inputs[: len(op.outputs)]
    op.view([a.layout for a in values], values)


@_rule("CustomTransforms")
def _custom_transforms(op: Op) -> None:
    values = op.inputs[-len(op.outputs) :]
    op.view([a.layout for a in values], values)


@_rule("Broadcast", "BroadcastAxes")
def _broadcast(op: Op) -> None:
    op.view([np.broadcast_to(op.inputs[0].layout, op.outputs[0].shape)], op.inputs[:1])


@_rule("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze")
def _reshape(op: Op) -> None:
    try:
        op.view([op.inputs[0].layout.reshape(op.outputs[0].shape, copy=False)], op.inputs[:1])
    except ValueError:  # numpy's answer where a reshape needs a copy
        op.stream()


@_rule("Contiguous")
def _contiguous(op: Op) -> None:
    if op.inputs[0].is_row_contiguous:
        op.view([op.inputs[0].layout], op.inputs)
    else:
        op.stream()


def _tiled(n: int) -> int:
    return math.ceil(n / _TILE) * _TILE


@_rule("Matmul", "AddMM")
def _matmul(op: Op) -> None:
    (a, b), output = op.inputs[:2], op.outputs[0]
    matrices = math.prod(output.shape[:-2])
    op.operations = 2 * _tiled(a.shape[-2]) * _tiled(b.shape[-1]) * a.shape[-1] * matrices
    op.rate = "float32 product" if output.dtype == "float32" else "product"
    op.rows = a.shape[-2]
    op.stream()
    op.bytes += sum(_copy_bytes(x) for x in (a, b))


def _copy_bytes(x: Array) -> int:
    """Return bytes of the copy of an operand neither of whose last two axes is contiguous."""
    in_order = x.layout.itemsize in x.layout.strides[-2:] or 1 in x.shape[-2:]
    return 0 if in_order else x.read_bytes + x.nbytes


@_rule("QuantizedMatmul")
def _quantized_matmul(op: Op) -> None:
    x, output = op.inputs[0], op.outputs[0]
    depth = x.shape[-1]
    op.rows = x.layout.size // depth
    op.operations = 2 * _tiled(op.rows) * depth * output.shape[-1]
    is_floating = op.inputs[2].dtype == "uint8"  # its scales
    op.rate = "quantized product"
    if is_floating and not op.attributes:
        op.rate = "floating gradient"
    op.stream()
    if x.layout.ndim > 1 and not x.layout[(0,) * (x.layout.ndim - 2)].flags.c_contiguous:
        op.bytes += x.read_bytes + x.nbytes


@_rule("Quantize")
def _dequantize(op: Op) -> None:
    op.stream()


@_rule("ScaledDotProductAttention")
def _attention(op: Op) -> None:
    """Of causal attention what a query sees is computed, in whole tiles; the last sees all keys."""
    batch, heads, queries, width = op.inputs[0].shape
    keys = op.inputs[1].shape[2]
    share = min(1, 1 - (queries / 2 - _TILE) / keys) if op.attributes else 1
    op.operations = 4 * batch * heads * queries * keys * width * share
    op.rate = "attention"
    op.stream()
    rows = Array((batch, queries, heads, width), op.outputs[0].dtype).layout
    op.outputs[0].layout = rows.transpose(0, 2, 1, 3)


@_rule("ScaledDotProductAttentionVJP")
def _attention_gradient(op: Op) -> None:
    """Scores and their gradient block by block: five products, two kernels that stream both."""
    batch, heads, queries, width = op.inputs[0].shape
    kv_heads, keys = op.inputs[1].shape[1:3]
    rows, columns = min(_ATTENTION_BLOCK, queries), min(_ATTENTION_BLOCK, keys)
    blocks = [
        (min(rows, queries - i), min(columns, keys - j))
        for i in range(0, queries, rows)
        for j in range(0, keys, columns)
        if not op.attributes or j < i + rows + keys - queries
    ]
    scores = batch * heads * sum(n * m for n, m in blocks)
    op.operations, op.rate = 10 * scores * width, "product"
    of_queries, of_keys = batch * heads * rows * width, batch * heads * columns * width
    of_sums = 2 * batch * kv_heads * columns * width + of_queries
    op.stream()
    # scores in half precision nine times; sums in float32 are read and written
    op.bytes += 18 * scores + len(blocks) * (4 * of_queries + 8 * of_keys + 8 * of_sums)
    op.dispatches = 1 + 8 * len(blocks)


@_rule("RMSNorm", "LayerNorm")
def _norm(op: Op) -> None:
    x = op.inputs[0]
    op.bytes = x.nbytes + op.outputs[0].nbytes
    if x.shape and _element_strides(x)[-1] != 1:
        op.bytes += 2 * x.nbytes


@_rule("RMSNormVJP", "LayerNormVJP")
def _norm_gradient(op: Op) -> None:
    """Two inputs, the gradient of x, that of the weight row by row, and the sum of its rows."""
    op.bytes, op.dispatches = 5 * op.inputs[0].nbytes, 2


@_rule("RoPE")
def _rope(op: Op) -> None:
    op.bytes = op.inputs[0].nbytes + op.outputs[0].nbytes


@_rule("CrossEntropy", "CrossEntropyVJP")
def _cross_entropy(op: Op) -> None:
    op.bytes = op.inputs[0].nbytes + sum(a.nbytes for a in op.outputs)


@_rule("Gather", "GatherAxis")
def _gather(op: Op) -> None:
    op.bytes = 2 * op.outputs[0].nbytes + sum(a.read_bytes for a in op.inputs[1:])


@_rule("Scatter", "ScatterAxis", "SliceUpdate", "DynamicSliceUpdate")
def _update(op: Op) -> None:
    """The array that is updated is donated, or written first where it is a broadcast constant."""
    update = op.inputs[1 if op.name.endswith("SliceUpdate") else -1]
    is_filled = op.inputs[0].read_bytes < op.outputs[0].nbytes
    op.bytes = 2 * update.nbytes + is_filled * op.outputs[0].nbytes
    op.dispatches = 1 + is_filled


@_rule("Concatenate")
def _concatenate(op: Op) -> None:
    op.bytes, op.dispatches = 2 * op.outputs[0].nbytes, len(op.inputs)


@_rule("Pad")
def _pad(op: Op) -> None:
    op.bytes, op.dispatches = op.inputs[0].nbytes + 2 * op.outputs[0].nbytes, 2


def _own_kernel(op: Op) -> None:
    """As `our_step.kernel_cost` declares it."""
    nbytes, operations, by_matrix_units = op.attributes
    op.stream()
    op.bytes = max(op.bytes, nbytes or 0)
    op.operations = operations or 0
    op.rate = "kernel product" if by_matrix_units else "kernel"
