"""Adapters of other tools, as PEFT, mlx-lm and `packs export` write them."""

from pathlib import Path

from mlx_packs.convert.interop import SIDECAR, export_pack
from tests.fuzz.kind import SUBJECT, Kind, command
from tests.fuzz.subjects import write_base, write_pack_on

TENSORS = {"peft": "adapter_model.safetensors", "mlx-lm": "adapters.safetensors"}
CONFIG = "adapter_config.json"
MORE = {
    "use_dora": True,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 4},
    "modules_to_save": ["lm_head"],
    "target_modules": "all-linear",
    "bias": "lora_only",
    "fine_tune_type": "dora",
    "num_layers": -1,
}


class ImportKind(Kind):
    """Folders of adapters; one of them is imported."""

    name = "import"
    words = (*MORE, *"peft_type LORA lora_parameters keys scale rank r lora_alpha".split())
    format = "peft"

    def make(self, folder):
        pack = write_pack_on(write_base(folder.with_name("base")), folder.with_name("pack"))
        folder.mkdir()
        for name in TENSORS:
            export_pack(pack, name, folder / name)

    def mutate(self, case):
        """Change the config, the tensors or the sidecar of one of them."""
        self.format = case.rng.choice(list(TENSORS))
        if case.rng.random() < 0.6:  # else the task and the recipe are those of the sidecar
            case.write(f"{self.format}/{SIDECAR}", b"")
            Path(SUBJECT, self.format, SIDECAR).unlink()
        names = (CONFIG, TENSORS[self.format], SIDECAR)
        self.parts = dict(zip((f"{self.format}/{name}" for name in names), (4, 4, 2), strict=True))
        super().mutate(case)

    def change(self, case, name):
        case.edit(name, **case.some(MORE) if name.endswith(CONFIG) else {})

    def cheap(self):
        return [command("import", f"{SUBJECT}/{self.format}", "--model", "base", "--out", "out/p")]
