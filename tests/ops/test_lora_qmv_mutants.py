"""Edits of the text of kernels/lora_qmv that the self-check on a user's machine must find."""

import pytest

from mlx_packs.ops import _backend
from mlx_packs.ops import lora_qmv_kernel as op_kernel
from mlx_packs.ops._check import first_fault
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation
from tests.helpers.variants import slow_except

# Each is one edit of the text: what is wrong, to the text, what it becomes, and the case that sees it.
PLAIN, HEADS, GATED, MANY = (
    op_kernel.QmvProgram(mx.bfloat16, 64, 4, 1, (5, 0, 3), (0, 0, 0), False),
    op_kernel.QmvProgram(mx.bfloat16, 64, 4, 1, (5, 3), (64, 0), False),
    op_kernel.QmvProgram(mx.bfloat16, 64, 4, 1, (5, 3), (0, 0), True),
    op_kernel.QmvProgram(mx.bfloat16, 64, 4, 4, (5, 3), (0, 0), False),
)
QMV_LOOP = "int k = lane * EIGHTS * 8; k < depth; k += LANES * EIGHTS * 8"
DOWN_LOOP = "int k = lane * 8; k < depth; k += LANES * 8"
MUTANTS = {
    "every_second_turn": (QMV_LOOP, QMV_LOOP.replace("+= LANES", "+= 2 * LANES"), PLAIN),
    "no_tail_of_columns": (QMV_LOOP, QMV_LOOP.replace("k <", "k + LANES * EIGHTS * 8 <="), PLAIN),
    "scale_and_bias_swapped": (
        "(scale, part, multiply_add(bias, total",
        "(bias, part, multiply_add(scale, total",
        PLAIN,
    ),
    "scale_of_the_first_group": ("(depth / GROUP) + k / GROUP", "(depth / GROUP)", PLAIN),
    "second_word_is_the_first": ("word[1] = both.y", "word[1] = both.x", PLAIN),
    "outputs_past_the_end_stored": ("r < rows && output0 + o < outputs", "r < rows", PLAIN),
    "no_tail_of_columns_of_a": (DOWN_LOOP, DOWN_LOOP.replace("k <", "k + LANES * 8 <="), PLAIN),
    "h_of_other_rows": ("h[size_t(r) * RANKS + rank]", "h[rank + size_t(r)]", MANY),
    "b_by_columns": ("b[size_t(r) * outputs + column]", "b[size_t(column) * R + r]", PLAIN),
    "no_epsilon": (" + epsilon)", ")", HEADS),
    "sigmoid_of_the_negative": ("exponential(-gate)", "exponential(gate)", GATED),
    "up_from_the_ranks_of_gate": ("adapted<T, R1, R0, RANKS>", "adapted<T, R1, 0, RANKS>", GATED),
}


QUICK = ("every_second_turn", "scale_and_bias_swapped", "no_tail_of_columns", "no_epsilon")


@pytest.mark.parametrize("name", slow_except(MUTANTS, *QUICK))
def test_the_self_check_finds_a_mutant(name, monkeypatch):
    text, changed, instance = MUTANTS[name]
    intact = _backend.source("lora_qmv", "metal")
    assert intact.count(text) == 1
    with emulation("metal", orders=("forward",)):
        monkeypatch.setattr(_backend, "source", lambda *_: intact.replace(text, changed))
        try:
            fault = first_fault(op_kernel.checks("metal", instance))
        except Exception as error:  # of the emulator, as of a device
            fault = str(error)
    assert fault


@pytest.mark.slow
@pytest.mark.parametrize("instance", [PLAIN, HEADS, GATED, MANY])
def test_the_self_check_passes_the_kernel_that_mutants_are_of(instance):
    with emulation("metal", orders=("forward",)):
        assert first_fault(op_kernel.checks("metal", instance)) is None
