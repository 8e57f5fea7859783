"""Merge a pack into its base: a checkpoint of the base's own names and dtypes that needs no pack.

The merge is planned from lazy tensors (`merge_plan`), compared with the attached pack before a file
is written, and written atomically, tensor by tensor (`bases.writer`). It is rejected
where quantization would erase the pack's effect.
"""

import time
from dataclasses import replace
from pathlib import Path

from ..bases import files as base_files
from ..bases import writer
from ..bases.tokenizer import load_tokenizer, with_template
from ..bases.turns import unnamed_ends
from ..bases.writer import WritePlan
from ..config.arguments import checked_arguments
from ..config.choices import architecture_of
from ..config.data import Columns
from ..data.in_memory import Data
from ..display import Display, display_of
from ..errors import PackError
from ..evaluation.rows import comparison_data
from ..packs.base import Base, name_of
from ..packs.compatibility import check_checkpoint, find_base
from ..packs.manifest import (
    architecture_facts,
    chat_template_of,
    has_score_head,
    task_code,
)
from ..packs.pack import Pack
from .external import check_choice, unsupported
from .fidelity import ROWS, Outcome, check_max_drift, compare_next_tokens
from .merge_plan import DTYPES, REQUANTIZE, MergeRequest, plan_merge


@checked_arguments
def merge_pack(  # noqa: PLR0913 - a public facade
    pack: str | Path | Pack,
    base: Base | str | Path | None,
    out: str | Path,
    requantize: str = "none",
    dtype: str = "auto",
    max_drift: float | None = None,
    data: Data | None = None,
    rows: int = ROWS,
    max_shard_gb: float = 1.0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    columns: Columns | None = None,
    progress: bool | Display = True,
) -> dict:
    """Merge a pack into its base model, and write the result if it matches the attached pack.

    Args:
        pack: A pack or its folder.
        base: Its base model: a folder, a Hub id, a loaded one, or None for the one of its training.
        out: Folder to write the merged model to.
        requantize: Format of the merged weights. ``"none"`` writes dense weights in the float dtype
            of the base model, and ``"same"`` quantizes as the base model is. ``"affine4"``,
            ``"affine8"``, ``"nf4"``, ``"mxfp4"`` and ``"nvfp4"`` quantize the weights that change,
            and others that become smaller by it.
        dtype: Dtype of the merged weights before any quantization: ``"float32"``, ``"bfloat16"``,
            ``"float16"``, or ``"auto"`` for the base model's.
        max_drift: Maximum mean KL divergence of the merged model from the attached pack, in nats
            per token (of a reranker per document). None is a tenth of the KL divergence that the
            pack itself makes, and 0.02 at most. An embedder's is 1 - cosine, and 0.001 at most.
        data: Examples to compare on; None is the data of the pack, or the bundled if it has gone.
        rows: Maximum number of these examples.
        max_shard_gb: Maximum size of a file of weights, in 10^9 bytes.
        overwrite: Whether to replace a folder that this function wrote.
        trust_remote_code: Whether to allow executing Python code shipped with the base model.
        columns: Names of the columns of ``data``.
        progress: Whether to show the progress, as in `train_pack`.

    Returns:
        The output of `packs merge --json`. If ``passed`` is false, nothing was written, and
        ``passes`` is the cheapest setting that would pass (``affine8``, ``none --dtype float32``).

    Raises:
        PackError: If the pack has another base model or cannot be merged, or ``out`` cannot be
            written.
    """
    started = time.monotonic()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    chosen, compared_on = comparison_data(pack, [pack], data)
    request = MergeRequest(
        pack=pack,
        model=find_base(pack) if base is None else name_of(base),
        requantize=requantize,
        dtype=dtype,
        max_drift=max_drift,
        columns=columns or chosen,
        rows=rows,
        max_shard_gb=max_shard_gb,
        trust_remote_code=trust_remote_code,
        display=display_of(progress),
    )

    _check(request)
    source, _ = check_checkpoint(pack, request.model)
    writer.output_folder(str(out), source, overwrite)
    compare = task_code(pack.manifest, "compare_merged") or compare_next_tokens
    outcome = compare(request)
    report = _report(request, outcome, out) | {"compared_on": compared_on}
    if not report["passed"]:
        return report

    plan = _with_files(plan_merge(request, _facts(request, outcome)), request, source)
    record = writer.write(out, source, plan, overwrite, request.display)
    return report | {
        "verified": outcome.verified(requantize),
        **_written(out, record),
        "seconds": round(time.monotonic() - started, 2),
    }


def _check(request: MergeRequest) -> None:
    check_choice("requantize", request.requantize, REQUANTIZE)
    check_choice("dtype", request.dtype, DTYPES)
    if request.requantize != "none" and not architecture_facts(request.pack.manifest).quantizable:
        raise PackError(
            f"--requantize {request.requantize}: an encoder is written dense, as transformers "
            "reads it.",
            "unsupported",
        )
    check_max_drift(request.max_drift)

    if has_score_head(request.pack.manifest):
        raise unsupported(
            request.pack.name,
            "has a score head, and a merged checkpoint has no place for it. "
            "Use packs export --to peft.",
        )


def _with_files(plan: WritePlan, request: MergeRequest, source: Path) -> WritePlan:
    """Add what the tokenizer and the task of a pack need beside the weights."""
    pack = request.pack
    config = base_files.read_config(source / base_files.CONFIG)
    template = chat_template_of(pack.manifest)
    tokenizer = None
    ends: tuple[int, ...] = ()
    if architecture_of(config["model_type"]) == "decoder":
        from mlx_lm.utils import load_config

        tokenizer = load_tokenizer(source, load_config(source), request.trust_remote_code)
        # what ends an answer if the base does not name it: the pack writes it
        if unnamed := unnamed_ends(with_template(tokenizer, template)):
            ends = (tokenizer.eos_token_id, *unnamed)

    files = {}
    if files_of := task_code(pack.manifest, "merged_files"):
        files = files_of(pack, source, config, tokenizer)
    if template:
        files[base_files.CHAT_TEMPLATE] = template
    return replace(plan, ends=ends, texts=files)


def _report(request: MergeRequest, outcome: Outcome, out: str | Path) -> dict:
    """Return the facts known before anything is written."""
    return {
        "out": str(out),
        "model": base_files.public_name(str(request.model)),
        "requantize": request.requantize,
        "dtype": request.dtype,
        **outcome.scores,
        "max_drift": outcome.limit,
        "passed": outcome.passes == request.requantize,
        "passes": outcome.passes,
        "tried": outcome.tried,
    }


def _written(out: str | Path, record: dict) -> dict:
    """Return facts of the folder that was written."""
    return {
        "changed": record["merged"]["changed"],
        "names": record["merged"]["names"],
        "files": sorted(file.name for file in Path(out).iterdir()),
        "shards": len(record["files"]),
        "gb": sum(file["bytes"] for file in record["files"].values()) / 1e9,
    }


def _facts(request: MergeRequest, outcome: Outcome) -> dict:
    return {
        "base": base_files.public_name(str(request.model)),
        "pack_sha256": request.pack._adapters_hash,
        "requantize": request.requantize,
        "dtype": request.dtype,
        **{name: outcome.scores[name] for name in outcome.recorded},
    }
