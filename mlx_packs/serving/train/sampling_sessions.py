"""What clients sample from: the base, saved models, and models as they were at some step."""

import uuid
from dataclasses import dataclass
from functools import partial

from ...errors import PackError
from ...packs.pack import Pack
from ..generation import Generator
from ..registry import BASE_NAME
from .states import Saved, run_of

_PREFIX = "tinker"  # of names in the registry, which other packs do not have
_SAVED = "saved"
_MOST_LOADED = 8  # saved models in memory, and steps of each model


@dataclass(frozen=True)
class SamplingSession:
    """A name in the registry of packs, and where its pack is saved, if it is."""

    model: str
    uri: str | None = None


class SamplingSessions:
    """Sampling sessions by id; their packs are served beside all others.

    The latest eight steps of each model are in memory, and the latest eight saved models.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._sessions: dict[str, SamplingSession] = {}
        # names in the registry, by the id of the model of steps, or `_SAVED`
        self._loaded: dict[str, list[str]] = {}

    def find(self, session_id: str) -> SamplingSession:
        session = self._sessions.get(session_id)
        if session is None:
            raise PackError(
                f"sampling_session_id '{session_id:.80}': is not known here. Make a new sampling "
                "client.",
                "not-found",
                "sampling_session_id",
            )
        return session

    def of_base(self) -> str:
        return self._new(SamplingSession(BASE_NAME))

    async def of_saved(self, saved: Saved) -> str:
        """Return the id of a new session on a saved model as it is now."""
        name = f"{_PREFIX}/{saved.run}/{saved.kind}/{saved.name}"
        await self._load(_SAVED, name, Pack.open(saved.folder))
        return self._new(SamplingSession(name, saved.uri))

    async def of_step(self, model_id: str, pack: Pack, number: int) -> str:
        """Return the id of a new session on a model as it is now, whose weights ``pack`` has."""
        name = f"{_PREFIX}/{run_of(model_id)}/step-{number}"
        await self._load(model_id, name, pack)
        return self._new(SamplingSession(name))

    async def _load(self, group: str, name: str, pack: Pack) -> None:
        """Serve a pack, and no longer the oldest of its group if that has too many."""
        names = [each for each in self._loaded.get(group, []) if each != name]
        removed = names[: max(0, len(names) + 1 - _MOST_LOADED)]
        self._loaded[group] = [*names[len(removed) :], name]

        def replace_packs() -> None:
            for each in (*removed, name):
                self._forget(each)
            self._generator.registry.add(name, pack)

        await self._generator.result_of(replace_packs)

    async def forget_steps(self, model_id: str) -> None:
        """Free the memory of all steps of a model."""
        for name in self._loaded.pop(model_id, []):
            await self._generator.result_of(partial(self._forget, name))

    def _new(self, session: SamplingSession) -> str:
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = session
        return session_id

    def _forget(self, name: str) -> None:
        if name in self._generator.registry.names:
            self._generator.registry.remove(name)
