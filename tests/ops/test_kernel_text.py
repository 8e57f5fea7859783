"""The text of kernels: bugs planted in its loops are seen, arrays of a thread are registers."""

import runpy
import sys
from pathlib import Path

import pytest

from mlx_packs.ops import (
    _backend,
    grouped_lora_kernel,
    lora_qmv_kernel,
    multi_lora_kernel,
    nf4_kernel,
)
from mlx_packs.ops._check import first_fault
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation
from tests.helpers.variants import slow_except
from tests.metal_emulator import KernelFault
from tests.metal_emulator import kernel as emulated_kernels
from tests.metal_emulator.passes import compile_call, private_arrays
from tests.ops.cases import quantized_weight

ROOT = Path(__file__).parents[2]

# Bugs of the loop over the columns of x that no launch with one tile a group shows, and of `up`.
MUTANTS = {
    "every_second_tile_skipped": ("column0 += DEPTH", "column0 += 2 * DEPTH"),
    "column_of_x_from_the_chunk": ("row0, column0, index)", "row0, begin, index)"),
    "last_tile_as_wide_as_the_others": ("min(DEPTH, end - column0)", "min(DEPTH, depth)"),
    "first_part_alone": ("p < parts", "p < 1"),
    "second_of_a_tail_dropped": ("count > 1 ?", "count > 2 ?"),
}


def is_seen(check: list) -> bool:
    """Whether a check fails: by its numbers, or by a fault of the emulator."""
    try:
        return first_fault(check) is not None
    except KernelFault:
        return True


@pytest.mark.parametrize("mutant", slow_except(MUTANTS, "last_tile_as_wide_as_the_others"))
def test_self_checks_see_a_bug_of_a_loop(mutant, monkeypatch):
    right, wrong = MUTANTS[mutant]
    source = _backend.source

    def mutated(op: str, suffix: str) -> str:
        text = source(op, suffix)
        assert op != "grouped_lora" or text.count(right) == 1
        return text.replace(right, wrong)

    monkeypatch.setattr(_backend, "source", mutated)
    sizes = (mx.float32, mx.float32, (16, 16))
    with emulation("metal", orders=("forward",)):
        for rows4 in (grouped_lora_kernel.FEW_ROWS4, grouped_lora_kernel.MANY_ROWS4):
            instance = grouped_lora_kernel.GroupProgram(*sizes, (0, 1), rows4)
            assert is_seen(grouped_lora_kernel.checks("metal", instance))
        instance = multi_lora_kernel.BatchProgram(*sizes, grouped_lora_kernel.FEW_ROWS4)
        assert is_seen(multi_lora_kernel.checks("metal", instance))


@pytest.fixture
def arrays(monkeypatch):
    """Arrays of a thread that are left after optimization, by name and template of the kernel."""
    left: dict[tuple, list[str]] = {}

    def compiled(language, definition, call, checks):
        left[(definition.name, *call.template)] = private_arrays(definition, call)
        return compile_call(language, definition, call, checks)

    monkeypatch.setattr(emulated_kernels, "compile_call", compiled)
    with emulation("metal", compile_only=True):
        yield left


@pytest.mark.parametrize("rank", [1, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_arrays_of_lora_kernels_stay_in_registers(arrays, rank):
    widths = (4096, 1000)
    for rows in (1, 8):
        x, *y = (mx.zeros((rows, w), mx.bfloat16) for w in (2560, *widths))
        a, b = [mx.zeros((2560, rank))] * 2, [mx.zeros((rank, w)) for w in widths]
        grouped_lora_kernel.by_kernel("metal", x, y, a, b, (1.0, 1.0))
        stacked = [[v[None] for v in part] for part in ([x, *y], a, b)]
        scales, pack = [mx.ones((8,))] * 2, mx.zeros((8,), mx.int32)
        (x, *y), a, b = stacked
        multi_lora_kernel.by_kernel("metal", x, y, a, b, scales, pack)
    assert len(arrays) == 8 and not any(arrays.values()), arrays


def test_arrays_of_nf4_kernels_stay_in_registers(arrays):
    weight = quantized_weight(64, 2560, True)
    nf4_kernel._dequantized("metal", weight, mx.bfloat16)
    for rows in nf4_kernel.ROW_TILES:
        nf4_kernel._matvec("metal", weight, mx.zeros((rows, 2560), mx.bfloat16))
    assert len(arrays) == 1 + len(nf4_kernel.ROW_TILES) and not any(arrays.values()), arrays


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_arrays_of_lora_qmv_kernels_stay_in_registers(arrays, rows):
    for ranks, heads, gated in (((16, 5), (128, 0), False), ((16, 16), (0, 0), True)):
        instance = lora_qmv_kernel.QmvProgram(mx.bfloat16, 64, 4, rows, ranks, heads, gated)
        sizes = lora_qmv_kernel.GroupSizes(2560, (256, 256))
        check = lora_qmv_kernel.check_of("metal", instance, rows, sizes)
        check.kernel(*check.inputs)
    assert len(arrays) == 4 and not any(arrays.values()), arrays


def test_an_array_with_an_unknown_index_is_seen(arrays, monkeypatch):
    source = _backend.source
    monkeypatch.setattr(_backend, "source", lambda *of: source(*of).replace("UNROLL for", "for"))
    nf4_kernel._matvec("metal", quantized_weight(64, 2560, True), mx.zeros((1, 2560)))
    assert all(arrays.values())


def test_sources_for_the_compiler_of_apple_have_every_kernel_and_the_files_text(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with emulation("metal"):  # restores what the script changes
        runpy.run_path(str(ROOT / ".ci/metal_sources.py"))["main"](tmp_path)
    texts = [file.read_text() for file in tmp_path.iterdir()]
    assert all(t.startswith('#include "mlx/backend') and "[[host_name(" in t for t in texts)
    for file in ROOT.glob("kernels/*/*.metal"):
        assert any(file.read_text() in text for text in texts), file
