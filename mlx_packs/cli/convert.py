"""Commands that write weights: merge, combine and quantize; and export and import of adapters."""

from pathlib import Path

import click

from ..config.choices import ADAPTER_FORMATS, DESTINATIONS, WEIGHT_FORMATS, WEIGHT_MODES
from ..display import Display, size
from ..errors import PackError
from . import options
from .inspect import bits_line
from .options import option
from .output import exit_if_failed, print_report

# Options of the comparison that a merged result has to pass.
_fidelity = options.add(
    option(
        "--max-drift",
        type=float,
        metavar="KL",
        help="Gate: write nothing and exit with code 1 if the mean KL divergence is above KL.",
        default_text="a tenth of the pack's own, and 0.02 at most",
    ),
    options.data(
        "Examples to compare on", default=None, default_text="the data of the pack, or the bundled"
    ),
    option("--rows", default=32, type=click.IntRange(1), help="Number of examples to compare on."),
)


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@options.model_of_pack
@options.out("Folder to write the merged model to.")
@option(
    "--requantize",
    default="none",
    metavar=f"{{none,same,{','.join(WEIGHT_FORMATS)}}}",
    help="Format of the merged weights: dense (none), the base model's (same), or another.",
)
@option(
    "--dtype",
    default="auto",
    metavar="{auto,float32,bfloat16,float16}",
    help="Dtype of the merged weights; auto is the base model's.",
)
@_fidelity
@options.max_shard_gb
@options.overwrite
@options.execution
def merge(pack: Path, model: str | None, out: str, **settings) -> None:
    """Merge a pack into its base model.

    The merged model is first compared with the base model with the pack attached: by mean KL
    divergence in nats per token, or for an encoder by 1 - cosine of the embeddings. If quantization
    would erase the pack's effect, nothing is written, a setting that passes is suggested, and the
    exit code is 1.
    """
    from ..convert.merge import merge_pack
    from ..packs.pack import Pack

    model = options.base_of(model, Pack.open(pack))
    report = merge_pack(pack, model, out, **settings, progress=Display())
    requantize = settings["requantize"]

    lines = [f"data    {report['compared_on']}", *_fidelity_lines(report)]
    if report["passed"]:
        lines.append(
            f"wrote   {report['out']} ({size(report['gb'] * 1e9)}, {report['shards']} shard(s)): "
            f"{report['changed']} weights changed, requantize {requantize}"
        )

    print_report(report, lines)
    if not report["passed"]:
        scores = report["tried"]
        tried = ", ".join(f"{name} {score:.2g}" for name, score in scores.items())
        advice = f"nothing passes ({tried})"
        if passing := report["passes"]:
            advice = f"--requantize {passing} passes ({scores[passing]:.2g})"
        _fail(scores[requantize], report["max_drift"], advice)


@click.command()
@click.argument("weighted_packs", metavar="PACK=WEIGHT...", nargs=-1, type=click.Path())
@options.out("Folder to write the pack to.")
@option(
    "--method",
    default="linear",
    metavar="{linear,svd,ties,dare}",
    help="Method that combines the deltas; linear keeps all ranks.",
)
@option("--rank", type=int, help="Rank of the result of svd, ties and dare.")
@option(
    "--density",
    type=float,
    metavar="SHARE",
    help="Share of the deltas that ties and dare keep.",
    default_text="0.5",
)
@option("--seed", default=0, help="Random seed of dare.")
@options.model
@_fidelity
@options.overwrite
@options.execution
def combine(weighted_packs: tuple[str, ...], out: str, method: str, model: str, **settings) -> None:
    """Combine several packs of one base model into one.

    The weighted deltas are added up (linear). The sum can also be reduced to a rank (svd), after
    trimming and electing signs (ties) or dropping weights at random (dare). The effect of the
    reduction is measured.
    """
    from ..convert.combine import combine_packs

    pairs = [_weighted(text) for text in weighted_packs]
    report = combine_packs(pairs, out, method, **settings, base=model, progress=Display())
    lines = [f"data    {report['compared_on']}", *_fidelity_lines(report)]
    if report["passed"]:
        lines.append(f"pack    {report['out']} ({report['pack_mb']:.2f} MB) by {method}")

    print_report(report, lines)
    if not report["passed"]:
        advice = f"--rank {report['passes']} passes" if report["passes"] else "no rank passes"
        _fail(report["kl_mean"], report["max_drift"], advice)


def _weighted(text: str) -> tuple[str, float]:
    folder, _, weight = text.rpartition("=")
    try:
        if folder:
            return folder, float(weight)
    except ValueError:
        pass
    raise PackError(f"{text}: must be PACK=WEIGHT, as in packs/tickets=0.7.", flag="weighted_packs")


def _fidelity_lines(report: dict) -> list[str]:
    if "documents" in report:
        return [
            f"drift   KL {report['drift_mean']:.2g} nats per document, of {report['documents']}, "
            f"of the {report['drift_of_pack']:.2g} by which the pack moves their scores"
        ]

    if "drift_mean" in report:
        return [
            f"drift   1 - cosine {report['drift_mean']:.2g} on {report['texts']} texts, of the "
            f"{report['drift_of_pack']:.2g} by which the pack moves them"
        ]

    return [
        f"drift   KL {report['kl_mean']:.2g} nats per token · PPL {report['ppl_before']:.3f} → "
        f"{report['ppl_after']:.3f} (ratio {report['ppl_ratio']:.4f}) · same first token "
        f"{report['same_token']:.1%} · {report['rows']} examples, {report['targets']:,} targets",
        f"pack    moves the base model by KL {report['kl_of_pack']:.2g}",
    ]


def _fail(value: float, limit: float, advice: str) -> None:
    """Exit with code 1 because a result is too far from the attached adapters."""
    drift = f"gate --max-drift failed: {value:.4g} > {limit:.4g}"
    exit_if_failed([f"{drift}. Nothing was written. {advice}."])


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@option(
    "--to",
    required=True,
    type=click.Choice((*ADAPTER_FORMATS, *DESTINATIONS)),
    help="Format of the adapter to write, or program that opens it.",
)
@option(
    "--out",
    metavar="DIR",
    help="Folder to write the adapter to.",
    default_text="needed; with --to lmstudio its folder of models",
)
@option(
    "--from",
    "start",
    metavar="NAME",
    help="Base model as the program calls it: a model or a .gguf file of Ollama, or for LM Studio "
    "the base model to merge into.",
    default_text="with lmstudio, the base that the pack names",
)
@options.as_json
def export(pack: Path, to: str, out: str | None, start: str | None) -> None:
    """Convert a pack for another tool.

    \b
    mlx-lm, peft  adapter folders, which packs import converts back
    gguf          an adapter for llama.cpp (llama-server --lora) and a Modelfile
    ollama        the same, for a model of Ollama (--from)
    lmstudio      the merged model, where LM Studio looks for models
    swift         an adapter folder for mlx-swift-lm

    Every adapter is numerically verified against the pack, and a merged model is compared with it.
    """  # noqa: D301 - click keeps the lines after \b
    from ..convert.formats import MODELS
    from ..convert.interop import export_pack

    if out is None and to != "lmstudio":
        raise PackError("--out: name the folder to write.", flag="out")

    report = export_pack(pack, to, out or MODELS / pack.resolve().name, start)
    proven = "measured against base and pack" if to == "lmstudio" else "numerically verified"
    lines = [
        f"wrote   {report['out']} ({report['mb']:.2f} MB): {report['modules']} modules for "
        f"{to}, {proven}"
    ]
    if variables := report["template_kwargs"]:
        shown = ", ".join(f"{name}={value!r}" for name, value in variables.items())
        lines.append(
            f"note    the pack was trained with variables of the chat template ({shown}): set them "
            "in the other program, too"
        )

    label = "try     " if to in DESTINATIONS else "note    "
    print_report(report, lines + [f"{label}{note}" for note in report["notes"]])


@click.command("import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@options.out("Folder to write the pack to.")
@option(
    "--model",
    metavar="MODEL",
    help="Base model of the adapter.",
    default_text="the one that the adapter names",
)
@option(
    "--labels",
    metavar="NAMES",
    help="Names of the labels of a classifier (SEQ_CLS), in the order of its outputs, separated "
    "by commas.",
    default_text="those it was exported with, or LABEL_0, LABEL_1, ...",
)
@options.overwrite
@options.trust_remote_code
@options.as_json
def import_(
    folder: Path,
    out: str,
    model: str | None,
    labels: str | None,
    overwrite: bool,
    trust_remote_code: bool,
) -> None:
    """Convert an adapter of PEFT or mlx-lm to a pack.

    DIR is the folder of the adapter; only safetensors files are read. An adapter that a pack cannot
    store exactly is rejected with the reason.
    """
    from ..convert.interop import import_adapter

    names = options.names(labels)
    report = import_adapter(folder, out, model, overwrite, trust_remote_code, names)
    in_full = f" · stored in full: {', '.join(report['replaced'])}" if report["replaced"] else ""
    ranks = ", ".join(map(str, report["ranks"]))
    lines = [
        f"pack    {report['out']} ({report['pack_mb']:.2f} MB) from {report['from']}: "
        f"{', '.join(report['kinds'])} of rank {ranks} on {report['modules']} modules of "
        f"{report['base']}{in_full}"
    ]
    print_report(report, lines + [f"note    {note}" for note in report["notes"]])


@click.command()
@options.setting(
    "model", required=True, help="Checkpoint to quantize: a folder or a Hugging Face id."
)
@options.out("Folder to write the quantized checkpoint to.")
@option("--mode", type=click.Choice([*WEIGHT_MODES]), default="nf4", help="Kind of quantization.")
@options.setting("double_quant", "double-quant")
@option(
    "--bits",
    type=int,
    help="With --mode affine: bits per weight (2, 3, 4, 5, 6 or 8).",
    default_text="4",
)
@option(
    "--group-size",
    type=int,
    help="Number of weights that share a scale: 32, 64 or 128; with --mode nf4 also 256.",
    default_text="64",
)
@options.setting("keep")
@option(
    "--bits-for",
    multiple=True,
    metavar="REGEX=BITS",
    help="Quantize the modules whose path matches REGEX in affine mode with BITS bits. Repeatable.",
)
@options.max_shard_gb
@options.overwrite
@options.trust_remote_code
@options.as_json
def quantize(model: str, out: str, overwrite: bool, trust_remote_code: bool, **settings) -> None:
    """Write a 4-bit (or 2- to 8-bit) copy of a checkpoint.

    Tensors are quantized one by one, so the model may be larger than memory.
    """
    from ..bases.quantization import QuantizeOptions
    from ..bases.weight_formats import specified_format
    from ..bases.writer import quantize

    geometry = {name: settings[name] for name in ("bits", "group_size", "double_quant")}
    how = QuantizeOptions(
        specified_format(settings["mode"], **geometry),
        options.names(settings["keep"]),
        tuple(map(_bits_for, settings["bits_for"])),
        settings["max_shard_gb"],
    )
    report = quantize(model, out, how, overwrite, trust_remote_code, Display())
    print_report(report, _lines(report))


def _bits_for(text: str) -> tuple[str, int]:
    expression, _, bits = text.rpartition("=")
    if not expression or not bits.isdecimal():
        raise PackError(f"--bits-for {text}: must be REGEX=BITS, as in 'down_proj=8'.")
    return expression, int(bits)


def _lines(report: dict) -> list[str]:
    return [
        f"wrote   {report['out']} ({size(report['gb'] * 1e9)}, {report['shards']} shard(s))",
        bits_line(report),
        *_dense_lines(report["left_dense"]),
        f"took    {report['seconds']:.1f} s · process peak {report['process_peak_gb']:.2f} GB",
    ]


def _dense_lines(reasons: dict[str, str]) -> list[str]:
    lines = []
    for reason in dict.fromkeys(reasons.values()):
        paths = [path for path, why in reasons.items() if why == reason]
        shown = ", ".join(paths[:3])
        if len(paths) > 3:
            shown += f" and {len(paths) - 3} more"
        lines.append(f"dense   {shown} ({reason})")
    return lines
