"""Damage to files, and hashes of files that a test has changed."""

import json
import random
from pathlib import Path

from mlx_packs.reading import file_facts, sealed, without_seal


def renew_hashes(checkpoint: Path, state: dict | None = None) -> None:
    """Write the state of a checkpoint, or another one, with the hashes of its files as they are."""
    file = checkpoint / "state.json"
    if state is None:
        state = without_seal(json.loads(file.read_text()))
    facts = file_facts(checkpoint, ("adapters.safetensors", "optimizer.safetensors"))
    file.write_text(json.dumps(sealed({**state, "files": facts})))


def flip_bit(file: Path, bit: int) -> None:
    """Flip one bit of a file in place."""
    with file.open("r+b") as f:
        f.seek(bit // 8)
        (byte,) = f.read(1)
        f.seek(bit // 8)
        f.write(bytes([byte ^ 1 << bit % 8]))


def bits_to_flip(file: Path, count: int, rng: random.Random) -> list[int]:
    """Return bits of a file: of its first and last bytes, of a safetensors header, and at random."""
    size = 8 * file.stat().st_size
    chosen = [0, 63, 64, 8 * 200, size - 1]
    if file.suffix == ".safetensors":
        header = 8 * (8 + int.from_bytes(file.read_bytes()[:8], "little"))
        chosen += [header - 1, header, *(rng.randrange(64, header) for _ in range(count // 4))]
    chosen += [rng.randrange(size) for _ in range(count)]
    return [bit for bit in dict.fromkeys(chosen) if bit < size][:count]
