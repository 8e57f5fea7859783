"""Bugs planted in a right Metal kernel, one at a time: each must be seen for its own reason."""

import mlx.core as mx
import pytest

from . import Checks, KernelFault, metal_kernel, why_not
from .samples import BOUNDS, METAL, N, expected, run

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

WRITTEN = "threadgroup_barrier(mem_flags::mem_threadgroup);  // parts written"
LAST = "y[row] = T(total(parts, SIMDGROUPS) * scale[0]);"
SUM = "sum = metal::simd_sum(sum);"
TOTAL = "inline float total"


def before_sum(text: str) -> tuple[str, str]:
    return SUM, f"{text} {SUM}"


def before_total(text: str) -> tuple[str, str]:
    """At file scope."""
    return TOTAL, f"{text}\n{TOTAL}"


def instead_of_written(old: str, new: str) -> tuple[str, str]:
    return WRITTEN, WRITTEN.replace(old, new)


# A thread that comes too early finds memory that nobody has written, or races with the writer.
EARLY = "(race|uninitialised)"

# name: (kind of the fault and a word of its message, the changes of the text)
BUGS = {
    "missing_barrier": (EARLY + ": .*parts", (WRITTEN, "")),
    "barrier_without_memory": (
        EARLY + ": .*parts",
        instead_of_written("mem_threadgroup", "mem_none"),
    ),
    "barrier_of_the_simdgroup_only": (
        EARLY + ": .*parts",
        instead_of_written("threadgroup_barrier", "simdgroup_barrier"),
    ),
    "all_lanes_write": ("race: .*parts", ("if (lane == 0) parts", "parts")),
    "groups_write_the_same_rows": ("race: .*threadgroup 1", (LAST, LAST.replace("[row]", "[r]"))),
    "barrier_in_half_the_lanes": ("divergence: .*barrier", (WRITTEN, f"if (lane < 16) {WRITTEN}")),
    "early_return": ("divergence: .*has ended", before_sum("if (thread_index > 40) return;")),
    "simd_sum_in_half_the_lanes": ("divergence: .*simd_sum", before_sum("if (lane < 16)")),
    "different_barriers": (
        "divergence: .*barrier",
        (WRITTEN, f"if (simd == 0) {WRITTEN}\n else threadgroup_barrier(mem_flags::mem_none);"),
    ),
    "missing_row_test": ("bounds: .*`x`", ("row < N", "true")),
    "wild_pointer": ("bounds: .*far from every array", ("x[k]", "x[k + 0x7fffffff]")),
    "threadgroup_array_one_short": (
        "bounds: .*outside an array",
        ("parts[SIMDGROUPS];", "parts[SIMDGROUPS - 1];"),
    ),
    "private_array_overrun_through_a_pointer": (
        "bounds: .*private array",
        before_sum(
            "float a[4]; thread float* p = a; p[3 + int(4.0f * scale[0])] = sum; sum = p[r];"
        ),
    ),
    "write_to_an_input": ("bounds: .*read only", (LAST, f"{{ ((device T*)x)[0] = T(1); {LAST} }}")),
    "wide_store_across_the_end": (
        "bounds: .*8 bytes at offset 16 of `y`",
        (LAST, f"{{ {LAST} if (row == N - 1) ((device ulong*)y)[2] = 0; }}"),
    ),
    "threadgroup_memory_not_written": (
        "uninitialised: .*parts",
        ("if (lane == 0) parts", "if (thread_index == 0) parts"),
    ),
    "output_never_written": ("unwritten: .*`y`", ("row < N", "row < N - 1")),
    "shuffle_from_lane_32": (
        "lane: .*lane 32",
        before_sum("sum += 0.0f * metal::simd_shuffle(sum, ushort(lane + 1));"),
    ),
    "misaligned_vector": (
        "alignment: .*aligned",
        before_sum("if (inside) sum += ((const device float4*)(x + 1))->x;"),
    ),
    "signed_overflow": (
        "undefined: .*overflow",
        before_sum("int big = 0x7fffffff - int(lane); sum += float(big + int(lane) + r);"),
    ),
    "too_much_threadgroup_memory": (
        "threadgroup memory: .*limit is 32768",
        ("parts[SIMDGROUPS];", "parts[SIMDGROUPS]; threadgroup float more[8192]; more[0] = 0.0f;"),
    ),
    # what the strict pass and the linters reject before anything runs
    "wrong_address_space": (
        "compile: .*no matching function",
        ("const threadgroup float* parts", "const device float* parts"),
    ),
    "pointer_without_address_space": ("lint: .*address space", ("const device T* x", "const T* x")),
    "cast_between_address_spaces": (
        "lint: .*address space to another",
        before_sum("sum += ((const device float*)parts)[0];"),
    ),
    "write_through_constant": ("compile: .*(read-only|const)", (LAST, f"scale[0] = 1.0f; {LAST}")),
    "double_literal": ("lint: .*double", ("* scale[0]", "* 1.0 * scale[0]")),
    "local_accumulator_not_set": (
        "compile: .*uninitialized",
        ("float sum = 0.0f;\n  for (uint", "float sum;\n  for (uint"),
    ),
    "recursion": (
        "lint: .*recursion",
        before_total("inline int down(int n) { return n > 0 ? down(n - 1) : n; }"),
        ("int count) {", "int count) { count += down(count) - down(count);"),
    ),
    "function_pointer": (
        "lint: .*function pointer",
        before_sum("auto f = &metal::simd_is_first; if (f()) sum += 0.0f;"),
    ),
    "new": ("compile: .*poisoned", before_sum("thread float* q = new float(1.0f);")),
    "standard_library": ("compile: .*std", before_sum("sum = std::max(sum, 0.0f);")),
    "unknown_function": (
        "lint: .*does not have",
        before_total("float secret(float);"),
        before_sum("sum += secret(sum);"),
    ),
    "global_variable": ("lint: .*outlives", before_total("int calls = 0;"), before_sum("calls++;")),
    "variable_length_array": (
        "compile: .*variable length",
        before_sum("float kept[r + 1]; kept[0] = sum;"),
    ),
    "threadgroup_array_in_a_helper": (
        "compile: .*address space",
        ("int count) {", "int count) { threadgroup float own[4]; own[0] = 0.0f;"),
    ),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernel_without_bugs_is_right(dtype):
    y, kernel = METAL.run(dtype)
    assert mx.abs(y.astype(mx.float32) - expected(dtype)).max() < BOUNDS[dtype]
    report = kernel.reports[-1]
    assert (report.groups, report.threads_per_group) == (3, 64)
    assert report.threadgroup_bytes == 16
    assert report.half_operations == report.bfloat_operations == 0
    assert report.roundings == (0 if dtype == mx.float32 else N)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_seen(bug):
    pattern, *changes = BUGS[bug]
    METAL.fault(*changes, match=pattern)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        [("float sum = 0.0f;\n  for (uint", "T sum = T(0);\n  for (uint")],
        [("float(x[k]) * float(w[k])", "float(x[k] * w[k])")],
    ],
    ids=["accumulator", "product"],
)
def test_arithmetic_in_16_bits_is_counted(changes, dtype):
    METAL.fault(*changes, match="precision: ", dtype=dtype)
    assert METAL.planted(*changes).run(dtype, Checks(low_precision=True))[0].shape == (N,)


def test_too_many_threads_are_refused():
    METAL.fault(match="launch: ", threadgroup=(2048, 1, 1))


def test_too_many_buffers_are_refused():
    names = [f"a{i}" for i in range(31)]
    kernel = metal_kernel("many", names, ["y"], "y[thread_position_in_grid.x] = a0[0];")
    sizes = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(4,)]}
    with pytest.raises(KernelFault, match="32 buffers"):
        kernel(inputs=[mx.zeros((9,))] * 31, output_dtypes=[mx.float32], **sizes)


def test_atomics_are_no_race_and_their_absence_is():
    body = "uint i = thread_position_in_grid.x; {}"
    atomic = "atomic_fetch_add_explicit(&y[a[i]], 1u, memory_order_relaxed);"
    of_four = {"shape": (4,), "dtype": mx.uint32, "init_value": 0}
    of_four |= {"grid": (64, 1, 1), "threadgroup": (32, 1, 1)}
    a = mx.arange(64) % 4
    assert run(body.format(atomic), a, **of_four, atomic_outputs=True).tolist() == [16] * 4
    with pytest.raises(KernelFault, match="race"):
        run(body.format("y[a[i]] += 1u;"), a, **of_four)


def test_result_that_depends_on_the_order_of_threads_is_seen():
    """Atomics alone make no order: who comes first takes the first place."""
    body = """
        threadgroup atomic_uint next;
        uint i = thread_position_in_grid.x;
        if (i == 0) atomic_store_explicit(&next, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[atomic_fetch_add_explicit(&next, 1u, memory_order_relaxed)] = a[i];
        """
    with pytest.raises(KernelFault, match="differs between the orders"):
        run(body, mx.arange(16), dtype=mx.int32)


def test_neighbours_exchange_through_memory_behind_a_barrier():
    """A lane reads what its neighbour in the simdgroup has written."""
    body = """
    threadgroup float parts[64];
    uint i = thread_position_in_grid.x;
    parts[i] = a[i];
    {}
    y[i] = parts[i ^ 1];
    """
    a = mx.arange(64).astype(mx.float32)
    right = body.format("simdgroup_barrier(mem_flags::mem_threadgroup);")
    assert run(right, a).tolist() == [i ^ 1 for i in range(64)]
    with pytest.raises(KernelFault, match=EARLY):
        run(body.format(""), a)


def test_matrix_multiply_in_half_the_lanes_is_divergence():
    body = """
    simdgroup_matrix<float, 8, 8> left, right, sum(0.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, a, 8);
    if (thread_index_in_simdgroup < LANES)
      simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, y, 8);
    """
    x = mx.random.normal((8, 8))
    one = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    assert mx.abs(run(body, x, **one, template=[("LANES", 32)]) - x @ x).max() < 1e-5
    with pytest.raises(KernelFault, match="divergence"):
        run(body, x, **one, template=[("LANES", 16)])
