"""Mutants of bytes, JSON, YAML and safetensors, each drawn from a random generator.

A `Mutator` remembers in ``notes`` what it changed, so that a failure can say what was wrong.
"""

import copy
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

DEEP = 100_000  # beyond every recursion limit
LONG = 5_000  # digits, beyond what Python converts to an integer
CONTROLS = "\x00 \x07 \x1b]0;owned\x07 \x1b[31m \x7f \x9b31m \u202e \u2066 \u200f \ud800".split(" ")
# Of an integer where a format has eight bytes for one.
EDGES = (0, 1, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1)


class Raw(str):
    """Text that stands in a mutant as it is, whether it is JSON or not."""


NUMBERS = (0, 1, -1, 2, 3, 255, 0.5, -0.5, 1e-30, 5e-324, 1e308, 2**31, -(2**31), 2**32, 2**53)
NUMBERS += (2**63, -(2**63), 2**64, 10**30, float("nan"), float("inf"), -float("inf"))
TEXTS = ("", " ", "x", "0", "1e5", "NaN", "none", "tiny", "..", ".", "/", "~", "../../outside/evil")
TEXTS += ("/dev/zero", "/dev/stdin", "a" * 300, "b" * 100_000, "{{ 1 / 0 }}", "%s%n", "é\u0301")
TEXTS += tuple(f"x{control}y" for control in CONTROLS)
OTHERS = (None, True, False, [], {}, [[]], [None], [0] * 1000, {"": None}, {"a": {"b": []}})
RAWS = (Raw("9" * LONG), Raw("-" + "9" * LONG), Raw("1e999"), Raw("1" + "0" * 400), Raw("nul"))
RAWS += (Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP + "1" + "}" * DEEP), Raw("[" * DEEP))
RAWS += (Raw('"\\ud800"'), Raw('{"a":1,"a":[]}'), Raw('"\\u0000"'), Raw("[" * 900 + "]" * 900))


# Changes of a tree, and how often each is drawn.
_CHANGES = {"value": 8, "near": 6, "delete": 4, "rename": 3, "copy": 3, "grow": 1}
_DTYPES = "BOOL U8 I8 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64 C64 x".split()


def dumps(value: Any) -> str:
    """Return JSON, with `Raw` texts as they are."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(k)}:{dumps(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key or index) of a tree."""
    pairs, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, (dict, list)):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            pairs += [(node, key) for key in keys]
            todo += [node[key] for key in keys]
    return pairs


class Mutator:
    """Draws mutants; ``words`` are names that a mutant may put in the place of others."""

    def __init__(self, rng: random.Random, words: Sequence[str] = ()):
        self.rng, self.words, self.notes = rng, tuple(words), []

    def note(self, text: str) -> None:
        """Remember a change."""
        self.notes.append(text if len(text) < 120 else f"{text[:100]}… ({len(text)} characters)")

    def value(self) -> Any:
        """Return a value that is wrong in most places."""
        kinds = (NUMBERS, TEXTS, OTHERS, RAWS, self.words or TEXTS)
        return copy.deepcopy(self.rng.choice(self.rng.choices(kinds, (4, 4, 3, 1, 2))[0]))

    def near(self, value: Any) -> Any:
        """Return a value that is almost another one."""
        if isinstance(value, bool) or value is None:
            near = [True, False, None, 0, 1, "true"]
        elif isinstance(value, (int, float)):
            near = [value + 1, value - 1, -value, value * 2, value * 1000, value / 2, str(value)]
        elif isinstance(value, str):
            near = [self._near_text(value), *self.words[:1], [value], {value: value}]
        elif isinstance(value, list):
            near = [value[:-1], value * 2, [value], value[::-1], dict(enumerate(value))]
        else:
            near = [list(value), list(value.values()), [value], {**value, "more": 1}]
        return self.rng.choice(near)

    def _near_text(self, text: str) -> str:
        at = self.rng.randrange(len(text) + 1)
        middle = self.rng.choice([*CONTROLS, "x", ".", "/", "é", "0"])
        return self.rng.choice([text[:-1], text.upper(), text[:at] + middle + text[at:]])

    def tree(self, tree: Any) -> Any:
        """Return a tree with one to three changes: values, keys, types, depth, duplicates."""
        tree = copy.deepcopy(tree)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            all_places = places(tree)
            if not all_places or self.rng.random() < 0.01:
                self.note("the whole becomes another value")
                return self.value()
            self._change(*self.rng.choice(all_places), all_places)
        return tree

    def _change(self, holder: Any, key: Any, all_places: list) -> None:
        rng = self.rng
        value = holder[key]
        kind = rng.choices(list(_CHANGES), list(_CHANGES.values()))[0]

        if kind == "value":
            holder[key] = self.value()
        elif kind == "near":
            holder[key] = self.near(value)
        elif kind == "delete":
            del holder[key]
        elif kind == "rename" and isinstance(holder, dict):
            name = self.near(str(key)) if rng.random() < 0.5 else rng.choice(TEXTS + self.words)
            holder[name if isinstance(name, str) else "x"] = holder.pop(key)
        elif kind == "copy":
            other, name = rng.choice(all_places)
            with suppress(LookupError):  # an earlier change has removed it
                holder[key] = copy.deepcopy(other[name])
        else:
            kind = "grow"
            often = 300 if len(dumps(value)) < 1000 else 2
            holder[key] = [copy.deepcopy(value)] * rng.choice((2, often))

        shown = f": {holder[key]!r}" if kind in ("value", "near", "copy") else ""
        self.note(f"{kind} at {key!r}{shown}")

    def json(self, data: bytes) -> bytes:
        """Return a mutant of a JSON file: of its tree, or now and then of its bytes."""
        if self.rng.random() < 0.15:
            return self.bytes(data)
        text = dumps(self.tree(json.loads(data))).encode(errors="surrogatepass")
        if self.rng.random() < 0.03:
            self.note("a byte order mark")
            return b"\xef\xbb\xbf" + text
        return text

    def file(self, name: str, data: bytes) -> bytes:
        """Return a mutant of a file, by its format."""
        mutant = {".json": self.json, ".safetensors": self.safetensors}
        return mutant.get(PurePath(name).suffix, self.bytes)(data)

    def bytes(self, data: bytes) -> bytes:
        """Return a mutant of bytes: flips, cuts, inserts, splices, known bad values."""
        data = bytearray(data)
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            kind = self.rng.choice(_BYTE_CHANGES)
            at = self.rng.randrange(len(data) + 1)
            self._change_bytes(kind, data, at)
            self.note(f"bytes: {kind} at {at}")
        return bytes(data)

    def _change_bytes(self, kind: str, data: bytearray, at: int) -> None:
        rng = self.rng

        if kind == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "set":
            data[at : at + 1] = bytes([rng.choice(_BYTES)])
        elif kind == "cut the end":
            del data[at:]
        elif kind == "cut":
            del data[at : at + rng.choice((1, 2, 8, 100))]
        elif kind == "insert":
            data[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif kind == "insert known":
            data[at:at] = rng.choice(_KNOWN)
        elif kind == "splice":
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.choice((4, 40, 400))]
        elif kind == "overwrite":
            data[at : at + 8] = rng.choice(EDGES).to_bytes(8, "little")

    def safetensors(self, data: bytes) -> bytes:
        """Return a mutant of a safetensors file: of its header, its length, its numbers."""
        length = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        kind = self.rng.choices(
            ("tree", "tensor", "length", "numbers", "body", "bytes"), (4, 6, 1, 2, 2, 2)
        )[0]

        if kind == "bytes":
            return self.bytes(data)
        if kind == "length":
            length = self.rng.choice((*EDGES, length - 1, length + 1, length + len(body)))
            self.note(f"header of {length} bytes")
            return length.to_bytes(8, "little") + data[8:]
        if kind == "body":
            return data[: 8 + length] + self.bytes(body)
        if kind == "numbers":  # NaN, infinities, the largest or zeros
            fill = bytes.fromhex(self.rng.choice(("ffffffff", "0000807f", "ffff7f7f", "00000000")))
            count = self.rng.choice((1, 16, len(body) // 4))
            at = self.rng.randrange(max(1, len(body) // 4)) * 4
            self.note(f"{count} numbers at {at} are {fill.hex()}")
            filled = (body[:at] + fill * count)[: len(body)] + body[at + 4 * count :]
            return data[: 8 + length] + filled

        header = self.tree(header) if kind == "tree" else self._tensor(header)
        text = dumps(header).encode(errors="surrogatepass")
        return len(text).to_bytes(8, "little") + text + body

    def _tensor(self, header: dict) -> dict:
        """Change what a header says of one tensor, in ways that a reader may believe."""
        rng = self.rng
        header = copy.deepcopy(header)
        name = rng.choice([name for name in header if name != "__metadata__"])
        tensor, shape = header[name], header[name]["shape"]
        kind = rng.choice(("dtype", "shape", "size", "offsets", "drop", "name"))

        if kind == "dtype":
            tensor["dtype"] = rng.choice(_DTYPES)
        elif kind == "shape":
            tensor["shape"] = rng.choice([shape[::-1], shape[1:], [1, *shape], [], [0, *shape]])
        elif kind == "size" and shape:
            shape[rng.randrange(len(shape))] = rng.choice((*EDGES, -1, 0.5, shape[0] * 2, True))
        elif kind == "offsets":
            begin, end = tensor["data_offsets"]
            edge = rng.choice(EDGES)
            ways = [[end, begin], [begin, end + 4], [begin + 1, end + 1]]
            tensor["data_offsets"] = rng.choice([*ways, [0, edge], [edge, edge], [-4, end]])
        elif kind == "drop":
            del header[name]
        elif kind == "name":
            header[rng.choice([*TEXTS, name[:-1], f"{name}.x", *self.words])] = header.pop(name)

        self.note(f"tensor {name}: {kind} {header.get(name, '')}")
        return header


# What means something to readers of text, JSON and YAML.
_BYTES = b'\x00\t\n\x1b",:[\\{}\x7f\x9b\xff'
_KNOWN = (b"\x00", b"\xff\xfe", b"\x80", b"\xed\xa0\x80", b"\x1b[31m", b"\xe2\x80\xae", b"\r")
_KNOWN += (b"\n\n", b"[" * 2000, b"9" * LONG, b"NaN", b"\\ud800", b"../../outside/evil")
_KNOWN += (b"!!python/name:os", b"&a [*a]")
_BYTE_CHANGES = ("flip", "flip", "set", "set", "cut the end", "cut")
_BYTE_CHANGES += ("insert", "insert known", "insert known", "splice", "overwrite")
