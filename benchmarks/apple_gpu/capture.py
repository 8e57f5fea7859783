"""Graphs of steps and shapes of batches, laid out in a process of its own, which ends with them.

    python -m benchmarks.apple_gpu.capture < jobs.json

Reads ``{"implementation": ..., "jobs": [...]}`` and prints a line of JSON with a result for each
job. mlx-lm's process never imports mlx_packs, which changes MLX for its process.
"""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .lazy_graph import Node, address
from .libmlx import MetalBuild, Unsupported

OURS, MLX_LM = "mlx_packs", "mlx-lm"
_CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class StepJob:
    """A step of one implementation.

    Args:
        config: config.json of the model, of as many blocks as are to be laid out.
        batch: sequences.
        length: inputs of each.
        targets: target slots; None: as full rows with the share ``supervised`` are laid out.
        path: matmul path.
        recompute: activation checkpointing; of mlx-lm, block is ``--grad-checkpoint``.
        packed: whether sequences hold several examples.
        method: of training; of mlx-lm lora or dora.
        groups: of sequences that begin alike, as many in each; 0: the batch is no tree.
        prefix: inputs that the sequences of a group begin with, computed once.
        root: of these, inputs that all sequences begin with, computed before the others.
        weights: how the model is quantized.
        compiled: False: as a step of ours with blocks on disk, which is not.
    """

    config: dict
    batch: int
    length: int
    rank: int = 16
    path: str = "quantized"
    recompute: str = "none"
    supervised: float = 1.0
    targets: int | None = None
    packed: bool = False
    method: str = "lora"
    groups: int = 0
    prefix: int = 0
    root: int = 0
    weights: str = "affine4"
    compiled: bool = True


@dataclass(frozen=True)
class EpochJob:
    """The batches of one epoch over examples of some lengths (`our_step.batch_steps`)."""

    lengths: list[int]
    supervised: float
    batch_size: int
    packing: bool
    max_length: int


@dataclass(frozen=True)
class Captured:
    """A step's graph (`costs.priced`), and the targets that it was laid out with."""

    nodes: list[Node]
    outputs: list[int]
    targets: int


class Failed(Exception):
    """A step could not be laid out."""


def capture(implementation: str, jobs: list[StepJob | EpochJob]) -> list[Captured | list[tuple]]:
    """Return the graph of each step and the batches (`our_step.batch_steps`) of each epoch.

    Raises: Failed; Unsupported is one.
    """
    kinds = {StepJob: "step", EpochJob: "epoch"}
    request = {
        "implementation": implementation,
        "jobs": [{"kind": kinds[type(job)], **asdict(job)} for job in jobs],
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.apple_gpu.capture"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=_CHECKOUT,
        # a BLAS is bound by a product, and nothing can be evaluated
        env=os.environ | {"MLX_PACKS_BLAS": "off", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.strip()]
        raise Failed(f"{implementation}: {reason[-1] if reason else 'its process died'}")
    return [_result(result) for result in json.loads(done.stdout.splitlines()[-1])]


def _result(result: dict | list) -> Captured | list[tuple]:
    if isinstance(result, list):
        return [tuple(batch) for batch in result]
    return Captured([Node(*node) for node in result["nodes"]], result["outputs"], result["targets"])


WEIGHTS = {  # group size, bits and mode
    "affine4": (64, 4, "affine"),
    "mxfp4": (32, 4, "mxfp4"),
    "nvfp4": (16, 4, "nvfp4"),
}


def _model(config: dict, weights: str) -> object:
    """Return mlx-lm's model of a config, 4-bit, bfloat16, frozen; nothing of it is evaluated."""
    import mlx.core as mx
    import mlx.nn as nn

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    group_size, bits, mode = WEIGHTS[weights]
    nn.quantize(model, group_size, bits, mode=mode)
    model.freeze()
    return model


class _Ours:
    def __init__(self, build: MetalBuild) -> None:
        self.graph = importlib.import_module("benchmarks.apple_gpu.our_step")
        build.kernel_cost = self.graph.kernel_cost

    def targets(self, job: StepJob) -> int:
        if job.targets is not None:
            return job.targets
        full = [job.length + 1] * job.batch
        shapes = self.graph.batch_shapes(full, job.supervised, job.batch, False, job.length + 1)
        return shapes[0][2]

    def step(self, job: StepJob) -> tuple[list, list]:
        names = ("path", "recompute", "packed", "method", "groups", "prefix", "root", "compiled")
        options = {name: getattr(job, name) for name in names}
        size = {"batch": job.batch, "length": job.length, "rank": job.rank}
        quantization = dict(zip(("group_size", "bits", "mode"), WEIGHTS[job.weights], strict=True))
        config = job.config | {"quantization": quantization}
        model = _model(job.config, job.weights)
        return self.graph.lazy_step(model, config, targets=job.targets, **size, **options)

    def batches(self, job: EpochJob) -> list[tuple[int, int, int, int]]:
        return self.graph.batch_steps(**asdict(job))


class _MlxLM:
    def __init__(self, _: MetalBuild) -> None:
        self.module = importlib.import_module("benchmarks.apple_gpu.mlx_lm_step")

    def targets(self, job: StepJob) -> int:
        return job.batch * job.length

    def step(self, job: StepJob) -> tuple[list, list]:
        size = {"batch": job.batch, "length": job.length, "rank": job.rank}
        options = {"recompute": job.recompute, "method": job.method}
        return self.module.lazy_step(_model(job.config, job.weights), **options, **size)

    def batches(self, job: EpochJob) -> list[tuple[int, int, int, int]]:
        shapes = self.module.batch_shapes(job.lengths, job.batch_size, job.max_length)
        return [(*shape, 0) for shape in shapes]


_IMPLEMENTATIONS = {OURS: _Ours, MLX_LM: _MlxLM}


def _results(request: dict) -> list:
    build = MetalBuild()
    implementation = _IMPLEMENTATIONS[request["implementation"]](build)
    results = []
    for fields in request["jobs"]:
        if fields.pop("kind") == "epoch":
            results.append(implementation.batches(EpochJob(**fields)))
            continue
        job = StepJob(**fields)
        job = replace(job, targets=implementation.targets(job))
        outputs, leaves = implementation.step(job)
        nodes = [
            [n.name, n.primitive, n.inputs, n.outputs, n.attributes]
            for n in build.graph(outputs, leaves)
        ]
        names = [address(output) for output in outputs]
        results.append({"nodes": nodes, "outputs": names, "targets": job.targets})
    return results


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what trainers print is not the answer
    try:
        print(json.dumps(_results(json.load(sys.stdin))), file=answers, flush=True)
        code = 0
    except Unsupported as error:
        print(error, file=sys.stderr)
        code = 2
    except Exception as error:
        place = error.__traceback__
        while place.tb_next:
            place = place.tb_next
        file = Path(place.tb_frame.f_code.co_filename).name
        print(f"{type(error).__name__}: {error} ({file}:{place.tb_lineno})", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # MLX would wait for the streams of a GPU that is none


if __name__ == "__main__":
    main()
