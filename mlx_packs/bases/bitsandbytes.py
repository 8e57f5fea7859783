"""The 4-bit tensors of bitsandbytes as ours: the same bits, other names and shapes.

A weight [O, D] of theirs is uint8 [O * D / 2, 1] and has beside it ``weight.absmax``, the tables
that codes stand for, and ``weight.quant_state.bitsandbytes__nf4``: JSON, as bytes.
"""

import numpy as np

from ..errors import PackError, file_errors
from ..ops.blockwise import dynamic_map
from ..ops.nf4 import BLOCK_SIZES, LEVELS, NESTED_BLOCK_SIZE, NF4Weight
from ..reading import parse_json
from ..runtime import mx

_STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_DTYPES = ("float32", "float16", "bfloat16")  # of what was quantized
_LONGEST_STATE = 1 << 16
_LARGEST_OFFSET = 3.4e38  # of float32
_REMEDY = "Download the checkpoint again, or `packs quantize` the one that is not quantized."


def from_bitsandbytes(weights: dict[str, mx.array], where: str) -> dict[str, mx.array]:
    """Return all weights of the checkpoint ``where``, 4-bit ones by our names, codes lazy."""
    _check_kinds(weights, where)

    renamed = dict(weights)
    for state_name in [name for name in weights if name.endswith(f"{_STATE}nf4")]:
        name = state_name.removesuffix(f"{_STATE}nf4")
        parts = {part: renamed.pop(f"{name}.{part}", None) for part in _PARTS}
        codes = renamed.pop(name, None)
        state = renamed.pop(state_name)

        with file_errors(f"{where}: {name}", _REMEDY):
            weight = _weight(codes, _state(state), **parts)

        if not name.endswith(".weight"):
            raise PackError(
                f"{where}: {name}: 4-bit is read for the weights of modules only. {_REMEDY}",
                "unsupported",
            )

        renamed |= weight.tensors(name.removesuffix(".weight"))

    return renamed


def _check_kinds(weights: dict[str, mx.array], where: str) -> None:
    def unsupported(name: str, fault: str) -> PackError:
        return PackError(f"{where}: {name}: {fault}. Only NF4 is read. {_REMEDY}", "unsupported")

    with_state = {name.partition(_STATE)[0] for name in weights if _STATE in name}
    for name in weights:
        if name.endswith(".SCB"):
            raise unsupported(name, "is 8-bit bitsandbytes (load_in_8bit)")

        base, is_state, kind = name.partition(_STATE)
        if is_state and kind != "nf4":
            raise unsupported(base, f"has quant_type '{kind}'")

        base, is_map, _ = name.rpartition(".quant_map")
        if is_map and base not in with_state:
            raise unsupported(base, "has a quant_map but no quant_state")


def _state(state: mx.array) -> dict:
    if state.dtype != mx.uint8 or state.size > _LONGEST_STATE:
        raise ValueError(f"its quant_state must be at most {_LONGEST_STATE} bytes of JSON.")
    try:
        values = parse_json(np.array(state).tobytes().decode())
    except ValueError as error:
        raise ValueError(f"its quant_state is no JSON: {error}.") from None

    if not isinstance(values, dict):
        raise ValueError("its quant_state must be a mapping.")
    return values


def _weight(
    weight: mx.array | None,
    state: dict,
    absmax: mx.array | None,
    quant_map: mx.array | None,
    nested_absmax: mx.array | None,
    nested_quant_map: mx.array | None,
) -> NF4Weight:
    valid = {"quant_type": ("nf4",), "blocksize": BLOCK_SIZES, "dtype": _DTYPES}
    if nested_absmax is not None:
        valid |= {"nested_blocksize": (NESTED_BLOCK_SIZE,), "nested_dtype": ("float32",)}
    for key, values in valid.items():
        if state.get(key) not in values:
            raise ValueError(f"{key} must be one of {values} but is {state.get(key)!r}.")

    shape = state.get("shape")
    if not _is_matrix(shape):
        raise ValueError(f"shape must be [O, D] with even D but its quant_state says {shape!r}.")

    bytes_wanted = shape[0] * shape[1] // 2
    if weight is None or weight.nbytes != bytes_wanted:
        actual = f"its weight has {weight.nbytes}" if weight is not None else "there is no weight"
        raise ValueError(f"shape {shape} takes {bytes_wanted} bytes but {actual}.")

    _check_table("quant_map", quant_map, mx.array(LEVELS))

    offset = None
    if nested_absmax is not None:
        _check_table("nested_quant_map", nested_quant_map, dynamic_map())
        value = state.get("nested_offset")
        if not isinstance(value, (int, float)) or not abs(value) < _LARGEST_OFFSET:
            raise ValueError(f"nested_offset must be a finite number but is {value!r}.")
        offset = mx.array([value], dtype=mx.float32)

    codes = weight.flatten().view(mx.uint8).reshape(shape[0], shape[1] // 2)
    return NF4Weight(codes, absmax, nested_absmax, offset, state["blocksize"])


def _is_matrix(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) != 2:
        return False
    return all(type(n) is int and n > 0 for n in shape) and shape[1] % 2 == 0


def _check_table(part: str, table: mx.array | None, levels: mx.array) -> None:
    if table is None or table.shape != levels.shape:
        shape = "is missing" if table is None else f"has shape {list(table.shape)}"
        raise ValueError(f"{part} must have {levels.size} levels but {shape}.")
    if not mx.array_equal(table.astype(mx.float32), levels).item():
        raise ValueError(f"{part} must be the levels of NF4 as bitsandbytes has them but differs.")
