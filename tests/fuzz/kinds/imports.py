"""Adapters of other tools, as PEFT, mlx-lm and `packs export` write them."""

import json
from pathlib import Path

from mlx_packs.convert.interop import SIDECAR, export_pack
from tests.fuzz.kind import SUBJECT, Call, Case, Kind, command
from tests.fuzz.subjects import write_base, write_pack_on

TENSORS = {"peft": "adapter_model.safetensors", "mlx-lm": "adapters.safetensors"}
CONFIG = "adapter_config.json"
MORE = {
    "use_dora": True,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "modules_to_save": ["lm_head"],
    "layers_to_transform": [0],
    "target_modules": "all-linear",
    "fan_in_fan_out": True,
    "bias": "lora_only",
    "fine_tune_type": "dora",
    "num_layers": -1,
    "trainable_token_indices": [1],
}


class ImportKind(Kind):
    """Folders of adapters; one of them is imported."""

    name = "import"
    words = (
        *MORE,
        "peft_type",
        "LORA",
        "lora_parameters",
        "keys",
        "scale",
        "rank",
        "r",
        "lora_alpha",
    )

    def make(self, folder: Path) -> None:
        """Export a pack to both formats."""
        pack = write_pack_on(write_base(folder.with_name("base")), folder.with_name("pack"))
        folder.mkdir()
        for name in TENSORS:
            export_pack(pack, name, folder / name)

    def mutate(self, case: Case) -> None:
        """Change the config, the tensors or the sidecar of one of them."""
        rng = case.rng
        self.format = rng.choice(list(TENSORS))
        if rng.random() < 0.6:  # else what was exported here is restored from the sidecar
            case.write(f"{self.format}/{SIDECAR}", b"")
            Path(SUBJECT, self.format, SIDECAR).unlink()
        name = rng.choices((CONFIG, TENSORS[self.format], SIDECAR), (4, 4, 2))[0]
        file = f"{self.format}/{name}"
        if rng.random() < 0.03:
            case.replace(file)
        elif name == CONFIG:
            config = json.loads(case.files[file])
            for key in rng.sample(list(MORE), rng.choice((0, 1, 2))):
                config[key] = MORE[key]
            case.mutator.note(file)
            case.write(file, case.mutator.json(json.dumps(config).encode()))
        else:
            case.edit(file, case.mutator.json if name == SIDECAR else case.mutator.safetensors)

    format = "peft"

    def cheap(self) -> list[Call]:
        """Return importing the mutated one."""
        return [command("import", f"{SUBJECT}/{self.format}", "--model", "base", "--out", "out/p")]

    def whole(self) -> list[Call]:
        """Return importing it by the base that it names."""
        return []
