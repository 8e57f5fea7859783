"""The run folder: step-NNNNNN checkpoints, the pointer `latest`, metrics.jsonl, config.json."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..config.parse import current_keys
from ..errors import PackError
from ..files import atomic_write, to_json
from ..leftovers import discard, recovered

CONFIG = "config.json"
LATEST = "latest"  # names a checkpoint
METRICS = "metrics.jsonl"
RUN_FORMAT = "mlx_packs run 1"
_STEP = re.compile(r"step-\d{6,}")


def run_folder(pack: Path) -> Path:
    """Return the run folder beside a pack."""
    if pack.name in ("", ".."):
        raise PackError(f"--out {pack}: must name a folder of its own.", "invalid")
    return pack.with_name(pack.name + "-run")


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, oldest first."""
    recovered(run)
    entries = run.iterdir() if run.is_dir() else []
    folders = [f for f in entries if _STEP.fullmatch(f.name) and f.is_dir() and not f.is_symlink()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def clear_run(run: Path) -> None:
    """Remove the checkpoints, the pointer and the metrics of an earlier run."""
    for folder in checkpoints(run):
        discard(folder, folder)
    for name in (LATEST, METRICS):
        (run / name).unlink(missing_ok=True)


def write_identity(run: Path, identity: dict) -> None:
    """Write the ``recipe`` of a run, and the fingerprints of its ``base`` and ``data``.

    A resumed run takes the ``matmul_path`` that is there, the choice of ``auto``.
    """
    atomic_write(run / CONFIG, to_json({"format": RUN_FORMAT, **identity}))


def read_identity(run: Path) -> dict:
    """Return the identity that `write_identity` wrote."""
    file = run / CONFIG
    try:
        identity = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise PackError(
            f"{file}: cannot be read as JSON. This is no run folder.", "unreadable"
        ) from None
    kinds = {"recipe": dict, "base": str, "data": dict}
    has_format = isinstance(identity, dict) and identity.get("format") == RUN_FORMAT
    if not has_format or not all(isinstance(identity.get(k), kind) for k, kind in kinds.items()):
        raise PackError(
            f"{file}: is not that of a run (it needs format '{RUN_FORMAT}', recipe, base, data).",
            "unreadable",
        )
    return identity | {"recipe": current_keys(identity["recipe"])}


def recorded_matmul_path(run: Path) -> str | None:
    """Return the matmul path that ``auto`` chose when a run began; None if it chose none."""
    path = read_identity(run).get("matmul_path")
    return path if isinstance(path, str) else None


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder, or empty."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return bool(read_identity(folder))
    except PackError:
        return False


def latest_checkpoint(run: Path) -> Path | None:
    """Return the checkpoint that `latest` names; None if it names none of this folder."""
    pointer = run / LATEST
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return run / name if _STEP.fullmatch(name) and (run / name).is_dir() else None


def check_resumable(run: Path) -> dict:
    """Return the identity of a run; it must have a checkpoint to continue from."""
    if latest_checkpoint(run) is None:
        if not (folders := checkpoints(run)):
            raise PackError(f"--resume: {run} has no checkpoint to continue from.", "not-found")
        raise PackError(
            f"--resume: {run / LATEST} must name a checkpoint of this folder. The newest is "
            f"{folders[-1].name}.",
            "unreadable",
        )
    return read_identity(run)


def check_unchanged(where: str, then: Mapping, now: Mapping) -> None:
    """Check that a run continues with the settings, by name, that it began with."""
    for name, value in now.items():
        if then.get(name) != value:
            raise PackError(
                f"{where}: {name} is {value!r} but the run used {then.get(name)!r}. Resume with "
                "the original settings.",
                "mismatch",
                name.rpartition(".")[2],
            )


def read_metrics(run: Path, batches: int) -> list[dict]:
    """Return the lines of metrics.jsonl up to a batch; later ones are removed from the file."""
    file, lines = run / METRICS, []
    if not file.is_file():
        return lines
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["batch"] <= batches:
                lines.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash cut short
    atomic_write(file, "".join(json.dumps(line) + "\n" for line in lines))
    return lines
