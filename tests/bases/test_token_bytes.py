"""The bytes of a token: joined they are the text, whatever way a tokenizer writes bytes."""

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_packs.bases.tokenizer import token_bytes

TEXT = "Ab  \N{GRINNING FACE} é\N{CJK UNIFIED IDEOGRAPH-4E2D}\n<think>b"
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def wrapped(tokenizer: Tokenizer) -> TokenizerWrapper:
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level(decoder) -> TokenizerWrapper:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoder
    return wrapped(tokenizer)


def sentencepiece(decoder) -> TokenizerWrapper:
    pieces = BYTES | {piece: 256 + i for i, piece in enumerate(("\u2581", "A", "b", "é", "<unk>"))}
    model = models.BPE(vocab=pieces, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "never", split=False)
    tokenizer.decoder = decoder
    return wrapped(tokenizer)


TOKENIZERS = {
    "byte-level": lambda: byte_level(decoders.ByteLevel()),
    "byte-level in a sequence": lambda: byte_level(decoders.Sequence([decoders.ByteLevel()])),
    "sentencepiece": lambda: sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    ),
    "metaspace": lambda: sentencepiece(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("\u2581", "never")])
    ),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_bytes_of_tokens_are_those_of_the_text(kind):
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [token_bytes(tokenizer, token) for token in tokens]
    assert b"".join(parts) == TEXT.encode() and len(parts) > len(TEXT.encode()) - 10
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|end|>")) == b"<|end|>"
    assert token_bytes(tokenizer, 10**6) == b""  # of a vocabulary that is padded
