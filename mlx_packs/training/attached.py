"""What a run trains: adapters on its base, their initial values, and the objectives of phases."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..adapters.saved_modules import attach_method
from ..adapters.trainable import Trainable
from ..bases.geometry import is_embedding
from ..display import VERBOSE, Display, shown_count
from ..errors import PackError, errors_of, library_errors
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import bare_module
from ..nn.wrapped import NoisyEmbedding, trained_module
from ..objectives.reference import PhaseReference
from ..packs.adapter_config import adapter_config_of
from ..packs.compatibility import check_base
from ..packs.pack import Pack
from ..reading import read_header
from ..runtime import mx
from ..tasks.task import Binding, task_class
from .fit import Objectives
from .planning import reads_limited
from .prepare import FLAG, InitialAdapters, PreparedRun


def add_noise(trainable: Trainable, alpha: float) -> None:
    """Put noise on the embeddings of the tokens, in training, until the trainable is detached.

    NEFTune: https://arxiv.org/abs/2310.05914
    """
    vocab_size = trainable.base.vocab_size
    noisy = {}
    for path, module in trainable.model.named_modules():  # a module comes before those inside it
        table = bare_module(trained_module(module))
        is_inside = path.rpartition(".")[0] in noisy
        if not is_inside and is_embedding(table) and frozen_weight(table).shape[0] == vocab_size:
            noisy[path] = NoisyEmbedding(module, alpha)

    if not noisy:
        raise PackError(
            f"--neftune-noise-alpha: {trainable.base.name} has no embedding that it can be added "
            "to.",
            "unsupported",
        )
    trainable.swap(list(noisy.items()))


@contextmanager
def attached(prepared: PreparedRun) -> Iterator[Trainable]:
    """Attach what is trained to the base, and yield it."""
    run = prepared.run
    memory = prepared.memory
    with run.display.working(run.train.method, "attaching"):  # pissa decomposes every weight
        trainable = attach_method(
            prepared.target, prepared.lora, run.train, memory.choice.matmul_path
        )

    try:
        _describe(trainable, run.display, prepared.base_weights)
        if prepared.initial is not None:
            load_adapters(trainable, prepared.initial)
        trainable.recompute(memory.recompute)
        trainable = task_class(run.train.tasks[-1], run.train).trained_here(trainable, run.display)

        with reads_limited(prepared.base, memory.plan):
            yield trainable
    finally:
        trainable.detach()


@contextmanager
def bound_objectives(
    prepared: PreparedRun, trainable: Trainable
) -> Iterator[tuple[Objectives, PhaseReference]]:
    """Yield the objective of each phase, by its name, and what the run starts from."""
    run = prepared.run
    objectives = {}
    references = {}
    origin = PhaseReference(trainable, run.files.reference_file(0), not run.begins_with_adapters)
    origin.take(fresh=not run.place.resume)
    for phase in run.phases:
        references[phase.name] = origin
        if phase.first_batch:
            file = run.files.reference_file(phase.first_batch)
            references[phase.name] = PhaseReference(trainable, file, run=origin)

    with ExitStack() as closes:
        for task in prepared.tasks.values():
            of_task = [data for data in prepared.data if data.task is task]
            bound = task.bind(Binding(trainable, of_task, references, prepared.memory))
            for objective in dict.fromkeys(bound):
                closes.callback(objective.close)
            objectives |= {d.phase.name: o for d, o in zip(of_task, bound, strict=True)}

        if run.train.neftune_noise_alpha:
            add_noise(trainable, run.train.neftune_noise_alpha)
        yield objectives, origin


def _describe(trainable: Trainable, display: Display, base_weights: int) -> None:
    count = trainable.parameter_count()
    share = f"{100 * count / base_weights:.3g} % of {shown_count(base_weights)}"
    text = f"{count:,} trainable parameters ({share}) · {trainable.details}"
    display.line(trainable.method, text, VERBOSE)
    for group in trainable.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)

    for note in trainable.notes:
        display.line("note", note)

    model_type = trainable.base.config["model_type"]
    blocks = len(trainable.base.model.layers)
    if trainable.specs and adapter_config_of(trainable.specs, model_type, blocks) is None:
        display.line(
            "note",
            "ranks or scales differ between projections: stock mlx-lm opens what "
            "`packs export --to mlx-lm` makes of this pack",
        )


def load_adapters(trainable: Trainable, initial: InitialAdapters) -> None:
    """Set the trainable parameters from a file of exactly these tensors."""
    file = initial.file
    with errors_of("resume_adapter_file"):
        read_header(file)
        if initial.pack is not None:
            _check_pack(initial.pack, trainable)

    with library_errors(lambda reason: PackError(f"{FLAG} {file}: {reason}.", "unreadable")):
        tensors = mx.load(str(file))
    trainable.load(tensors, str(file))


def _check_pack(pack: Pack, trainable: Trainable) -> None:
    """Raise a PackError unless a pack has the base model and the adapters of a run."""
    check_base(pack, trainable.base)
    if not pack.specs or pack.specs == trainable.specs:
        return

    settings = adapter_settings(pack)
    flags = "the rank_pattern and alpha_pattern of its recipe"
    if "rank" in settings:
        flags = f"--rank {settings['rank']} --alpha {settings['alpha']:g}"
    if pack.specs.keys() != trainable.specs.keys():
        leaves = dict.fromkeys(path.rpartition(".")[2] for path in pack.specs)
        flags += f" --target-modules {','.join(leaves)}, in the same blocks"
    raise PackError(f"{pack.name}: its adapters differ from this run's. Pass {flags}.", "mismatch")


def adapter_settings(pack: Pack) -> dict[str, Any]:
    """Return settings that make the adapters of a pack, module by module."""
    ranks = {}
    alphas = {}
    for path, spec in pack.specs.items():
        for part in spec.slices:
            name = f"{path}.{part.name}" if len(spec.slices) > 1 else path

            if part.rank:
                ranks[name] = part.rank
                alphas[name] = part.alpha

    settings: dict[str, Any] = {"target_modules": tuple(ranks)}
    if len(set(ranks.values())) > 1 or len(set(alphas.values())) > 1:
        return {**settings, "rank_pattern": ranks, "alpha_pattern": alphas}
    return {**settings, "rank": max(ranks.values()), "alpha": max(alphas.values())}
