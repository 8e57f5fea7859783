"""The tensors and quantization states of a base in bitsandbytes' 4 bits."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.writer import quantize
from tests.fuzz.checkpoints import CheckpointKind
from tests.fuzz.kind import SUBJECT, Case
from tests.fuzz.subjects import write_base

FILE, STATE = "model.safetensors", ".quant_state.bitsandbytes__"


class BaseBnb(CheckpointKind):
    """A checkpoint as bitsandbytes writes it."""

    name = "base-bnb"
    words = (
        "nf4",
        "fp4",
        "blocksize",
        "nested_blocksize",
        "nested_offset",
        "float32",
        "absmax",
        "shape",
    )

    def make(self, folder: Path) -> None:
        """Quantize a base in the layout of bitsandbytes."""
        source = write_base(folder.with_name("dense"), mx.bfloat16)
        quantize(source, folder, QuantizeOptions(layout="bitsandbytes"))
        (folder / "quantization.json").unlink(missing_ok=True)
        shutil.rmtree(source)
        self.tensors = mx.load(str(folder / FILE))
        mx.eval(self.tensors)

    def mutate(self, case: Case) -> None:
        """Change a quant_state, the file of tensors, or quantization_config."""
        part = case.rng.choices(("state", "tensors", "config"), (4, 5, 2))[0]
        if part == "config":
            case.edit("config.json", case.mutator.json)
        elif part == "tensors":
            case.edit(FILE, case.mutator.safetensors)
        else:
            self._state(case)

    def _state(self, case: Case) -> None:
        name = case.rng.choice([name for name in self.tensors if STATE in name])
        case.mutator.note(name)
        state = json.loads(np.array(self.tensors[name]).tobytes())
        text = case.mutator.json(json.dumps(state).encode()) or b" "
        tensors = self.tensors | {name: mx.array(np.frombuffer(text, np.uint8))}
        case.write(FILE, b"")
        mx.save_safetensors(f"{SUBJECT}/{FILE}", tensors, {"format": "pt"})
