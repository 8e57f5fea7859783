"""The kinds of input that are fuzzed."""

from tests.fuzz.kind import Kind
from tests.fuzz.kinds.base_enc import BaseEnc
from tests.fuzz.kinds.base_tok import BaseTok
from tests.fuzz.kinds.checkpoints import (
    BaseBnb,
    BaseConfig,
    BaseDense,
    BaseFp4,
    BaseRec,
    BaseSt,
)
from tests.fuzz.kinds.ckpt import CkptKind
from tests.fuzz.kinds.gguf import GgufKind
from tests.fuzz.kinds.http import BodyKind
from tests.fuzz.kinds.hub import HubKind
from tests.fuzz.kinds.image import ImageKind
from tests.fuzz.kinds.imports import ImportKind
from tests.fuzz.kinds.jsonl import JsonlKind
from tests.fuzz.kinds.pack import PackKind
from tests.fuzz.kinds.recipes import YamlKind
from tests.fuzz.kinds.tables import TableKind

_BASES = (BaseBnb, BaseConfig, BaseDense, BaseEnc, BaseFp4, BaseRec, BaseSt, BaseTok)
_FILES = (CkptKind, GgufKind, ImageKind, ImportKind, JsonlKind, PackKind, TableKind, YamlKind)
_KINDS = (*_BASES, *_FILES, HubKind, BodyKind)
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in _KINDS}
