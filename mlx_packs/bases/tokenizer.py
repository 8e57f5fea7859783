"""The tokenizer of a checkpoint: its tokens as texts, another chat template, marks of thoughts."""

import copy
import importlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..config.data import CHAT_TEMPLATES, MARKS, PLAIN
from ..errors import PackError, library_errors
from ..reading import read_json
from ..terminal import guarded_native
from .chat_template import check_syntax
from .sandboxed_tokenizer import confine, read_ahead
from .turns import images_of, stop_at_answer_end, unnamed_ends
from .unsupported import unreadable_tokenizer


def load_tokenizer(
    path: Path,
    config: dict,
    trust_remote_code: bool,
    ahead: "Future[int | None] | None" = None,
) -> Any:
    """Return the tokenizer of a decoder, as mlx-lm wraps it; ``ahead`` is of `read_ahead`."""
    ahead = ahead or read_ahead(path)
    from mlx_lm.utils import load_tokenizer
    from transformers.utils import logging as transformers_logging

    key = ahead.result()  # a file that takes too much is not read in this process
    verbosity = transformers_logging.get_verbosity()
    try:
        if not (path / "tokenizer.json").is_file():  # it then logs each thing that it tries
            transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        with guarded_native(), library_errors(partial(unreadable_tokenizer, path)):
            options = {"trust_remote_code": trust_remote_code, **stored_template(path)}

            ends = config.get("eos_token_id")
            tokenizer = load_tokenizer(path, options, eos_token_ids=ends)
            if parser := _parser_of_named_template(tokenizer):
                options["tool_parser_type"] = parser
                tokenizer = load_tokenizer(path, options, eos_token_ids=ends)

            confine(tokenizer._tokenizer, path, key)
            tokens = tokenizer.encode("a b", add_special_tokens=False)
            tokenizer.decode(tokens)
    finally:
        transformers_logging.set_verbosity(verbosity)

    if not all(isinstance(token, int) for token in tokenizer.eos_token_ids):
        raise unreadable_tokenizer(path, "eos_token_id is no number")
    # without its files, transformers makes an empty tokenizer of the kind that the config names
    if not tokens:
        raise unreadable_tokenizer(path, "it knows no token")

    with library_errors(partial(unreadable_tokenizer, path)):
        stop_at_answer_end(tokenizer)
    return tokenizer


def _parser_of_named_template(tokenizer: Any) -> str | None:
    """mlx-lm's parser for the calls of a template by name; it looks at a single one only."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict) or tokenizer.has_tool_calling:
        return None

    return tool_parser_of(tokenizer, templates.get("tool_use", templates.get("default")))


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token stands for: maybe a part of a character, or none without a text."""
    from mlx_lm.tokenizer_utils import _byte_decoder

    piece = tokenizer.convert_ids_to_tokens(int(token))
    if piece is None or isinstance(piece, bytes):
        return piece or b""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])

    added = tokenizer.added_tokens_decoder.get(token)
    if added is not None and added.special:
        return piece.encode()

    decoder = _decoder_of(tokenizer)
    if "Metaspace" in decoder or _SPACE in decoder:
        return piece.replace(_SPACE, " ").encode()
    if added is not None:
        return piece.encode()

    letters = _byte_decoder()
    text = tokenizer.decode([token])
    is_of_bytes = "ByteLevel" in decoder or "\ufffd" in text
    if is_of_bytes and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece)
    return text.encode()


def readable_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens; an image is ``[image of 224 tokens]``."""
    images = images_of(tokenizer)
    if images is None or min(tokens, default=0) >= 0:
        return tokenizer.decode(list(tokens))
    return images.readable(tokenizer, list(tokens))


def _decoder_of(tokenizer: Any) -> str:
    """How a fast tokenizer joins its pieces, as tokenizer.json has it; empty for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return ""
    return decoder.__getstate__().decode()


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHARACTERS = 16  # of a token, on average over a text that is cut; languages have 1 to 6
_SPACE = "\u2581"  # as sentencepiece writes it


def stored_template(path: Path) -> dict[str, str]:
    """The template of a processor of transformers 4 (Qwen2-VL), if a tokenizer reads no other."""
    file = path / "chat_template.json"
    others = (path / "chat_template.jinja", path / "additional_chat_templates")
    if not file.is_file() or any(other.exists() for other in others):
        return {}

    config = path / "tokenizer_config.json"
    if config.is_file() and read_json(config).get("chat_template"):
        return {}

    template = read_json(file).get("chat_template")
    if not isinstance(template, str):
        raise PackError(
            f"{file}: 'chat_template' must be a text. Copy the file of the model's publisher.",
            "unreadable",
        )

    return {"chat_template": template}


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that a model continues; a BOS token is there once at most."""
    with tokenizer_errors(tokenizer):
        tokens = tokenizer.encode(text)
    if starts_twice(tokenizer, tokens):
        return tokens[1:]
    return tokens


def starts_twice(tokenizer: Any, tokens: Sequence[int]) -> bool:
    """Whether a text begins with BOS, and the tokenizer has put another one before it."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokens[:2]) == [bos, bos] and adds_bos(tokenizer)


def tokenizer_errors(tokenizer: Any) -> AbstractContextManager[None]:
    """Raise what a tokenizer raises over a text as an error that names its folder."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    return library_errors(partial(unreadable_tokenizer, folder))


def load_encoder_tokenizer(
    path: Path,
    config: dict,
    lower_case: bool,
    trust_remote_code: bool,
    ahead: "Future[int | None] | None" = None,
) -> Any:
    """Return the tokenizer of an encoder; ``ahead`` is of `read_ahead`."""
    ahead = ahead or read_ahead(path)
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file() and not (path / "vocab.txt").is_file():
        raise PackError(f"{path}: has neither tokenizer.json nor vocab.txt.", "not-found")

    key = ahead.result()
    with guarded_native(), library_errors(partial(unreadable_tokenizer, path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        if tokenizer.is_fast and lower_case:
            _lower(tokenizer.backend_tokenizer)
        confine(tokenizer, path, key)
        works = tokenizer.is_fast and tokenizer.encode("a")

    if not works:
        raise PackError(
            f"{path}: the tokenizer cannot be loaded: it is no fast WordPiece.", "unsupported"
        )

    if len(tokenizer) > config["vocab_size"]:
        raise PackError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, but the encoder "
            f"{config['vocab_size']} rows for them.",
            "mismatch",
        )

    return tokenizer


def _lower(backend: Any) -> None:
    """Let a tokenizer make its texts lower case before all else."""
    from tokenizers.normalizers import Lowercase, Sequence

    steps = [Lowercase()]
    if backend.normalizer:
        steps.append(backend.normalizer)
    backend.normalizer = Sequence(steps)


def beginning(text: str, limit: int) -> str:
    """The part of a text that ``limit`` tokens can have, so that no more is tokenized."""
    return text[: limit * _CHARACTERS]


def tokens_of(tokenizer: Any, texts: Sequence[str], limit: int) -> list[np.ndarray]:
    """Each text with [CLS] and [SEP], cut to ``limit``."""
    if not texts:
        return []

    with tokenizer_errors(tokenizer):
        encoding = tokenizer(
            [beginning(text, limit) for text in texts],
            truncation=True,
            max_length=limit,
            return_attention_mask=False,
            return_token_type_ids=False,
        )

    return [np.array(ids, dtype=np.int32) for ids in encoding["input_ids"]]


def padded(rows: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """One int32 [B, T], padded with zeros."""
    tokens = np.zeros((len(rows), width or max(map(len, rows))), dtype=np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


def in_batches(
    compute: Callable[[np.ndarray, np.ndarray], Any], rows: Sequence[np.ndarray], batch_size: int
) -> np.ndarray:
    """Return results [N, ...] of rows of tokens by those of [B, T] with lengths [B]; N > 0."""
    lengths = np.array([len(row) for row in rows], np.int32)
    order = np.argsort(-lengths, kind="stable")
    results = np.empty(0)

    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        values = np.array(compute(padded([rows[i] for i in chosen]), lengths[chosen]))
        if not start:
            results = np.zeros((len(rows), *values.shape[1:]), values.dtype)
        results[chosen] = values

    return results


_TAIL = 64  # tokens at the end of a prompt, more than any mark and the white space after it


def thought_marks(tokenizer: Any) -> tuple[str, str]:
    """Return what opens and what ends thoughts, by default as most models write them."""
    if getattr(tokenizer, "has_thinking", False):
        return tokenizer.think_start, tokenizer.think_end
    return "<think>", "</think>"


def opens_thoughts(tokenizer: Any, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends with the mark that opens thoughts, and white space."""
    opening, _ = thought_marks(tokenizer)
    return readable_text(tokenizer, prompt[-_TAIL:]).rstrip().endswith(opening)


def split_thoughts(tokenizer: Any, text: str, is_open: bool = False) -> tuple[str, str]:
    """Return the thoughts and the answer of a text; the answer is empty if thoughts do not end.

    ``is_open``: the text begins in the thoughts, as `opens_thoughts` has it.
    """
    opening, end = thought_marks(tokenizer)
    written = text.lstrip()
    if not is_open and not written.startswith(opening):
        return "", text

    thoughts, _, answer = written.removeprefix(opening).partition(end)
    return thoughts.strip(), answer.strip()


def with_template(tokenizer: Any, text: str | None) -> Any:
    """Return a tokenizer whose chat template is ``text``; None leaves it as it is."""
    if text is None:
        return tokenizer

    templated = tokenizer.__dict__.setdefault("_templated", {})
    if text not in templated:
        templated[text] = _with_template(tokenizer, text)
    return templated[text]


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer begins a text with BOS."""
    if (adds := getattr(tokenizer, "_adds_bos", None)) is None:
        bos = tokenizer.bos_token_id
        adds = tokenizer._adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
    return adds


def tool_parser_of(tokenizer: Any, template: str | None) -> str | None:
    """Return the name of mlx-lm's parser for the calls that a template writes."""
    from mlx_lm import tokenizer_utils

    infer = getattr(tokenizer_utils, "_infer_tool_parser", None)
    if infer is None or template is None:
        return None
    return infer(SimpleNamespace(chat_template=template, get_vocab=tokenizer.get_vocab))


def _with_template(tokenizer: Any, text: str) -> Any:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    _check_marks(tokenizer, text)
    check_syntax(text, "--chat-template")

    own = tokenizer._tokenizer
    plain = copy.copy(own)
    plain.chat_template = text

    if text == PLAIN and adds_bos(tokenizer):
        plain.chat_template = "{{- bos_token }}" + text

    tools = {}
    if parser := tool_parser_of(own, text):
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        tools = {
            "tool_parser": module.parse_tool_call,
            "tool_call_start": module.tool_call_start,
            "tool_call_end": module.tool_call_end,
        }

    ends = tokenizer.eos_token_ids - set(unnamed_ends(tokenizer))
    templated = TokenizerWrapper(plain, lambda _: tokenizer.detokenizer, ends, **tools)
    templated._images = getattr(tokenizer, "_images", None)
    templated._template_name = "--chat-template"

    stop_at_answer_end(templated)
    return templated


def _check_marks(tokenizer: Any, text: str) -> None:
    """Raise a PackError if a named template marks turns with what is no token of the base."""
    vocabulary = tokenizer.get_vocab()
    usable = [
        name
        for name, template in CHAT_TEMPLATES.items()
        if all(mark in vocabulary for mark in MARKS.get(template, ()))
    ]

    for name, template in CHAT_TEMPLATES.items():
        if text == template and name not in usable:
            raise PackError(
                f"--chat-template {name}: {MARKS[template][0]} is no token of the base model. Name "
                f"one of {', '.join(usable)}, or a .jinja file.",
                "unsupported",
                "chat_template",
            )
