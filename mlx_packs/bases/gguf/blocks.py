"""The weights of a GGUF file as MLX has them: exact affine codes, or dense numbers.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are blocks of 32 codes with a scale d in float16, and are MLX's
affine format (w = scale x code + bias, groups of 32) with the same codes:

    Q4_0: w = d (q - 8)      scale d, bias -8 d
    Q5_0: w = d (q - 16)     scale d, bias -16 d
    Q4_1, Q5_1: w = d q + m  scale d, bias m
    Q8_0: w = d q, q signed  scale d, bias -128 d, code q + 128

Multiples by powers of two are exact in float16. Only a bias that overflows float16 needs float32.

The blocks of K-quants have 256 codes, and float16 numbers d and m that groups share. Scales of
groups are integers times these, so they need float32. Groups of 32 are MLX's format again:

    Q4_K, Q5_K: w = d s q - m t  scale d s, bias -m t

Groups of 16 (Q6_K, Q3_K, Q2_K) have no exact form. Their weights are rounded to affine 8-bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from ...cache import release
from ...errors import PackError
from .header import GgufFile, TensorInfo

DENSE = ("F32", "F16", "BF16")
_LARGEST_CODE = np.float32(255)  # of 8 bits
_ROWS_BYTES = 2 << 20  # of blocks that are read at a time

Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes [groups, size], scales, biases [groups]


@dataclass(frozen=True)
class BlockFormat:
    """How the blocks of a type become MLX's affine format."""

    bits: int  # of a code
    read: Callable[[np.ndarray], Codes]  # of blocks [N, bytes]
    group_size: int = 32  # weights that share a scale
    is_k: bool = False  # whether it is of a K-quant, whose scales need float32


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte of each block, [blocks]."""
    return blocks[:, start : start + 2].copy().view(np.float16)[:, 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """The 32 codes of each 16 bytes: the low halves first."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Bit 4 of the 32 codes of each block, from its 4 bytes."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _multiple(scales: np.ndarray, factor: int) -> np.ndarray:
    """An exact multiple of float16 scales: in float32 if one overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = scales * np.float16(factor)
    if np.isinf(half).any() and not np.isinf(scales).any():
        return scales.astype(np.float32) * factor
    return half


def _nibbles_of(start: int, fifth: int | None, factor: int | None, blocks: np.ndarray) -> Codes:
    """Codes from a byte of each block on, their fifth bits from another one if there are any.

    The bias is a multiple of the scale; with ``factor`` None it is in the block.
    """
    codes = _nibbles(blocks[:, start:])
    if fifth is not None:
        codes |= _fifth_bits(blocks[:, fifth : fifth + 4])
    scales = _half(blocks, 0)
    if factor is None:
        return codes, scales, _half(blocks, 2)
    return codes, scales, _multiple(scales, factor)


def _q8_0(blocks: np.ndarray) -> Codes:
    scales = _half(blocks, 0)
    return blocks[:, 2:] ^ 128, scales, _multiple(scales, -128)


def _q4_k(blocks: np.ndarray) -> Codes:
    return _codes_of_pairs(blocks[:, 16:]).reshape(-1, 32), *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Codes:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _codes_of_pairs(blocks[:, 48:]) | fifth << 4
    return codes.reshape(-1, 32), *_k_scales(blocks)


def _codes_of_pairs(packed: np.ndarray) -> np.ndarray:
    """The low 4 bits of 8 groups, [N, 8, 32]: two groups share each 32 bytes."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases of the groups of Q4_K and Q5_K blocks, float32 [8 N]."""
    # 12 bytes have 6 bits for each: of the first four groups together, of others in two parts
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).swapaxes(0, 1)
    scales = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    minimums = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=1)

    d, m = (_half(blocks, start).astype(np.float32)[:, None] for start in (0, 2))
    with np.errstate(invalid="ignore"):
        return (d * scales).reshape(-1), -(m * minimums).reshape(-1)


def _rounded(kind: str, group_size: int, blocks: np.ndarray) -> Codes:
    """Weights that are rounded to 8 bits, from the least to the largest of a group."""
    weights = dequantized(blocks, kind).reshape(-1, group_size)
    biases = weights.min(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        scales = (weights.max(axis=1) - biases) / _LARGEST_CODE
        steps = np.where(scales > 0, scales, np.float32(1))
        codes = np.rint((weights - biases[:, None]) / steps[:, None]).astype(np.uint8)
    return codes, scales, biases


def _to_8_bits(kind: str, *group_sizes: int) -> tuple[BlockFormat, ...]:
    return tuple(
        BlockFormat(8, partial(_rounded, kind, size), size, is_k=True) for size in group_sizes
    )


# Formats of a type; of several the first one that is near enough is taken, the smallest first.
FORMATS: dict[str, tuple[BlockFormat, ...]] = {
    "Q4_0": (BlockFormat(4, partial(_nibbles_of, 2, None, -8)),),
    "Q4_1": (BlockFormat(4, partial(_nibbles_of, 4, None, None)),),
    "Q5_0": (BlockFormat(5, partial(_nibbles_of, 6, 2, -16)),),
    "Q5_1": (BlockFormat(5, partial(_nibbles_of, 8, 4, None)),),
    "Q8_0": (BlockFormat(8, _q8_0),),
    "Q4_K": (BlockFormat(4, _q4_k, is_k=True),),
    "Q5_K": (BlockFormat(5, _q5_k, is_k=True),),
    "Q6_K": _to_8_bits("Q6_K", 32),
    "Q3_K": _to_8_bits("Q3_K", 128, 64, 32),
    "Q2_K": _to_8_bits("Q2_K", 128, 64, 32),
}


def block_rows(file: GgufFile, tensor: TensorInfo) -> np.ndarray:
    """The bytes of a tensor, which are mapped, by rows of the last axis."""
    return file.data(tensor).reshape(prod(tensor.shape[:-1]), -1)


def blocks_of(rows: np.ndarray, kind: str) -> np.ndarray:
    """Blocks [N, bytes] of rows of bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])


def read_affine(file: GgufFile, tensor: TensorInfo, block_format: BlockFormat) -> list[np.ndarray]:
    """A matrix in a format of its type, read in slices of rows.

    Returns packed codes, uint32 [rows, columns x bits / 32], and scales and biases in float16 or
    float32, [rows, columns / group size].
    """
    rows, columns = tensor.shape
    bits = block_format.bits

    weight = np.empty((rows, columns * bits // 32), np.uint32)
    numbers: tuple[list[np.ndarray], ...] = ([], [])
    for part, stored in _slices(file, tensor):
        codes, *parts = block_format.read(blocks_of(stored, tensor.type))
        if not all(np.isfinite(values).all() for values in parts):
            raise _not_finite(file, tensor)

        weight[part] = _packed(codes, bits).reshape(len(stored), -1)
        for slices, values in zip(numbers, parts, strict=True):
            slices.append(values.reshape(-1, columns // block_format.group_size))

    dtype = np.result_type(*numbers[0], *numbers[1])
    return [weight, *(np.concatenate(slices, dtype=dtype) for slices in numbers)]


def _slices(file: GgufFile, tensor: TensorInfo) -> Iterator[tuple[slice, np.ndarray]]:
    """Slices of the rows of a tensor, with their bytes; mapped pages do not stay in memory."""
    rows = block_rows(file, tensor)
    step = max(1, _ROWS_BYTES // rows.shape[1])
    for start in range(0, len(rows), step):
        yield slice(start, start + step), rows[start : start + step]
        release(rows)


def _not_finite(file: GgufFile, tensor: TensorInfo) -> PackError:
    return file.fault(f"{tensor.name} has NaN or infinite weights. Get it again.")


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [groups, size] as MLX packs them: a little-endian stream of bits in uint32."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4).view(np.uint32)
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little").view(np.uint32)


def read_dense(file: GgufFile, tensor: TensorInfo) -> np.ndarray:
    """Any type becomes float32, in slices of rows that are dequantized in turn."""
    columns = tensor.shape[-1]
    result = np.empty((prod(tensor.shape) // columns, columns), np.float32)
    try:
        for part, stored in _slices(file, tensor):
            result[part] = dequantized(stored, tensor.type)
    except NotImplementedError:
        raise file.fault(
            f"{tensor.name} is {tensor.type}, which the package gguf cannot dequantize. Get the "
            "model in another quantization, such as Q4_K_M or Q8_0.",
            "unsupported",
        ) from None

    if not np.isfinite(result).all():
        raise _not_finite(file, tensor)
    return result.reshape(tensor.shape)


def dequantized(stored: np.ndarray, kind: str) -> np.ndarray:
    """The weights of bytes of any type; a NotImplementedError if gguf has no formula for it."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # gguf returns these unchanged
    dense = {"F16": np.float16, "F32": np.float32}
    if kind in dense:
        return stored.view(dense[kind])
    return dequantize(stored, GGMLQuantizationType[kind])
