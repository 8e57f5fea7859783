"""The record that `packs quantize` leaves in a folder, and what it vouches for."""

import shutil
from pathlib import Path

from mlx_packs.bases.files import RECORD
from tests.fuzz.checkpoints import CheckpointKind
from tests.fuzz.kind import SUBJECT, Call, Case, command
from tests.fuzz.subjects import resealed, write_base
from tests.helpers.checkpoints import write_quantized

FILE = "model.safetensors"


class BaseRec(CheckpointKind):
    """A folder of `packs quantize` with its record."""

    name = "base-rec"
    words = ("files", "bytes", "sha256", "format", "quantization", FILE, "config.json")

    def make(self, folder: Path) -> None:
        """Quantize a base to NF4."""
        source = write_base(folder.with_name("dense"))
        write_quantized(folder, source, mode="nf4")
        shutil.rmtree(source)

    def mutate(self, case: Case) -> None:
        """Change the record, or files with their hashes in the record."""
        part = case.rng.choices((RECORD, FILE, "config.json", "place"), (5, 3, 2, 0.3))[0]
        if part == "place":
            case.replace(case.rng.choice((RECORD, FILE)))
        elif part == RECORD:
            case.edit(RECORD, case.mutator.json)
        else:
            case.edit(
                part, case.mutator.json if part == "config.json" else case.mutator.safetensors
            )
            data = Path(SUBJECT, part).read_bytes()
            case.write(RECORD, resealed(case.files[RECORD], {part: data}))

    def cheap(self) -> list[Call]:
        """Return `packs inspect` too."""
        return [
            *super().cheap(),
            command("inspect", SUBJECT),
            command("inspect", SUBJECT, "--json"),
        ]
