"""The adapters that a run starts from: those of a pack, or of a file with mlx-lm's names."""

from pathlib import Path
from typing import Any

from ..adapters.trainable import Trainable
from ..errors import PackError, errors_of, library_errors
from ..packs.compatibility import check_base, note_of_start
from ..packs.manifest import ADAPTERS, MANIFEST, chat_template_of, is_hub_name, read_manifest
from ..packs.pack import Pack
from ..reading import read_header, sha256
from ..runtime import mx
from .settings import Run, RunSettings

FLAG = "--resume-adapter-file"


def adapters_file(start: str) -> Path:
    """Return the file of adapters that a setting names: itself, or the one of a pack."""
    path = Path(start).expanduser()
    is_name = is_hub_name(start) and path.suffix != ".safetensors"
    if not path.is_dir() and not is_name:
        if not path.is_file():
            raise PackError(f"{FLAG} {start}: no such file or pack.", "not-found")
        return path

    if path.is_dir() and not (path / MANIFEST).is_file() and (path / ADAPTERS).is_file():
        return path / ADAPTERS  # as mlx-lm writes it
    with errors_of("resume_adapter_file"):
        pack = Pack.open(start)
        pack.verify()
    return pack.path / ADAPTERS


def initial_adapters(start: str | None, earlier: dict | None) -> dict | None:
    """Return name and hash of adapters to start from, of ``earlier`` if resumed; None if fresh."""
    if earlier is not None:
        if start is not None:
            raise PackError(
                f"--resume and {FLAG}: a resumed run continues from its checkpoint. "
                "Leave one of them out.",
                "conflict",
                "resume_adapter_file",
            )
        return earlier["recipe"].get("resume_adapter_file")

    if start is None:
        return None
    file = adapters_file(start)
    return {"name": file.name, "sha256": sha256(file)}


def with_initial_template(settings: RunSettings, start: str | None) -> RunSettings:
    """Return settings with the chat template of the pack that a run starts from, unless set."""
    if start is None or settings.columns.chat_template is not None:
        return settings
    if not (manifest := adapters_file(start).parent / MANIFEST).is_file():
        return settings
    return settings.with_settings({}, {"chat_template": chat_template_of(read_manifest(manifest))})


def compare_with_initial_pack(run: Run, pack: Pack) -> None:
    """Say where a pack records another use than the pack that its run started from."""
    start = run.request.option("resume_adapter_file")
    if start is None or not (manifest := adapters_file(start).parent / MANIFEST).is_file():
        return
    if note := note_of_start(read_manifest(manifest), pack.manifest):
        run.display.line("note", note)


def load_adapters(trainable: Trainable, start: str) -> None:
    """Set the trainable parameters from a file of exactly these tensors."""
    file = adapters_file(start)
    with errors_of("resume_adapter_file"):
        read_header(file)
        if (file.parent / MANIFEST).is_file():
            _check_pack(Pack.open(file.parent), trainable)

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
