"""How far a merge at each precision lies from the attached pack; writes the table of docs/merge.md.

    python -m benchmarks.merge_drift PACK... [--model tiny] [--data DIR] [--rows 32] [--write]

Drift does not depend on the machine, but for the order of float32 sums.
"""

import argparse
import math
from pathlib import Path

from mlx_packs import Pack
from mlx_packs.convert.fidelity import Fidelity, compare_next_tokens, drift_limit
from mlx_packs.convert.merge_plan import MergeRequest
from mlx_packs.display import QUIET, Display
from mlx_packs.evaluation.rows import columns_of
from mlx_packs.packs.making import versions_line

DOC = Path(__file__).parents[1] / "docs" / "merge.md"
BEGIN, END = "<!-- merge drift -->", "<!-- end of merge drift -->"
WAYS = {
    "fp32": ("none", "float32"),
    "bf16": ("none", "bfloat16"),
    "8-bit affine": ("affine8", "auto"),
    "4-bit affine": ("affine4", "auto"),
    "4-bit NF4": ("nf4", "auto"),
    "mxfp4": ("mxfp4", "auto"),
    "nvfp4": ("nvfp4", "auto"),
}


def table(packs: list[Pack], model: str, data: str, rows: int) -> list[str]:
    """A row for each pack and precision."""
    lines = [
        "| pack | merged into | KL, nats per token | of the pack's own | PPL ratio | same first "
        "token | default gate |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pack in packs:
        columns = columns_of(pack, data)
        for name, (requantize, dtype) in WAYS.items():
            request = MergeRequest(
                pack=pack,
                model=model,
                requantize=requantize,
                dtype=dtype,
                max_drift=math.inf,
                columns=columns,
                rows=rows,
                max_shard_gb=1.0,
                trust_remote_code=False,
                display=Display(QUIET),
            )
            fidelity = Fidelity(**compare_next_tokens(request).scores)
            limit = drift_limit(None, fidelity.kl_of_pack)
            verdict = "passes" if fidelity.kl_mean <= limit else "**rejected**"
            lines.append(
                f"| {_name(pack)}, moves the base by {fidelity.kl_of_pack:.2g} | {name} | "
                f"{fidelity.kl_mean:.2g} | {fidelity.kl_mean / fidelity.kl_of_pack:.1%} | "
                f"{fidelity.ppl_ratio:.4f} | {fidelity.same_token:.1%} | {verdict} |"
            )
            print(lines[-1], flush=True)
    return lines


def _name(pack: Pack) -> str:
    steps = pack._part("recipe").get("iters")
    return f"{steps} updates" if steps else pack.path.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packs", nargs="+", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--data", default="benchmarks/passages")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--write", action="store_true", help="put the table into docs/merge.md")
    options = parser.parse_args()
    packs = [Pack.open(path) for path in options.packs]
    versions = " · ".join(f"{k} {v}" for k, v in versions_line().items())
    results = [
        *table(packs, options.model, options.data, options.rows),
        "",
        f"{options.rows} rows of `{options.data}`, base `{options.model}`. {versions}.",
    ]
    if options.write:
        text = DOC.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        DOC.write_text(before + "\n".join([BEGIN, "", *results, "", END]) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
