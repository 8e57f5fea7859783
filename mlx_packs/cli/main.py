"""The `packs` command: thin, parse, call one function, print, exit code.

Exit codes: 0 done, 1 a gate failed, 2 wrong use or bad input in one clear line.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import click

from ..config.schema import MEMORY_SETTINGS, LoRAConfig, TrainConfig
from ..errors import PackError, did_you_mean, printable
from . import options


class _Commands(click.Group):
    """Commands whose modules are imported when they are called: `packs inspect` stays quick."""

    lazy = {
        "train": ("mlx_packs.cli.train", "command"),
        "eval-batch": ("mlx_packs.cli.eval_batch", "command"),
        "eval-tasks": ("mlx_packs.cli.eval_tasks", "command"),
    }

    def list_commands(self, ctx):
        return sorted({*super().list_commands(ctx), *self.lazy})

    def get_command(self, ctx, name):
        if name in self.lazy:
            module, attribute = self.lazy[name]
            return getattr(importlib.import_module(module), attribute)
        return super().get_command(ctx, name)

    def resolve_command(self, ctx, args):
        name = args[0] if args else ""
        if args and not name.startswith("-") and self.get_command(ctx, name) is None:
            hint = did_you_mean(name, self.list_commands(ctx))
            raise PackError(f"no such command '{name}'. {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands)
@click.version_option(package_name="mlx-packs")
def packs():
    """Teach a 4-bit Qwen3 something of your own and carry the result around as a pack."""


def _print(value: dict | list, as_json: bool, lines: list[str]) -> None:
    """The object, or lines about it; what a stranger's manifest says cannot steer a terminal."""
    if not as_json:
        click.echo("\n".join(map(printable, lines)))
        return
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo(re.sub(r"[\x7f-\x9f]", lambda control: f"\\u{ord(control[0]):04x}", text))


@packs.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or quantization.json.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Each adapter and the base's tensor it changes."
)
def inspect(pack, as_json, verbose):
    """Show a pack: base, ranks, results, hashes.

    Loads no tensor and no model. PACK may be a folder of `packs quantize` too: every shard is then
    held against its hash.
    """
    from ..bases.files import RECORD
    from ..packs.manifest import read_pin
    from ..packs.pack import Pack

    if (pack / RECORD).is_file():
        from ..bases.writer import verify
        from ..display import Display

        record = verify(pack, Display())
        _print(record, as_json, _record_lines(pack, record))
        return
    found = Pack.open(pack)
    found.verify()
    pin = read_pin(found.path)
    report = found.manifest | ({"hub": pin} if pin else {})
    _print(report, as_json, _inspect_lines(found, verbose))


def _record_lines(folder: Path, record: dict) -> list[str]:
    """A folder that `packs quantize` wrote, for people."""
    from ..bases.files import quantization_name

    size = sum(facts["bytes"] for facts in record["files"].values())
    kind = quantization_name(record["quantization"])
    lines = [
        f"base    {folder} ({_size(size / 1e9)}) · {kind} · format {record['format']}",
        _bits_line(record),
        f"source  fingerprint {record['source'][:12]} · mlx {record['versions'].get('mlx')}",
    ]
    for name, facts in record["files"].items():
        lines.append(f"file    {name} · {facts['bytes']:,} bytes · sha256 {facts['sha256']} ok")
    return lines


def _inspect_lines(pack, verbose: bool = False) -> list[str]:
    """A pack for people; optional parts of its manifest only as far as they are there.

    verbose: every adapter too.
    """
    from ..bases.files import quantization_name
    from ..gates import shown
    from ..packs.manifest import (
        moved_metrics,
        phase_lines,
        read_pin,
        replaced_of,
        shown_graph,
        shown_result,
    )

    m = pack.manifest
    base, modules = m["base"], m["adapters"]["modules"]
    ranks = sorted({s["rank"] for module in modules for s in module["slices"]})
    scales = sorted({round(s.scale, 4) for spec in pack.specs.values() for s in spec.slices})
    lines = [
        f"pack    {pack.path} ({pack.size_mb:.2f} MB, {m.get('profile')})",
        f"base    {base['id']} · {base['model_type']} · {base['num_layers']} blocks · "
        f"{quantization_name(base['quantization'])} · fingerprint {base['fingerprint'][:12]}",
    ]
    count = f"{m['adapters']['parameters']:,} weights ({m['adapters'].get('dtype') or 'float32'})"
    if modules:
        lines.append(
            f"lora    rank {', '.join(map(str, ranks))} · scale {', '.join(map(str, scales))} · "
            f"{count} on {len(modules)} projections in {len(m['adapters']['groups'])} groups"
        )
    else:
        lines.append(f"full    {count} in {len(replaced_of(m))} tensors of the base, whole")
    if pin := read_pin(pack.path):
        lines.append(f"hub     {pin['repo']}@{pin['revision']} · commit {pin['commit']}")
    if license := m.get("license"):
        lines.append(f"licence {license}")
    if data := pack.part("data"):
        rows = " / ".join(f"{n:,} {split}" for split, n in (data.get("rows") or {}).items())
        objective = pack.part("objective")
        learned = f"loss on {objective.get('loss_on') or '?'}"
        if objective.get("task") == "embedding":
            learned = f"embeddings, loss {objective.get('loss')}"
        lines.append(f"data    {data.get('source')} · {rows or '?'} rows · {learned}")
    lines += [f"graph   {line}" for line in shown_graph(pack.part("objective"))]
    result = pack.part("eval")
    before, after = (shown_result(result, when) for when in ("before", "after"))
    if before and after:
        lines.append(
            f"eval    held-out PPL {before} → {after} on {result.get('rows', '?')} "
            f"{result.get('split', '?')} rows"
        )
    elif moved := moved_metrics(result):
        lines.append(f"eval    held-out {moved} on {result.get('rows', '?')} rows")
    lines += [f"phase   {line}" for line in phase_lines(m.get("phases") or ())]
    if gates := pack.part("gates"):
        lines.append(f"gates   {shown(gates).removeprefix(' · ')}")
    if created := pack.part("measured").get("created"):
        lines.append(f"made    {created} · mlx {pack.part('versions').get('mlx')}")
    if verbose:
        lines += [f"adapts  {_adapted_line(module)}" for module in modules]
    elif keyed := sum("base_key" in module for module in modules):
        lines.append(f"adapts  {keyed} of {len(modules)} by the names of the base's files (-v)")
    for name, facts in m["files"].items():
        lines.append(f"file    {name} · {facts['bytes']:,} bytes · sha256 {facts['sha256']} ok")
    return lines


def _adapted_line(module: dict) -> str:
    """An adapter, its ranks, and the tensor of the base's files that it changes."""
    ranks = ", ".join(f"{s['name']} {s['rank']}" for s in module["slices"])
    ranks = ranks if len(module["slices"]) > 1 else str(module["slices"][0]["rank"])
    key = module.get("base_key") or "not known"
    if isinstance(key, list):
        key = f"{key[0]} … {key[-1]} ({len(key)} tensors)"
    return f"{module['path']} · rank {ranks} · base key {key}"


@packs.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--model", default="tiny", metavar="M", help="Base to hold the pack against. [tiny]")
@click.option("--dry-run", is_flag=True, help="Check hashes, shapes and base; load no weights.")
@click.option("--max-pack-mb", type=float, help="Gate: exit with 1 if the pack is larger.")
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print what was checked.")
def apply(pack, model, dry_run, max_pack_mb, trust_remote_code, as_json):
    """Check that a pack fits a base.

    Without --dry-run it is attached, run and taken off again.
    """
    from ..gates import failures, judge, limits
    from ..packs.pack import Pack, check_against

    held = limits(max_pack_mb=max_pack_mb)
    found = Pack.open(pack)
    report = check_against(found, model)
    if not dry_run:
        report |= _apply_for_real(found, model, trust_remote_code)
    parts = [f"{report['projections']} projections"] if report["projections"] else []
    parts += [f"{report['whole']} tensors whole"] if report["whole"] else []
    lines = [
        f"fits    {report['pack']} on {report['model']}: hashes, base fingerprint "
        f"{report['fingerprint'][:12]}, {', '.join(parts)}, {report['pack_mb']} MB"
    ]
    if "largest_embedding_change" in report:
        lines.append(
            f"applied embeddings moved by up to {report['largest_embedding_change']:.3f}; after "
            "detaching they are bit-equal to before"
        )
    if "largest_logit_change" in report:
        lines.append(
            f"applied logits moved by up to {report['largest_logit_change']:.3f}; after detaching "
            "they are bit-equal to before"
        )
    gates = judge(held, {"max_pack_mb": report["pack_mb"]})
    if gates:
        report["gates"] = gates
    _print(report, as_json, lines)
    options.exit_by(failures(gates))


def _apply_for_real(pack, model: str, trust_remote_code: bool) -> dict:
    """Attach, run, detach: how far logits or embeddings move, and that detaching restores them."""
    from ..packs.base import load_base_for
    from ..runtime import mx

    base = load_base_for(pack, model, trust_remote_code)
    probe = mx.arange(1, min(33, base.vocab_size))[None]
    before = base.model(probe)
    mx.eval(before)
    attached = pack.attach(base)
    moved = mx.abs(base.model(probe) - before).max().item()
    attached.detach()
    if not mx.array_equal(base.model(probe), before).item():
        raise PackError(f"{pack.path}: detaching did not restore the base; please report this.")
    return {f"largest_{'embedding' if base.is_encoder else 'logit'}_change": moved}


@packs.command()
@click.argument("pack", required=False)
@click.option("--model", default="tiny", metavar="M", help="Base of the pack. [tiny]")
@click.option(
    "--pack",
    "packs",
    multiple=True,
    metavar="P=W",
    help="Pack with a weight, repeatable: the deltas add up.",
)
@click.option("--data", default="tiny", metavar="D", help="Rows: folder, file or 'tiny'. [tiny]")
@click.option("--split", default="test", help="Split of a folder; valid if there is no test.")
@click.option("--batch-size", default=4, show_default=True, type=click.IntRange(1))
@click.option("--max-seq-length", type=click.IntRange(2), help="[as the pack was trained]")
@click.option("--chat-feature", metavar="COLUMN", help="Column with chats. [the pack's own]")
@click.option("--prompt-feature", metavar="COLUMN", help="Column with prompts. [the pack's own]")
@click.option("--completion-feature", metavar="COLUMN", help="Completions. [the pack's own]")
@click.option("--text-feature", metavar="COLUMN", help="Column with text. [the pack's own]")
@click.option("--loss-on", type=click.Choice(["all", "completion", "assistant"]))
@click.option("--limit", default=-1, help="At most so many batches.")
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def eval(
    pack,
    packs,
    model,
    data,
    split,
    batch_size,
    max_seq_length,
    loss_on,
    limit,
    trust_remote_code,
    as_json,
    **features,
):
    """Perplexity and accuracy, base and pack.

    Of an encoder's pack: correlation with scores, retrieval, or triplet accuracy, by the rows. Both
    on the same rows, with standard errors; that of the ratio is paired by row, and so far
    smaller. PACK may be PACK=W, and several with --pack are taken as one, their deltas added up.
    """
    from ..evaluation.evaluate import columns_of, evaluate
    from ..packs.base import load_base_for

    opened = _one_pack([pack] if pack else [], packs)
    if opened is None:
        raise PackError("eval: name a PACK, or packs to add up: --pack a=0.7 --pack b=0.3.")
    given = {name: column for name, column in features.items() if column is not None}
    report = evaluate(
        load_base_for(opened, model, trust_remote_code),
        opened,
        data,
        split,
        batch_size,
        max_seq_length,
        loss_on,
        limit,
        columns=columns_of(opened, data, **given),
    )
    _print(report.to_json(), as_json, _eval_lines(report))


def _eval_lines(report) -> list[str]:
    """Base and pack on the same rows, for people."""
    from ..evaluation.embeddings import EmbeddingReport
    from ..packs.manifest import shown_metrics, shown_perplexity

    if isinstance(report, EmbeddingReport):
        return [
            f"base    {shown_metrics(report.base)}",
            f"pack    {shown_metrics(report.pack)}",
            f"rows    {report.rows} {report.format}",
        ]
    lines = [
        f"{name}    PPL {shown_perplexity(s.ppl, s.ppl_se, 3)} · token accuracy {s.accuracy:.1%}"
        for name, s in (("base", report.base), ("pack", report.pack))
    ]
    ratio = shown_perplexity(report.ppl_ratio, report.difference.ppl_ratio_se, 3)
    lines.append(
        f"ratio   {ratio}, paired by row, on {report.rows} rows, {report.targets:,} target tokens"
    )
    return lines


def _one_pack(*given):
    """The pack that ``DIR`` or ``DIR=0.7`` texts name together; None if there is none."""
    from ..packs.weighted_sum import open_weighted, weighted_sum

    texts = [text for group in given for text in group]
    return weighted_sum([open_weighted(text) for text in texts]) if texts else None


@packs.command()
@click.option("--model", default="tiny", metavar="M", help="Base: folder, hub id or 'tiny'. [tiny]")
@click.option(
    "--pack",
    "packs",
    multiple=True,
    metavar="P",
    help="Pack to apply; several add up: --pack a=0.7 --pack b=0.3.",
)
@click.option("--prompt", required=True, help="What the user says; - reads standard input.")
@click.option("--system", help="System message.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without chat template.")
@click.option("--max-tokens", default=100, show_default=True, type=click.IntRange(1))
@click.option("--temp", default=0.0, show_default=True, type=click.FloatRange(0))
@click.option("--seed", default=0, show_default=True)
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print prompt and text as JSON, at the end.")
def generate(model, packs, prompt, system, raw, max_tokens, temp, seed, trust_remote_code, as_json):
    """Stream text, with a pack or without."""
    from contextlib import nullcontext

    from ..bases.loading import hold_causal
    from ..inference.generate import chat_prompt, stream
    from ..packs.base import load_base_for

    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt.strip():
        raise PackError("--prompt: is empty.")
    opened = _one_pack(packs)
    base = load_base_for(opened, model, trust_remote_code)
    hold_causal(base, "generate")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    tokens = base.tokenizer.encode(prompt) if raw else chat_prompt(base, messages)
    with base.applied(opened) if opened else nullcontext():
        pieces = []
        for piece in stream(base, tokens, max_tokens, temp, seed):
            pieces.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
    pack = " + ".join(packs) or None
    report = {"prompt": prompt, "text": "".join(pieces), "pack": pack, "model": model}
    _print(report, as_json, [""])


@packs.command()
@click.option("--model", required=True, metavar="M", help="Dense checkpoint: folder or hub id.")
@click.option("--out", required=True, metavar="DIR", help="Folder to write.")
@click.option("--mode", type=click.Choice(["nf4", "affine"]), default="nf4", show_default=True)
@click.option(
    "--double-quant/--no-double-quant",
    default=None,
    help="nf4: absmax in 8 bits, or in float32. [double]",
)
@click.option("--bits", type=int, metavar="N", help="affine: 2, 3, 4, 5, 6 or 8. [4]")
@click.option(
    "--group-size",
    type=int,
    metavar="N",
    help="Weights that share a scale: 32, 64 or 128, nf4 256 too. [64]",
)
@click.option("--block", type=int, metavar="N", help="nf4: another name of --group-size.")
@click.option(
    "--keep", default="", metavar="NAMES", help="Modules left dense: leaf or path, comma."
)
@click.option(
    "--bits-for",
    multiple=True,
    metavar="REGEX=N",
    help="Modules, by path, that become affine with N bits; repeatable.",
)
@click.option(
    "--format",
    type=click.Choice(["mlx", "bitsandbytes"]),
    default="mlx",
    show_default=True,
    help="bitsandbytes: for transformers.",
)
@click.option("--max-shard-gb", default=1.0, show_default=True, metavar="GB")
@click.option("--overwrite", is_flag=True, help="Replace DIR if it is there.")
@options.trust_remote_code()
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def quantize(
    model,
    out,
    mode,
    double_quant,
    block,
    bits,
    group_size,
    keep,
    bits_for,
    format,
    max_shard_gb,
    overwrite,
    trust_remote_code,
    as_json,
):
    """Write a 4-bit (or 2- to 8-bit) copy of a checkpoint.

    Tensor by tensor, so that a model larger than memory can be quantized. After an interruption the
    same command goes on.
    """
    from ..bases.quantization import Packing
    from ..bases.writer import Recipe
    from ..bases.writer import quantize as write
    from ..display import Display

    double = "--no-double-quant" if double_quant is False else "--double-quant"
    others = {"--bits": bits} if mode == "nf4" else {"--block": block, double: double_quant}
    if misplaced := [flag for flag, value in others.items() if value is not None]:
        raise PackError(f"{', '.join(misplaced)}: not with --mode {mode}.")
    if None not in (block, group_size) and block != group_size:
        raise PackError(f"--block {block}: is --group-size by another name, which is {group_size}.")
    size = group_size if block is None else block
    packing = Packing(
        mode, 4 if bits is None else bits, 64 if size is None else size, double_quant is not False
    )
    recipe = Recipe(
        packing,
        tuple(name.strip() for name in keep.split(",") if name.strip()),
        tuple(_bits_for(text) for text in bits_for),
        format,
        max_shard_gb,
    )
    report = write(model, out, recipe, overwrite, trust_remote_code, Display())
    _print(report, as_json, _quantize_lines(report))


def _bits_for(text: str) -> tuple[str, int]:
    expression, _, bits = text.rpartition("=")
    if not expression or not bits.isdecimal():
        raise PackError(f"--bits-for {text}: must be REGEX=BITS, as in 'down_proj=8'.")
    return expression, int(bits)


def _left_dense(reasons: dict[str, str]) -> list[str]:
    """A line for each reason, with the first modules that it holds for."""
    lines = []
    for reason in dict.fromkeys(reasons.values()):
        paths = [path for path, why in reasons.items() if why == reason]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        lines.append(f"dense   {', '.join(paths[:3])}{more} ({reason})")
    return lines


def _size(gb: float) -> str:
    return f"{gb:.2f} GB" if gb >= 0.1 else f"{gb * 1e3:.1f} MB"


def _bits_line(report: dict) -> str:
    where = f", {report['bits_per_quantized_weight']:.2f} where quantized"
    return (
        f"bits    {report['bits_per_weight']:.2f} a weight{where if report['quantized'] else ''} · "
        f"{report['quantized']} tensors quantized, {report['dense']} as they were"
    )


def _quantize_lines(report: dict) -> list[str]:
    found = f", {report['shards_found']} of them found finished" if report["shards_found"] else ""
    return [
        f"wrote   {report['out']} ({_size(report['gb'])}, {report['shards']} shard(s){found})",
        _bits_line(report),
        *_left_dense(report["left_dense"]),
        f"took    {report['seconds']:.1f} s · process peak {report['process_peak_gb']:.2f} GB",
    ]


@packs.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--model", default="tiny", metavar="M", help="Base of the pack. [tiny]")
@click.option("--out", required=True, metavar="DIR", help="Folder to write.")
@click.option(
    "--requantize",
    default="none",
    metavar="{none,same,affine4,affine8,nf4}",
    help="Bits of merged weights: none is dense. [none]",
)
@click.option(
    "--dtype",
    default="auto",
    metavar="{auto,float32,bfloat16,float16}",
    help="Of the weights that change. [auto: as in the base]",
)
@click.option(
    "--max-drift",
    type=float,
    metavar="KL",
    help="Gate: largest mean KL. [0.02, a tenth of the pack's]",
)
@click.option("--data", default="tiny", metavar="D", help="Rows to measure on. [tiny]")
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1))
@click.option("--max-shard-gb", default=1.0, show_default=True, metavar="GB")
@click.option("--overwrite", is_flag=True, help="Replace DIR if it is there.")
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def merge(
    pack,
    model,
    out,
    requantize,
    dtype,
    max_drift,
    data,
    rows,
    max_shard_gb,
    overwrite,
    trust_remote_code,
    as_json,
):
    """Write the base with a pack merged into it.

    The merged model is measured against the base with the pack attached first (mean KL, nats a
    token; of an encoder 1 - cosine of embeddings). Where rounding to few bits would take the pack
    out again, nothing is written, the way that would pass is named, and the exit code is 1.
    """
    from ..convert.merge import merge_pack
    from ..display import Display

    report = merge_pack(
        pack,
        model,
        out,
        requantize,
        dtype,
        max_drift,
        data,
        rows,
        max_shard_gb,
        overwrite,
        trust_remote_code,
        display=Display(),
    )
    lines = _drift_lines(report)
    if report["passed"]:
        lines.append(
            f"wrote   {report['out']} ({_size(report['gb'])}, {report['shards']} shard(s)): "
            f"{report['changed']} weights changed, requantize {requantize}"
        )
    _print(report, as_json, lines)
    if not report["passed"]:
        advice = (
            f"--requantize {report['passes']} passes ({report['tried'][report['passes']]:.2g})"
            if report["passes"]
            else f"nothing passes ({', '.join(f'{k} {v:.2g}' for k, v in report['tried'].items())})"
        )
        drift = report["tried"][requantize]
        _gate_failed("max-drift", drift, report["max_drift"], advice)


def _drift_lines(report: dict) -> list[str]:
    """What was measured between two ways of applying adapters."""
    if "drift_mean" in report:
        return [
            f"drift   1 - cosine {report['drift_mean']:.2g} on {report['texts']} texts, of the "
            f"{report['drift_of_pack']:.2g} by which the pack moves them"
        ]
    lines = [
        f"drift   KL {report['kl_mean']:.2g} nats a token · PPL {report['ppl_before']:.3f} → "
        f"{report['ppl_after']:.3f} (ratio {report['ppl_ratio']:.4f}) · same first token "
        f"{report['same_token']:.1%} · {report['rows']} rows, {report['targets']:,} targets"
    ]
    return lines + [f"pack    moves the base by KL {report['kl_of_pack']:.2g}"]


def _gate_failed(name: str, value: float, limit: float, advice: str) -> None:
    click.echo(
        f"packs: gate --{name} failed: {value:.2g} > {limit:.2g}; nothing was written; {advice}.",
        err=True,
    )
    sys.exit(1)


@packs.command()
@click.argument("packs_given", metavar="PACK=WEIGHT...", nargs=-1)
@click.option("--out", required=True, metavar="PACK", help="Pack to write.")
@click.option(
    "--method",
    default="linear",
    metavar="{linear,svd,ties,dare}",
    help="linear keeps all ranks. [linear]",
)
@click.option("--rank", type=int, metavar="R", help="Of the pack, for svd, ties and dare.")
@click.option("--density", type=float, metavar="D", help="Share that ties and dare keep. [0.5]")
@click.option("--seed", default=0, show_default=True, help="Of what dare drops.")
@click.option("--model", default="tiny", metavar="M", help="Base of the packs. [tiny]")
@click.option(
    "--max-drift",
    type=float,
    metavar="KL",
    help="Gate: largest mean KL. [0.02, a tenth of the pack's]",
)
@click.option("--data", default="tiny", metavar="D", help="Rows to measure on. [tiny]")
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1))
@click.option("--overwrite", is_flag=True, help="Replace PACK if it is there.")
@options.trust_remote_code()
@options.backend
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def combine(
    packs_given,
    out,
    method,
    rank,
    density,
    seed,
    model,
    max_drift,
    data,
    rows,
    overwrite,
    trust_remote_code,
    as_json,
):
    """Make one pack of several of one base.

    Deltas are added by weight (linear), brought to a rank (svd), trimmed and elected by sign (TIES)
    or thinned out at random (DARE); what bringing them to a rank loses is measured.
    """
    from ..convert.combine import combine_packs
    from ..display import Display

    report = combine_packs(
        [_weighted(text) for text in packs_given],
        out,
        method,
        rank,
        density,
        seed,
        model,
        max_drift,
        data,
        rows,
        overwrite,
        trust_remote_code,
        display=Display(),
    )
    lines = _drift_lines(report)
    if report["passed"]:
        lines.append(f"pack    {report['out']} ({report['pack_mb']:.2f} MB) by {method}")
    _print(report, as_json, lines)
    if not report["passed"]:
        advice = f"--rank {report['passes']} passes" if report["passes"] else "no rank passes"
        _gate_failed("max-drift", report["kl_mean"], report["max_drift"], advice)


def _weighted(text: str) -> tuple[str, float]:
    """PACK=WEIGHT."""
    folder, _, weight = text.rpartition("=")
    try:
        if folder:
            return folder, float(weight)
    except ValueError:
        pass
    raise PackError(f"{text}: must be PACK=WEIGHT, as in packs/notes=0.7.")


@packs.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["mlx-lm", "peft"]))
@click.option("--out", required=True, metavar="DIR", help="Folder to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def export(pack, to, out, as_json):
    """Write a pack as an adapter of PEFT or mlx-lm."""
    from ..convert.interop import export_pack

    report = export_pack(pack, to, out)
    lines = [
        f"wrote   {report['out']} ({report['mb']:.2f} MB): {report['modules']} modules for "
        f"{to}, proven by numbers"
    ]
    _print(report, as_json, lines + [f"note    {note}" for note in report["notes"]])


@packs.command("import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="PACK", help="Pack to write.")
@click.option("--model", metavar="M", help="Its base here. [as the adapter names it]")
@click.option("--overwrite", is_flag=True, help="Replace PACK if it is there.")
@options.trust_remote_code()
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def import_(folder, out, model, overwrite, trust_remote_code, as_json):
    """Make a pack of an adapter of PEFT or mlx-lm.

    Safetensors only. What cannot be carried exactly is refused with the reason.
    """
    from ..convert.interop import import_adapter

    report = import_adapter(folder, out, model, overwrite, trust_remote_code)
    whole = f" · whole: {', '.join(report['replaced'])}" if report["replaced"] else ""
    ranks = ", ".join(map(str, report["ranks"]))
    lines = [
        f"pack    {report['out']} ({report['pack_mb']:.2f} MB) from {report['from']}: "
        f"{', '.join(report['kinds'])} of rank {ranks} on {report['modules']} modules of "
        f"{report['base']}{whole}"
    ]
    _print(report, as_json, lines)


_SEARCHED = {
    "batch_size": "{}, less if need be",
    "max_seq_length": "{}, less if need be",
    "rank": "{}, less if need be",
    "recompute": "{}, block if need be",
    "matmul_path": "all",
    "quantize": "none, nf4 and affine4",
}


def _memory_options(command):
    """Those of `packs train` that change its peak."""
    for cls in (TrainConfig, LoRAConfig):
        for f in reversed(dataclasses.fields(cls)):
            if f.name in MEMORY_SETTINGS:
                default = _SEARCHED.get(f.name, "{}").format(options.default_of(f))
                command = options.of_field(f, default.removeprefix("None"))(command)
    return command


@packs.command()
@click.option("--model", metavar="M", help="Base: folder, hub id or 'tiny'. [tiny]")
@click.option("--memory", type=float, metavar="GB", help="Memory to fit. [this machine's]")
@click.option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Plan for such a device, with --memory. [this machine's]",
)
@options.configs
@_memory_options
@click.option("--json", "as_json", is_flag=True, help="Print the options as a list.")
def plan(memory, device, configs, as_json, **flags):
    """Say what fits into a memory, and how to start it.

    Reads config.json and the headers of the tensors only, of a hub id too. What is said by a flag
    or a file stands; batch, recomputation, length and rank give way in this order until it fits.
    The command at the end has the peak that is shown.
    """
    from ..bases.loading import TINY
    from ..config.schema import said
    from ..memory.plan import read_checkpoint
    from ..memory.recommend import advise, table
    from ..runtime import assumed_device, total_memory
    from .train import read_configs, recipe_of

    if device is not None and memory is None:
        raise PackError(f"--device {device}: say how much memory it has: --memory GB.")
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        raise PackError(f"--memory {memory:g}: must be a positive number of GB.")
    flags = {k: v for k, v in flags.items() if v is not None}
    values = read_configs(configs, flags)
    recipe = recipe_of(flags, values)
    model = recipe.run.get("model", TINY)
    under = recipe_of({"model": model}, values)
    limit = total_memory() if memory is None else int(memory * 1e9)
    checkpoint = read_checkpoint(model)
    with assumed_device(device):
        found = advise(checkpoint, limit, recipe.lora, recipe.train, said(values, flags))
        report = [
            {**option.to_json(), "command": option.command(model, configs, under)}
            for option in found
        ]
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        lines = table(found, checkpoint, limit, configs, under, width)
    _print(report, as_json, lines)


@packs.command("list")
@click.argument("folder", required=False)
@click.option("--hub-cache", is_flag=True, help="Packs in the caches of the Hub.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def list_(folder, hub_cache, as_json):
    """Show the packs below a folder.

    Without FOLDER below this one, or with --hub-cache those in the caches of the Hub alone. Reads
    manifests and sizes of files; hashes are for `packs inspect`.
    """
    from ..packs.listing import list_packs, table

    top = folder or (None if hub_cache else ".")
    found = list_packs(top, hub_cache)
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    where = " or ".join(filter(None, (top and f"below {top}", hub_cache and "in the Hub's caches")))
    _print(found, as_json, table(found, width) if found else [f"no packs {where}"])


@packs.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def diff(a, b, as_json):
    """Show what two packs share, and how far apart they are.

    By layer: norms of both deltas and of their difference, the cosine between them, and how far the
    directions overlap that they read and write. Loads no base.
    """
    from ..packs.diff import diff, lines

    report = diff(a, b)
    _print(report, as_json, lines(report))


@packs.command()
@click.argument("pack")
@click.argument("repo")
@click.option("--private", is_flag=True, help="Make a repository that is new a private one.")
@click.option("--revision", metavar="BRANCH", help="Branch to push to. [main]")
@click.option("--license", metavar="ID", help="The Hub's name for it. [the base's]")
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def push(pack, repo, private, revision, license, as_json):
    """Upload a pack to the Hugging Face Hub.

    REPO is owner/name. The pack is checked first; what is uploaded is what lies in its folder, so
    a licence or a card without the Hub's metadata is written there before. A pack that was pulled
    stays as it is, and a copy is changed.
    """
    from ..display import Display
    from ..packs.push import push

    report = push(
        pack, repo, private=private, revision=revision, license=license, display=Display()
    )
    name = report["repo"] + ("" if revision is None else f"@{report['revision']}")
    lines = [
        f"pushed  {len(report['files'])} files ({_size(report['bytes'] / 1e9)}) · commit "
        f"{report['commit'][:12]} · {report['url']}",
        f"try     packs pull {name} --out packs/{report['repo'].rsplit('/', 1)[-1]}",
    ]
    _print(report, as_json, lines)


@packs.command()
@click.argument("repo")
@click.option("--out", metavar="DIR", help="Folder to write. [the cache, for --pack owner/name]")
@click.option("--overwrite", is_flag=True, help="Replace a pack in DIR.")
@click.option("--json", "as_json", is_flag=True, help="Print what was pulled.")
def pull(repo, out, overwrite, as_json):
    """Fetch a pack from the Hugging Face Hub.

    REPO is owner/name or owner/name@revision. Only the files of its manifest are fetched, each is
    checked, and DIR appears when all are right. After an interruption the same command goes on.
    """
    from ..display import Display
    from ..packs.hub import pull
    from ..packs.manifest import read_pin

    if overwrite and out is None:
        raise PackError("--overwrite: is for --out DIR; the cache is always brought up to date.")
    pack = pull(repo, out, overwrite=overwrite, display=Display())
    base = shlex.quote(pack.manifest["base"]["id"])
    report = {"pack": str(pack.path), "pack_mb": pack.size_mb, **(read_pin(pack.path) or {})}
    lines = [
        f"pulled  {pack.path} ({pack.size_mb:.2f} MB) · commit {report['commit'][:12]} · hashes ok",
        f'try     packs generate --model {base} --pack {out or repo} --prompt "…"',
    ]
    _print(report, as_json, lines)


@packs.command()
@click.option(
    "--report",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the whole report as JSON, to attach to an issue.",
)
@options.backend
@click.option("-v", "--verbose", is_flag=True, help="Show every instance, on a CPU too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report.")
def doctor(file, verbose, as_json):
    """Check this machine and its kernels.

    The usual instances of every kernel are compared with plain MLX, and timed. Exit code 1 if one
    is wrong; training then takes the reference by itself.
    """
    from ..display import Display
    from ..files import atomic_write, to_json
    from ..ops.diagnostics import examine_all, kernel_instances

    if file is not None and not file.parent.is_dir():
        raise PackError(f"--report {file}: there is no folder {file.parent}.")
    with Display().task("kernels", len(kernel_instances()), "instances") as bar:
        report = examine_all(bar.advance)
    lines = _doctor_lines(report, verbose)
    if file is not None:
        atomic_write(file, to_json(report))
        lines.append(f"report  {file}: attach it to an issue")
    _print(report, as_json, lines)
    if not all(kernel["ok"] for kernel in report["kernels"]):
        click.echo("packs: a kernel is wrong on this machine; please report it", err=True)
        sys.exit(1)


def _doctor_lines(report: dict, verbose: bool) -> list[str]:
    """The machine, and a table of kernels; without kernels one line for each op and dtype."""
    memory, blas = report["memory"], report["blas"]
    lines = [
        f"device  {report['device']} · {report['system']}",
        "version " + " · ".join(f"{k} {v}" for k, v in report["versions"].items()),
        f"blas    {blas['library']} · {blas['note']} · "
        f"{blas['threads'] or '?'} threads · {blas['lanes']} lanes · "
        f"{blas['gflops']:.0f} GFLOP/s fp32",
        f"memory  {memory['total_gb']:.1f} GB · this process {memory['process_peak_gb']:.2f} GB",
    ]
    kernels = report["kernels"]
    if kernels[0]["backend"] != "reference":
        lines.append(f"kernels {kernels[0]['backend']}, compared with plain MLX")
    else:
        lines.append("kernels none on a CPU; plain MLX compared with float64")
        if not verbose:
            return lines + _doctor_groups(kernels)
    width = max(len(kernel["instance"]) for kernel in kernels)
    lines.append(f"        {'op':<13} {'instance':<{width}}  error    kernel us  plain us")
    for k in kernels:
        error = "-      " if k["max_error"] is None else f"{k['max_error']:.1e}"
        kernel_us, plain_us = (
            "-" if k[key] is None else f"{k[key]:,.0f}" for key in ("kernel_us", "reference_us")
        )
        lines.append(
            f"        {k['op']:<13} {k['instance']:<{width}}  {error}  "
            f"{kernel_us:>9}  {plain_us:>8}  {_verdict(k)}"
        )
    return lines


def _verdict(kernel: dict) -> str:
    return "ok" if kernel["ok"] else kernel["fault"][:160]


def _doctor_groups(kernels: list[dict]) -> list[str]:
    """Instances of one op and dtype together: how many, the worst error, what is wrong."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for kernel in kernels:
        groups.setdefault((kernel["op"], kernel["instance"].split()[0]), []).append(kernel)
    lines = []
    for (op, dtype), found in groups.items():
        worst = max((k["max_error"] for k in found if k["max_error"] is not None), default=None)
        error = "-" if worst is None else f"{worst:.1e}"
        bad = next((k for k in found if not k["ok"]), None)
        verdict = "ok" if bad is None else f"{bad['instance']}: {_verdict(bad)}"
        lines.append(f"        {op:<13} {dtype:<9} {len(found):>2} sizes  error {error}  {verdict}")
    return lines


def run_command(command: click.Command) -> None:
    """Run a command as a program: every error that a user can mend is one line and exit code 2."""
    try:
        sys.exit(command.main(standalone_mode=False) or 0)
    except PackError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.NoSuchOption as error:
        options.no_such_option(error).show()
        sys.exit(PackError.exit_code)
    except click.ClickException as error:
        _fail(" ".join(error.format_message().split()))
    except (click.Abort, KeyboardInterrupt):
        click.echo("packs: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a disk that fills up, a folder that may not be read
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        _fail(
            f"memory is exhausted ({' '.join(str(error).split())[:120]}); pass a smaller "
            "--batch-size or --max-seq-length, or train with --grad-checkpoint."
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Whether MLX (Metal, CUDA or host) could not get memory; it raises plain RuntimeErrors."""
    told = str(error).lower()
    signs = ("malloc", "memory", "resource limit")
    return isinstance(error, MemoryError) or any(sign in told for sign in signs)


def _fail(message: str) -> None:
    click.echo(f"packs: {printable(message)}", err=True)
    sys.exit(2)


def main() -> None:
    """Entry point of the `packs` command."""
    run_command(packs)


if __name__ == "__main__":
    main()
