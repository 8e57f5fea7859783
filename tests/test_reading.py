"""Readers of files that somebody else wrote: one line for what is wrong, in time and memory."""

import json
import os
import socket
from pathlib import Path

import pytest

from mlx_packs.errors import PackError, library_errors
from mlx_packs.reading import (
    HEADER_BYTES,
    YAML_BYTES,
    json_objects,
    open_regular,
    parse_json,
    read_header,
    read_json,
    read_text,
    read_yaml,
    tail,
)
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises

DEEP = "[" * 100_000 + "]" * 100_000


def write_safetensors(file: Path, header: object, data: bytes = b"") -> Path:
    """Write a safetensors file with any header: a value, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def tensor(dtype: str = "F32", shape: tuple = (2,), begin: int = 0, end: int = 8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def error_of(reader, file: Path) -> str:
    """The message of the error that a reader raises about a file."""
    try:
        read = reader(file)
    except PackError as error:
        check(error, "unreadable", None, str(file))
        return error.message
    pytest.fail(f"{file.read_bytes()[:99]} was read as {read!r:.99}")


def nines(form: str) -> str:
    """Lines of YAML that each have the one before nine times: 9 ** 6 values."""
    return "".join(
        f"{name}: &{name} {form % ', '.join([f'*{before}'] * 9)}\n"
        for before, name in zip("abcdef", "bcdefg", strict=True)
    )


def test_a_pipe_a_device_a_socket_a_folder_are_not_opened(here):  # a socket's path is short
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name in ("pipe", "folder", "link", "socket", "/dev/zero"):
            for reader in (read_json, read_yaml, read_text, open_regular, read_header):
                with raises("unreadable", None, name):
                    reader(Path(name))


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    regular, pipe = tmp_path / "file", tmp_path / "pipe"
    regular.write_text("{}")
    os.mkfifo(pipe)
    facts = os.stat(regular)
    monkeypatch.setattr(os, "stat", lambda _: facts)
    with raises("unreadable", None, str(pipe), "pipe"):
        open_regular(pipe)


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    file = tmp_path / "c.yaml"
    with file.open("wb") as f:
        f.truncate(YAML_BYTES + 1)
    with raises("unreadable", None, str(file), f"{YAML_BYTES:,}"):
        read_yaml(file)
    with file.open("wb") as f:
        f.truncate(1 << 40)  # a sparse file
    with raises("unreadable", None, str(file)):
        read_json(file)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (DEEP, ["deep"]),
        ('{"a":' * 101 + "1" + "}" * 101, ["deep"]),
        ("[" + "1" * 5000 + "]", ["5,000 digits"]),
        ("[" + "[]," * 2_000_001 + "[]]", ["lists"]),
        ('["a\\ud800"]', ["\\ud800"]),
        ('{"\\udfff": 1}', ["\\udfff"]),
        ('{"a": }', ["JSON"]),
        ("", ["JSON"]),
    ],
)
def test_json_that_no_program_can_use_is_one_line(tmp_path, text, names):
    file = tmp_path / "config.json"
    file.write_text(text)
    with raises("unreadable", None, str(file), *names) as caught:
        read_json(file, object)
    assert len(caught.value.message) < 300


def test_json_at_its_limits_is_read():
    value = parse_json('{"a":' * 100 + "9" * 100 + "}" * 100)
    for _ in range(100):
        value = value["a"]
    assert value == int("9" * 100)
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert parse_json("[" + "[]," * 200 + "[]]") == [[]] * 201


def test_text_that_is_not_utf8_names_the_byte(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with raises("unreadable", None, "a.json", "UTF-8", "7"):
        read_json(tmp_path / "a.json")


UNUSABLE_YAML = (
    DEEP,
    "a: " + "9" * 5000,
    "a: 0x" + "f" * 5000,
    "a: !!timestamp never",
    "a: !!bool perhaps",
    "a: !!int ''",
    "a: 2001-99-99",
    "a: &a [*a]",
    "a: &a {<<: *a}",
    "a: *b",
    'a: "\\ud800"',
    "{[a]: 1}",
    "a: \x00",
    "a: 1\n---\nb: 2",
    "!!python/object/apply:os.system [true]",
    "a: &a [1,2,3,4,5,6,7,8,9]\n" + nines("[%s]"),
    "a: &a {k: 1}\n" + nines("{<<: [%s]}"),
)


def test_yaml_that_no_program_can_use_is_one_line(tmp_path):
    for number, text in enumerate(UNUSABLE_YAML):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        message = error_of(read_yaml, file)
        assert "\n" not in message and len(message) < 600, text


def test_yaml_with_aliases_is_read(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &a [q_proj, 1e-5]\nb: *a\nc: {<<: {d: 1}}\n")
    modules = ["q_proj", 1e-5]
    assert read_yaml(tmp_path / "c.yaml") == {"a": modules, "b": modules, "c": {"d": 1}}


CONTRADICTORY_HEADERS = (
    DEEP.encode(),
    b"\xff",
    [],
    {"a": []},
    {"a": {"dtype": "F32"}},
    {"a": tensor("F31")},
    {"a": tensor("F32", (3,))},
    {"a": tensor("F32", (-2, -1))},
    {"a": tensor("F32", (2**62, 4))},
    {"a": tensor("F32", (2.0,))},
    {"a": tensor("F32", ("2",))},
    {"a": tensor("F32", (True, 2))},
    {"a": tensor("F32", (10**90,) * 31)},
    {"a": tensor("F32", (1,) * 40 + (2,))},
    {"a": tensor("F32", (2,), 8, 0)},
    {"a": tensor("F32", (2,), -8, 0)},
    {"a": tensor("F32", (2,), 4, 12)},
    {"a": tensor(), "b": tensor("F32", (2,), 4, 12)},
    {"a": tensor(), "b": tensor("F32", (0,), 4, 4)},
    {"a": tensor(), "__metadata__": {"format": 1}},
    {"a": tensor(), "__metadata__": [1]},
    {},
)


def test_a_header_that_contradicts_itself_or_the_file_is_damage(tmp_path):
    for number, header in enumerate(CONTRADICTORY_HEADERS):
        file = write_safetensors(tmp_path / f"{number}.safetensors", header, bytes(8))
        assert len(error_of(read_header, file)) < 400, header


def test_a_header_is_read_with_its_offset(tmp_path):
    header = {
        "b": tensor("F4", (2, 3), 8, 11),
        "a": tensor(),
        "empty": tensor("F32", (0, 9), 8, 8),
        "__metadata__": {"format": "mlx"},
    }

    file = write_safetensors(tmp_path / "model.safetensors", header, bytes(11))
    names, start = read_header(file)
    assert set(names) == {"a", "b", "empty"} and start == file.stat().st_size - 11

    mx.save_safetensors(str(file), {"a": mx.zeros((2, 3)), "b": mx.zeros((0,)), "c": mx.array(1)})
    assert {name: t["shape"] for name, t in read_header(file)[0].items()} == {
        "a": [2, 3],
        "b": [0],
        "c": [],
    }


def test_a_large_header_that_is_declared_is_not_read(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as f:
        f.write((4 << 30).to_bytes(8, "little"))
        f.truncate(5 << 30)
    with raises("unreadable", None, str(file), f"{HEADER_BYTES:,}"):
        read_header(file)
    file.write_bytes((300 << 30).to_bytes(8, "little") + b"{}")
    with raises("unreadable", None, str(file)):
        read_header(file)


class PanicException(BaseException):  # as of a library in Rust
    pass


@pytest.mark.parametrize("error", [ValueError("a\n b."), RecursionError(), PanicException("a b")])
def test_what_a_library_raises_is_one_line(error):
    with raises("unreadable", None, "file: ") as caught:
        with library_errors(lambda reason: PackError(f"file: {reason}.", "unreadable")):
            exec("raise error", {"__name__": "a_library", "error": error})
    assert "\n" not in caught.value.message and not caught.value.message.endswith("..")


def test_a_defect_of_ours_keeps_its_traceback():
    for defect in (AttributeError, KeyError, AssertionError, KeyboardInterrupt):
        with pytest.raises(defect):
            with library_errors(lambda reason: PackError(reason)):
                exec("raise error", {"__name__": "mlx_packs.bases.loading", "error": defect()})


def test_a_tail_leaves_an_incomplete_line(tmp_path):
    file = tmp_path / "lines"
    assert tail(file).lines == []
    file.write_bytes(b"one\ntw")
    first = tail(file)
    assert (first.lines, first.end, first.is_whole) == ([b"one"], 4, True)

    file.write_bytes(file.read_bytes() + b"o\nthree\n")
    second = tail(file, first.file, first.end)
    assert (second.lines, second.end, second.is_whole) == ([b"two", b"three"], 14, False)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_tail_reads_a_replaced_or_cut_file_anew(tmp_path, is_replaced):
    file = tmp_path / "lines"
    file.write_bytes(b"one\ntwo\n")
    before = tail(file)
    new = file
    if is_replaced:
        new = tmp_path / "new"
    new.write_bytes(b"1\n" if new is file else b"1\n" * 9)
    new.replace(file)
    after = tail(file, before.file, before.end)
    assert (set(after.lines), after.is_whole) == ({b"1"}, True)


def test_a_tail_is_bounded(tmp_path):
    file = tmp_path / "lines"
    file.write_bytes(b"".join(b"%d\n" % n for n in range(1000)))
    last = tail(file, most=11)
    assert (last.lines, last.is_whole) == ([b"998", b"999"], True)

    file.write_bytes(b"x" * (2 << 20))  # a line that never ends is not read again and again
    assert (tail(file).lines, tail(file).end) == ([], 2 << 20)


def test_objects_of_lines_leave_out_all_else():
    lines = [b'{"a": 1}', b"[1]", b"7", b"{", b'{"b": "\xff"}', b"[" * 10_000]
    assert list(json_objects(lines)) == [{"a": 1}, {"b": "\ufffd"}]
