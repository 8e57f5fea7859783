"""Where the packs of a server come from: named folders, a folder that is watched, the Hub."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from ..errors import PackError
from ..files import is_hub_id
from ..packs.folder import packs_below
from ..packs.hub import cached
from ..packs.manifest import MANIFEST
from ..packs.pack import Pack
from .embedding import EmbeddingWorker
from .fields import not_found, value_error
from .generation import TextWorker
from .registry import check_name

log = logging.getLogger("mlx_packs.serving")


async def follow(scan: Callable[[], None], seconds: float) -> None:
    """Call a function again and again; a fault is logged once, not every time."""
    fault = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            await run_in_threadpool(scan)
            fault = ""
        except PackError as error:
            if error.message != fault:
                log.warning("%s", error.message)
            fault = error.message
        except Exception:
            log.exception("A folder that is watched could not be read.")


class Library:
    """Adds packs to a worker and takes them away, by name.

    ``folder`` is scanned for packs that come and go; None has none.
    """

    def __init__(self, worker: TextWorker | EmbeddingWorker, folder: Path | None) -> None:
        self._worker = worker
        self._folder = folder
        self._watched: dict[str, object] = {}  # by name, what tells a folder from a changed one
        self._held: set[str] = set()  # names that `put` alone serves

    def load(self, name: str, folder: Path, source: str | None = None) -> bool:
        """Serve a pack of a folder under a name, and wait; return whether it is new."""
        add = partial(self._worker.registry.add, name, Pack.open(folder), source or folder.name)
        return self._worker.call(add).result()

    def put(self, name: str, pack: Pack | None, source: str) -> None:
        """Serve a pack, or the base model for None, under a name, and wait.

        Requests that began with what had the name end with it; nothing else changes it any more.
        """
        self._held.add(name)
        self._watched.pop(name, None)
        self._worker.call(partial(self._worker.registry.add, name, pack, source)).result()

    async def add(self, source: str, name: str | None) -> tuple[str, bool]:
        """Serve a pack that a client names: of the watched folder or the Hub, else a PackError."""
        folder = self._below(source)
        if folder is None and not is_hub_id(source.partition("@")[0]):
            below = f"a folder below {self._folder.name} or " if self._folder else ""
            reason = f"is not here. Name {below}a pack of the Hub (owner/name)."
            raise not_found("source", source, reason)

        is_of_hub = folder is None
        if not name:
            name = source if is_of_hub else self._name_of(folder)
        check_name(name)
        self._check_free(name)

        shown = None
        if is_of_hub:  # never a folder of that name below the current one
            folder = await run_in_threadpool(cached, source)
            shown = source
        return name, await run_in_threadpool(self.load, name, folder, shown)

    async def remove(self, name: str) -> None:
        """Serve a pack no more; it comes back if it changes in the watched folder."""
        self._check_free(name)
        registry = self._worker.registry
        await self._worker.result_of(lambda: registry.remove(name))

    def _check_free(self, name: str) -> None:
        """Raise a PackError for a name that `put` serves."""
        if name in self._held:
            text = "versions of --learn are served under it, and packs learn --use chooses which."
            raise value_error("name", name, text, "conflict")

    def scan(self) -> None:
        """Add packs of the folder that are new or changed, and remove those that are gone."""
        if self._folder is None:
            return
        present = {}
        for folder, fault in packs_below(self._folder):
            name = self._name_of(folder)
            if fault is None and name not in self._held:
                present[name] = folder

        for name in [name for name in self._watched if name not in present]:
            del self._watched[name]
            if self._worker.registry.packs.get(name) is not None:
                self._worker.call(lambda name=name: self._worker.registry.remove(name)).result()
                log.info("%s: is gone, and no longer served.", name)

        for name, folder in sorted(present.items()):
            stamp = _stamp(folder)
            if stamp is None or self._watched.get(name) == stamp:
                continue
            self._watched[name] = stamp
            try:
                if self.load(name, folder):
                    log.info("%s: is served.", name)
            except PackError as error:
                log.warning("%s", error.message)

    def _name_of(self, folder: Path) -> str:
        top = self._folder.resolve()
        folder = folder.resolve()
        if folder == top:
            return top.name
        return folder.relative_to(top).as_posix()

    def _below(self, source: str) -> Path | None:
        """Return the folder of a pack below the one that is watched; None if there is none."""
        if self._folder is None:
            return None

        top = self._folder.resolve()
        try:
            folder = (top / source).resolve()
            is_pack = top in folder.parents and (folder / MANIFEST).is_file()
        except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
            return None
        return folder if is_pack else None


def _stamp(folder: Path) -> object:
    """Return what differs when a pack was rewritten or is not copied yet; None if it has gone."""
    try:
        facts = {file.name: file.stat() for file in folder.iterdir()}
    except OSError:
        return None
    return {name: (f.st_mtime_ns, f.st_size, f.st_ino) for name, f in facts.items()}
