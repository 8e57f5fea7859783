"""The BLAS of CPUs: every bound product proven, every read bounded, no crash by any layout."""

import ctypes
import random
import struct
import sys

import pytest

from mlx_packs import runtime
from mlx_packs.cpu import blas
from mlx_packs.cpu.blas import ElfError, Segment
from mlx_packs.ops import diagnostics

linux = pytest.mark.skipif(sys.platform != "linux", reason="MLX has Accelerate here")
BASE = 0x7000_0000_0000
NAMES = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
TAGS_AT, STRINGS_AT, SYMBOLS_AT, RELOCATIONS_AT, SLOTS_AT = 0x100, 0x200, 0x280, 0x400, 0x600
SIZE = 0x800


def image(machine: str = "x86_64", relocated: bool = True) -> bytearray:
    """A loaded ELF64 library that calls three functions, and one of another name."""
    names = [b"", b"malloc", *(name.encode() for name in NAMES)]
    strings = b""
    places = []
    for name in names:
        places.append(len(strings))
        strings += name + b"\0"

    base = BASE if relocated else 0
    tags = {
        2: 24 * (len(names) - 1),
        5: base + STRINGS_AT,
        6: base + SYMBOLS_AT,
        10: len(strings),
        11: 24,
        20: 7,
        23: base + RELOCATIONS_AT,
        0: 0,
    }

    kind = {"x86_64": (62, 7), "aarch64": (183, 1026)}[machine]
    data = bytearray(SIZE)
    data[:16] = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    struct.pack_into("<HHIQQQIHHHHHH", data, 16, 3, kind[0], 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    struct.pack_into("<IIQQQQQQ", data, 64, 1, 5, 0, 0, 0, SIZE, SIZE, 4096)
    struct.pack_into("<IIQQQQQQ", data, 120, 2, 6, 0, TAGS_AT, 0, 0, 16 * len(tags), 8)

    for i, (tag, value) in enumerate(tags.items()):
        struct.pack_into("<QQ", data, TAGS_AT + 16 * i, tag, value)
    data[STRINGS_AT : STRINGS_AT + len(strings)] = strings
    for i, place in enumerate(places):
        struct.pack_into("<IBBHQQ", data, SYMBOLS_AT + 24 * i, place, 18, 0, 0, 0, 0)
    for i in range(1, len(names)):
        entry = (SLOTS_AT + 8 * i, i << 32 | kind[1], 0)
        struct.pack_into("<QQq", data, RELOCATIONS_AT + 24 * (i - 1), *entry)

    return data


def reader(data: bytearray, longest: int = SIZE):
    """Reads an image where it is loaded, and nothing beside it."""

    def read(address: int, size: int) -> bytes:
        at = address - BASE
        if size < 0 or at < 0 or at + size > len(data):
            raise ElfError("outside")
        assert size <= longest
        return bytes(data[at : at + size])

    return read


EXPECTED = {name: BASE + SLOTS_AT + 8 * (i + 2) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("relocated", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_slots_are_found_by_name(machine, relocated):
    data = image(machine, relocated)
    assert blas.jump_slots(reader(data), BASE, machine, NAMES) == EXPECTED
    with pytest.raises(ElfError):
        blas.jump_slots(reader(data), BASE, "ppc64le", NAMES)
    other = "aarch64" if machine == "x86_64" else "x86_64"
    with pytest.raises(ElfError):
        blas.jump_slots(reader(data), BASE, other, NAMES)


@pytest.mark.parametrize("size", [*range(0, SIZE, 61), SIZE - 1])
def test_an_image_that_ends_early_is_an_error_or_has_all_slots(size):
    # tables are whole before the slots, which only a writer touches
    try:
        assert blas.jump_slots(reader(image()[:size]), BASE, "x86_64", NAMES) == EXPECTED
    except ElfError:
        assert size < SLOTS_AT


def test_mutated_images_are_errors_or_name_slots_and_never_read_outside():
    """Bytes, words and whole tables: what is unknown falls back, and nothing else is raised."""
    draw = random.Random(18)
    words = (0, 1, 7, 24, 2**31, 2**32 - 1, 2**63, 2**64 - 1, BASE, BASE + SIZE, BASE - 8)
    errors = 0

    for _ in range(5_000):
        data = image(relocated=draw.random() < 0.5)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(SLOTS_AT)
            if draw.random() < 0.5:
                data[at] = draw.randrange(256)
            else:
                struct.pack_into("<Q", data, at & ~7, draw.choice(words))

        try:
            slots = blas.jump_slots(reader(data), BASE, "x86_64", NAMES)
            assert set(slots) <= set(NAMES)
            assert all(address % 8 == 0 for address in slots.values())
        except ElfError:
            errors += 1

    assert errors > 500


MAPS = """\
7f0000000000-7f0000100000 r--p 00000000 fd:01 77 /a b/lib/libmlx.so{deleted}
7f0000100000-7f0000200000 r-xp 00100000 fd:01 77 /a b/lib/libmlx.so{deleted}
7f0000200000-7f0000201000 rw-p 00200000 fd:01 77 /a b/lib/libmlx.so{deleted}
7f0000201000-7f0000300000 rw-p 00000000 00:00 0
7fff00000000-7fff00001000 r-xp 00000000 00:00 0 [vdso]
"""


@pytest.mark.parametrize("deleted", ["", " (deleted)"])
def test_a_library_that_an_upgrade_replaced_is_still_found(deleted):
    maps = blas.parse_maps(MAPS.format(deleted=deleted))
    library = blas.library_segments("libmlx.so", maps)
    assert [s.offset for s in library] == [0, 0x100000, 0x200000]
    assert {s.path for s in library} == {"/a b/lib/libmlx.so"}
    assert blas.covers(library, 0x7F0000200FF8, 8, "w")
    assert not blas.covers(library, 0x7F0000200FF9, 8, "w")
    assert not blas.covers(library, 0x7F0000100000, 8, "w")


def test_a_library_that_is_loaded_twice_or_not_at_all_is_an_error():
    twice = MAPS.format(deleted=" (deleted)") + MAPS.format(deleted="").replace(" 77 ", " 78 ")
    for text in (twice, ""):
        with pytest.raises(ElfError):
            blas.library_segments("libmlx.so", blas.parse_maps(text))


def test_memory_is_read_within_ranges_alone():
    buffer = ctypes.create_string_buffer(b"0123456789abcdef", 16)
    start = ctypes.addressof(buffer)
    file = ("fd:01", "1", "/x")
    read = blas.memory_reader(
        [
            Segment(start, start + 8, "r--p", 0, file),
            Segment(start + 8, start + 16, "rw-p", 8, file),
        ]
    )

    assert read(start + 6, 4) == b"6789"
    for address, size in ((start - 1, 2), (start + 15, 2), (start, 17), (0, 1), (start, -1)):
        with pytest.raises(ElfError):
            read(address, size)
    with pytest.raises(ElfError):
        blas.memory_reader([Segment(start, start + 8, "---p", 0, file)])(start, 1)


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
    _, addresses, _ = blas._open_blas()
    assert runtime.BLAS.bound
    assert {name: slot.value for name, slot in unbound.items()} == addresses
    assert set(addresses) == set(NAMES)


@linux
@pytest.mark.parametrize("wrong", NAMES)
def test_a_wrong_product_is_undone_for_its_function_alone(unbound, monkeypatch, wrong):
    """Each proof goes through the entry that it is for: with another in its place it fails."""
    before = {name: slot.value for name, slot in unbound.items()}
    library, addresses, threads = blas._open_blas()
    address = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value  # writes no result
    monkeypatch.setattr(
        blas, "_open_blas", lambda: (library, {**addresses, wrong: address}, threads)
    )
    bound = blas.bind()
    assert {name: slot.value for name, slot in unbound.items()} == before
    assert bound.bound == (wrong != "cblas_sgemm")
    assert "wrong product" in bound.note and (wrong in bound.note or not bound.bound)


@linux
@pytest.mark.parametrize("fault", ["unreadable", "read-only", "no code"])
def test_what_cannot_be_bound_safely_is_left_and_said(unbound, monkeypatch, fault):
    before = {name: slot.value for name, slot in unbound.items()}
    maps = blas.own_maps()
    if fault == "unreadable":
        maps = [s._replace(permissions="---p") if "libmlx" in s.path else s for s in maps]
    elif fault == "read-only":
        maps = [s._replace(permissions="r--p") if "libmlx" in s.path else s for s in maps]
    else:
        maps = [s for s in maps if "x" not in s.permissions or "libmlx" in s.path]
    monkeypatch.setattr(blas, "own_maps", lambda: maps)
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
