"""LM Studio: a merged model where it looks for models, since it opens no adapters."""

from pathlib import Path

from ..errors import PackError
from ..packs.pack import Pack
from .merge import merge_pack

MODELS = Path("~/.lmstudio/models/mlx-packs")  # <publisher>/<model>, as LM Studio has them


class LMStudio:
    """The base with the pack in it, quantized as the base is where the merge gate lets that pass.

    A pack of ``--for-merge`` is merged in its format.
    """

    def write(self, pack: Pack, out: Path, start: str | None) -> dict:
        """Write the model; ``start`` is the base, where it is not the one that the pack names."""
        base = pack.manifest["base"]
        requantize = "same" if base["quantization"] else "none"
        if pack.for_merge != "none":
            requantize = pack.for_merge

        report = merge_pack(pack, start or base["id"], out, requantize=requantize)
        notes = []
        if not report["passed"] and report["passes"] in report["tried"]:
            requantize = report["passes"]
            notes.append(
                f"merged with --requantize {requantize}: quantized as the base, it would lose too "
                "much of the pack"
            )
            report = merge_pack(pack, start or base["id"], out, requantize=requantize)

        if not report["passed"]:
            tried = ", ".join(f"{name} {drift:.2g}" for name, drift in report["tried"].items())
            raise PackError(
                f"{out}: not written: merged, the model would differ too much from the base with "
                f"the pack ({tried}; at most {report['max_drift']:.2g}). `packs merge` has more "
                "choices.",
                "unsupported",
            )

        return {"requantize": requantize, "notes": [*notes, "LM Studio lists it in My Models"]}
