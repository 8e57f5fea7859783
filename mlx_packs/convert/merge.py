"""Merge a pack into its base: a checkpoint of the base's own names and dtypes that needs no pack.

The merge is planned from lazy tensors (`merge_plan`), compared with the attached pack before a file
is written (`MERGERS`), and written atomically, tensor by tensor (`bases.writer`). It is rejected
where quantization would erase the pack's effect.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ..bases import files as base_files
from ..bases import writer
from ..config.choices import ARCHITECTURES, architecture_of, registered
from ..config.schema import DataConfig
from ..display import QUIET, Display
from ..errors import PackError
from ..evaluation.rows import columns_of
from ..packs.pack import Pack
from .fidelity import ROWS, Outcome, check_max_drift
from .merge_decoder import compare_next_tokens
from .merge_encoder import compare_embeddings
from .merge_plan import DTYPES, REQUANTIZE, MergeRequest, plan_merge

# Each compares a merged model, before it is written, with the pack attached.
MERGERS: dict[str, Callable[[MergeRequest], Outcome]] = registered(
    ARCHITECTURES, {"decoder": compare_next_tokens, "encoder": compare_embeddings}
)


def merge_pack(  # noqa: PLR0913 - a public facade
    pack: str | Path | Pack,
    model: str | Path,
    out: str | Path,
    requantize: str = "none",
    dtype: str = "auto",
    max_drift: float | None = None,
    data: str | Path = "tiny",
    rows: int = ROWS,
    max_shard_gb: float = 1.0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    columns: DataConfig | None = None,
    display: Display | None = None,
) -> dict:
    """Write a pack's base with the pack merged into it, if the two stay alike.

    Args:
        pack: a pack or its folder.
        model: its base.
        out: the folder to write.
        requantize: ``none`` writes dense weights in the base's float dtype; ``same`` quantizes as
            the base is quantized; ``affine4``, ``affine8``, ``nf4`` quantize the weights that
            change so, and of the others those that become smaller by it.
        dtype: of the weights that change (before quantization, where there is one): ``auto`` is the
            base's, or ``float32``, ``bfloat16``, ``float16``.
        max_drift: largest mean KL, nats a token, of the attached pack from the merged model; None
            is a tenth of the KL that the pack itself makes, and 0.02 at most. For an encoder it is
            the mean of 1 - cosine of embeddings, at most 0.001.
        data: examples to compare on.
        rows: at most so many of them.
        max_shard_gb: largest file, in GB.
        overwrite: whether a folder that was written here is replaced.
        trust_remote_code: whether to run Python code that comes with the base.
        columns: names of the data's columns.
        display: progress output.

    Returns:
        What `packs merge --json` prints. With ``passed`` false nothing is written, and ``passes``
        names the cheapest setting that would pass (``affine8``, ``none --dtype float32``).

    Raises:
        PackError: the pack is not of this base, cannot be merged, or ``out`` cannot be written.
    """
    started = time.monotonic()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    request = MergeRequest(
        pack=pack,
        model=model,
        requantize=requantize,
        dtype=dtype,
        max_drift=max_drift,
        columns=columns or columns_of(pack, data),
        rows=rows,
        max_shard_gb=max_shard_gb,
        trust_remote_code=trust_remote_code,
        display=display or Display(QUIET),
    )
    _check(request)
    source, _ = pack.check_checkpoint(model)
    writer.output_folder(str(out), source, overwrite)
    outcome = MERGERS[architecture_of(pack.manifest["base"]["model_type"])](request)
    report = _report(request, outcome, out)
    if not report["passed"]:
        return report
    plan = plan_merge(request, _facts(request, outcome))
    record, _ = writer.write(out, source, plan, overwrite, request.display)
    return report | {
        "changed": record["merged"]["changed"],
        "names": record["merged"]["names"],
        "shards": len(plan.shards),
        "gb": sum(file["bytes"] for file in record["files"].values()) / 1e9,
        "seconds": round(time.monotonic() - started, 2),
    }


def _check(request: MergeRequest) -> None:
    if request.requantize not in REQUANTIZE:
        valid = ", ".join(REQUANTIZE)
        raise PackError(f"--requantize {request.requantize}: must be one of {valid}.", "unknown")
    if request.dtype not in DTYPES:
        raise PackError(f"--dtype {request.dtype}: must be one of {', '.join(DTYPES)}.", "unknown")
    check_max_drift(request.max_drift)


def _report(request: MergeRequest, outcome: Outcome, out: str | Path) -> dict:
    """Return what is known before anything is written."""
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


def _facts(request: MergeRequest, outcome: Outcome) -> dict:
    """Return what the written folder records."""
    return {
        "base": base_files.public_name(str(request.model)),
        "pack_sha256": request.pack.adapters_hash,
        "requantize": request.requantize,
        "dtype": request.dtype,
        **{name: outcome.scores[name] for name in outcome.recorded},
    }
