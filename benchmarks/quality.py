"""What each training method is worth: held-out perplexity and right answers, three seeds each.

The base is the bundled one, dequantized and trained further in float32 on the passages, so that no
grid holds its weights. Every method trains on the same examples for as many batches, and is measured
by the share of full fine-tuning's gain that it keeps, in nats per token. The packs of plain LoRA
are also measured merged into 4 bits. What a step costs is for `methods` to say.

    python -m benchmarks quality --work DIR    # a stopped run goes on where it was
"""

import argparse
import json
import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, merge_pack, train_pack

from . import alone, history
from .history import Environment, Record, record
from .problems import write_problems

PASSAGES = Path(__file__).parent / "passages"
SEEDS, RANKS, RANK = (0, 1, 2), (4, 8, 16, 32, 64), 16
BATCH, GRID = 8, "affine4"
FULL, MERGED = "full", ", merged into affine4"


@dataclass(frozen=True)
class Data:
    """Examples to train on: a value of `--data`, and for how many batches."""

    title: str
    batches: int


DATA = {"tiny": Data("reminders", 60), "problems": Data("arithmetic", 150)}


@dataclass(frozen=True)
class Case:
    """A way of training: its settings, the rank of its adapters, and whether it is merged, too."""

    train: dict = field(default_factory=dict)
    merged: bool = False
    rank: int = RANK
    data: tuple[str, ...] = tuple(DATA)


CASES = {
    FULL: Case({"method": "full", "learning_rate": 3e-4}),
    "lora": Case(merged=True),
    "dora": Case({"method": "dora"}),
    "pissa": Case({"method": "pissa"}),
    "qlora affine4": Case({"quantize": "affine4"}),
    "qlora nf4": Case({"quantize": "nf4"}),
    **{f"lora rank {r}": Case(rank=r, data=("tiny",)) for r in RANKS if r != RANK},
}


def write_base(work: Path) -> Path:
    """Write the dense base of all runs."""
    out = work / "base"
    if not out.exists():
        settings = TrainConfig(
            method="full", matmul_path="dense", iters=60, batch_size=8, max_seq_length=256,
            learning_rate=3e-4, val_batches=0, test_batches=4,
        )  # fmt: skip
        train_pack("tiny", PASSAGES, None, settings, work / "passages", overwrite=True)
        merge_pack(work / "passages", "tiny", out, "none", "float32", max_drift=1.0, progress=False)
    return out


def measure(name: str, data: str, seed: int, work: Path) -> dict:
    """Return the results of one run on held-out examples, of its merged model if there is one."""
    case = CASES[name]
    place = str(work / data) if (work / data).is_dir() else data
    settings = {
        "iters": DATA[data].batches,
        "batch_size": BATCH,
        "max_seq_length": 256,
        "learning_rate": 1e-3,
        "lr_schedule": "linear",
        "warmup_steps": 10,
        "val_batches": 0,
        "matmul_path": "dense",
        "metric": "exact",
        "seed": seed,
        **case.train,
    }
    out = work / "packs" / f"{name} {data} {seed}".replace(" ", "-")
    lora = None if name == FULL else LoRAConfig(rank=case.rank)
    train = TrainConfig(**settings)
    report = train_pack(work / "base", place, lora, train, out, overwrite=True).report
    result = {
        "ppl_before": report["ppl_before"],
        "ppl": report["ppl_after"],
        "right": report["answers"]["after"]["share"],
        "peak_mb": report["peak_gb"] * 1000,
        "pack_mb": report["pack_mb"],
    }
    if not case.merged:
        return result
    merged = work / "merged" / out.name
    report_of_merge = merge_pack(
        out,
        work / "base",
        merged,
        GRID,
        max_drift=100,
        data=place,
        overwrite=True,
        progress=False,
    )
    base, limit = load_base(merged), report["answers"]["rows"]  # the first ones
    scored = evaluate(base, None, place, max_seq_length=256, progress=False).base
    answers = evaluate(base, None, place, metric="exact", limit=limit, progress=False).answers
    after = {"ppl": scored.ppl, "right": answers.before.share, "kl": report_of_merge["kl_mean"]}
    return result | {"merged": after}


Results = dict[tuple[str, str, int], dict]  # by method, data and seed


def results(work: Path, jobs: int) -> Results:
    """Return the results of every run; those that an earlier one has left are read."""
    file, done = work / "results.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else ():
        entry = json.loads(line)
        done[entry["name"], entry["data"], entry["seed"]] = entry["result"]

    def run(name: str, data: str, seed: int) -> None:
        print(f"{name} on {data}, seed {seed}", file=sys.stderr)
        arguments = ["--alone", name, "--data", data, "--seed", str(seed), "--work", str(work)]
        result = alone.run("quality", arguments)
        done[name, data, seed] = result
        entry = {"name": name, "data": data, "seed": seed, "result": result}
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")

    every = [(n, data, seed) for seed in SEEDS for data in DATA for n in CASES]
    every.sort(key=lambda each: CASES[each[0]].rank != RANK)  # the curve over ranks comes last
    wanted = [each for each in every if each[1] in CASES[each[0]].data and each not in done]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda each: run(*each), wanted))
    return done


@dataclass(frozen=True)
class Row:
    """What a method, or its merged model, has reached on some data: a number for each seed."""

    name: str
    data: str
    ppl: list[float]
    kept: list[float]  # of full fine-tuning's gain in nats per token, %
    right: list[float]  # answers, %
    peak_mb: list[float]  # of training


def rows(done: Results) -> list[Row]:
    """Return the rows of the table."""
    listed = []
    for data in DATA:
        full = [done[FULL, data, seed] for seed in SEEDS]
        before = full[0]["ppl_before"]  # of the dense base, whatever a method begins with
        gain = statistics.mean(math.log(before / run["ppl"]) for run in full)
        for name, case in CASES.items():
            if data not in case.data:
                continue
            runs = [done[name, data, seed] for seed in SEEDS]
            listed.append(_row(name, data, runs, before, gain))
            if case.merged:
                runs = [run | run["merged"] for run in runs]
                listed.append(_row(name + MERGED, data, runs, before, gain))
    return listed


def _row(name: str, data: str, runs: list[dict], before: float, gain: float) -> Row:
    return Row(
        name,
        data,
        [run["ppl"] for run in runs],
        [100 * math.log(before / run["ppl"]) / gain for run in runs],
        [100 * run["right"] for run in runs],
        [run["peak_mb"] for run in runs],
    )


def records(table_rows: list[Row]) -> list[Record]:
    here, lines = Environment.here(), []
    for row in table_rows:
        data = DATA[row.data]
        of = partial(record, here, "quality", row.name, f"{data.title}, {data.batches} x {BATCH}")
        lines += [
            of("perplexity", "", row.ppl),
            of("gain kept", "% of full fine-tuning's", row.kept),
            of("right answers", "%", row.right),
        ]
    return lines


def table(table_rows: list[Row]) -> str:
    """Return the results as Markdown: mean and standard deviation over the seeds."""
    lines = []
    for data, facts in DATA.items():
        lines += ["", f"| {facts.title} | perplexity | gain kept | right answers | peak memory |"]
        lines.append("|---|---|---|---|---|")
        for row in (row for row in table_rows if row.data == data):
            peak = statistics.median(row.peak_mb)
            lines.append(
                f"| {row.name} | {_cell(row.ppl, '.3f')} | {_cell(row.kept, '.1f')} % "
                f"| {_cell(row.right, '.0f')} % | {peak:.0f} MB |"
            )
    return "\n".join(lines)


def _cell(values: list[float], digits: str) -> str:
    return f"{statistics.mean(values):{digits}} ± {statistics.stdev(values):{digits}}"


def draw(table_rows: list[Row], file: Path) -> None:
    """Draw the share of the gain that is kept: by method, and by the rank of LoRA."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "quality"  # the same picture each time
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.axvline(100, color="gray", lw=0.8)
    right.axhline(100, color="gray", lw=0.8)
    for data, facts in DATA.items():
        shown = [row for row in table_rows if row.data == data and "rank" not in row.name]
        names, (means, errors) = [row.name for row in shown], _ends(shown)
        left.errorbar(means, names, xerr=errors, fmt="o", capsize=3, label=facts.title)
    named = {row.name: row for row in table_rows if row.data == "tiny"}
    curve = [named["lora" if rank == RANK else f"lora rank {rank}"] for rank in RANKS]
    right.errorbar(RANKS, *_ends(curve), fmt="o-", capsize=3)
    left.invert_yaxis()
    left.legend(fontsize=8)
    left.set_xlabel("gain kept, % of full fine-tuning's")
    right.set_xscale("log", base=2)
    right.set_xticks(RANKS, [str(rank) for rank in RANKS])
    right.set_xlabel(f"rank of LoRA ({DATA['tiny'].title})")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(file, metadata={"Date": None})


def _ends(shown: list[Row]) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of what each row keeps."""
    return [statistics.mean(row.kept) for row in shown], [
        statistics.stdev(row.kept) for row in shown
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks quality", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for packs and results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time [1]")
    parser.add_argument("--plot", type=Path, help="SVG file for the plot")
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    if options.alone:
        print(json.dumps(measure(options.alone, options.data, options.seed, work)))
        return 0
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "problems").exists():
        write_problems(work / "problems")
    write_base(work)
    try:
        done = results(work, options.jobs)
    except alone.Failed as error:
        print(f"benchmarks: quality: {error}", file=sys.stderr)
        return 2
    table_rows = rows(done)
    history.append(records(table_rows), options.history)
    print(table(table_rows))
    if options.plot:
        draw(table_rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
