"""Write every kernel as the complete Metal source that MLX makes of it, to be compiled by `xcrun metal`.

    python .ci/metal_sources.py OUT

MLX itself generates each text, on any machine: `mx.export_function` walks the call of a kernel. What
MLX puts before it when it compiles on a Mac, its ``utils.h``, is included from the wheel of MLX. The
instances are those of `packs doctor`, at their real sizes; nothing is computed.
"""

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mlx_packs.ops import _backend, dispatch  # noqa: E402 - the path comes first
from mlx_packs.ops._check import outputs_and_gradients  # noqa: E402
from mlx_packs.ops.diagnostics import kernel_instances  # noqa: E402
from mlx_packs.runtime import mx  # noqa: E402
from tests.metal_emulator.launch import Call, Definition  # noqa: E402
from tests.metal_emulator.metal_source import generated  # noqa: E402

PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'


class Recorder:
    """What ``mx.fast.metal_kernel`` returns, with calls that write their source and give zeros."""

    out = Path()

    def __init__(self, **definition) -> None:
        names = {key: tuple(definition.pop(key)) for key in ("input_names", "output_names")}
        self.definition = Definition(**names, **definition)

    def __call__(self, **arguments) -> list[mx.array]:
        """Write the source of one call."""
        values = {k: tuple(v) for k, v in arguments.items()}
        _, source = generated(self.definition, Call(**values))
        digest = hashlib.sha256(source.encode()).hexdigest()[:12]
        file = self.out / f"{self.definition.name}-{digest}.metal"
        file.write_text(PRELUDE + source, encoding="utf-8")
        shapes = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]


def main(out: Path) -> None:
    """Write the sources of all instances into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    Recorder.out = out
    _backend.MAKERS["metal"] = Recorder
    dispatch.detect = lambda: "metal"
    for instance in kernel_instances():
        workload = instance.workload("metal")
        outputs_and_gradients(workload.kernel, workload.inputs)
    print(f"{len(list(out.glob('*.metal')))} sources of {len(kernel_instances())} instances")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
