"""The launches of kernels and of plain MLX, forward, by which the rules of ops/ choose kernels.

`benchmarks.cost_tables` prints their expected times (`benchmarks.launch_costs`).
"""

from collections.abc import Sequence

from mlx_packs.chips import BANDWIDTH_REACHED
from mlx_packs.ops.grouped_lora import stacks
from mlx_packs.ops.grouped_lora_kernel import GroupProgram, GroupSizes, down_chunk, row_tile
from mlx_packs.ops.lora_qmv_kernel import OUTPUTS, QmvProgram
from mlx_packs.ops.multi_lora_kernel import BatchProgram, BatchSizes
from mlx_packs.ops.nf4 import NESTED_BLOCK_SIZE
from mlx_packs.ops.nf4_kernel import MATVEC_OUTPUTS
from mlx_packs.ops.nf4_kernel import row_tile as nf4_row_tile
from mlx_packs.ops.profile import tiles

from .launch_costs import CACHE_FACTOR, Launch, casts, level, product

Plans = tuple[Sequence[Launch], Sequence[Launch]]  # of plain MLX and of kernels
UNPACK_FLOPS = 6  # shift, mask, look up; each costs as much as a multiply-add
PLAIN_TILE = 64  # rows that share one read of a factor in MLX's gathered product; assumed


def grouped_lora(instance: GroupProgram, rows: int, sizes: GroupSizes) -> Plans:
    """Return launches of plain MLX and of the kernels, forward."""
    e = instance.dtype.size
    f = instance.factors.size
    n = rows
    d, widths = sizes
    total = sum(instance.ranks)
    adapted = [(r, o) for r, o in zip(instance.ranks, widths, strict=True) if r]

    of_products = [r for r, _ in adapted]
    steps = []
    if stacks(n, of_products):
        steps.append([Launch("copy A into the stack", 2 * f * d * r) for r in of_products])
        of_products = [total]
    if f != e:
        steps.append([Launch("cast A", (e + f) * d * r) for r in of_products])
    steps.append([product("x A", e, n, d, r) for r in of_products])
    if f != e:
        steps[0] += [Launch("cast B", (e + f) * r * o) for r, o in adapted]
    steps.append(
        [
            Launch("y + h B", e * (2 * n * o + n * r + r * o), 2 * n * r * o, matmul=True)
            for r, o in adapted
        ]
    )
    plain = [launch for step in steps for launch in level(step)]

    row_tiles = tiles(n, 4 * row_tile(n))
    computed = row_tiles * 4 * row_tile(n)  # rows, with those of no use in a tile of four
    parts = tiles(d, down_chunk(row_tiles, d))

    hidden = 4 * parts * n * total
    moved = e * n * d + f * d * total + hidden
    down = Launch("down", moved, 2 * computed * d * total, f * row_tiles * d * total)

    area = sum(r * o for r, o in adapted)
    moved = 2 * e * n * sum(widths) + f * area + hidden
    return plain, [down, Launch("up", moved, 2 * computed * area, f * row_tiles * area)]


def lora_qmv(instance: QmvProgram, rows: int, sizes: GroupSizes) -> Plans:
    """Return launches of plain MLX with factors in the same dtype, and of the kernels.

    The weights are left out: both read them once, and that takes most of the time. Our kernel reads
    x from a cache for every four outputs; what of that takes longer than the weights counts.
    """
    e = instance.dtype.size
    n = rows
    d = sizes.inputs
    total = sum(instance.ranks)

    each = list(zip(instance.ranks, instance.heads, sizes.widths, strict=True))
    plain = level(
        [*(Launch("x W", e * n * (d + o)) for *_, o in each), product("x A", e, n, d, total)]
    )
    adapted = [(r, o) for r, _, o in each if r]
    plain += level([Launch("y + h B", e * (2 * n * o + n * r + r * o)) for r, o in adapted])
    plain += level([Launch("norm", 2 * e * n * o) for _, head, o in each if head])

    outputs = e * n * sum(sizes.widths)
    if instance.gated:
        plain += [Launch("SwiGLU", 1.5 * outputs)]
        outputs /= 2

    between = 4 * n * (total + sum(sizes.widths))  # y and h in float32
    factors = e * sum(r * o for r, o in adapted)
    again = e * n * d * tiles(sum(sizes.widths), OUTPUTS) * BANDWIDTH_REACHED / CACHE_FACTOR
    stored = d * sum(sizes.widths) * (instance.bits / 8 + 2 * e / instance.group_size)
    late = max(0.0, again - stored)

    kernel = [
        Launch("product", e * d * (n + total) + between + late),
        Launch("up", between + factors + outputs),
    ]
    return plain, kernel


def multi_lora(instance: BatchProgram, rows: int, sizes: BatchSizes) -> Plans:
    """Return launches of plain MLX and of the kernels, forward; every sequence has a pack.

    ``scales`` and ``pack`` are taken to need no copy.
    """
    sequences, d, widths, packs = sizes
    ranks = instance.ranks
    e = instance.dtype.size
    f = instance.factors.size
    total = sum(ranks)
    n = sequences * rows
    used = min(sequences, packs)
    pairs = list(zip(ranks, widths, strict=True))
    reads = sequences * tiles(rows, PLAIN_TILE)

    def gathered(what: str, depth: int, columns: int) -> Launch:
        area = depth * columns
        moved = f * (n * (depth + columns) + used * area)
        return Launch(what, moved, 2 * n * area, f * reads * area, matmul=True)

    half = e if f == 4 else 4  # with factors as narrow as x nothing is cast
    first = [Launch("index of packs: max", 16 * sequences), *casts("cast x", half, [n * d])]
    index = [Launch("index of packs: equal", 16 * sequences)]
    index += [Launch("scales of packs", 12 * sequences)] * len(pairs)

    steps = [
        first,
        [Launch("index of packs: min", 16 * sequences)],
        [gathered("x A", d, r) for r in ranks] + index,
        [Launch("scale it", 2 * f * n * r) for r in ranks],
        [gathered("h B", r, o) for r, o in pairs],
        casts("cast delta", half, [n * o for o in widths]),
        [Launch("add", 3 * e * n * o) for o in widths],
        [Launch("keep rows without a pack", 3 * e * n * o) for o in widths],
    ]

    area = sum(r * o for r, o in pairs)
    row_tiles = sequences * tiles(rows, 4 * row_tile(rows))
    computed = row_tiles * 4 * row_tile(rows)  # rows, with those of no use in a tile of four
    hidden = 4 * tiles(d, down_chunk(row_tiles, d)) * n * total

    moved = e * n * d + f * used * d * total + hidden
    down = Launch("down", moved, 2 * computed * d * total, f * row_tiles * d * total)
    moved = 2 * e * n * sum(widths) + f * used * area + hidden
    up = Launch("up", moved, 2 * computed * area, f * row_tiles * area)
    return [launch for step in steps for launch in level(step)], [down, up]


def nf4_dequantize(
    itemsize: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> Plans:
    """Return launches that dequantize the weight: of plain MLX, and the kernel."""
    n = shape[0] * shape[1]
    blocks = tiles(n, block_size)

    plain = []
    if double_quant:
        plain += [
            Launch("look up absmax", 5 * blocks),
            Launch("times nested absmax", 8 * blocks),
            Launch("add offset", 8 * blocks),
        ]

    plain += [Launch("look up levels", 4.5 * n), Launch("times absmax", 8 * n + 4 * blocks)]
    plain += casts("cast", itemsize, [n])
    stored = _quantized_bytes(n, block_size, double_quant)
    return plain, [Launch("dequantize", stored + itemsize * n, (UNPACK_FLOPS + 2) * n)]


def nf4_matvec(
    itemsize: int, rows: int, shape: tuple[int, int], block_size: int, double_quant: bool
) -> Plans:
    """Return launches of a product with few rows: by a dense weight, and by the matvec kernel."""
    outputs, depth = shape
    n = outputs * depth
    dense = nf4_dequantize(itemsize, shape, block_size, double_quant)[1]
    dense += [product("MLX's product", itemsize, rows, depth, outputs)]

    tile = nf4_row_tile(rows)
    row_tiles = tiles(rows, tile)
    stored = _quantized_bytes(n, block_size, double_quant)
    x = itemsize * rows * depth
    flops = row_tiles * (UNPACK_FLOPS + 2 * tile) * n
    again = row_tiles * stored + tiles(outputs, MATVEC_OUTPUTS) * x
    return dense, [Launch("matvec", stored + x + itemsize * rows * outputs, flops, again)]


def _quantized_bytes(n: int, block_size: int, double_quant: bool) -> float:
    blocks = tiles(n, block_size)
    absmax = blocks + 4 * tiles(blocks, NESTED_BLOCK_SIZE) if double_quant else 4 * blocks
    return n / 2 + absmax
