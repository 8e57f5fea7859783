"""Runs as processes of their own: queued, started, stopped and resumed.

The folder of a run that waits has a ``waiting.json`` with its settings; its process removes it. The
process also holds the lock of the queue to its end: studios on one home start one run at a time,
and none twice, also when one of them is killed.
"""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config.functions import names_function
from ..config.recipe import RunOptions, base_defaults, check_named, resolve
from ..config.schema import TrainConfig
from ..errors import PackError, flag_of
from ..files import atomic_write, exclusive_writer, make_folder, to_json, write_errors
from ..filesystem import discard, is_locked, lock
from ..packs.manifest import MANIFEST
from ..reading import check_regular, read_json
from ..training.run_folder import LOG, WAITING, RunFolder, name_of_run, run_folder
from ..training.status import read_status
from .access import RUNS, check_data, check_name, folder_of_run

# What a form or a waiting run may specify; all else has its default.
SETTINGS = """
model data task on_bad_row prompt_feature completion_feature chat_feature text_feature iters epochs
patience learning_rate batch_size grad_accumulation_steps rank max_seq_length recompute quantize
metric sample_every seed
""".split()
# Settings of a recipe that reach beyond this machine, or run code that came with a model; those
# that name a function in a file are of terminals, too.
_OF_TERMINALS = ("trust_remote_code", "allow_urls", "report_to")
_QUEUE = ".studio.lock"
_BYTES = 64 << 10
_TICK_S = 5.0


def command_of(*arguments: str) -> list[str]:
    """Return the command line of `packs` with these arguments, by this Python."""
    return [sys.executable, "-m", "mlx_packs", *arguments]


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise the first error of settings, as `packs train` resolves them."""
    model = settings.get("model", RunOptions.model)
    task = settings.get("task", TrainConfig.task)
    defaults = base_defaults(model, task, TrainConfig.method)
    check_named(resolve(settings, defaults=defaults))


def arguments_of(home: Path, name: str, settings: Mapping[str, str]) -> list[str]:
    """Return the arguments of `packs train` for a run of the home; they run in that folder.

    Raises:
        PackError: a setting is none of `SETTINGS` or no text, the data are outside of the home, or
            a run that is to be resumed has settings that only a terminal may have.
    """
    for key, value in settings.items():
        is_known = key in SETTINGS or key == "resume"
        is_text = isinstance(value, str) and value.isprintable()
        if not is_known or not is_text or names_function(value):
            raise PackError(f"{key!r:.80}: is no setting of the studio.", "unknown")

    if "data" in settings:
        check_data(home, settings["data"])
    arguments = [f"{flag_of(key)}={settings[key]}" for key in SETTINGS if settings.get(key)]
    arguments = ["train", *arguments, f"--out={RUNS}/{name}"]
    if "resume" not in settings:
        return arguments

    recipe = RunFolder(folder_of_run(home, name)).check_resumable()["recipe"]
    functions = [name for name in ("metric", "reward") if names_function(recipe.get(name))]
    for setting in (*_OF_TERMINALS, *functions):
        if recipe.get(setting):
            command = f"`packs train --out {RUNS}/{name} --resume`"
            text = f"the run has {flag_of(setting)}. Resume it in a terminal: {command}."
            raise PackError(f"{name}: {text}", "conflict")
    return [*arguments, "--resume"]


def queue(home: Path, name: str, settings: Mapping[str, str]) -> None:
    """Queue a new run, and start it unless another one trains."""
    check_name(name)
    pack = home / RUNS / name
    if free_name(home, name) != name:
        raise PackError(f"{name}: exists already. Choose another name.", "exists", "out")
    arguments_of(home, name, settings)
    check_settings(settings)

    make_folder(pack.parent)
    with write_errors(pack):
        run_folder(pack).mkdir()
    _wait(home, run_folder(pack), settings)


def free_name(home: Path, name: str) -> str:
    """Return a name that no pack or run has, with a number if it is taken."""
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    packs = (home / RUNS / each for each in names)
    return next(p.name for p in packs if not (p.exists() or run_folder(p).exists()))


def resume(home: Path, name: str, batches: str = "") -> None:
    """Queue the rest of a run; ``batches`` replaces the number of all of its batches."""
    folder = folder_of_run(home, name)
    if read_status(folder).state in ("training", "waiting"):
        raise PackError(f"{name}: is running or waits already.", "busy")

    settings = {"resume": "yes"}
    if batches:
        TrainConfig.from_mapping({"iters": batches})  # checks the number
        settings["iters"] = batches
    arguments_of(home, name, settings)
    _wait(home, folder, settings)


def _wait(home: Path, folder: Path, settings: Mapping[str, str]) -> None:
    with write_errors(folder):
        atomic_write(folder / WAITING, to_json({"settings": settings}))
    start_next(home)


def stop(home: Path, name: str) -> bool:
    """Have a run save its progress and end, or take it out of the queue; return whether it ran."""
    folder = folder_of_run(home, name)
    status = read_status(folder)
    if status.state == "training" and status.is_alive:
        with suppress(ProcessLookupError):
            os.kill(status.process, signal.SIGTERM)
        return True

    if status.state == "waiting":
        with _queue_lock(home) as queued:
            if queued is None and not training(home):
                raise PackError(f"{name}: starts just now. Stop it in a few seconds.", "busy")
            (folder / WAITING).unlink(missing_ok=True)
            with suppress(OSError):  # a run that was to be resumed
                folder.rmdir()
        return False
    raise PackError(f"{name}: does not run, or its process is of another machine.", "conflict")


def delete(home: Path, name: str, typed: str, with_pack: bool) -> None:
    """Delete the folder of a run that does not train, and its pack if that is asked for.

    Raises:
        PackError: ``typed`` is another name, the run trains or waits, or a folder is none of a run
            or pack, or outside of the home.
    """
    folder = folder_of_run(home, name)
    if typed.strip() != name:
        raise PackError(f"{name}: is not deleted, since another name was typed.", "conflict", "out")
    if read_status(folder).state in ("training", "waiting"):
        raise PackError(f"{name}: is running or waits. Stop it before.", "busy")

    pack = home / RUNS / name
    doomed = {folder: RunFolder(folder).is_run()}
    if with_pack:
        doomed[pack] = (pack / MANIFEST).is_file() and not pack.is_symlink()
    is_inside = folder.resolve().parent == home.resolve() / RUNS
    if not all(doomed.values()) or not is_inside:
        text = f"is not deleted: only packs and runs below {RUNS}/ of the home are."
        raise PackError(f"{name}: {text}", "conflict", "out")
    for each in doomed:
        with exclusive_writer(each), write_errors(each):
            discard(each, each)


def training(home: Path) -> str:
    """Return the name of the run of the home whose lock a process holds; empty if none trains."""
    locks = (home / RUNS).glob(".*-run.lock")
    return next((path.name[1:].removesuffix("-run.lock") for path in locks if is_locked(path)), "")


@contextmanager
def _queue_lock(home: Path) -> Iterator[int | None]:
    """Yield the locked file of the queue; None if another studio or its run holds the lock."""
    with (home / RUNS / _QUEUE).open("ab") as file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def start_next(home: Path) -> None:
    """Start the run that has waited longest, unless a run trains."""
    if not _waiting(home):
        return
    with _queue_lock(home) as queued:
        if queued is not None and not training(home):
            any(_started(home, folder, queued) for folder in _waiting(home))


def _waiting(home: Path) -> list[Path]:
    """Return the folders of runs that wait, the oldest first; none with links or special files."""
    times = {}
    for file in (home / RUNS).glob(f"*-run/{WAITING}"):
        with suppress(OSError, PackError):
            folder = folder_of_run(home, name_of_run(file.parent))
            for log in folder.glob(LOG):
                check_regular(log)
            times[folder] = file.stat().st_mtime
    return sorted(times, key=times.__getitem__)


def command_line(home: Path, arguments: Sequence[str]) -> str:
    """Return a command of `packs` as it is typed in a terminal."""
    return f"{shlex.join(['cd', str(home)])} && {shlex.join(['packs', *arguments])}"


def waiting_arguments(home: Path, folder: Path) -> list[str]:
    """Return the arguments of the command of a run that waits."""
    settings = read_json(folder / WAITING, dict, _BYTES).get("settings")
    if not isinstance(settings, dict):
        raise PackError(f"{WAITING}: has no settings.", "unreadable")
    return arguments_of(home, name_of_run(folder), settings)


def _started(home: Path, folder: Path, queued: int) -> bool:
    """Start a waiting run; if its settings are unfit, note that in its log and return False."""
    waiting = folder / WAITING
    try:
        since = waiting.stat().st_mtime_ns
        arguments = waiting_arguments(home, folder)
    except PackError as error:
        (folder / LOG).write_text(f"packs: {error.message}\n")
        waiting.unlink(missing_ok=True)
        return False

    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command_of(*arguments),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[queued],
        )

    def reap() -> None:
        """Remove what would start a run again that failed early; a later file is to resume it."""
        process.wait()
        with suppress(OSError):
            if waiting.stat().st_mtime_ns == since:
                waiting.unlink()
        with suppress(OSError, PackError):
            start_next(home)

    threading.Thread(target=reap, daemon=True).start()
    return True


def keep_starting(home: Path) -> None:
    """Start waiting runs for ever, also after runs of terminals and other studios."""
    while True:
        with suppress(OSError, PackError):
            start_next(home)
        time.sleep(_TICK_S)
