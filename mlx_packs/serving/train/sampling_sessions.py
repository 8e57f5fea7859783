"""What clients sample from: the base, saved models, and models as they were at some step."""

import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from ...errors import PackError
from ...packs.pack import Pack
from ..generation import Generator
from ..registry import BASE_NAME
from .states import Saved, States, run_of

_PREFIX = "tinker"  # of names in the registry, which other packs do not have
_LOADED = 8  # saved models that stay in memory, and steps of each model


@dataclass(frozen=True)
class SamplingSession:
    """A name in the registry of packs, and where its pack is saved, if it is."""

    model: str
    uri: str | None = None


class SamplingSessions:
    """Sampling sessions by id; their packs are served beside all others.

    A saved model that was not used for long leaves the memory, and comes back when it is used; one
    that is sampled from stays. Steps of a model are in memory alone: the last eight of each stay.
    """

    def __init__(self, generator: Generator, states: States) -> None:
        self._generator = generator
        self._states = states
        self._sessions: dict[str, SamplingSession] = {}
        self._loaded: OrderedDict[str, None] = OrderedDict()  # names of saved models
        self._uses: Counter[str] = Counter()  # samples that are computed, by these names
        self._steps: dict[str, list[str]] = {}  # names in the registry by id of the model

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
        session = SamplingSession(_name_of(saved), saved.uri)
        async with self.loaded(session):
            return self._new(session)

    async def of_step(self, model_id: str, pack: Pack, number: int) -> str:
        """Return the id of a new session on a model as it is now, whose weights ``pack`` has."""
        name = f"{_PREFIX}/{run_of(model_id)}/step-{number}"

        def serve() -> None:
            self._forget(name)
            self._generator.registry.add(name, pack)

        await self._generator.result_of(serve)

        names = self._steps.setdefault(model_id, [])
        if name in names:
            names.remove(name)
        names.append(name)

        if len(names) > _LOADED:
            await self._generator.result_of(partial(self._forget, names.pop(0)))

        return self._new(SamplingSession(name))

    async def forget_steps(self, model_id: str) -> None:
        """Free the memory of all steps of a model."""
        for name in self._steps.pop(model_id, []):
            await self._generator.result_of(partial(self._forget, name))

    @asynccontextmanager
    async def loaded(self, session: SamplingSession) -> AsyncIterator[None]:
        """Have the pack of a session in memory meanwhile; PackError if it is gone."""
        if session.uri is None:
            self._generator.registry.check_model(session.model)
            yield
            return

        name = session.model
        self._uses[name] += 1
        self._loaded[name] = None
        self._loaded.move_to_end(name)

        try:
            await self._make_room()
            await self._generator.result_of(partial(self._open, name, session.uri))
            yield
        finally:
            self._uses[name] -= 1
            await self._make_room()

    async def _make_room(self) -> None:
        """Forget the saved models that were used first, as many as are too many."""
        while len(self._loaded) > _LOADED:
            name = next((each for each in self._loaded if not self._uses[each]), None)
            if name is None:
                return
            del self._loaded[name]
            await self._generator.result_of(partial(self._forget, name))

    def _new(self, session: SamplingSession) -> str:
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = session
        return session_id

    def _open(self, name: str, uri: str) -> None:
        """Serve a saved model as it is now; called by the thread that computes."""
        try:
            pack = Pack.open(self._states.find(uri).folder)
        except PackError:
            self._forget(name)
            raise
        self._generator.registry.add(name, pack)

    def _forget(self, name: str) -> None:
        if name in self._generator.registry.names:
            self._generator.registry.remove(name)


def _name_of(saved: Saved) -> str:
    return f"{_PREFIX}/{saved.run}/{saved.kind}/{saved.name}"
