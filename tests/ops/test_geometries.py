"""Every kernel instance that real models ask for compiles, within the limits of a launch."""

import itertools

import pytest

from mlx_packs.ops import grouped_lora_kernel, lora_qmv_kernel, multi_lora_kernel, nf4_kernel
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation
from tests.helpers.variants import nightly_except
from tests.ops.cases import DTYPES, quantized_weight

pytestmark = pytest.mark.slow

# hidden, FFN, query heads x 128, KV heads x 128
MODELS = {
    "qwen3_4b": (2560, 9728, 4096, 1024),
    "qwen3_0_6b": (1024, 3072, 2048, 1024),
    "qwen3_8b": (4096, 12288, 4096, 1024),
    "qwen3_14b": (5120, 17408, 5120, 1024),
    "llama3_8b": (4096, 14336, 4096, 1024),  # and Mistral 7B
}
RANKS = (1, 4, 8, 16, 32, 33, 64)
ROWS = (1, 8)


def groups(name: str) -> list[tuple[int, tuple[int, ...]]]:
    """Input and output widths of each projection group."""
    hidden, ffn, q, kv = MODELS[name]
    return [(hidden, (q, kv, kv)), (q, (hidden,)), (hidden, (ffn, ffn)), (ffn, (hidden,))]


def check_launches(built) -> None:
    """What the emulator saw of each launch; it rejects more than its own limits."""
    for kernel in built:
        for report in kernel.reports:
            assert report.threads_per_group <= 1024 and report.threadgroup_bytes <= 32768
            assert report.threadgroup_bytes <= 20480, "two groups must fit into a core"


@pytest.mark.parametrize("language", nightly_except(["metal", "cuda"], "metal"))
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((model, (16,)) for model in MODELS),
        ("qwen3_4b", (64,)),
        *nightly_except([("qwen3_4b", RANKS)]),
    ],
)
def test_grouped_lora_compiles_at_every_geometry_and_rank(name, ranks, language):
    factors = [(mx.float32, mx.float32), *itertools.product(DTYPES[1:], (mx.float32, None))]
    with emulation(language, compile_only=True) as built:
        cases = list(itertools.product(groups(name), ranks, factors, ROWS))
        for (depth, widths), rank, (dtype, of_factors), rows in cases:
            x, *y = (mx.zeros((rows, w), dtype) for w in (depth, *widths))
            a = [mx.zeros((depth, rank), of_factors or dtype) for _ in widths]
            b = [mx.zeros((rank, w), of_factors or dtype) for w in widths]
            grouped_lora_kernel.by_kernel(language, x, y, a, b, (1.0,) * len(widths))
        assert sum(len(kernel.reports) for kernel in built) == 2 * len(cases)
        check_launches(built)


@pytest.mark.parametrize("language", nightly_except(["metal", "cuda"], "metal"))
@pytest.mark.parametrize("name", MODELS)
def test_other_kernels_compile_at_every_geometry(name, language):
    with emulation(language, compile_only=True) as built:
        for depth, widths in groups(name):
            for dtype in DTYPES:
                for sequences, rows in ((1, 1), (64, 1), (4, 128)):
                    x = mx.zeros((sequences, rows, depth), dtype)
                    y = [mx.zeros((sequences, rows, w), dtype) for w in widths]
                    a = [mx.zeros((2, depth, 16)) for _ in widths]
                    b = [mx.zeros((2, 16, w)) for w in widths]
                    scales = [mx.ones((8,))] * len(widths)
                    pack = mx.zeros((max(8, sequences),), mx.int32)
                    multi_lora_kernel.by_kernel(language, x, y, a, b, scales, pack)

                for width in set(widths):
                    for double_quant in (False, True):
                        weight = quantized_weight(width, depth, double_quant)
                        nf4_kernel._dequantized(language, weight, dtype)
                        for rows in nf4_kernel.ROW_TILES:
                            nf4_kernel._matvec(language, weight, mx.zeros((rows, depth), dtype))

            heads = (128, 128, 0) if len(widths) == 3 else (0,) * len(widths)
            instance = lora_qmv_kernel.QmvProgram(
                mx.bfloat16, 64, 4, 1, (16,) * len(widths), heads, len(widths) == 2
            )
            for rows in ROWS:
                sized = instance._replace(row_tile=rows)
                sizes = lora_qmv_kernel.GroupSizes(depth, widths)
                check = lora_qmv_kernel.check_of(language, sized, rows, sizes)
                check.kernel(*check.inputs)

        names = " ".join(kernel.definition.name for kernel in built)
        for name in ("multi_lora", "nf4_dequantize", "nf4_matvec", "qmv"):
            assert name in names
        check_launches(built)
