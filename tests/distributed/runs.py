"""Runs that are trained by one rank or several: `python -m tests.distributed.runs FOLDER NAME...`."""

import sys
from dataclasses import replace
from pathlib import Path

from mlx_packs import LoRAConfig, Phase, TrainConfig, train_pack
from mlx_packs.distributed.link import launched
from tests.helpers.bases import dense_tiny
from tests.helpers.encoders import all_pairs, all_scored, write_encoder, write_pairs
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import chat, write_rows

LORA = LoRAConfig(rank=2, num_layers=2)
SETTINGS = {
    **{"iters": 2, "batch_size": 4, "max_seq_length": 96, "matmul_path": "dense"},
    **{"learning_rate": 2e-3, "lr_schedule": "constant"},
    **{"steps_per_report": 1, "steps_per_eval": 2, "save_every": 2},
}
RUNS = {
    "plain": {"data": "chats"},
    "uneven": {"data": "few", "iters": 3},
    "groups": {"data": "texts", "share_prefix": "on", "cache_frozen": "off"},
    # the shares of four ranks are a row each
    "alike": {"data": "alike", "share_prefix": "on", "grad_accumulation_steps": 2, "iters": 3},
    "packed": {"data": "chats", "packing": True, "max_seq_length": 128},
    "cached": {"data": "chats", "cache_frozen": "on", "iters": 4},
    "adam8": {"data": "chats", "optimizer": "adamw_8bit", "exchange_dtype": "bfloat16"},
    "disk": {"data": "chats", "offload_base": "on", "matmul_path": "transient"},
    "dpo": {"data": "preferences", "task": "dpo"},
    "kto": {"data": "rated", "task": "kto"},
    "reward": {"data": "preferences", "task": "reward"},
    "phases": {
        "data": "preferences",
        "phases": (
            Phase(name="told", data="chats", task="lm", iters=2),
            Phase(name="preferred", task="dpo", iters=2),
        ),
    },
    "mnrl": {"data": "pairs", "task": "embedding", "loss": "mnrl"},
    "cached-mnrl": {
        **{"data": "pairs", "task": "embedding", "loss": "cached-mnrl", "mini_batch_size": 2}
    },
    "cosent": {"data": "scored", "task": "embedding", "loss": "cosent"},
}
PIPELINES = {
    "whole": {"data": "chats", "batch_size": 3, "iters": 4},
    "pieces": {"data": "chats", "micro_batches": 2, "grad_accumulation_steps": 2, "iters": 5},
    "blocks": {"data": "few", "recompute": "block", "matmul_path": "quantized", "iters": 4},
    "top": {"data": "chats", "num_layers": 2, "z_loss": 1e-3, "load_best": True, "iters": 4},
}


def write_data(folder: Path) -> None:
    chats = [
        chat(f"Say {'one two three '[: 4 + i]}.", f"{'Yes, ' * (1 + i % 5)}{i}.") for i in range(18)
    ]
    write_rows(folder / "chats", train=chats[:12], valid=chats[12:15], test=chats[15:])
    write_rows(folder / "few", train=chats[:5], valid=chats[12:15])

    system = {"role": "system", "content": "Say what you are told, in as few words as there are."}
    alike = [{"messages": [system, *row["messages"]]} for row in chats]
    write_rows(folder / "alike", train=alike[:12], valid=alike[12:])

    texts = [" ".join(f"{word} {i}" for i in range(16)) for word in ("tide", "price", "wind")]
    asked = [{"prompt": f"{t} {i}?", "completion": f"It is {i}."} for t in texts for i in range(5)]
    write_rows(folder / "texts", train=asked, valid=asked[:3])

    rows = [preference(i) for i in range(16)]
    write_rows(folder / "preferences", train=rows[:12], valid=rows[12:])
    rows = [rated(i) for i in range(16)]
    write_rows(folder / "rated", train=rows[:12], valid=rows[12:])

    write_pairs(folder / "pairs", all_pairs())
    write_pairs(folder / "scored", all_scored())
    write_encoder(folder / "encoder")


def train(folder: Path, name: str, out: Path, **changes) -> None:
    """Train one of the runs; a pipeline where there are several ranks."""
    settings = {**SETTINGS, **(RUNS | PIPELINES)[name], **changes}
    lora = LORA
    if name in PIPELINES:
        lora = LoRAConfig(rank=2, num_layers=settings.pop("num_layers", -1))
        settings["pipeline"] = launched() is not None
    resume = settings.pop("resume", False)
    data = str(folder / settings.pop("data"))

    base = "tiny" if name in PIPELINES or "offload_base" in settings else dense_tiny()
    if settings.get("task") == "embedding":
        base = folder / "encoder"
        settings.pop("matmul_path")

    if phases := settings.get("phases"):
        settings.pop("iters")
        settings["phases"] = tuple(
            replace(phase, data=str(folder / phase.data)) if phase.data else phase
            for phase in phases
        )

    train_pack(base, data, lora, TrainConfig(**settings), out, resume=resume)


if __name__ == "__main__":
    place, where, *names = sys.argv[1:]
    for each in names:
        name, *changes = each.split(",")  # "plain,iters=8,resume=1"
        values = {key: int(value) for key, value in (c.split("=") for c in changes)}
        train(Path(place), name, Path(where) / name, **values)
