"""The tokenizer of a stranger: it encodes and decodes in a sandbox with limits.

transformers keeps a `tokenizers.Tokenizer` in each fast tokenizer. `confine` puts an object in its
place whose texts and tokens are worked on in the sandbox, so that all that uses a tokenizer of
transformers is covered.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from ..errors import PackError, reason_of
from ..sandbox.process import TEMPLATES, TOKENIZERS, Fault, LimitExceeded
from .unsupported import unreadable_tokenizer

_KEYS = itertools.count()
_HAS_OFFSETS: ContextVar[bool] = ContextVar("has_offsets", default=True)
_CHANGES = ("add_tokens", "add_special_tokens")


def read_ahead(folder: Path) -> "Future[int | None]":
    """Let a sandbox read a folder's tokenizer.json while other parts of a base are loaded.

    Returns its future key there, None without such a file; PackError if the file takes too much.
    """
    future: Future[int | None] = Future()

    def read() -> None:
        try:
            future.set_result(_read(folder / "tokenizer.json"))
        except BaseException as error:
            future.set_exception(error)

    TEMPLATES.start()
    Thread(target=read, name="tokenizer", daemon=True).start()
    return future


def _read(file: Path) -> int | None:
    if not file.is_file():
        return None

    key = next(_KEYS)
    try:
        TOKENIZERS.call("open_file", key, str(file.absolute()), **_for_file(file.stat().st_size))
    except Fault as error:
        raise unreadable_tokenizer(file.parent, reason_of(error)) from None
    except LimitExceeded as error:
        raise unreadable_tokenizer(file.parent, f"it {error}") from None
    return key


def _for_file(size: int) -> Any:
    """Return what a tokenizer.json needs beyond the limits: Gemma 3's has 33 MB."""
    return {"more_cpu_s": size / 1e7, "more_memory": 8 * size}


def confine(tokenizer: Any, folder: Path, key: int | None) -> None:
    """Let a fast tokenizer of transformers encode and decode in the sandbox.

    ``folder`` has its files, for errors; ``key`` is what `read_ahead` returned.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    if getattr(tokenizer, "is_fast", False) and not isinstance(backend, SandboxedTokenizer):
        tokenizer._tokenizer = SandboxedTokenizer(backend, folder, key)


@contextmanager
def with_offsets(is_needed: bool) -> Iterator[None]:
    """Leave out ``offset_mapping`` of encodings inside the block, which costs time, or not."""
    token = _HAS_OFFSETS.set(is_needed)
    try:
        yield
    finally:
        _HAS_OFFSETS.reset(token)


class _Encoding:
    """What transformers reads of a `tokenizers.Encoding`, from int32 arrays.

    ``ids`` are [N]; ``offsets`` [2 N], the start and end of each token, or empty; ``masks`` [3, N],
    type ids, attention mask and special tokens, None if none is special and all are of one text.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray, masks: np.ndarray | None) -> None:
        self._ids = ids
        self._offsets = offsets
        self._masks = masks
        self.n_sequences = 1
        self.overflowing: list[_Encoding] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        return self._ids.tolist()

    @property
    def offsets(self) -> list[tuple[int, int]]:
        starts, ends = self._offsets.reshape(-1, 2).T.tolist()
        return list(zip(starts, ends, strict=True))

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self) if self._masks is None else self._masks[0].tolist()

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self) if self._masks is None else self._masks[1].tolist()

    @property
    def special_tokens_mask(self) -> list[int]:
        return [0] * len(self) if self._masks is None else self._masks[2].tolist()


class SandboxedTokenizer:
    """A `tokenizers.Tokenizer` whose `encode_batch` and `decode` run in a sandbox.

    Every other attribute is read from, and written to, the tokenizer itself.
    """

    def __init__(self, backend: Any, folder: Path, key: int | None = None) -> None:
        vars(self).update(_backend=backend, _folder=folder, _opened=None)
        vars(self)["_key"] = next(_KEYS) if key is None else key
        if key is not None and self._is_adjusted():
            vars(self)["_opened"] = TOKENIZERS.generation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _CHANGES:
            vars(self)["_opened"] = None
        return getattr(self._backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)
        if name != "encode_special_tokens":  # which each call has
            vars(self)["_opened"] = None

    def __copy__(self) -> Any:
        return copy.copy(self._backend)

    def __reduce__(self) -> tuple:
        return SandboxedTokenizer, (self._backend, self._folder)

    def encode(
        self,
        sequence: Any,
        pair: Any = None,
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> _Encoding:
        """As `tokenizers.Tokenizer.encode`."""
        text = sequence if pair is None else (sequence, pair)
        return self.encode_batch([text], is_pretokenized, add_special_tokens)[0]

    def encode_batch(
        self, input: Sequence[Any], is_pretokenized: bool = False, add_special_tokens: bool = True
    ) -> list[_Encoding]:
        """As `tokenizers.Tokenizer.encode_batch`."""
        backend = self._backend
        settings = backend.truncation, backend.padding, backend.encode_special_tokens
        options = {"is_pretokenized": is_pretokenized, "add_special_tokens": add_special_tokens}
        has_offsets = _HAS_OFFSETS.get()
        arguments = list(input), settings, options, has_offsets
        counts, content = self._call("encode", *arguments, characters=sum(map(len, input)))

        encodings: list[_Encoding] = []
        numbers = np.frombuffer(content, np.int32)
        for encoding, is_overflow in _encodings(counts, numbers, has_offsets):
            owner = encodings[-1].overflowing if is_overflow else encodings
            owner.append(encoding)

        if not is_pretokenized:
            for text, encoding in zip(input, encodings, strict=True):
                encoding.n_sequences = 1 if isinstance(text, str) else len(text)
        return encodings

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """As `tokenizers.Tokenizer.decode`."""
        return self.decode_batch([ids], skip_special_tokens)[0]

    def decode_batch(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """As `tokenizers.Tokenizer.decode_batch`."""
        batch = [[int(token) for token in ids] for ids in sequences]
        characters = 8 * sum(map(len, batch))
        texts, _ = self._call("decode", batch, skip_special_tokens, characters=characters)
        return texts

    def _call(self, name: str, *arguments: Any, characters: int) -> tuple[Any, bytes]:
        """Call the sandbox, which may take more for many characters of the user's own."""
        more: Any = {"more_cpu_s": characters / 1e6, "more_memory": 64 * characters}
        try:
            if self._opened != TOKENIZERS.generation:
                self._open()
            return self._called(name, arguments, more)
        except LimitExceeded as error:
            raise PackError(
                f"{self._folder}: the tokenizer {error}. Use the tokenizer files that the model's "
                "publisher has, or a shorter text.",
                "unreadable",
            ) from None

    def _called(self, name: str, arguments: tuple, more: Any) -> tuple[Any, bytes]:
        try:
            return TOKENIZERS.call(name, self._key, *arguments, **more)
        except Fault as error:
            if error.kind != "UnknownTokenizer":
                raise

        self._open()  # others were used meanwhile, or the process is another one
        return TOKENIZERS.call(name, self._key, *arguments, **more)

    def _open(self) -> None:
        """Send the tokenizer to the sandbox, which does not know it as it is now."""
        text = self._backend.to_str()
        TOKENIZERS.call("open_text", self._key, text, **_for_file(len(text)))
        vars(self)["_opened"] = TOKENIZERS.generation

    def _is_adjusted(self) -> bool:
        """Return whether the sandbox's copy of the file could be made equal to this tokenizer."""
        from ..sandbox.tokens import parts_of

        try:
            return TOKENIZERS.call("adjust", self._key, *parts_of(self._backend))[0]
        except (LimitExceeded, Fault):
            return False


def _encodings(
    counts: Sequence[Sequence[int]], numbers: np.ndarray, has_offsets: bool
) -> Iterator[tuple[_Encoding, bool]]:
    """Yield what `sandbox.tokens.encode` returns, and whether it is a part of the one before."""
    sizes = [(count, 2 * count * has_offsets, 3 * count * masks) for count, _, masks in counts]
    parts = iter(np.split(numbers, np.cumsum(sizes)[:-1]))
    for (count, is_overflow, has_masks), ids, offsets, masks in zip(
        counts, parts, parts, parts, strict=False
    ):
        rows = masks.reshape(3, count) if has_masks else None
        yield _Encoding(ids, offsets, rows), bool(is_overflow)
