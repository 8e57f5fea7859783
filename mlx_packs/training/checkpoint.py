"""The run folder: step-NNNNNN checkpoints, the pointer `latest`, metrics.jsonl, config.json.

A checkpoint is whole or absent. It holds all that the next step depends on: adapters, optimizer,
random state, and how many batches were taken (the order of the data is a function of the seed).
"""

import json
import math
import re
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_unflatten

from ..adapters.lora import Attached
from ..config.recipe import current_keys
from ..errors import PackError
from ..files import save_tensors, to_json, whole_folder, write_whole
from ..runtime import mx

ADAPTERS = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
RUN_FORMAT = "mlx_packs run 1"
_STEP = re.compile(r"step-\d{6,}")


@dataclass
class Window:
    """What was learned since the last report."""

    batches: int = 0
    targets: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, targets: int, seconds: float) -> None:
        self.batches += 1
        self.targets += targets
        self.loss_sum += loss * targets
        self.seconds += seconds

    @property
    def tokens_per_s(self) -> float:
        """Supervised tokens a second."""
        return self.targets / self.seconds


@dataclass
class Cursor:
    """How far a run is: batches taken, updates made, targets learned, seconds spent.

    grad_norm: of the last update.   window: what the next report tells of.
    """

    batches: int = 0
    updates: int = 0
    trained_tokens: int = 0
    train_s: float = 0.0
    grad_norm: float = 0.0
    window: Window = field(default_factory=Window)

    def count(self, loss: float, targets: int, norm: float | None, seconds: float) -> None:
        """Another batch was taken; ``norm`` is that of its update, None if it made none."""
        self.batches += 1
        if norm is not None:
            self.updates += 1
            self.grad_norm = norm
        self.trained_tokens += targets
        self.train_s += seconds
        self.window.add(loss, targets, seconds)


def step_folder(run: Path, batches: int) -> Path:
    """The folder of the checkpoint after so many batches."""
    return run / f"step-{batches:06d}"


def save_checkpoint(
    run: Path, attached: Attached, optimizer: optimizers.Optimizer, cursor: Cursor
) -> Path:
    """Write a checkpoint and point `latest` at it."""
    folder = step_folder(run, cursor.batches)
    with whole_folder(folder, replace=True) as partial:
        save_tensors(partial / ADAPTERS, attached.tensors())
        state = dict(tree_flatten(optimizer.state))
        state["random"] = mx.random.state[0]
        save_tensors(partial / OPTIMIZER, state)
        (partial / STATE).write_text(to_json(asdict(cursor)))
    write_whole(run / "latest", folder.name + "\n")
    return folder


def run_folder(pack: Path) -> Path:
    """The run folder that stands beside a pack."""
    if pack.name in ("", ".."):
        raise PackError(f"--out {pack}: must name a folder of its own.")
    return pack.with_name(pack.name + "-run")


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run folder; nothing else that may stand in it."""
    found = run.iterdir() if run.is_dir() else []
    return sorted(f for f in found if _STEP.fullmatch(f.name) and f.is_dir() and not f.is_symlink())


def clear_run(run: Path) -> None:
    """Remove what an earlier run left in its folder: checkpoints, pointer, metrics."""
    for folder in checkpoints(run):
        shutil.rmtree(folder)
    for name in ("latest", METRICS):
        (run / name).unlink(missing_ok=True)


def write_identity(run: Path, identity: dict) -> None:
    """Write what a run is: its ``recipe``, and fingerprints of its ``base`` and ``data``."""
    write_whole(run / CONFIG, to_json({"format": RUN_FORMAT, **identity}))


def read_identity(run: Path) -> dict:
    """What `write_identity` wrote. Raises: PackError if this is no run of ours."""
    file = run / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise PackError(f"{file}: cannot be read as JSON; this is no run folder.") from None
    kinds = {"recipe": dict, "base": str, "data": dict}
    marked = isinstance(found, dict) and found.get("format") == RUN_FORMAT
    if not marked or not all(isinstance(found.get(k), kind) for k, kind in kinds.items()):
        raise PackError(
            f"{file}: is not that of a run (it needs format '{RUN_FORMAT}', recipe, base, data)."
        )
    return found | {"recipe": current_keys(found["recipe"])}


def is_run(folder: Path) -> bool:
    """Whether a folder is a run of ours, or empty."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        return bool(read_identity(folder))
    except PackError:
        return False


def latest_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint of a run folder, or None."""
    pointer = run / "latest"
    if not pointer.is_file():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    return run / name if _STEP.fullmatch(name) and (run / name).is_dir() else None


def check_resumable(run: Path) -> dict:
    """The identity of a run that has a checkpoint to continue from.

    Raises: PackError if there is none, or if the run folder is damaged.
    """
    if latest_checkpoint(run) is None:
        if not (kept := checkpoints(run)):
            raise PackError(f"--resume: {run} has no checkpoint to continue from.")
        raise PackError(
            f"--resume: {run / 'latest'} must name a checkpoint of this folder; the newest is "
            f"{kept[-1].name}."
        )
    return read_identity(run)


def kept_metrics(run: Path, batches: int) -> list[dict]:
    """The curve up to a batch; what was logged beyond it is removed from the file."""
    file, kept = run / METRICS, []
    if not file.is_file():
        return kept
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            if line["batch"] <= batches:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # a line that a crash cut short
    write_whole(file, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def load_checkpoint(folder: Path, attached: Attached, optimizer: optimizers.Optimizer) -> Cursor:
    """Set adapters, optimizer and random state from a checkpoint; the optimizer is initialised.

    Raises: PackError if it is damaged or does not belong to this run's adapters and optimizer.
    """
    cursor = read_cursor(folder)
    try:
        tensors = mx.load(str(folder / ADAPTERS))
        state = mx.load(str(folder / OPTIMIZER))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise PackError(f"{folder}: is not a whole checkpoint ({error}).") from None
    key = _take_state(folder / OPTIMIZER, state, optimizer)
    attached.load(tensors, str(folder / ADAPTERS))
    set_random_state(key)
    optimizer.state = tree_unflatten(list(state.items()))
    return cursor


def set_random_state(key: mx.array) -> None:
    """Let MLX's random numbers go on from a state."""
    high, low = key.tolist()
    mx.random.seed((high << 32) | low)  # the state is a key, and seed(n) sets it to key(n)


def read_cursor(folder: Path) -> Cursor:
    """How far a checkpoint is. Raises: PackError if it is damaged."""
    try:
        return _cursor(json.loads((folder / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PackError(f"{folder}: is not a whole checkpoint ({error}).") from None


_REALS = ("train_s", "grad_norm", "loss_sum", "seconds")
_NEWER = ("grad_norm", "window")  # which the first runs did not have


def _cursor(found: object) -> Cursor:
    """A cursor from JSON. Raises: ValueError or TypeError, in words, if it is none."""
    found = _counts(found, Cursor, "")
    found["window"] = Window(**_counts(found.get("window", asdict(Window())), Window, "window."))
    if found["batches"] and not found["train_s"]:
        raise ValueError(f"{STATE}: train_s must be positive after {found['batches']} batches")
    return Cursor(**found)


def _counts(found: object, cls: type, at: str) -> dict:
    """The fields of a class from JSON, every number of them held."""
    names = [f.name for f in fields(cls)]
    given = set(found) if isinstance(found, dict) else set()
    if not set(names) - set(_NEWER) <= given <= set(names):
        raise ValueError(f"{STATE} must hold {', '.join(at + name for name in names)}")
    for key, value in found.items():
        kinds = (int, float) if key in _REALS else (int,)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        if key != "window" and (not number or not math.isfinite(value) or value < 0):
            raise ValueError(f"{STATE}: {at}{key} must be a number of 0 or more, but is {value!r}")
    return dict(found)


def _take_state(file: Path, state: dict, optimizer: optimizers.Optimizer) -> mx.array:
    """Hold an optimizer's state against a fresh one's; takes the random key out and returns it.

    Names become those of the fresh one, whose blocks may be recomputed where those of the file were
    not, or the other way round.
    Raises: PackError listing what is missing, unknown or misshaped.
    """
    wanted = {name: tuple(a.shape) for name, a in tree_flatten(optimizer.state)} | {"random": (2,)}
    here = {_unwrapped(name): name for name in wanted}
    renamed = {here.get(_unwrapped(name), name): a for name, a in state.items()}
    state.clear()
    state.update(renamed)
    found = {name: tuple(a.shape) for name, a in state.items()}
    faults = [
        f"{name}: is {found.get(name, 'missing')}, must be {wanted.get(name, 'absent')}"
        for name in sorted(set(wanted) | set(found))
        if found.get(name) != wanted.get(name)
    ]
    if "random" in state and state["random"].dtype != mx.uint32:
        faults.append(f"random: is {state['random'].dtype}, must be uint32")
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise PackError(f"{file}: does not fit the optimizer: {'; '.join(faults[:3])}{more}.")
    return state.pop("random")


def _unwrapped(name: str) -> str:
    """A name as if no block were recomputed (`nn.recompute.RecomputedBlock`)."""
    return name.replace(".block.", ".")
