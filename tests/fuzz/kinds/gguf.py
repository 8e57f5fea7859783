"""A base in a GGUF file: its header, its metadata, its tensors."""

from gguf import GGUFReader

from mlx_packs import load_base
from mlx_packs.bases.loading import lazy_base
from tests.fuzz.kind import SUBJECT, Case, Kind, command, library
from tests.fuzz.mutate import EDGES
from tests.helpers.gguf_file import write_tiny

FILE = "m.gguf"
MODEL = f"{SUBJECT}/{FILE}"
PLAN = ("plan", "--model", MODEL, "--memory", "1", "--batch-size", "1")
GENERATE = ("generate", "--model", MODEL, "--prompt", "a", "--max-tokens", "1", "--raw")


class GgufKind(Kind):
    """A file of llama.cpp with tensors of four types, a byte-level tokenizer and a template."""

    name = "gguf"

    def make(self, folder):
        """Write a tiny file, load it, and remember where values of keys and tensors are."""
        folder.mkdir()
        file = folder / FILE
        write_tiny(file, kinds={"token_embd": "Q8_0", "blk.1.ffn_up": "Q5_0"})
        load_base(file)  # imports what calls need
        reader = GGUFReader(file)
        fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        fields += [tensor.field for tensor in reader.tensors]
        self.values = {f.name: int(f.offset) + 8 + len(f.name.encode()) for f in fields}
        self.header_bytes = int(min(tensor.data_offset for tensor in reader.tensors))

    def mutate(self, case):
        """Change a value, bytes of the header or of tensors, or what the file is."""
        kind = case.rng.choices(("value", "header", "tensors", "place"), (60, 25, 12, 3))[0]
        if kind == "place":
            return case.replace(FILE)
        data = case.files[FILE]
        if kind == "value":
            return case.write(FILE, self._changed_value(case, data))
        parts = {"header": data[: self.header_bytes], "tensors": data[self.header_bytes :]}
        case.mutator.note(kind)
        parts[kind] = case.mutator.bytes(parts[kind])
        return case.write(FILE, b"".join(parts.values()))

    def _changed_value(self, case: Case, data: bytes) -> bytes:
        """Change the type, length, shape or number that follows the name of a key or a tensor."""
        rng, changed = case.rng, bytearray(data)
        name = rng.choice(list(self.values))
        at = self.values[name] + rng.choice((0, 4, 4, 8, 12, 16, 20, 24, 28))
        width = rng.choice((1, 4, 4, 8))
        old = int.from_bytes(changed[at : at + width], "little")
        new = rng.choice((*EDGES, old + 1, old * 2, old // 2, rng.randrange(40)))
        changed[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
        case.mutator.note(f"{name}: {width} bytes at {at} are {new}")
        return bytes(changed)

    def cheap(self):
        return [command(*PLAN), library(lambda: lazy_base(MODEL), "lazy_base")]

    def whole(self):
        return [command(*GENERATE)]
