"""The tensors of a base in MLX's 4 bits."""

import shutil
from pathlib import Path

from tests.fuzz.checkpoints import CheckpointKind
from tests.fuzz.kind import Case
from tests.fuzz.subjects import write_base
from tests.helpers.checkpoints import write_quantized


class BaseSt(CheckpointKind):
    """A quantized checkpoint without the record of `packs quantize`."""

    name = "base-st"
    words = ("quantization", "bits", "group_size", "mode", "mxfp4", "nf4", "scales", "biases")

    def make(self, folder: Path) -> None:
        """Quantize a base."""
        source = write_base(folder.with_name("dense"))
        write_quantized(folder, source)
        (folder / "quantization.json").unlink()
        shutil.rmtree(source)

    def mutate(self, case: Case) -> None:
        """Change the tensors, or what config.json says of their quantization."""
        name = case.rng.choices(("model.safetensors", "config.json"), (4, 1))[0]
        case.edit(name, case.mutator.json if name == "config.json" else case.mutator.safetensors)
