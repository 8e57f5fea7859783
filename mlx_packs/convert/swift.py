"""mlx-swift-lm: the folder that ``LoRAContainer.from(directory:)`` opens, and how to open it."""

import json
from pathlib import Path

from ..errors import PackError
from ..files import atomic_folder
from ..packs.pack import Pack
from ..terminal import printable
from .external import verify_numerically
from .mlx_lm import MlxLm

_README = """\
# {name}

An adapter of {base} for mlx-swift-lm.

```swift
import Foundation
import MLXLLM
import MLXLMCommon

let model = try await loadModelContainer(id: {quoted_base})
let folder = Bundle.main.url(forResource: {quoted_name}, withExtension: nil)!
let adapter = try LoRAContainer.from(directory: folder)
try await model.perform {{ context in
    try context.model.load(adapter: adapter)  // context.model.unload(adapter: adapter) takes it off
}}
let session = ChatSession(model)
print(try await session.respond(to: "Hello"))
```

It was not compiled where it was written: names are those of mlx-swift-lm in August 2026.
"""


class Swift:
    """The adapter as mlx-lm has it, on linears in blocks alone."""

    def write(self, pack: Pack, out: Path, start: str | None) -> dict:
        form = MlxLm()
        for path, spec in pack.specs.items():
            if spec.kind == "embedding" or spec.experts is not None:
                raise PackError(
                    f"{pack.name}: {path}: is no linear, and mlx-swift-lm adapts linears alone. "
                    "Merge the pack.",
                    "unsupported",
                )

        stored = form.convert(pack, out / form.tensor_file)
        keys = set(stored.config.get("lora_parameters", {}).get("keys", ()))
        if not pack.specs or keys & set(pack.specs):
            raise PackError(
                f"{pack.name}: has weights outside of the blocks, which mlx-swift-lm does not "
                "adapt. Merge the pack.",
                "unsupported",
            )

        deltas = form.deltas(stored, pack.manifest["base"]["model_type"])
        verify_numerically(pack.specs, pack.load_tensors(), deltas, out)
        name = printable(out.name)
        base = printable(pack.manifest["base"]["id"])
        quoted = {"quoted_name": _literal(name), "quoted_base": _literal(base)}
        readme = _README.format(name=name, base=base, **quoted)

        with atomic_folder(out) as partial:
            form.save(stored, partial)
            (partial / "README.md").write_text(readme, encoding="utf-8")
        return {"tensors": len(stored.tensors), "notes": [*stored.notes, f"see {out}/README.md"]}


def _literal(text: str) -> str:
    """Return a text as a literal of Swift, in which a backslash or a quote ends nothing."""
    return json.dumps(text, ensure_ascii=False)
