"""A lazy graph, read from MLX's memory: primitives, their inputs, shapes and dtypes.

`mx.export_to_dot` writes no shapes, and `mx.export_function` rejects fused primitives. So the
structures of MLX 0.32 (mlx/array.h, small_vector.h, primitives.h) are read in place by ctypes, as
GCC and Clang lay them out on 64-bit machines. Nothing is called, written or evaluated.
"""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_void_p,
)
from dataclasses import dataclass

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16", "complex64"),
)
LEAF, CONSTANT = "leaf", "constant"


class _Vector(Structure):
    """std::vector."""

    _fields_ = [("begin", c_void_p), ("end", c_void_p), ("capacity", c_void_p)]

    def items(self, kind: type) -> list:
        size = (self.end or 0) - (self.begin or 0)
        return list((kind * (size // ctypes.sizeof(kind))).from_address(self.begin)) if size else []


class _Shape(Structure):
    """SmallVector<int32_t>: an empty allocator, three pointers, ten inline numbers."""

    _fields_ = [("allocator", c_void_p), ("values", _Vector), ("inline", c_int32 * 10)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.values.items(c_int32))


class _Strides(Structure):
    _fields_ = [("allocator", c_void_p), ("values", _Vector), ("inline", c_int64 * 10)]


class _SharedPointer(Structure):
    _fields_ = [("object", c_void_p), ("control", c_void_p)]


class _Event(Structure):
    _fields_ = [("stream", c_int * 3), ("event", _SharedPointer), ("value", c_int64)]


class _Array(Structure):
    """array::ArrayDesc; an array is a shared pointer to it."""

    _fields_ = [
        *[("shape", _Shape), ("strides", _Strides), ("size", c_int64)],
        *[("dtype", c_int), ("item_size", c_uint8), ("primitive", _SharedPointer)],
        *[("status", c_int), ("event", _Event), ("is_tracer", c_bool), ("data", _SharedPointer)],
        *[("offset", c_int64), ("data_size", c_int64), ("flags", c_uint8)],
        *[("inputs", _Vector), ("siblings", _Vector), ("position", c_uint32)],
    ]


class _Primitive(Structure):
    """What all primitives begin with: the table of their virtual functions, and a stream."""

    _fields_ = [("functions", POINTER(c_void_p)), ("stream", c_int * 3)]


class _Transpose(_Primitive):
    _fields_ = [("axes", _Vector)]


class _Slice(_Primitive):
    _fields_ = [("starts", _Shape), ("ends", _Shape), ("steps", _Shape)]


class _QuantizedMatmul(Structure):
    """Its numbers begin where those of `_Primitive` end, which ctypes would align to 8 bytes."""

    _fields_ = [
        *[("functions", POINTER(c_void_p)), ("stream", c_int * 3)],
        *[("group_size", c_int), ("bits", c_int), ("mode", c_int), ("transpose", c_bool)],
    ]


class _Attention(_Primitive):
    """ScaledDotProductAttention and its gradient: behind a std::function."""

    _fields_ = [("fallback", c_void_p * 4), ("scale", c_float), ("is_causal", c_bool)]


class _TypeInfo(Structure):
    """std::type_info, which precedes the virtual functions (Itanium C++ ABI, 2.5.2)."""

    _fields_ = [("functions", c_void_p), ("name", c_char_p)]


@dataclass(frozen=True)
class Node:
    """A primitive, or an input array.

    Args:
        name: the C++ class of the primitive; `LEAF` or `CONSTANT`.
        primitive: its address, 0 if it is an input.
        inputs: names of arrays.
        outputs: name, shape and dtype of each array.
        attributes: axes of a transpose, steps of a slice, whether attention is causal, whether a
            quantized product is with the transposed weight, as a forward pass has it.
    """

    name: str
    primitive: int
    inputs: list[int]
    outputs: list[tuple[int, list[int], str]]
    attributes: list[int] | bool | None = None


def address(array: object) -> int:
    """Return the address of an `mx.array`'s ArrayDesc, which names it in a graph.

    nanobind: behind the head of a Python object are the offset of the C++ object and its state,
    of which bit 2 says that the object itself is there, not a pointer to it.
    """
    head = id(array) + object.__basicsize__
    offset = c_int32.from_address(head).value
    is_direct = c_uint32.from_address(head + 4).value >> 2 & 1
    at = id(array) + offset
    return c_void_p.from_address(at if is_direct else c_void_p.from_address(at).value).value


def primitive(array: object) -> int:
    """Return the address of the primitive that computes an array; it has to have one."""
    return _Array.from_address(address(array)).primitive.object


def read(outputs: Sequence[object], leaves: Sequence[object]) -> list[Node]:
    """Return the primitives from leaves to outputs, inputs first."""
    leaf_addresses = {address(leaf) for leaf in leaves}
    seen: set[int] = set()
    nodes: list[Node] = []
    stack: list[tuple[int, Iterator[int]]] = []

    def visit(at: int) -> None:
        if at in seen:
            return
        array = _Array.from_address(at)
        computed = at not in leaf_addresses and array.primitive.object is not None
        seen.update(_outputs(at) if computed else [at])
        stack.append((at, iter(_addresses(array.inputs) if computed else [])))

    for output in outputs:
        visit(address(output))
        while stack:
            at, waiting = stack[-1]
            source = next(waiting, None)
            if source is not None:
                visit(source)
                continue
            stack.pop()
            nodes.append(_node(at, LEAF if at in leaf_addresses else None))
    return nodes


def _addresses(vector: _Vector) -> list[int]:
    """Return the addresses of the arrays of a std::vector<array>."""
    return vector.items(c_void_p)[::2]


def _outputs(at: int) -> list[int]:
    """Return all arrays that the primitive of an array computes, in order."""
    array = _Array.from_address(at)
    arrays = _addresses(array.siblings)
    position = array.position if arrays else 0
    return [*arrays[:position], at, *arrays[position:]]


def _node(at: int, kind: str | None) -> Node:
    array = _Array.from_address(at)
    if kind or array.primitive.object is None:
        return Node(kind or CONSTANT, 0, [], [_described(at)])
    name, pointer = _class_name(array.primitive.object), array.primitive.object
    outputs = [_described(output) for output in _outputs(at)]
    return Node(name, pointer, _addresses(array.inputs), outputs, _attributes(name, pointer))


def _described(at: int) -> tuple[int, list[int], str]:
    array = _Array.from_address(at)
    return at, list(array.shape), DTYPES[array.dtype]


def _class_name(pointer: int) -> str:
    """Return the class of a primitive by its type_info: N3mlx4core4fast4RoPEE is RoPE."""
    functions = _Primitive.from_address(pointer).functions
    name, rest = "", _TypeInfo.from_address(functions[-1]).name.decode().lstrip("*N")
    while rest[:1].isdigit():
        digits = len(rest) - len(rest.lstrip("0123456789"))
        size = int(rest[:digits])
        name, rest = rest[digits : digits + size], rest[digits + size :]
    return name


def _attributes(name: str, pointer: int) -> list[int] | bool | None:
    if name == "Transpose":
        return _Transpose.from_address(pointer).axes.items(c_int)
    if name == "Slice":
        return list(_Slice.from_address(pointer).steps)
    if name == "QuantizedMatmul":
        return _QuantizedMatmul.from_address(pointer).transpose
    if name.startswith("ScaledDotProductAttention"):
        return _Attention.from_address(pointer).is_causal
    return None
