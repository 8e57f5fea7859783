"""The trainers that are compared, each a process of its own: ours, mlx-lm's loop, PEFT on torch.

python -m benchmarks.real.trainers NAME FOLDER    # started by `python -m benchmarks real`
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_packs.runtime import mx, on_cpu

from .. import alone
from .jobs import ALPHA, RANK, RATE, TARGETS, WEIGHT_DECAY, Job, lora
from .turns import Turns

if TYPE_CHECKING:
    from mlx_packs import TrainConfig

OURS, MLX_LM, PEFT = "mlx_packs", "mlx-lm with our BLAS", "PEFT"
OURS_SHARED = "mlx_packs with --share-prefix"
PAD_TO = 32  # to a multiple of which mlx-lm pads its batches


def ours(job: Job, turns: Turns, shared: bool = False) -> dict[str, Any]:
    """`train_pack`; its observer waits between turns."""
    from mlx_packs import Observer, train_pack

    class Steps(Observer):
        def on_phase_start(self, batches: int, done: int) -> None:
            turns.start()

        def on_step(self, line: dict) -> None:
            turns.step(line["loss"])

    config = train_config(job, "on" if shared else "off")
    name = OURS_SHARED if shared else OURS
    out = Path(job.folder) / ("pack-shared" if shared else "pack")
    run = train_pack(
        job.model,
        str(job.data),
        lora(),
        config,
        out,
        callbacks=[Steps()],
        resume_adapter_file=str(job.start),
        overwrite=True,
    )
    mx.save_safetensors(str(job.adapters(name)), dict(run.pack.tensors))
    return {"pack_mb": run.report["pack_mb"]}


def train_config(job: Job, share_prefix: str = "off") -> "TrainConfig":
    """Return the settings of a job, whose updates are those of torch's AdamW."""
    from mlx_packs import TrainConfig

    return TrainConfig(
        iters=job.steps,
        batch_size=job.batch_size,
        max_seq_length=job.max_seq_length,
        learning_rate=RATE,
        lr_schedule="constant",
        optimizer_config={"adamw": {"bias_correction": True, "weight_decay": WEIGHT_DECAY}},
        max_grad_norm=0.0,
        matmul_path="dense",
        metric="none",
        val_batches=0,
        test_batches=1,
        save_every=job.steps,
        steps_per_report=job.turn,
        seed=job.seed,
        awake=False,
        share_prefix=share_prefix,
    )


def mlx_lm(job: Job, turns: Turns) -> dict[str, Any]:
    """mlx-lm's own `train` on the dense weights; its iterator of batches waits between turns."""
    import mlx.optimizers as optimizers
    import mlx_lm
    from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, train
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from .. import stock

    model, _ = mlx_lm.load(job.dense)
    model.freeze()
    linear_to_lora_layers(model, -1, {"rank": RANK, "scale": ALPHA / RANK, "dropout": 0.0})
    model.load_weights(str(job.start), strict=False)

    def batches(**_: Any) -> Iterator[tuple[Any, Any]]:
        turns.start()
        for rows in job.batches:
            longest = max(len(tokens) for tokens, _ in rows)
            width = 1 + PAD_TO * -(-longest // PAD_TO)
            padded = np.zeros((len(rows), width), np.int32)
            for row, (tokens, _) in zip(padded, rows, strict=True):
                row[: len(tokens)] = tokens
            # its mask would include one pad after the end of a row: steps <= length
            spans = [[first, len(tokens) - 1] for tokens, first in rows]
            yield mx.array(padded), mx.array(spans)

    class Steps(TrainingCallback):
        def on_train_loss_report(self, train_info: dict) -> None:
            turns.step(train_info["train_loss"])

    with stock.mlx(reference_blas=False):
        train(
            model,
            optimizers.AdamW(RATE, weight_decay=WEIGHT_DECAY, bias_correction=True),
            None,
            args=TrainingArgs(
                batch_size=job.batch_size,
                iters=job.steps,
                steps_per_report=1,
                max_seq_length=job.max_seq_length,
                adapter_file=str(job.adapters(MLX_LM)),
                steps_per_save=job.steps + 1,
            ),
            iterate_batches=batches,
            training_callback=Steps(),
        )
    return {}


def peft(job: Job, turns: Turns) -> dict[str, Any]:
    """PEFT's adapters and torch's AdamW on the dense weights, on the GPU if MLX has one."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM

    device = torch_device()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(job.dense, dtype=dtype).to(device)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    adapters = peft_adapters(model)
    start = load_file(job.start)
    assert set(start) == set(adapters)
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(torch.tensor(start[name].T))

    optimizer = torch.optim.AdamW(adapters.values(), lr=RATE, weight_decay=WEIGHT_DECAY)
    model.train()
    turns.start()
    for rows in job.batches:
        optimizer.zero_grad()
        batch = {key: value.to(device) for key, value in _torch_batch(rows).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        turns.step(loss.item())

    trained = {name: p.detach().cpu().numpy().T.copy() for name, p in adapters.items()}
    save_file(trained, job.adapters(PEFT))
    return {}


def torch_device() -> str:
    """Return torch's name for the device that MLX computes on."""
    if on_cpu():
        return "cpu"
    return "mps" if mx.metal.is_available() else "cuda"


def peak_bytes(name: str) -> Callable[[], int]:
    """Return what gives the peak memory of a trainer: of its process on a CPU, of the GPU else."""
    if on_cpu():
        return alone.peak_rss_bytes
    if name != PEFT:
        return mx.get_peak_memory
    import torch

    if torch_device() == "mps":
        return torch.mps.driver_allocated_memory
    return torch.cuda.max_memory_allocated


def peft_adapters(model: Any) -> dict[str, Any]:
    """Return PEFT's parameters by mlx-lm's names, whose arrays are transposed."""
    adapters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            path, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            adapters[f"{path}.lora_{part[0].lower()}"] = parameter
    return adapters


def _torch_batch(rows: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Return a padded batch as transformers' models take it; -100 marks what is no target."""
    import torch

    width = max(len(tokens) for tokens, _ in rows)
    batch = {
        "input_ids": torch.zeros((len(rows), width), dtype=torch.long),
        "attention_mask": torch.zeros((len(rows), width), dtype=torch.long),
        "labels": torch.full((len(rows), width), -100),
    }
    for i, (tokens, first) in enumerate(rows):
        values = torch.tensor(tokens)
        batch["input_ids"][i, : len(tokens)] = values
        batch["attention_mask"][i, : len(tokens)] = 1
        batch["labels"][i, first : len(tokens)] = values[first:]
    return batch


TRAINERS: dict[str, Callable[[Job, Turns], dict[str, Any]]] = {
    OURS: ours,
    MLX_LM: mlx_lm,
    PEFT: peft,
}
SHARED_TRAINERS = {OURS_SHARED: partial(ours, shared=True)}  # where rows begin alike


def main(arguments: list[str]) -> int:
    name, folder = arguments
    turns = Turns(peak_bytes(name))
    result = (TRAINERS | SHARED_TRAINERS)[name](Job.read(folder), turns)
    turns.finish(result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
