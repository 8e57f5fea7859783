"""The weights of a GGUF file as MLX has them: exact affine codes, or dense numbers.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are blocks of 32 codes with a scale d in float16, and are MLX's
affine format (w = scale x code + bias, groups of 32) with the same codes:

    Q4_0: w = d (q - 8)      scale d, bias -8 d
    Q5_0: w = d (q - 16)     scale d, bias -16 d
    Q4_1, Q5_1: w = d q + m  scale d, bias m
    Q8_0: w = d q, q signed  scale d, bias -128 d, code q + 128

Multiples by powers of two are exact in float16. Only a bias that overflows float16 needs float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from ...errors import PackError
from .header import GgufFile, TensorInfo

GROUP_SIZE = 32
DENSE = ("F32", "F16", "BF16")
_ROWS_BYTES = 8 << 20  # of blocks that are dequantized at a time

Codes = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes [blocks, 32], scales and biases [blocks]


@dataclass(frozen=True)
class Affine:
    """A weight in MLX's affine format."""

    bits: int  # of a code
    weight: np.ndarray  # packed codes, uint32 [rows, columns x bits / 32]
    scales: np.ndarray  # of groups of 32, float16 or float32 [rows, columns / 32]
    biases: np.ndarray  # like scales

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns]."""
        return len(self.weight), self.scales.shape[1] * GROUP_SIZE

    def rows(self, order: np.ndarray) -> "Affine":
        parts = (self.weight[order], self.scales[order], self.biases[order])
        return Affine(self.bits, *parts)


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


def _q4_0(blocks: np.ndarray) -> Codes:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, _multiple(scales, -8)


def _q4_1(blocks: np.ndarray) -> Codes:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Codes:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scales, _multiple(scales, -16)


def _q5_1(blocks: np.ndarray) -> Codes:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Codes:
    scales = _half(blocks, 0)
    return blocks[:, 2:] ^ 128, scales, _multiple(scales, -128)


# bits, bytes of a block, and how codes, scales and biases are read
EXACT: dict[str, tuple[int, int, Callable[[np.ndarray], Codes]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q5_0": (5, 22, _q5_0),
    "Q5_1": (5, 24, _q5_1),
    "Q8_0": (8, 34, _q8_0),
}


def read_affine(file: GgufFile, tensor: TensorInfo) -> Affine:
    """A matrix of one of the `EXACT` types with the very codes and scales of the file."""
    bits, block_bytes, read = EXACT[tensor.type]
    rows, columns = tensor.shape

    codes, scales, biases = read(file.data(tensor).reshape(-1, block_bytes))
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise file.fault(f"{tensor.name} has NaN or infinite weights. Get it again.")

    dtype = np.result_type(scales, biases)
    groups = (rows, columns // GROUP_SIZE)

    return Affine(
        bits,
        _packed(codes, bits).reshape(rows, columns * bits // 32),
        scales.astype(dtype).reshape(groups),
        biases.astype(dtype).reshape(groups),
    )


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [blocks, 32] as MLX packs them: a little-endian stream of bits in uint32."""
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return (codes[:, ::2] | codes[:, 1::2] << 4).view(np.uint32)
    stream = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :bits]
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little").view(np.uint32)


def read_dense(file: GgufFile, tensor: TensorInfo) -> np.ndarray:
    """Any type becomes float32, in slices of rows that are dequantized in turn."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[tensor.type]
    columns = tensor.shape[-1]
    rows = file.data(tensor).reshape(-1, tensor.nbytes * columns // prod(tensor.shape))

    result = np.empty((len(rows), columns), np.float32)
    step = max(1, _ROWS_BYTES // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        try:
            if tensor.type == "F16":  # as in the file: gguf returns it unchanged
                result[start : start + step] = part.view(np.float16)
            elif tensor.type == "F32":
                result[start : start + step] = part.view(np.float32)
            else:
                result[start : start + step] = dequantize(part, kind)
        except NotImplementedError:
            raise PackError(
                f"{file.path}: {tensor.name} is {tensor.type}, which the package gguf cannot "
                "dequantize. Get the model in another quantization, such as Q4_K_M or Q8_0.",
                "unsupported",
                "model",
            ) from None

    if not np.isfinite(result).all():
        raise file.fault(f"{tensor.name} has NaN or infinite weights. Get it again.")
    return result.reshape(tensor.shape)
