"""What several ranks exchange in training: measured here, and predicted for Macs.

Measured are exchanges of gradients between processes of this machine, and a step of the bundled
base in which they overlap with the backward pass. Predicted are steps of several Macs, from the
graph of a step (`python -m benchmarks graph`) and the rates of links; no Mac was timed.

    python -m benchmarks scaling --plot docs/images/exchange.svg
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_packs.distributed.group import Group

from . import history, report
from .apple_gpu.capture import OURS, Failed, StepJob
from .apple_gpu.libmlx import Unsupported
from .apple_gpu.step import lay_out
from .history import Environment, Record, record
from .workloads import LLAMA3_8B, QWEN3_0_6B, QWEN3_4B

RANK, BATCH, LENGTH, CHIP = 16, 4, 512, "M4 Max"
SIZES = (2, 4)  # ranks that are measured
PART = 1 << 20  # numbers of a part of the gradients
LLAMA3_70B = LLAMA3_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
NIGHT_S = 8 * 3600
SERVER_FLOPS = 8 * 989e12 * 0.4  # eight H100 in bfloat16, of which 40 % is reached; assumed
FULL_BYTES = 16  # of a weight: bfloat16 and its gradient, float32 and two moments of Adam
MAC_GB = 128
USABLE = 0.75  # of a Mac's memory, what Metal recommends
MODELS = {
    "Qwen3-0.6B": QWEN3_0_6B,
    "Qwen3-4B": QWEN3_4B,
    "Llama-3-8B": LLAMA3_8B,
    "Llama-3-70B": LLAMA3_70B,
}


@dataclass(frozen=True)
class Link:
    """A link between neighbours: bytes a second, and seconds of one message. Assumed, not measured."""

    rate: float
    latency: float


LINKS = {
    "Wi-Fi": Link(0.1e9, 3e-3),
    "10 Gbit Ethernet": Link(1.1e9, 2e-4),
    "Thunderbolt 4 (ring)": Link(2.5e9, 2e-4),
    "Thunderbolt 5 (JACCL)": Link(6e9, 2e-5),
}


def projections(config: dict) -> list[tuple[int, int]]:
    """Return inputs and outputs of the projections of a block."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    feed_forward = [(hidden, inner), (hidden, inner), (inner, hidden)]
    return [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), *feed_forward]


def adapter_weights(config: dict) -> int:
    """Return the numbers of LoRA adapters on every projection of every block."""
    sums = sum(inputs + outputs for inputs, outputs in projections(config))
    return config["num_hidden_layers"] * RANK * sums


def block_weights(config: dict) -> int:
    """Return the weights of all blocks, by which a step's time grows."""
    products = sum(inputs * outputs for inputs, outputs in projections(config))
    return config["num_hidden_layers"] * products


def embedding_weights(config: dict) -> int:
    """Return the weights of the embedding and of the head, which may be one table."""
    tables = 1 if config.get("tie_word_embeddings") else 2
    return tables * config["vocab_size"] * config["hidden_size"]


def exchange_seconds(numbers: int, ranks: int, link: Link, number_bytes: int = 4) -> float:
    """Return the time of the sum over a ring: each rank sends 2 (N - 1) / N of the gradients.

    Bandwidth-optimal all-reduce: https://doi.org/10.1016/j.jpdc.2008.09.002
    """
    parts = -(-numbers // PART) + 2  # and two scalars
    sent = 2 * (ranks - 1) / ranks * numbers * number_bytes
    return sent / link.rate + parts * 2 * (ranks - 1) * link.latency


def step_seconds(config: dict) -> float:
    """Return the predicted seconds of a step on one Mac."""
    job = StepJob(config=config, batch=BATCH, length=LENGTH, rank=RANK)
    (step,) = lay_out([(OURS, job)], [CHIP])
    return step.whole.seconds[CHIP]


def measure_rank() -> None:
    """As one of several ranks, print the seconds of exchanges of several sizes."""
    from mlx_packs.runtime import mx

    ranks = Group(mx.distributed.init(strict=True))
    seconds = {}
    for name in ("Qwen3-0.6B", "Qwen3-4B"):
        numbers = adapter_weights(MODELS[name])
        parts = [mx.random.normal((PART,)) for _ in range(-(-numbers // PART))]
        mx.eval(parts)
        samples = []
        for _ in range(6):
            ranks.highest(0)  # they begin together
            began = time.perf_counter()
            mx.eval([ranks.sum(part) for part in parts])
            samples.append(time.perf_counter() - began)
        seconds[name] = samples[1:]
    samples = []
    for _ in range(101):
        began = time.perf_counter()
        ranks.highest(0)
        samples.append(time.perf_counter() - began)
    seconds["scalar"] = samples[1:]
    if ranks.is_first:
        print(json.dumps(seconds))


def timeline_rank() -> None:
    """As one of several ranks, print when the parts of the gradient of a step were there and sent."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    from mlx_packs import LoRAConfig, TrainConfig, load_base
    from mlx_packs.adapters.trainable import find_method
    from mlx_packs.distributed import group as current
    from mlx_packs.objectives.causal_lm import CausalLM, split_head
    from mlx_packs.runtime import mx

    ranks = Group(mx.distributed.init(strict=True))
    current.join(ranks)
    base = load_base("tiny")
    trainable = find_method("lora").attach(base, LoRAConfig(rank=64), TrainConfig(), "dense")
    objective = CausalLM(trainable.model, split_head(trainable.model))
    tokens = mx.random.randint(0, 4000, (4, 256))
    positions = mx.arange(1024)
    batch = (tokens, positions, tokens.reshape(-1), mx.ones((1024,)))
    gradient = nn.value_and_grad(trainable.model, lambda *arrays: objective.loss(*arrays)[0])
    events: list[tuple[float, float]] = []
    for _ in range(2):  # the second one counts
        ranks.highest(0)
        began = time.perf_counter()
        _, grads = gradient(*batch)
        named = list(reversed(tree_flatten(grads)))  # the last layers have theirs first
        eighth = -(-len(named) // 8)
        with ThreadPoolExecutor(1) as ready, ThreadPoolExecutor(1) as sent:

            def waited(array: mx.array, start: float = began) -> float:
                mx.eval(array)
                return time.perf_counter() - start

            times = []
            for i in range(0, len(named), eighth):
                part = mx.concatenate([a.reshape(-1) for _, a in named[i : i + eighth]])
                total = ranks.sum(part)
                mx.async_eval(part, total)
                times.append((ready.submit(waited, part), sent.submit(waited, total)))
            events = [(a.result(), b.result()) for a, b in times]
    if ranks.is_first:
        print(json.dumps({"events": events}))


def launch(size: int, mode: str) -> dict:
    """Return what the first of several ranks on this machine prints."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        start = 30000 + os.getpid() % 20000
        hosts.write_text(json.dumps([[f"127.0.0.1:{start + i}"] for i in range(size)]))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scaling", "--as-rank", mode],
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    return json.loads(outputs[0].splitlines()[-1])


def steps_of_models() -> dict[str, float]:
    """Return the predicted seconds of a step on one Mac, by model."""
    steps = {name: step_seconds(config) for name, config in MODELS.items() if "70B" not in name}
    share = block_weights(LLAMA3_70B) / block_weights(LLAMA3_8B)
    return steps | {"Llama-3-70B": steps["Llama-3-8B"] * share}  # which is not laid out


def predictions(steps: dict[str, float]) -> list[list[str]]:
    """Return the rows of the table of predicted steps: a model, a link, and several Macs."""
    lines = []
    for name, config in MODELS.items():
        numbers, step = adapter_weights(config), steps[name]
        for link_name, link in LINKS.items():
            row = [name, f"{numbers * 4 / 1e6:.0f} MB", f"{step:.2f} s", link_name]
            for ranks in (2, 4, 8):
                exchange = exchange_seconds(numbers, ranks, link)
                row.append(f"{1000 * exchange:.0f} ms · {ranks * step / (step + exchange):.2f} x")
            lines.append(row)
    return lines


def nights(steps: dict[str, float]) -> list[list[str]]:
    """Return the rows of the table of break-evens: what a night trains, and what a server would."""
    rows = []
    for name, config in MODELS.items():
        link = LINKS["Thunderbolt 4 (ring)"]
        exchange = exchange_seconds(adapter_weights(config), 4, link)
        tokens, weights = BATCH * LENGTH * NIGHT_S, block_weights(config)
        one, four = tokens / steps[name], 4 * tokens / (steps[name] + exchange)
        server = NIGHT_S * SERVER_FLOPS / (4 * weights)  # forward, and gradients of activations
        full_gb = FULL_BYTES * (weights + embedding_weights(config)) / 1e9
        fits = "fits" if full_gb < USABLE * MAC_GB else "does not fit"
        rows.append(
            [name, f"{one / 1e6:.1f} M", f"{four / 1e6:.1f} M", f"{server / 1e6:,.0f} M",
             f"{full_gb:,.0f} GB, {fits}"]
        )  # fmt: skip
    return rows


def table(heading: list[str], lines: list[list[str]]) -> str:
    """Return rows as Markdown."""
    rows = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(events: list[tuple[float, float]], file: Path) -> None:
    """Draw when each part of the gradient was there, and when its sum was."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
    numbers = range(len(events))
    axes.barh(numbers, [1000 * ready for ready, _ in events], color="lightgray", height=0.5)
    axes.plot([1000 * done for _, done in events], numbers, "o", ms=5)
    backward = 1000 * max(ready for ready, _ in events)
    axes.axvline(backward, color="black", lw=0.8, ls="--")
    axes.text(backward, 0, "backward pass is over ", ha="right", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_yticks(range(len(events)), [f"part {i + 1}" for i in range(len(events))])
    axes.set_xlabel("milliseconds of a step (bar: until a part is computed; dot: it is exchanged)")
    figure.savefig(file, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks scaling", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--plot", type=Path, help="SVG file for the timeline of a step")
    parser.add_argument("--as-rank", choices=("exchange", "timeline"), help=argparse.SUPPRESS)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.as_rank:
        {"exchange": measure_rank, "timeline": timeline_rank}[options.as_rank]()
        return 0
    lines: list[Record] = []
    here = Environment.here()
    for size in SIZES:
        for name, seconds in launch(size, "exchange").items():
            of = partial(record, here, "exchange", f"{size} ranks", name)
            lines.append(of("sum over the ranks", "ms", [1000 * s for s in seconds]))
    try:
        steps = steps_of_models()
    except (Failed, Unsupported) as error:
        print(f"benchmarks: scaling: {error}", file=sys.stderr)
        return 2
    print(report.render(lines))
    macs = ["2 Macs", "4 Macs", "8 Macs"]
    print(table(["model", "gradients", "step of one", "link", *macs], predictions(steps)), "\n")
    of_night = ["one M4 Max", "four", "8 × H100", "full fine-tuning"]
    print(table(["model", *of_night], nights(steps)), "\n")
    timeline = launch(2, "timeline")
    events = timeline["events"]
    backward = max(ready for ready, _ in events)
    before = sum(done <= backward for _, done in events)
    print(f"{before} of {len(events)} parts were exchanged before the backward pass was over")
    lines.append(
        record(
            here,
            "exchange",
            "2 ranks",
            "tiny, rank 64",
            "parts sent during the backward pass",
            "%",
            [100 * before / len(events)],
        )  # fmt: skip
    )
    history.append(lines, options.history)
    if options.plot:
        draw(events, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
