"""Tokenizers of the library `tokenizers`; this module runs in a sandbox.

A tokenizer.json has regular expressions that may not end, and replacements that may make gigabytes
of a word, on loading, encoding and decoding.
"""

import pickle
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Tokenizer


class UnknownTokenizer(Exception):  # noqa: N818
    """A tokenizer was not sent to this process, or is no longer kept."""


_tokenizers: OrderedDict[int, Tokenizer] = OrderedDict()
_MOST_TOKENIZERS = 4  # that are kept, those used last
_MOST_ADDED = 1 << 15  # tokens, each of which transformers reads slowly
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MODEL = (
    "dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback "
    "ignore_merges max_input_chars_per_word"
).split()


def open_file(key: int, path: str) -> None:
    """Read a tokenizer.json as the tokenizer of this key.

    It is tried with what mlx-lm encodes and decodes when it loads a tokenizer, since that happens
    in the other process.
    """
    tokenizer = Tokenizer.from_file(path)
    tokens = tokenizer.encode_batch(["a ,b"] * 2, add_special_tokens=False)[0].ids
    if (count := len(tokenizer.get_added_tokens_decoder())) > _MOST_ADDED:
        raise ValueError(f"it has {count:,} added tokens, but may have {_MOST_ADDED:,}")

    for ids in ([0], tokens):
        tokenizer.decode(ids, skip_special_tokens=False)
    _keep(key, tokenizer)


def open_text(key: int, text: str) -> None:
    """Read the text of a tokenizer.json as the tokenizer of this key."""
    _keep(key, Tokenizer.from_str(text))


def _keep(key: int, tokenizer: Tokenizer) -> None:
    _tokenizers[key] = tokenizer
    _tokenizers.move_to_end(key)
    while len(_tokenizers) > _MOST_TOKENIZERS:
        _tokenizers.popitem(last=False)


def _tokenizer(key: int) -> Tokenizer:
    if key not in _tokenizers:
        raise UnknownTokenizer
    _tokenizers.move_to_end(key)
    return _tokenizers[key]


def parts_of(tokenizer: Tokenizer) -> tuple[str, dict[int, AddedToken], bytes]:
    """Return what may differ from the file: settings of the model, added tokens, other parts."""
    model = tokenizer.model
    settings = {name: getattr(model, name) for name in _MODEL if hasattr(model, name)}
    facts = [type(model).__name__, tokenizer.get_vocab_size(with_added_tokens=False), settings]
    parts = [getattr(tokenizer, name) for name in _PARTS]
    return repr(facts), tokenizer.get_added_tokens_decoder(), pickle.dumps(parts)


def adjust(key: int, facts: str, added: dict[int, AddedToken], parts: bytes) -> bool:
    """Give a tokenizer that was read from a file the parts that it has in the other process.

    Returns:
        Whether it is then the same. If not, its text is to be sent.
    """
    tokenizer = _tokenizer(key)
    if parts_of(tokenizer)[0] != facts:
        return False

    tokenizer.add_tokens([token for _, token in sorted(added.items())])
    for name, part in zip(_PARTS, pickle.loads(parts), strict=True):
        setattr(tokenizer, name, part)
    facts_now, added_now, _ = parts_of(tokenizer)
    return facts_now == facts and _contents(added_now) == _contents(added)


def _contents(added: dict[int, AddedToken]) -> dict[int, bytes]:
    return {number: pickle.dumps(token) for number, token in added.items()}


def encode(
    key: int,
    texts: Sequence[Any],
    settings: tuple[dict | None, dict | None, bool],
    options: dict[str, bool],
    with_offsets: bool,
) -> tuple[list[list[int]], bytes]:
    """Return the tokens of texts, or of pairs of texts.

    ``settings`` are truncation, padding and `encode_special_tokens` of the tokenizer; ``options``
    are of `Tokenizer.encode_batch`.

    Returns:
        For each text and each of its overflowing parts the number of tokens, whether it is such a
        part, and whether it has masks; and for each of these, one behind the other, int32 arrays:
        token ids, with offsets the start and end of each token in the text, and where it has masks
        the type ids, the attention mask and the mask of special tokens.
    """
    tokenizer = _tokenizer(key)
    _set(tokenizer, *settings)
    encode_batch = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    encodings = encode_batch(list(texts), **options)

    is_plain = settings[1] is None and all(isinstance(text, str) for text in texts)
    adds_none = not options["add_special_tokens"] or not tokenizer.num_special_tokens_to_add(False)
    has_masks = not (is_plain and adds_none)

    counts = []
    content: list[Any] = []
    for encoding in encodings:
        for number, part in enumerate((encoding, *encoding.overflowing)):
            counts.append([len(part), int(number > 0), int(has_masks)])
            content.append(part.ids)
            if with_offsets:
                content.append(chain.from_iterable(part.offsets))
            if has_masks:
                content += [part.type_ids, part.attention_mask, part.special_tokens_mask]
    return counts, b"".join(array("i", numbers).tobytes() for numbers in content)


def _set(
    tokenizer: Tokenizer, truncation: dict | None, padding: dict | None, encode_special: bool
) -> None:
    if tokenizer.truncation != truncation:
        tokenizer.no_truncation() if truncation is None else tokenizer.enable_truncation(
            **truncation
        )
    if tokenizer.padding != padding:
        tokenizer.no_padding() if padding is None else tokenizer.enable_padding(**padding)
    tokenizer.encode_special_tokens = encode_special


def decode(key: int, batch: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
    """Return the texts of tokens."""
    tokenizer = _tokenizer(key)
    return [tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) for ids in batch]
