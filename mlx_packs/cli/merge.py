"""`packs merge` and `packs combine`: packs merged into their base model, or into one pack."""

from pathlib import Path

import click

from ..config.choices import WEIGHT_FORMATS
from ..display import Display, size
from ..errors import PackError
from . import options
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
    options.data("Examples to compare on"),
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
    report = merge_pack(pack, model, out, **settings, display=Display())
    requantize = settings["requantize"]

    lines = _fidelity_lines(report)
    if report["passed"]:
        lines.append(
            f"wrote   {report['out']} ({size(report['gb'] * 1e9)}, {report['shards']} shard(s)): "
            f"{report['changed']} weights changed, requantize {requantize}"
        )
    if report["passed"] and report["for_merge"] != "none":
        lines.append(f"exact   the pack was trained for {requantize} (--for-merge)")

    print_report(report, lines)
    if not report["passed"]:
        scores = report["tried"]
        passing = report["passes"]
        if passing:
            advice = f"--requantize {passing} passes ({scores[passing]:.2g})"
        else:
            tried = ", ".join(f"{name} {score:.2g}" for name, score in scores.items())
            advice = f"nothing passes ({tried})"
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
def combine(weighted_packs: tuple[str, ...], out: str, method: str, **settings) -> None:
    """Combine several packs of one base model into one.

    The weighted deltas are added up (linear). The sum can also be reduced to a rank (svd), after
    trimming and electing signs (ties) or dropping weights at random (dare). The effect of the
    reduction is measured.
    """
    from ..convert.combine import combine_packs

    pairs = [_weighted(text) for text in weighted_packs]
    report = combine_packs(pairs, out, method, **settings, display=Display())
    lines = _fidelity_lines(report)
    if report["passed"]:
        lines.append(f"pack    {report['out']} ({report['pack_mb']:.2f} MB) by {method}")

    print_report(report, lines)
    if not report["passed"]:
        advice = "no rank passes"
        if report["passes"]:
            advice = f"--rank {report['passes']} passes"
        _fail(report["kl_mean"], report["max_drift"], advice)


def _weighted(text: str) -> tuple[str, float]:
    """Return a folder and its weight from ``PACK=WEIGHT``."""
    folder, _, weight = text.rpartition("=")
    try:
        if folder:
            return folder, float(weight)
    except ValueError:
        pass
    raise PackError(f"{text}: must be PACK=WEIGHT, as in packs/tickets=0.7.", flag="weighted_packs")


def _fidelity_lines(report: dict) -> list[str]:
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
    drift = f"gate --max-drift failed: {value:.2g} > {limit:.2g}"
    exit_if_failed([f"{drift}. Nothing was written. {advice}."])
