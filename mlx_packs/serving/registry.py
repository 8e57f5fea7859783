"""The packs that are served, by name, and which of them requests still use."""

import itertools
import re
from dataclasses import dataclass, field

import mlx.nn as nn

from ..adapters.full_tensors import score_head
from ..adapters.spec import SCORE_WEIGHT
from ..nn.served_lora import BASE
from ..packs.compatibility import check_generates, check_use
from ..packs.manifest import has_score_head
from ..packs.pack import Pack
from ..packs.scored import OpenClassifier, classifier_of
from .fields import not_found, value_error
from .protocol import now
from .slots import PackSlots

BASE_NAME = "base"
_NAME = re.compile(r"[A-Za-z0-9][\w./@-]{0,127}", re.ASCII)


@dataclass(eq=False)
class Served:
    """A pack in memory, or the base: what requests compute with.

    Attributes:
        key: differs between any two entries that ever were; prompt caches are kept by it.
        classifier: what it labels texts with, if it is a classifier.
        head: the head of a classifier or reranker that has a new one.
        source: the name of the folder or of the Hub that it came from.
        created: when it was added, in seconds since 1970.
        users: requests that compute with it.
    """

    name: str
    slot: int
    pack: Pack | None
    key: int
    source: str | None = None
    created: int = field(default_factory=now)
    classifier: OpenClassifier | None = None
    head: nn.Linear | None = None
    users: int = 0
    retired: bool = False

    @property
    def adapters(self) -> str | None:
        if self.pack is None:
            return None
        return self.pack._adapters_hash


@dataclass
class PackRegistry:
    """Names and packs; only the thread that computes may call it, where nothing else is said.

    ``task`` is what requests compute: text and labels (lm), embeddings or ranks.
    """

    slots: PackSlots
    task: str = "lm"
    _entries: dict[str, Served] = field(default_factory=dict)
    _keys: itertools.count = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._entries[BASE_NAME] = Served(BASE_NAME, BASE, None, next(self._keys))

    @property
    def names(self) -> list[str]:
        """The names that a request may have for its model."""
        return list(self._entries)

    @property
    def entries(self) -> dict[str, Served]:
        return self._entries.copy()

    @property
    def packs(self) -> dict[str, Pack]:
        return {name: e.pack for name, e in self.entries.items() if e.pack is not None}

    def add(self, name: str, pack: Pack | None, source: str | None = None) -> bool:
        """Serve a pack, or the base for None, under a name; return whether it is another.

        A PackError if no request of this server can use it.
        A pack that had the name is used to the end by the requests that began with it.
        """
        check_name(name)
        before = self._entries.get(name)
        if pack is None:
            entry = Served(name, BASE, None, next(self._keys), source)
        else:
            if self.task != "lm":
                check_use(pack, self.task)
            elif not pack.is_classifier:
                check_generates(pack)
            if before is not None and before.pack and before.adapters == pack._adapters_hash:
                return False
            entry = self._load(name, pack, source)

        self._entries[name] = entry
        if before is not None:
            self._retire(before)
        return True

    def remove(self, name: str) -> None:
        """Serve a pack no more; requests that began with it end with it."""
        if name == BASE_NAME:
            raise value_error("name", name, "is not a pack.", "conflict")
        self._retire(self._entry(name))
        del self._entries[name]

    def recorded(self, model: str) -> dict:
        """Return the manifest of a pack, empty for the base; any thread may call it."""
        pack = self.packs.get(model)
        return pack.manifest if pack is not None else {}

    def check_model(self, model: str) -> None:
        """Raise a PackError unless a model can be leased now for text, embeddings or ranks.

        Any thread may call it.
        """
        pack = self._entry(model).pack
        if pack is not None and self.task == "lm":
            check_generates(pack)

    def lease(self, model: str, classifies: bool = False) -> Served:
        """Return what a request for ``base`` or a pack computes with, until `release`.

        A PackError if it ``classifies`` and the pack does not label texts.
        """
        entry = self._entry(model)
        if classifies and entry.classifier is None:
            text = "is no classifier. Name a pack of --task classify."
            raise value_error("model", model, text, "unsupported")
        entry.users += 1
        return entry

    def release(self, entry: Served) -> None:
        entry.users -= 1
        self._free(entry)

    def _load(self, name: str, pack: Pack, source: str | None) -> Served:
        slot = self.slots.add(pack)
        head = None
        if has_score_head(pack.manifest):
            head = score_head(pack.load_tensors()[SCORE_WEIGHT])

        classifier = None
        if pack.is_classifier:
            self.slots.selection.set([BASE])  # that the model is tried with
            classifier = classifier_of(self.slots.base, pack, head)

        if pack.path is not None:
            pack.tensors = None  # they are in the slot now
        return Served(name, slot, pack, next(self._keys), source, classifier=classifier, head=head)

    def _retire(self, entry: Served) -> None:
        """Free a slot, as soon as no request uses it."""
        entry.retired = True
        self._free(entry)

    def _free(self, entry: Served) -> None:
        """Remove the adapters of a pack that is served no more and that no request uses."""
        if entry.retired and entry.users == 0 and entry.slot != BASE:
            self.slots.remove(entry.slot)

    def _entry(self, name: str) -> Served:
        entry = self._entries.get(name)
        if entry is None:
            remedy = f"Served are {', '.join(self.names)}."
            if "+" in name:
                remedy = "A weighted sum is served as a pack: make one with packs combine."
            raise not_found("model", name, f"is not served. {remedy}")
        return entry


def check_name(name: str) -> None:
    """Raise a PackError unless a pack can be asked for by a name."""
    if name == BASE_NAME or not _NAME.fullmatch(name):
        text = f"Use letters, digits and . _ - / @, and not '{BASE_NAME}'."
        raise value_error("name", name, f"cannot name a pack here. {text}")
