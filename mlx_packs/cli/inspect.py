"""Commands that show what packs and runs contain: inspect, list, diff, report and apply."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config.choices import ARCHITECTURES
from ..display import Display
from ..errors import PackError, flag_of
from ..gates import evaluate_gates, failures, gate_limits
from . import options
from .options import option
from .output import exit_if_failed, print_report

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..packs.pack import Pack

_dry_run = option(
    "--dry-run",
    is_flag=True,
    help="Check hashes, shapes and the base model's fingerprint, without loading weights.",
)
_TAKES_IMAGES = "images  the base takes images: --image FILE of packs generate and packs chat"


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@option(
    "--on",
    metavar="MODEL",
    help="Base model: also check that the pack fits it, attach the pack, run it and detach it.",
)
@_dry_run
@options.setting("max_pack_mb", type=float)
@options.execution
@option(
    "-v", "--verbose", is_flag=True, help="Also list each adapter and the tensor that it changes."
)
def inspect(
    pack: Path,
    on: str | None,
    dry_run: bool,
    max_pack_mb: float | None,
    trust_remote_code: bool,
    verbose: bool,
) -> None:
    """Show a pack's base model, ranks, results and hashes.

    Without --on no tensor and no model is loaded. PACK may also be a folder that `packs quantize`
    wrote, whose files are then checked against their hashes, or another base model: a folder, a
    GGUF file or 'ollama:NAME'.
    """
    from ..bases.files import RECORD
    from ..packs.manifest import read_pin
    from ..packs.pack import Pack

    if on is None and (dry_run or max_pack_mb is not None):
        flag = "dry_run" if dry_run else "max_pack_mb"
        raise PackError(f"{flag_of(flag)}: needs --on MODEL.", "conflict", flag)
    if (pack / RECORD).is_file() or is_base(pack):
        if on is not None:
            raise PackError(f"--on: {pack} is a base model itself. Name a pack.", "conflict", "on")
        print_report(*describe_base(pack))
        return

    opened = Pack.open(pack)
    opened.verify()
    report = dict(opened.manifest)
    if pin := read_pin(opened.path):
        report["hub"] = pin
    lines = _pack_lines(opened, verbose)
    if on is None:
        print_report(report, lines)
        return

    report["fit"] = _fit(opened, on, dry_run, max_pack_mb, trust_remote_code)
    print_report(report, [*lines, *_fit_lines(report["fit"])])
    exit_if_failed(failures(report["fit"].get("gates", {})))


def is_base(name: Path) -> bool:
    """Return whether a name is a base model on this machine; a pack is none."""
    from ..bases.files import TINY
    from ..bases.readers import is_local_model, reader_of
    from ..packs.manifest import MANIFEST

    if os.path.isfile(name):
        return reader_of(name) is not None
    if os.path.isdir(name):
        return (name / "config.json").is_file() and not (name / MANIFEST).is_file()
    return str(name) == TINY or is_local_model(str(name))


def describe_base(name: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of a base model, what `packs quantize` recorded too, and their lines."""
    from ..bases.families import has_vision_tower
    from ..bases.files import RECORD, short_fingerprint
    from ..bases.loading import lazy_base

    base = lazy_base(name)
    facts = {
        "base": base.public_name,
        "model_type": base.config["model_type"],
        "architecture": base.architecture,
        "quantization": base.quantization,
        "fingerprint": base.fingerprint,
        "vocab_size": base.vocab_size,
        "takes_images": has_vision_tower(base.config),
    }
    lines = [
        f"base    {base.summary()}",
        f"weights fingerprint {short_fingerprint(base.fingerprint)}",
    ]

    if base.architecture == "decoder":
        facts |= _text_facts(base)
        template = "no chat template"
        if facts["has_chat_template"]:
            template = "with a chat template"
        lines.append(f"text    {base.vocab_size:,} tokens · {template}")
        if facts["answer_end"]:
            lines[-1] += f" · an answer ends with {facts['answer_end']}"
    if facts["takes_images"]:
        lines.append(_TAKES_IMAGES)
    if (name / RECORD).is_file():
        from ..bases.writer import verify

        record = verify(name, Display())
        facts |= record
        lines += [
            bits_line(record),
            f"source  fingerprint {short_fingerprint(record['source'])} · "
            f"mlx {record['versions'].get('mlx')}",
            *_file_lines(record["files"]),
        ]
    return facts, lines


def _text_facts(base: "BaseModel") -> dict[str, Any]:
    """Return whether a decoder has a chat template, and what ends an answer in it."""
    from ..bases.tokenizer import load_tokenizer
    from ..bases.turns import answer_end

    tokenizer = load_tokenizer(base.path, base.config, False)
    end = answer_end(tokenizer)
    text = end.text
    if not text and end.token is not None:
        text = tokenizer.decode([end.token])
    return {"has_chat_template": tokenizer.has_chat_template, "answer_end": text or None}


def bits_line(report: dict) -> str:
    """Return the bits per weight of a checkpoint that `packs quantize` wrote."""
    where = ""
    if report["quantized"]:
        where = f", {report['bits_per_quantized_weight']:.2f} where quantized"
    return (
        f"bits    {report['bits_per_weight']:.2f} per weight{where} · "
        f"{report['quantized']} tensors quantized, {report['dense']} unchanged"
    )


def _file_lines(files: dict[str, dict]) -> list[str]:
    return [
        f"file    {name} · {facts['bytes']:,} bytes · sha256 {facts['sha256']} ok"
        for name, facts in files.items()
    ]


def _pack_lines(pack: "Pack", verbose: bool) -> list[str]:
    from ..packs.facts import pack_rows
    from ..packs.manifest import read_pin

    manifest = pack.manifest
    modules = manifest["adapters"]["modules"]
    lines = [f"pack    {pack.path} ({pack.size_mb:.2f} MB, {manifest.get('profile')})"]
    if pin := read_pin(pack.path):
        lines.append(f"hub     {pin['repo']}@{pin['revision']} · commit {pin['commit']}")
    lines += [f"{label:<7} {value}" for label, value in pack_rows(manifest)]

    if manifest["base"].get("takes_images"):
        lines.append(_TAKES_IMAGES)
    if verbose:
        lines += [f"adapts  {_adapted_line(module)}" for module in modules]
    elif keyed := sum("base_key" in module for module in modules):
        lines.append(f"adapts  {keyed} of {len(modules)} by the names of the base's files (-v)")
    return lines + _file_lines(manifest["files"])


def _adapted_line(module: dict) -> str:
    slices = module["slices"]
    ranks = str(slices[0]["rank"])
    if len(slices) > 1:
        ranks = ", ".join(f"{s['name']} {s['rank']}" for s in slices)

    key = module.get("base_key") or "not known"
    if isinstance(key, list):
        key = f"{key[0]} … {key[-1]} ({len(key)} tensors)"
    return f"{module['path']} · rank {ranks} · base key {key}"


@click.command("list")
@click.argument("folder", required=False, type=click.Path())
@option("--hub-cache", is_flag=True, help="List the packs that were pulled by name.")
@option(
    "--bases",
    is_flag=True,
    help="List the base models on this disk instead, under the names that --model takes: the "
    "bundled one, those in the Hub's cache, of Ollama and of LM Studio.",
)
@options.as_json
def list_packs(folder: str | None, hub_cache: bool, bases: bool) -> None:
    """List the packs below a folder, or the base models on this disk.

    FOLDER is the current folder by default. With --hub-cache and no FOLDER, only the cache of
    pulled packs is searched. Only manifests and file sizes are read; `packs inspect` checks hashes.
    """
    from ..packs.folder import list_packs, table

    if bases and (folder is not None or hub_cache):
        raise PackError(
            "--bases: cannot be combined with FOLDER or --hub-cache. Pass one of them.", "conflict"
        )
    if bases:
        from ..bases import listing

        listed = listing.list_bases()
        print_report({"bases": listed}, listing.table(listed))
        return

    top = folder or None
    place = f"below {top}"
    if top is None and hub_cache:
        place = "in the cache of pulled packs"
    elif top is None:
        top = "."
        place = "below ."

    listed = list_packs(top, hub_cache)
    lines = [f"no packs {place}"]
    if listed:
        lines = table(listed)
    print_report({"packs": listed}, lines)


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@options.as_json
def diff(a: str, b: str) -> None:
    """Compare the deltas of two packs.

    For each layer, the output shows the norms of both deltas and of their difference, and the
    cosine between them. No base model is loaded.
    """
    from ..packs.diff import diff, lines

    report = diff(a, b)
    print_report(report, lines(report))


@click.command()
@click.argument("run_or_pack", type=click.Path())
@option(
    "-o",
    "--out",
    metavar="FILE",
    help="File to write.  [default: report.html in the run folder or the folder of the seeds; "
    "<pack>-report.html without one]",
)
@options.as_json
def report(run_or_pack: str, out: str | None) -> None:
    """Write a page about a run, a pack or several seeds.

    RUN_OR_PACK is a run folder, a pack's folder, the Hub id of a pulled pack, or the output folder
    of `packs train --seeds`. The page is one self-contained HTML file with the loss curve, results,
    samples, memory and recipe. The page of several seeds has the mean and standard error of every
    number. The page of an unfinished run shows the available parts. No model is loaded.
    """
    from ..training.run_page import write_page

    folder = Path(run_or_pack).expanduser()
    if (folder / "sweep.json").is_file():
        raise PackError(
            f"{folder}: is a sweep, whose table is in leaderboard.json. Name the pack of a trial, "
            f"such as {folder / 'trials' / '001' / 'pack'}.",
            "unsupported",
        )
    file = write_page(run_or_pack, out)
    print_report({"page": str(file), "bytes": file.stat().st_size}, [f"page    {file}"])


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@options.model_of_pack
@_dry_run
@options.setting("max_pack_mb", type=float)
@options.execution
def apply(
    pack: Path, model: str | None, dry_run: bool, max_pack_mb: float | None, trust_remote_code: bool
) -> None:
    """Check that a pack fits a base model, as packs inspect PACK --on MODEL does."""
    from ..packs.pack import Pack

    opened = Pack.open(pack)
    model = options.base_of(model, opened)
    report = _fit(opened, model, dry_run, max_pack_mb, trust_remote_code)
    print_report(report, _fit_lines(report))
    exit_if_failed(failures(report.get("gates", {})))


def _fit(
    pack: "Pack", model: str, dry_run: bool, max_pack_mb: float | None, trust_remote_code: bool
) -> dict[str, Any]:
    from ..packs.making import check_fit

    limits = gate_limits(max_pack_mb=max_pack_mb)
    report = check_fit(pack, model, trust_remote_code)
    if not dry_run:
        report |= _largest_change(pack, model, trust_remote_code)
    if gates := evaluate_gates(limits, {"max_pack_mb": report["pack_mb"]}):
        report["gates"] = gates
    return report


def _fit_lines(report: dict) -> list[str]:
    from ..bases.files import short_fingerprint

    tensors = []
    if report["projections"]:
        tensors.append(f"{report['projections']} projections")
    if report["full_tensors"]:
        tensors.append(f"{report['full_tensors']} tensors stored in full")

    lines = [
        f"fits    {report['pack']} on {report['model']}: hashes, base fingerprint "
        f"{short_fingerprint(report['fingerprint'])}, {', '.join(tensors)}, {report['pack_mb']} MB"
    ]
    for output in (facts.output for facts in ARCHITECTURES.values()):
        if (change := report.get(f"largest_{output}_change")) is not None:
            lines.append(
                f"applied {output}s moved by up to {change:.3f}; after detaching they are "
                "bit-identical to before"
            )

    return lines


def _largest_change(pack: "Pack", model: str, trust_remote_code: bool) -> dict:
    """Attach the pack, return how far outputs move, and check that detaching restores them."""
    from ..convert.fidelity import load_for_comparison
    from ..packs.making import attach_pack
    from ..runtime import mx

    base = load_for_comparison(pack, model, trust_remote_code)
    probe = mx.arange(1, min(33, base.vocab_size))[None]
    before = base.model(probe)
    mx.eval(before)

    attached = attach_pack(base, pack)
    change = mx.abs(base.model(probe) - before).max().item()
    attached.detach()

    if not mx.array_equal(base.model(probe), before).item():
        text = "detaching did not restore the base model. This is a bug; please report it."
        raise PackError(f"{pack.path}: {text}", "mismatch")
    return {f"largest_{ARCHITECTURES[base.architecture].output}_change": change}
