"""What bases need with full fine-tuning, LoRA and QLoRA, on several sizes of memory, in Markdown.

    python -m benchmarks.plan_table --device gpu --memory 8,16,24,64
    python -m benchmarks.plan_table --fits
    python -m benchmarks.plan_table --batches
    python -m benchmarks.plan_table --disk
    python -m benchmarks.plan_table --recipes
    python -m benchmarks.plan_table --calculator > docs/calculator_data.js

`--fits` prints the table of the README: QLoRA on Macs, with the predicted speed of a step
(`python -m benchmarks graph`). `--batches` prints the table of docs/choose.md: the largest batch of
QLoRA on each size of Mac. `--disk` prints the table of docs/memory.md: steps with the base on disk.
`--recipes` prints the table of examples/recipes, `--calculator` the data of docs/calculator.md.
Each base is a folder (its config.json is enough), a hub id, or one of `CONFIGS`, whose sizes are
those of the published config.json; without one, all of these. The numbers are those of `packs
plan`, which computes nothing.
"""

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import mlx.nn as nn

from mlx_packs.bases.model_classes import classes_of
from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.display import size
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers, tensors_of
from mlx_packs.memory.plan import ERROR, MemoryPlan
from mlx_packs.memory.read import describe, read_headers
from mlx_packs.memory.recommend import PlanOption, recommend
from mlx_packs.offload.disk import ASSUMED_RATE
from mlx_packs.runtime import assumed_device, metal_share, mx

from .apple_gpu.capture import OURS, StepJob
from .apple_gpu.step import lay_out
from .workloads import LLAMA3_8B, QWEN3_0_6B, QWEN3_4B

CONFIGS = {
    "all-minilm-l6-v2": {
        "model_type": "bert",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    },
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    },
}
_LONGEST = {"all-minilm-l6-v2": 256}  # by its sentence_bert_config.json
MACS_GB = (8, 16, 18, 24, 32, 36, 48, 64)
BATCHES = (1, 4)
CHIPS = {"M4": "M4", "M2 Pro": "M2 Pro in float16", "M4 Max": "M4 Max"}  # as `packs train` computes
# Qwen3-8B's and 14B's sizes are those of their published config.json.
QWEN3_8B = QWEN3_4B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_14B = QWEN3_8B | {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
}
FITTED = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-8B": QWEN3_8B,
    "Llama-3-8B": LLAMA3_8B,
    "Qwen3-14B": QWEN3_14B,
}
# The same for models that only docs/choose.md has.
CHOSEN = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-1.7B": QWEN3_0_6B | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen3-4B": QWEN3_4B,
    "Llama-3-8B": LLAMA3_8B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": QWEN3_14B,
    "Qwen3-32B": QWEN3_8B
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
    },
    "Llama-3-70B": LLAMA3_8B
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
}
# The same for steps with the base on disk.
ON_DISK = {
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": QWEN3_14B,
    "Qwen3-30B-A3B": QWEN3_8B
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "Qwen3-32B": CHOSEN["Qwen3-32B"],
    "Llama-3-70B": CHOSEN["Llama-3-70B"],
}
# The same for the recipes of examples/recipes, by the name of the file.
RECIPES = {
    "smollm2_1.7b": LLAMA3_8B
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "llama3.2_3b": LLAMA3_8B
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "qwen3_4b": QWEN3_4B,
    "mistral_7b": LLAMA3_8B | {"model_type": "mistral", "vocab_size": 32768},
    "qwen2.5_coder_7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "llama3.1_8b": LLAMA3_8B,
    "qwen3_8b": QWEN3_8B,
    "qwen3_30b_a3b": ON_DISK["Qwen3-30B-A3B"],
}
# The same for the memory calculator, and what it offers.
CALCULATED = CHOSEN | {
    "Llama-3.2-3B": RECIPES["llama3.2_3b"],
    "Mistral-7B": RECIPES["mistral_7b"],
    "Qwen2.5-7B": RECIPES["qwen2.5_coder_7b"],
    "Qwen3-30B-A3B": RECIPES["qwen3_30b_a3b"],
}
OFFERED = {
    "batch": (1, 2, 4, 8, 16),
    "tokens": (256, 512, 1024, 2048, 4096, 8192),
    "rank": (8, 16, 64),
    "recompute": ("block", "none"),
}
RECIPE_FILES = Path(__file__).parents[1] / "examples" / "recipes"
DISK_SHAPES = ((1, 256), (4, 512))
DISK_CHIPS = {
    "M1": "M1 in float16",
    "M2 Pro": "M2 Pro in float16",
    "M4": "M4",
    "M4 Max": "M4 Max",
    "M5": "M5",
}
CHOSEN_MACS_GB = (8, 16, 24, 64, 128)
LARGEST_BATCHES = (1, 2, 4, 8)
_BATCH, _LENGTH = 4, 512  # of the step whose speed is predicted
_METHODS = ("full", "lora", "lora-fp32", "qlora")


def headers_of(name: str) -> Headers:
    """A base by the name of its published config, or as `packs plan` reads it."""
    if name in CONFIGS:
        return describe(name, CONFIGS[name])
    return read_headers(name)


def cell(option: PlanOption | None) -> str:
    """What a way of training needs at least, and whether that fits."""
    if option is None:
        return "-"
    shape = f"batch {option.train.batch_size} x {option.train.max_seq_length}"
    return f"{option.fit}: {size(option.plan.peak_bytes)} ({shape})"


def rows(headers: Headers, memories: list[float]) -> list[str]:
    """A line for each memory, in GB of 10^9 bytes; one for all that are answered alike."""
    answers, train = {}, TrainConfig()
    if headers.name in _LONGEST:
        train = replace(train, max_seq_length=_LONGEST[headers.name])
    for memory in memories:
        options = recommend(headers, int(memory * 1e9), train=train)
        first = {m: next((o for o in options if o.method == m), None) for m in _METHODS}
        best = options[0]
        choice = f"{best.kind}, batch {best.train.batch_size} x {best.train.max_seq_length}"
        lora = first["lora"] or first["lora-fp32"]
        cells = [*map(cell, (first["full"], lora, first["qlora"])), f"**{choice}**: {best.why}"]
        answers.setdefault(" | ".join(cells), []).append(f"{memory:g}")
    return [f"| {', '.join(sizes)} GB | {answer} |" for answer, sizes in answers.items()]


def qlora_peak(headers: Headers, batch: int) -> int:
    """The peak of QLoRA with recomputed blocks, in bytes."""
    train = TrainConfig(
        quantize="affine4", matmul_path="quantized", recompute="block", batch_size=batch
    )
    return estimate(headers, LoRAConfig(), train).peak_bytes


def holds(mac_gb: int, peak: int) -> bool:
    """Whether the GPU of a Mac has the memory for a peak that is as wrong as plans may be."""
    return peak * (1 + ERROR) <= metal_share(mac_gb << 30)


def plan_on_disk(name: str, config: dict, batch: int = 1, length: int = 2048) -> MemoryPlan:
    """The plan of QLoRA on a stored 4-bit base that stays on disk."""
    model_class, arguments_class = classes_of(config)
    model = model_class(arguments_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    headers = Headers(name, config, tensors_of(model))
    train = TrainConfig(
        matmul_path="quantized", offload_base="on", batch_size=batch, max_seq_length=length
    )
    return estimate(headers, LoRAConfig(), train)


def smallest_mac(peak: int) -> str:
    """A peak, and the smallest Mac that holds it."""
    macs = (gb for gb in MACS_GB if holds(gb, peak))
    digits = f"{peak / 1e9:#.2g}".rstrip(".")
    return f"≈ {digits} GB → {next(macs)} GB"


def largest_batches(name: str) -> list[str]:
    """The largest of `LARGEST_BATCHES` for a model of `CHOSEN`, on each of `CHOSEN_MACS_GB`."""
    with assumed_device("gpu"):
        headers = describe(name, CHOSEN[name] | {"torch_dtype": "bfloat16"})
        peaks = {batch: qlora_peak(headers, batch) for batch in LARGEST_BATCHES}

    cells = []
    for gb in CHOSEN_MACS_GB:
        fitting = [batch for batch, peak in peaks.items() if holds(gb, peak)]
        cells.append(str(max(fitting)) if fitting else "–")
    return cells


def fits(name: str) -> list[str]:
    """What a model of `FITTED` needs on a Mac: for each of `BATCHES`, and with blocks on disk."""
    with assumed_device("gpu"):
        headers = describe(name, FITTED[name] | {"torch_dtype": "bfloat16"})
        peaks = [qlora_peak(headers, batch) for batch in BATCHES]
        peaks.append(plan_on_disk(name, headers.config).peak_bytes)
        return [smallest_mac(peak) for peak in peaks]


def tokens_per_s(config: dict) -> list[str]:
    """The predicted tokens/s of a 4-bit LoRA step on each of `CHIPS`."""
    job = StepJob(config=config, batch=_BATCH, length=_LENGTH, rank=16)
    (step,) = lay_out([(OURS, job)], list(CHIPS.values()))
    return [about(_BATCH * _LENGTH / step.whole.seconds[chip]) for chip in CHIPS.values()]


def about(value: float) -> str:
    """A prediction with two digits."""
    return f"≈ {float(f'{value:.2g}'):,.0f}"


def print_fits() -> None:
    """Print the README's table of what fits."""
    shapes = [f"{batch} × 2,048: peak → smallest Mac" for batch in BATCHES]
    shapes.append("1 × 2,048, blocks on disk")
    speeds = [f"{chip}, tokens/s" for chip in CHIPS]
    print("| " + " | ".join(["4-bit base model", *shapes, *speeds, "measured"]) + " |")
    print("|---" * (2 + len(shapes) + len(speeds)) + "|")

    for name, config in FITTED.items():
        print("| " + " | ".join([name, *fits(name), *tokens_per_s(config), ""]) + " |")


def print_batches() -> None:
    """Print the table of docs/choose.md."""
    print("| 4-bit base model | " + " | ".join(f"{gb} GB" for gb in CHOSEN_MACS_GB) + " |")
    print("|---" * (1 + len(CHOSEN_MACS_GB)) + "|")
    for name in CHOSEN:
        print("| " + " | ".join([name, *largest_batches(name)]) + " |")


def recipe_row(name: str) -> list[str]:
    """The file, the model, and the peak and smallest Mac of a recipe of `RECIPES`."""
    recipe = resolve(read_settings(RECIPE_FILES / f"{name}.yaml"), f"{name}.yaml")
    with assumed_device("gpu"):
        headers = describe(name, RECIPES[name] | {"torch_dtype": "bfloat16"})
        ways = {"quantize": "affine4", "matmul_path": "quantized", "recompute": "block"}
        peak = estimate(headers, recipe.lora, replace(recipe.train, **ways)).peak_bytes
    link = f"[{name}.yaml]({name}.yaml)"
    return [link, recipe.model.rpartition("/")[2], smallest_mac(peak)]


def print_recipes() -> None:
    """Print the table of examples/recipes/README.md."""
    print("| recipe | model | peak → smallest Mac |")
    print("|---|---|---|")
    for name in RECIPES:
        print("| " + " | ".join(recipe_row(name)) + " |")


def calculated(name: str, batch: int, tokens: int, rank: int, recompute: str) -> int:
    """The planned peak of QLoRA on the GPU of a Mac, in MB."""
    ways = {"quantize": "affine4", "matmul_path": "quantized", "recompute": recompute}
    train = TrainConfig(batch_size=batch, max_seq_length=tokens, **ways)
    with assumed_device("gpu"):
        headers = describe(name, CALCULATED[name] | {"torch_dtype": "bfloat16"})
        return round(estimate(headers, LoRAConfig(rank=rank), train).peak_bytes / 1e6)


def print_calculator() -> None:
    """Print the data of docs/calculator.js: peaks in MB by model, in the order of `OFFERED`."""
    choices = list(itertools.product(*OFFERED.values()))
    peaks = {name: [calculated(name, *choice) for choice in choices] for name in CALCULATED}
    macs = {gb: round(metal_share(gb << 30) / (1 + ERROR) / 1e6) for gb in (*MACS_GB, 96, 128)}
    print("// python -m benchmarks.plan_table --calculator")
    for name, value in (("OFFERED", OFFERED), ("MACS", macs), ("PEAKS", peaks)):
        print(f"const {name} = {json.dumps(value, separators=(',', ':'))};")


def print_disk() -> None:
    """Print the table of docs/memory.md: seconds of a step, and the share that waits for the disk.

    A step waits as long as reading takes longer than computing, at `ASSUMED_RATE`.
    """
    print(
        "| 4-bit base model | tokens | peak → smallest Mac | read | " + " | ".join(DISK_CHIPS), "|"
    )
    print("|---" * (4 + len(DISK_CHIPS)) + "|")
    for name, config in ON_DISK.items():
        for batch, length in DISK_SHAPES:
            with assumed_device("gpu"):
                headers = config | {"torch_dtype": "bfloat16"}
                plan = plan_on_disk(name, headers, batch, length)
            peak = smallest_mac(plan.peak_bytes)
            read = plan.offload.step_bytes
            times = seconds_on_disk(config, batch, length, read / ASSUMED_RATE)
            print("|", " | ".join([name, f"{batch} × {length}", peak, size(read), *times]), "|")


def seconds_on_disk(config: dict, batch: int, length: int, reading: float) -> list[str]:
    """The predicted seconds of a step on each of `DISK_CHIPS` whose blocks are read meanwhile.

    Experts count as a dense feed-forward as wide as those of a token, which computes as much.
    """
    if routed := config.get("num_experts_per_tok"):
        width = routed * config["moe_intermediate_size"]
        config = config | {"model_type": "qwen3", "intermediate_size": width}
    size = {"batch": batch, "length": length, "rank": 16}
    job = StepJob(config=config, **size, recompute="block", compiled=False)
    (step,) = lay_out([(OURS, job)], list(DISK_CHIPS.values()))

    cells = []
    for chip in DISK_CHIPS.values():
        computing = step.whole.seconds[chip]
        seconds = max(computing, reading)
        cell = f"≈ {float(f'{seconds:.2g}'):g} s"
        if reading > computing:
            cell += f", {1 - computing / seconds:.0%} waiting"
        cells.append(cell)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bases", nargs="*", default=list(CONFIGS))
    parser.add_argument("--device", choices=["cpu", "gpu"])
    parser.add_argument("--memory", default="8,16,24,64")
    parser.add_argument("--fits", action="store_true", help="the README's table")
    parser.add_argument("--batches", action="store_true", help="the table of docs/choose.md")
    parser.add_argument("--disk", action="store_true", help="the table of docs/memory.md")
    parser.add_argument("--recipes", action="store_true", help="the table of examples/recipes")
    parser.add_argument("--calculator", action="store_true", help="docs/calculator_data.js")
    options = parser.parse_args()
    if options.calculator:
        print_calculator()
        return
    if options.recipes:
        print_recipes()
        return
    if options.fits:
        print_fits()
        return
    if options.batches:
        print_batches()
        return

    if options.disk:
        print_disk()
        return

    memories = [float(part) for part in options.memory.split(",")]
    with assumed_device(options.device):
        for name in options.bases:
            print(f"**{name}**\n")
            print(
                "| memory | full fine-tune | LoRA, base unquantized | QLoRA | choice and reason |"
            )
            print("|---|---|---|---|---|")
            print("\n".join(rows(headers_of(name), memories)) + "\n")


if __name__ == "__main__":
    main()
