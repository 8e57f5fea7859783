"""The BLAS of CPUs: every bound product is proven, and what cannot be bound is left."""

import ctypes
import struct
import sys
from pathlib import Path

import pytest

from mlx_packs import runtime
from mlx_packs.cpu import blas
from mlx_packs.cpu.blas import ElfError, LoadedLibrary
from mlx_packs.ops import diagnostics

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX has Accelerate here")
NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
TAGS_AT, STRINGS_AT, SYMBOLS_AT, RELOCATIONS_AT, SLOTS_AT = 0, 0x100, 0x180, 0x280, 0x400


@pytest.fixture
def image():
    """A loaded library that calls three functions, and one of another name; and its memory."""
    memory = ctypes.create_string_buffer(0x500)
    base = ctypes.addressof(memory)
    names = ["", "malloc", *NAMES]
    strings = "\0".join(names).encode()
    tags = {2: 24 * 4, 5: base + STRINGS_AT, 6: base + SYMBOLS_AT, 23: base + RELOCATIONS_AT}
    for i, (tag, value) in enumerate(tags.items()):
        struct.pack_into("<QQ", memory, TAGS_AT + 16 * i, tag, value)
    memory[STRINGS_AT : STRINGS_AT + len(strings)] = strings
    for i, name in enumerate(names[1:], 1):
        struct.pack_into("<I", memory, SYMBOLS_AT + 24 * i, strings.index(name.encode()))
        entry = (SLOTS_AT + 8 * i, i << 32 | 7, 0)
        struct.pack_into("<QQq", memory, RELOCATIONS_AT + 24 * (i - 1), *entry)
    return LoadedLibrary(base, b"/x.so", base + TAGS_AT), memory


def test_slots_are_found_by_name(image):
    library, _ = image
    expected = {name: library.base + SLOTS_AT + 8 * (i + 2) for i, name in enumerate(NAMES)}
    assert blas.jump_slots(library, "x86_64", NAMES) == expected
    assert blas.jump_slots(library, "aarch64", NAMES) == {}  # whose relocations have another kind
    with pytest.raises(ElfError):
        blas.jump_slots(library, "ppc64le", NAMES)


@pytest.mark.parametrize("address", [0, STRINGS_AT])
def test_tables_that_are_not_in_the_library_are_an_error(image, address):
    library, memory = image
    struct.pack_into("<QQ", memory, TAGS_AT + 16, 5, address)
    with pytest.raises(ElfError):
        blas.jump_slots(library, "x86_64", NAMES)


def test_a_library_that_is_not_loaded_is_an_error():
    with pytest.raises(ElfError):
        blas.loaded_library("libother.so")


@pytest.fixture
def unbound(monkeypatch):
    """The entries of libmlx, as they were bound, after the test too; and the chosen BLAS."""
    slots = blas.gemm_slots()
    bound = {name: slot.value for name, slot in slots.items()}
    yield slots
    for name, slot in slots.items():
        slot.value = bound[name]


@linux
def test_each_entry_of_libmlx_points_to_the_blas(unbound):
    _, addresses, _ = next(blas._libraries())
    assert runtime.BLAS.bound
    assert {name: slot.value for name, slot in unbound.items()} == addresses
    assert set(addresses) == set(NAMES)


@linux
@pytest.mark.parametrize("wrong", NAMES)
def test_a_wrong_product_is_undone_for_its_function_alone(unbound, monkeypatch, wrong):
    """Each proof goes through the entry that it is for: with another in its place it fails."""
    before = {name: slot.value for name, slot in unbound.items()}
    library, addresses, threads = next(blas._libraries())
    address = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value  # writes no result
    faulty = (library, {**addresses, wrong: address}, threads)
    monkeypatch.setattr(blas, "_libraries", lambda: iter([faulty]))
    bound = blas.bind()
    assert {name: slot.value for name, slot in unbound.items()} == before
    assert bound.bound == (wrong != "cblas_sgemm")
    assert "wrong product" in bound.note and (wrong in bound.note or not bound.bound)


@linux
def test_the_next_library_replaces_one_that_computes_wrongly(unbound, monkeypatch, capsys):
    name, addresses, threads = next(blas._libraries())
    address = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    faulty = ("/x/libmkl_rt.so.3", dict.fromkeys(NAMES, address), 1)
    monkeypatch.setattr(blas, "_libraries", lambda: iter([faulty, (name, addresses, threads)]))
    assert blas.bind() == runtime.BLAS
    assert capsys.readouterr().err == (
        "mlx_packs: /x/libmkl_rt.so.3 gave a wrong product and is not used.\n"
    )


@linux
@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_mkl_comes_first_on_processors_of_intel_alone(vendor, tmp_path, monkeypatch):
    files = {"mkl": "/x/libmkl_rt.so.3", "scipy-openblas32": "/x/libscipy_openblas.so"}
    monkeypatch.setattr(blas, "_files_of", lambda package, _: [files[package]])
    monkeypatch.setattr(blas, "_CPUS", tmp_path / "cpuinfo")
    blas._CPUS.write_text(f"vendor_id\t: {vendor}\n")
    first, *others = [name for name, _ in blas._candidates() if name in files.values()]
    assert first == files["mkl" if vendor == "GenuineIntel" else "scipy-openblas32"]
    assert others == ([files["scipy-openblas32"]] if vendor == "GenuineIntel" else [])


def test_files_of_a_package_are_those_that_are_installed():
    assert blas._files_of("no-such-package", "*") == []
    (file,) = blas._files_of("numpy", "_multiarray_umath*.so")
    assert Path(file).is_file()


@linux
@pytest.mark.parametrize("permissions", ["r--p", "rw-p", ""])
def test_what_cannot_be_bound_safely_is_left_and_said(unbound, monkeypatch, permissions):
    before = {name: slot.value for name, slot in unbound.items()}
    monkeypatch.setattr(blas, "permissions_at", lambda _: permissions)
    bound = blas.bind()
    assert not bound.bound and "40 times" in bound.note
    assert {name: slot.value for name, slot in unbound.items()} == before


@pytest.mark.slow
def test_doctor_says_what_an_unbound_blas_costs(run, monkeypatch):
    monkeypatch.setattr(runtime, "BLAS", blas.Blas("as linked", False, f"{blas.SLOW}: unknown"))
    one = diagnostics.kernel_instances()[:1]
    monkeypatch.setattr(diagnostics, "kernel_instances", lambda: one)
    code, out, _ = run("doctor")
    assert code == 0 and "40 times: unknown" in out
