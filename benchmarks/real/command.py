"""The command ``python -m benchmarks real``: which parts run, with which seeds and trainers."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mlx_packs.errors import PackError
from mlx_packs.runtime import on_cpu

from .. import alone, history
from ..history import Environment, record
from . import agreement, files, groups, jobs, minilm, trainers
from .jobs import LARGE, PARTS, SHARED_PARTS, Part
from .results import Results, draw, losses, records, spread, table
from .turns import Trainer, train_alternately

NAMES = (*PARTS, "minilm", "perplexity")
AGREEMENT, RATES, GROUPS = "agreement", "rates", "groups"
_TRAININGS = PARTS | SHARED_PARTS
# Of its value: all trainers start with the same weights and batch. A GPU computes in bfloat16.
_FIRST_LOSS_TOLERANCE = 1e-3 if on_cpu() else 3e-2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        "python -m benchmarks real", description="A real model on real data, beside other trainers."
    )
    p.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="folder for runs and results"
    )
    p.add_argument(
        "--part",
        action="append",
        choices=(*NAMES, *SHARED_PARTS, AGREEMENT, RATES, GROUPS),
        help=f"repeatable: %(choices)s [{', '.join(NAMES)}]",
        metavar="PART",
    )
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="[0 1 2]")
    p.add_argument(
        "--only",
        action="append",
        choices=(*trainers.TRAINERS, *trainers.SHARED_TRAINERS, *minilm.TRAINERS),
        metavar="NAME",
        help="trainer, repeatable: %(choices)s [all]",
    )
    p.add_argument(
        "--large",
        action="store_true",
        help=f"banking77 as a user would train it, {LARGE.batch_size} x {LARGE.steps}",
    )
    p.add_argument("--batch-size", type=_positive, metavar="N", help="examples [the part's]")
    p.add_argument("--steps", type=_positive, metavar="N", help="[the part's]")
    p.add_argument("--rows", type=_positive, metavar="N", help="held-out examples [the part's]")
    p.add_argument("--turn", type=_positive, default=5, metavar="N", help="steps of a turn [5]")
    p.add_argument("--plot", type=Path, metavar="SVG", help="picture of banking77")
    p.add_argument("--llama-server", metavar="PATH", help="llama.cpp's server, for agreement")
    p.add_argument(
        "--gguf", type=Path, metavar="FILE", help="base of llama.cpp [the SmolLM2 that is trained]"
    )
    history.add_option(p)
    return p


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 2 after an error that the user can correct, 1 if trainers disagree."""
    asked = parser()
    options = asked.parse_args(arguments)
    options.work = options.work.expanduser().resolve()
    parts = options.part or list(NAMES)
    if options.plot and "banking77" not in parts:
        asked.error("--plot: is a picture of banking77; add --part banking77")

    try:
        options.work.mkdir(parents=True, exist_ok=True)
        for part in parts:
            print(f"{part}:", file=sys.stderr)
            if part in _TRAININGS:
                run_training(part, options)
            else:
                OTHERS[part](options)
    except Disagreement as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    except (alone.Failed, files.Missing, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


class Disagreement(Exception):
    """Trainers have other first losses, so they do not train the same thing."""


def part_of(name: str, options: argparse.Namespace) -> Part:
    """Return a part with the sizes of the command line."""
    part = LARGE if options.large and name == LARGE.data else _TRAININGS[name]
    changed = {"batch_size": options.batch_size, "steps": options.steps, "rows": options.rows}
    return replace(part, **{key: value for key, value in changed.items() if value is not None})


def run_training(name: str, options: argparse.Namespace) -> None:
    """Train SmolLM2 on a data set by each trainer and seed; print, draw and record."""
    part, model, work = part_of(name, options), files.smollm2(), options.work
    size = f"{part.batch_size}x{part.steps}, {part.rows} rows"
    # banking77's rows share the beginning that the chat template writes
    shares = part.beginning or name == "banking77"
    names = [*trainers.TRAINERS, *(trainers.SHARED_TRAINERS if shares else ())]
    chosen = [n for n in names if not options.only or n in options.only]
    jobs.write_dense(model, work / "dense")
    results = Results(work)
    for seed in options.seeds:
        job = jobs.prepare(part, name, seed, options.turn, model, work)
        missing = [n for n in chosen if results.get(name, size, seed, n) is None]
        if not missing:
            continue
        print(f"{name}, seed {seed}", file=sys.stderr)
        processes = [_trainer(n, "real.trainers", job.folder) for n in missing]
        train_alternately(processes, job.steps, job.turn)
        scores = alone.run("real.score", [job.folder, *missing])
        _keep(results, name, size, seed, processes, scores)

    by_trainer = results.select(name, size, options.seeds)
    _finish(
        name,
        f"{part.batch_size} x {part.steps}, {part.rows} held-out rows, rank {jobs.RANK}",
        by_trainer,
        trainers.PEFT,
        options,
    )


def _trainer(name: str, module: str, folder: str) -> Trainer:
    """Start a trainer; ours keeps its own number of BLAS threads, the others get every core."""
    is_ours = name in (trainers.OURS, trainers.OURS_SHARED)
    threads = None if is_ours else os.cpu_count()
    return Trainer(name, module, [name, folder], threads)


def _keep(
    results: Results,
    part: str,
    size: str,
    seed: int,
    processes: Sequence[Trainer],
    scores: dict[str, dict],
) -> None:
    entries = [
        {
            "part": part,
            "size": size,
            "seed": seed,
            "trainer": process.name,
            "turns": [asdict(turn) for turn in process.turns],
            "score": scores[process.name],
        }
        for process in processes
    ]
    check_first_losses(entries)
    for entry in entries:
        results.add(entry)


def check_first_losses(entries: Sequence[dict]) -> None:
    """Raise Disagreement unless all trainers of a seed have the same loss at the first step."""
    reference = losses(entries[0])[0]
    for entry in entries[1:]:
        other = losses(entry)[0]
        if abs(other - reference) > _FIRST_LOSS_TOLERANCE * abs(reference):
            raise Disagreement(
                f"{entry['part']}, seed {entry['seed']}: the first loss of {entry['trainer']} is "
                f"{other:.4f}, of {entries[0]['trainer']} {reference:.4f}; nothing is recorded"
            )


def _finish(
    name: str,
    shape: str,
    by_trainer: dict[str, list[dict]],
    baseline: str,
    options: argparse.Namespace,
) -> None:
    rate = minilm.RATE if name == "minilm" else jobs.RATE
    note = (
        f"AdamW with bias correction, learning rate {rate:g}, rank {jobs.RANK}; same batches and "
        "first adapters; a process for each trainer, alternating."
    )
    if trainers.MLX_LM in by_trainer:
        weights = "with our OpenBLAS" if on_cpu() else "in bfloat16, as PEFT"
        note += f" mlx-lm trains the dense weights {weights}."
    history.append(records(name, shape, by_trainer, baseline, note), options.history)
    print(f"\n{name}: {shape}\n\n{table(by_trainer)}\n", flush=True)
    if options.plot and name == "banking77":
        draw(by_trainer, "banking77", options.plot)


def run_minilm(options: argparse.Namespace) -> None:
    """Train MiniLM on pairs by each trainer and seed; print and record."""
    name, model, work = "minilm", files.minilm(), options.work
    batch, steps = options.batch_size or minilm.BATCH, options.steps or minilm.STEPS
    queries = options.rows or minilm.QUERIES
    size = f"{batch}x{steps}, {queries} rows"
    chosen = [n for n in minilm.TRAINERS if not options.only or n in options.only]
    results = Results(work)
    for seed in options.seeds:
        missing = [n for n in chosen if results.get(name, size, seed, n) is None]
        if not missing:
            continue
        print(f"{name}, seed {seed}", file=sys.stderr)
        folder = work / f"{name}-{batch}x{steps}-seed{seed}"
        references = min(minilm.REFERENCES, 2 * queries)
        job = minilm.PairJob(
            seed, batch, steps, options.turn, references, queries, str(model), str(folder)
        )
        minilm.prepare(job)
        processes = [_trainer(n, "real.minilm", str(folder)) for n in missing]
        scores = train_alternately(processes, steps, options.turn)
        _keep(results, name, size, seed, processes, scores)

    by_trainer = results.select(name, size, options.seeds)
    shape = f"{batch} pairs x {steps}, {queries} queries, rank {jobs.RANK}"
    _finish(name, shape, by_trainer, minilm.SENTENCE_TRANSFORMERS, options)


def run_perplexity(options: argparse.Namespace) -> None:
    """Evaluate the same weights in four formats; print and record."""
    rows = options.rows or 200
    dense = jobs.write_dense(files.smollm2(), options.work / "dense")
    results = alone.run("real.perplexity", [str(dense), str(options.work), str(rows)])

    here = Environment.here()
    lines = ["| format | perplexity | times dense, paired |", "|---|---|---|"]
    new_records = []
    for name, result in results.items():
        ratio = f"{result['ratio']:.4f} ± {result['ratio_se']:.4f}" if "ratio" in result else "1"
        lines.append(f"| {name} | {result['ppl']:.3f} ± {result['ppl_se']:.3f} | {ratio} |")
        note = f"Standard error of the perplexity over the rows: {result['ppl_se']:.3f}."
        shape = f"tldr, {rows} held-out rows"
        new_records.append(
            record(
                here, "real perplexity", name, shape, "perplexity", "", [result["ppl"]], note=note
            )
        )
    history.append(new_records, options.history)
    print("\n".join(lines), flush=True)


def run_agreement(options: argparse.Namespace) -> None:
    """Compare the answers of ours, PEFT and llama.cpp to the rows of a run on banking77."""
    part, model = part_of("banking77", options), files.smollm2()
    jobs.write_dense(model, options.work / "dense")
    seed = options.seeds[0]
    job = jobs.prepare(part, "banking77", seed, options.turn, model, options.work)
    if not (Path(job.folder) / "pack").is_dir():
        raise PackError(
            f"{job.folder}: has no pack. Run `python -m benchmarks real --work {options.work} "
            "--part banking77` with the same sizes first."
        )

    programs = {agreement.OURS: [], agreement.PEFT: []}
    if options.llama_server:
        programs[agreement.LLAMA_CPP] = [options.llama_server, str(options.gguf or model)]
    answers, expected = {}, []
    for name, rest in programs.items():
        print(f"answers of {name}", file=sys.stderr)
        result = alone.run("real.agreement", [name, job.folder, *rest])
        answers[name], expected = result["answers"], result["expected"]
    (Path(job.folder) / "answers.json").write_text(json.dumps(answers, indent=1))
    _report_agreement(agreement.compare(answers, expected), len(expected), options)


def _report_agreement(
    compared: dict[str, dict[str, float]], rows: int, options: argparse.Namespace
) -> None:
    here, new_records = Environment.here(), []
    lines = ["| program | same answer as ours | exact answers |", "|---|---|---|"]
    for name, shares in compared.items():
        lines.append(f"| {name} | {shares['agreement']:.0%} | {shares['exact']:.0%} |")
        for metric, share in shares.items():
            new_records.append(
                record(
                    here,
                    "real agreement",
                    name,
                    f"banking77, {rows} rows",
                    metric,
                    "%",
                    [100 * share],
                )
            )
    history.append(new_records, options.history)
    print("\n".join(lines), flush=True)


def run_rates(options: argparse.Namespace) -> None:
    """Train at several learning rates, with and without a warm-up; print and record."""
    steps, rows = options.steps or 40, options.rows or 100
    for data in ("banking77", "tldr"):
        results = [
            entry
            for seed in options.seeds
            for entry in alone.run(
                "real.rates", [data, str(options.work), str(steps), str(rows), str(seed)]
            )
        ]
        _report_rates(f"{data}, {PARTS[data].batch_size} x {steps}, {rows} rows", results, options)


def _report_rates(shape: str, results: list[dict], options: argparse.Namespace) -> None:
    here = Environment.here()
    lines = [f"{shape}, {len(options.seeds)} seeds", "", "| rate | warm-up | perplexity |"]
    lines.append("|---|---|---|")
    new_records = []
    for rate, warmup in dict.fromkeys((r["rate"], r["warmup"]) for r in results):
        ppl = [r["ppl"] for r in results if (r["rate"], r["warmup"]) == (rate, warmup)]
        lines.append(f"| {rate:g} | {warmup:g} | {spread(ppl)} |")
        name = f"rate {rate:g}, warm-up {warmup:g}"
        note = "Defaults of packs train but for the rate and the warm-up; rank 16."
        new_records.append(
            record(here, "real rates", name, shape, "perplexity", "", ppl, note=note)
        )
    history.append(new_records, options.history)
    print("\n".join(lines), flush=True)


def run_groups(options: argparse.Namespace) -> None:
    """Train with and without groups of examples that begin alike; print and record the curves."""
    steps, rows = options.steps or 60, options.rows or 120
    results = [
        entry
        for seed in options.seeds
        for entry in alone.run("real.groups", [str(options.work), str(steps), str(rows), str(seed)])
    ]

    shape = f"lines of gsm8k's solutions, {groups.BATCH} x {steps}, {rows} held-out rows"
    here, new_records = Environment.here(), []
    lines = [f"{shape}, {len(options.seeds)} seeds: validation loss", ""]

    for way in dict.fromkeys(r["way"] for r in results):
        curves = [r["losses"] for r in results if r["way"] == way]
        points = [spread(list(values)) for values in zip(*curves, strict=True)]
        lines.append(f"{way}: {', '.join(points)}")
        last = [curve[-1] for curve in curves]
        note = (
            f"Of each seed after {steps} batches; before, every quarter: {'; '.join(points[:-1])}."
        )
        new_records.append(
            record(here, "real groups", way, shape, "validation loss", "", last, note=note)
        )
    history.append(new_records, options.history)
    print("\n".join(lines), flush=True)


OTHERS = {
    "minilm": run_minilm,
    "perplexity": run_perplexity,
    AGREEMENT: run_agreement,
    RATES: run_rates,
    GROUPS: run_groups,
}
