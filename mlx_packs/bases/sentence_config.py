"""The configuration of a sentence-transformers folder: tokens, pooling and normalization.

Sentence-BERT: https://arxiv.org/abs/1908.10084
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..kinds import check_kind
from ..reading import read_json

POOLING = ("mean", "cls", "max")
MODULES = "modules.json"
_SETTINGS = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
_PROMPTS = "config_sentence_transformers.json"


@dataclass(frozen=True)
class SentenceConfig:
    """The configuration by which texts become vectors."""

    pooling: str = "mean"  # of the states of the tokens, one of `POOLING`
    normalize: bool = False  # to length 1
    max_seq_length: int | None = None  # with [CLS] and [SEP]; None is the number of positions
    lower_case: bool = False  # before the tokenizer's own steps

    def to_json(self) -> dict:
        """Its entry in a pack's manifest."""
        return {"pooling": self.pooling, "normalize": self.normalize}


def read_sentence_config(path: Path) -> SentenceConfig:
    """Read the files of sentence-transformers in a folder; without them pooling is the mean."""
    settings = _read(path / _SETTINGS)
    prompts = _read(path / _PROMPTS)
    if name := prompts.get("default_prompt_name"):
        raise PackError(
            f"{path / _PROMPTS}: puts the prompt '{name}' before every text. Set "
            "default_prompt_name to null and write it into your texts.",
            "unsupported",
        )

    longest = settings.get("max_seq_length")
    if longest is None:
        longest = _read(path / _TOKENIZER).get("model_max_length")
        if isinstance(longest, (int, float)) and longest < 2**31:
            longest = int(longest)
        else:
            longest = None

    if longest is not None and not (type(longest) is int and longest > 2):
        raise PackError(
            f"{path / _SETTINGS}: max_seq_length must be an integer above 2, but is {longest!r}.",
            "unreadable",
        )

    pooling, normalize = _modules(path)
    return SentenceConfig(pooling, normalize, longest, settings.get("do_lower_case") is True)


def _modules(path: Path) -> tuple[str, bool]:
    """The pooling, and whether vectors are normalized, from ``modules.json``."""
    file = path / MODULES
    pooling = SentenceConfig.pooling
    kinds = []
    for module in _read(file, list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise PackError(
                f"{file}: every module must have a 'type', but got {module}.", "unreadable"
            )

        kind = module["type"].rpartition(".")[2]
        place = module.get("path") or ""
        if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
            raise PackError(
                f"{file}: the path of a module must be in the folder, but is {place!r}.",
                "unreadable",
            )

        kinds.append(kind)
        if kind == "Transformer" and place:
            raise PackError(
                f"{file}: its Transformer is in the folder '{place}'. Move what is in it up, and "
                "set its path to ''.",
                "unsupported",
            )

        if kind == "Pooling":
            pooling = _pooling(path / place / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            raise PackError(
                f"{file}: the module {kind} ('{place}') is not supported. Known are Transformer, "
                "Pooling and Normalize.",
                "unsupported",
            )

    if kinds and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise PackError(
            f"{file}: must be Transformer, Pooling and at most Normalize, in this order, but is "
            f"{', '.join(kinds)}.",
            "unsupported",
        )

    return pooling, "Normalize" in kinds


def _pooling(file: Path) -> str:
    """The one kind of pooling that a config of the Pooling module turns on."""
    config = _read(file)
    methods = config.get("pooling_mode")
    try:
        check_kind("pooling_mode", methods, "text or a list of texts?")
    except ValueError as error:
        raise PackError(f"{file}: {error}.", "unreadable") from None

    if methods is None:  # before sentence-transformers 5 a switch for each
        names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
        switches = {k.removeprefix("pooling_mode_"): v for k, v in config.items()}
        methods = [names.get(key, key) for key, value in switches.items() if value is True]
        methods = [name for name in methods if name != "include_prompt"]

    if isinstance(methods, str):
        methods = [methods]
    methods = list(methods or [])
    if len(methods) != 1 or methods[0] not in POOLING:
        raise PackError(
            f"{file}: pools by {' and '.join(map(str, methods)) or 'nothing'}. Supported is one "
            f"of {', '.join(POOLING)}.",
            "unsupported",
        )

    return methods[0]


def _read(file: Path, kind: type = dict) -> Any:
    """An empty ``kind`` if there is no file."""
    return read_json(file, kind) if file.is_file() else kind()
