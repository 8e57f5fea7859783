"""The run folder of a training, which is resumed."""

import shutil
from pathlib import Path

from mlx_packs import load_base, train_pack
from mlx_packs.adapters.trainable import find_method
from mlx_packs.optim import make_optimizer
from mlx_packs.training.checkpoint import load_checkpoint
from mlx_packs.training.run_folder import RunFolder
from tests.fuzz.kind import SUBJECT, Case, Kind, command, library
from tests.fuzz.subjects import resealed, write_base, write_chats
from tests.helpers.runs import LORA, TRAIN

NEWEST = "step-000002"


class CkptKind(Kind):
    """A run folder, whose pack is not there yet."""

    name = "ckpt"
    words = "step-000001 step-000002 step-000009 latest batches adam random window".split()
    in_place = True
    share = 0.05

    def make(self, folder):
        base = load_base(write_base(folder.with_name("base")))
        write_chats(folder.with_name("data"))
        folder.mkdir()
        train_pack("base", "data", LORA, TRAIN, folder / "o")
        shutil.rmtree(folder / "o")
        self.trainable = find_method("lora").attach(base, LORA, TRAIN, "dense")

    def mutate(self, case):
        rng = case.rng
        name = rng.choice([name for name in case.files if rng.random() < 0.9 or NEWEST in name])
        if rng.random() < 0.03:
            return case.replace(name)
        case.edit(name)
        return self._seal(case, name) if rng.random() < 0.7 else None

    def _seal(self, case: Case, name: str) -> None:
        """Give a mutant right hashes, so that no older checkpoint is taken instead."""
        data = Path(SUBJECT, name).read_bytes()
        if name.endswith(".json"):
            case.write(name, resealed(data))
        elif name.endswith(".safetensors"):
            state = f"{Path(name).parent}/state.json"
            case.write(state, resealed(case.files[state], {Path(name).name: data}))

    def _load(self) -> None:
        run = Path(SUBJECT, "o-run")
        RunFolder(run).check_resumable()
        optimizer = make_optimizer(TRAIN)
        optimizer.init(self.trainable.model.trainable_parameters())
        state = load_checkpoint(RunFolder(run).latest_checkpoint(), self.trainable, optimizer)
        RunFolder(run).metrics_until(state.batches)

    def cheap(self):
        return [
            command("report", f"{SUBJECT}/o-run", "--out", "out/r.html"),
            library(self._load, "load_checkpoint"),
        ]

    def whole(self):
        return [command("train", "--out", f"{SUBJECT}/o", "--resume", "-q")]

    def left(self):
        return ["o"] if Path(SUBJECT, "o").exists() else []
