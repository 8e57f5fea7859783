"""The tensors of checkpoints, and what changes them."""

import json
from collections.abc import Callable
from pathlib import Path

from mlx_packs.runtime import mx


def set_keys(file: Path, **values) -> None:
    """Set keys of a JSON file; None takes one out."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    content = {k: v for k, v in (content | values).items() if v is not None}
    file.write_text(json.dumps(content))


def change_tensors(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    """Change the tensors of a checkpoint of one file in place."""
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    change(tensors)
    mx.save_safetensors(file, tensors, {"format": "mlx"})


def tensors_of(folder: Path) -> dict[str, mx.array]:
    """Load the tensors of a checkpoint of any number of files."""
    files = folder.glob("model*.safetensors")
    return {name: tensor for file in files for name, tensor in mx.load(str(file)).items()}


def overwrite(file: Path, at: int, data: bytes) -> None:
    """Write bytes over those of a file from a place on."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)
