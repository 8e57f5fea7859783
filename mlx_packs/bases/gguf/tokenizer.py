"""The tokenizer.json and tokenizer_config.json that the metadata of a GGUF file describe.

llama.cpp knows two kinds that matter here: ``gpt2`` (byte-level BPE with merges, and the expression
by which ``tokenizer.ggml.pre`` splits texts) and ``llama`` (SentencePiece BPE, whose merges follow
from scores).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import library_errors
from ..chat_template import check_syntax
from .header import GgufFile

# Kinds of tokens (llama.cpp's llama_token_type)
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Split:
    expression: str  # finds what becomes one piece; the published one of the models
    digits: bool = False  # whether each digit is a piece first
    whole_words: bool = False  # whether a piece that is a token stays whole (``ignore_merges``)
    nfc: bool = False  # whether the text is normalized first


_SPLITS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("gpt-2", "phi-2", "default"), _Split(_GPT2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _Split(_GPT2, digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Split(_LLAMA3, whole_words=True)),
    "smaug-bpe": _Split(_LLAMA3),
    "dbrx": _Split(_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Split(_QWEN2, nfc=True)),
    "gpt-4o": _Split(_GPT4O),
    "tekken": _Split(_TEKKEN, whole_words=True),
}
# Control tokens that end an answer, also where no key of the file says so (as in llama.cpp).
_ENDS = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT> <|end_of_text|>"
).split()
_SPACE = "▁"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file."""

    tokens: list[str]  # by number
    types: list[int]  # llama.cpp's kind of each token
    scores: list[float]  # of SentencePiece; empty for byte-level BPE
    merges: list[str]  # of byte-level BPE
    ends: list[int]  # numbers of tokens that end an answer, the first one is EOS
    special: dict[str, int]  # numbers of bos, eos, unk and pad, if the file has them


def tokenizer_files(file: GgufFile, vocab_size: int) -> tuple[str, dict[str, Any], list[int]]:
    """Return tokenizer.json, tokenizer_config.json and the tokens that end an answer.

    Raises PackError if there is no tokenizer, its kind is unknown, or its template is no Jinja.
    """
    kind = file.get("tokenizer.ggml.model", str, "")
    if not kind or "tokenizer.ggml.tokens" not in file.metadata:
        raise file.fault("has no tokenizer. Get the GGUF of the same model that has one.")

    if kind not in ("gpt2", "llama"):
        raise file.fault(
            f"has a tokenizer of the kind {kind[:40]!r}; gpt2 and llama are read. Use the "
            "safetensors of the same model.",
            "unsupported",
        )

    vocabulary = _vocabulary(file, kind, vocab_size)
    template = file.get("tokenizer.chat_template", str, None)
    if template is not None:
        check_syntax(template, str(file.path))

    def broken(reason: str) -> Exception:
        return file.fault(f"its tokenizer cannot be built: {reason}. Copy or download it again.")

    with library_errors(broken):  # type: ignore[arg-type]
        build = _byte_level if kind == "gpt2" else _sentence_piece
        tokenizer = build(file, vocabulary)
        _add_tokens(tokenizer, vocabulary)
        begins = _add_bos(tokenizer, file, vocabulary, kind)
        text = tokenizer.to_str()

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": begins,
        "model_max_length": file.size("%.context_length"),
    }

    for name, number in vocabulary.special.items():
        config[f"{name}_token"] = vocabulary.tokens[number]
    if template is not None:
        config["chat_template"] = template
    return text, config, vocabulary.ends


def _vocabulary(file: GgufFile, kind: str, vocab_size: int) -> Vocabulary:
    tokens = _texts(file, "tokenizer.ggml.tokens")
    if not 1 <= len(tokens) <= vocab_size:
        raise file.fault(f"has {len(tokens):,} tokens, but its embedding {vocab_size:,} rows.")
    if len(set(tokens)) != len(tokens):
        raise file.fault("has two tokens of the same text. Copy or download it again.")

    types = _numbers(file, "tokenizer.ggml.token_type", len(tokens)) or [1] * len(tokens)
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens))
    merges = _texts(file, "tokenizer.ggml.merges") if kind == "gpt2" else []

    if kind == "llama" and scores is None:
        raise file.fault("has a SentencePiece tokenizer without scores.")

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if number is None:
            continue
        if not 0 <= number < len(tokens):
            raise file.fault(f"tokenizer.ggml.{key}_token_id is {number}, which is no token.")
        special[name] = number

    if "eos" not in special:
        raise file.fault("names no tokenizer.ggml.eos_token_id, so no answer would end.")

    types = [int(t) for t in types]
    for number in special.values():
        types[number] = _CONTROL

    ends = _ends(file, tokens, types, special["eos"])
    return Vocabulary(tokens, types, list(map(float, scores or ())), merges, ends, special)


def _ends(file: GgufFile, tokens: list[str], types: list[int], eos: int) -> list[int]:
    """EOS, EOT and EOM by their keys, and the well-known."""
    ends = [eos]
    for key in ("eot", "eom"):
        number = file.get(f"tokenizer.ggml.{key}_token_id", int, None)
        if number is not None and 0 <= number < len(tokens):
            ends.append(number)

    names = set(_ENDS)
    ends += [n for n, token in enumerate(tokens) if token in names and types[n] == _CONTROL]
    return list(dict.fromkeys(ends))


def _texts(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise file.fault(f"has no list of texts at {key}.")
    return value


def _numbers(file: GgufFile, key: str, count: int) -> Any:
    value = file.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or len(value) != count or not np.isfinite(value).all():
        raise file.fault(f"{key} must be {count:,} numbers, one for each token.")
    return value.tolist()


def _byte_level(file: GgufFile, vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITS:
        raise file.fault(
            f"splits texts by {name[:40]!r} (tokenizer.ggml.pre), which is not known here. Use "
            "the safetensors of the same model.",
            "unsupported",
        )

    split = _SPLITS[name]
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    if any(len(pair) != 2 for pair in pairs):
        raise file.fault("has a merge that is no pair of tokens. Copy or download it again.")

    vocab = {token: number for number, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()

    steps: list[Any] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.Split(Regex(split.expression), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, vocabulary: Vocabulary) -> Any:
    """Merges follow from scores; unknown characters become bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: number for number, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[vocabulary.special["unk"]] if "unk" in vocabulary.special else None
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))

    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(vocabulary, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )

    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        parts.append(decoders.Strip(" ", 1, 0))

    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[float, int, tuple[str, str]]] = []
    plain = (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    for token, number in vocab.items():
        if vocabulary.types[number] in plain:
            continue

        score = vocabulary.scores[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, cut, (left, right)))

    merges.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in merges]


def _add_tokens(tokenizer: Any, vocabulary: Vocabulary) -> None:
    """Add the tokens that are never split, in their order."""
    from tokenizers import AddedToken

    kinds = (_CONTROL, _UNKNOWN, _USER_DEFINED)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in kinds and token
        ]
    )


def _add_bos(tokenizer: Any, file: GgufFile, vocabulary: Vocabulary, kind: str) -> bool:
    """Add BOS and EOS to texts where the file says so; return whether it is BOS."""
    from tokenizers import processors

    names = []
    begins = file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama")
    begins = begins and "bos" in vocabulary.special
    if begins:
        names.append(vocabulary.tokens[vocabulary.special["bos"]])

    template: list[str] = [f"{name}:0" for name in names] + ["$A:0"]
    if file.get("tokenizer.ggml.add_eos_token", bool, False):
        names.append(vocabulary.tokens[vocabulary.special["eos"]])
        template.append(f"{names[-1]}:0")

    if names:
        numbers = {token: number for number, token in enumerate(vocabulary.tokens)}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(name, numbers[name]) for name in dict.fromkeys(names)]
        )

    return begins
