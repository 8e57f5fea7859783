"""The configuration of a sentence-transformers folder: tokens, pooling and normalization.

Sentence-BERT: https://arxiv.org/abs/1908.10084
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Code, PackError, file_errors
from ..kinds import check_keys, check_kind
from ..reading import read_json

POOLING = ("mean", "cls", "max", "lasttoken")
QUERY = "query"  # name of the prompt before queries
MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
PROMPTS = "config_sentence_transformers.json"


@dataclass(frozen=True)
class SentenceConfig:
    """The configuration by which texts become vectors."""

    pooling: str = "mean"  # of the states of the tokens, one of `POOLING`
    normalize: bool = False  # to length 1
    max_seq_length: int | None = None  # with [CLS] and [SEP]; None is the number of positions
    lower_case: bool = False  # before the tokenizer's own steps
    adds_eos: bool = False  # whether an end token is put after what the tokenizer gives
    prompts: Mapping[str, str] = field(default_factory=dict)  # before texts of a kind, by its name

    def prompt(self, name: str) -> str:
        """Return a prompt by its name; a PackError if there is none."""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise PackError(f"prompt '{name}': is none of this base's. Known are {known}.")
        return self.prompts[name]

    def to_json(self) -> dict:
        """Its entry in a pack's manifest."""
        return {"pooling": self.pooling, "normalize": self.normalize}


def base_settings(path: Path, is_decoder: bool) -> dict:
    """Return what packs of embeddings record of a base, and need in another one."""
    return read_sentence_config(path, is_decoder).to_json()


def read_sentence_config(path: Path, is_decoder: bool = False) -> SentenceConfig:
    """Read the files of sentence-transformers in a folder.

    Without them an encoder pools by the mean, and a decoder takes the state of an end token.
    """
    settings = _read(path / SETTINGS)
    prompts = _read(path / PROMPTS)
    if name := prompts.get("default_prompt_name"):
        raise _unsupported(
            path / PROMPTS,
            f"puts the prompt '{name}' before every text. Set default_prompt_name to null and "
            "write it into your texts.",
        )

    with file_errors(path / SETTINGS):
        check_keys(settings, {"max_seq_length": "an integer from 3 to 2147483647?"})
    longest = settings.get("max_seq_length")
    if longest is None:
        longest = _read(path / _TOKENIZER).get("model_max_length")
        longest = int(longest) if isinstance(longest, (int, float)) and longest < 2**31 else None

    lower_case = settings.get("do_lower_case") is True
    with file_errors(path / PROMPTS):
        check_keys(prompts, {"prompts": "a mapping?", "prompts.*": "text"})
    named = dict(prompts.get("prompts") or {})
    if is_decoder and not (path / MODULES).is_file():
        return SentenceConfig("lasttoken", True, longest, lower_case, adds_eos=True, prompts=named)

    pooling, normalize = _modules(path)
    return SentenceConfig(pooling, normalize, longest, lower_case, prompts=named)


def _modules(path: Path) -> tuple[str, bool]:
    """The pooling, and whether vectors are normalized (modules.json)."""
    file = path / MODULES
    modules = _read(file, list)
    with file_errors(file):
        check_keys(modules, {"*": "a mapping", "*.type": "text", "*.path": "text?"})

    pooling = SentenceConfig.pooling
    kinds = []
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        kinds.append(kind)
        place = module.get("path") or ""
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise _unsupported(
                file, f"the path of a module must be in the folder, but is {place!r}.", "unreadable"
            )

        if kind == "Transformer" and place:
            raise _unsupported(
                file,
                f"its Transformer is in the folder '{place}'. Move what is in it up, and set its "
                "path to ''.",
            )

        if kind == "Pooling":
            pooling = _pooling(path / place / "config.json")

    if kinds and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _unsupported(
            file,
            "must be Transformer, Pooling and at most Normalize, in this order, but is "
            f"{', '.join(kinds)}.",
        )

    return pooling, "Normalize" in kinds


def _pooling(file: Path) -> str:
    """The one kind of pooling that a config of the Pooling module turns on."""
    config = _read(file)
    methods = config.get("pooling_mode")
    with file_errors(file):
        check_kind("pooling_mode", methods, "text or a list of texts?")

    if methods is None:  # before sentence-transformers 5 a switch for each
        names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
        on = [key for key, value in config.items() if value is True and key != "include_prompt"]
        switches = [key.removeprefix("pooling_mode_") for key in on]
        methods = [names.get(key, key) for key in switches]

    if isinstance(methods, str):
        methods = [methods]
    methods = list(methods or [])
    if len(methods) != 1 or methods[0] not in POOLING:
        used = " and ".join(map(str, methods)) or "nothing"
        raise _unsupported(file, f"pools by {used}. Supported is one of {', '.join(POOLING)}.")

    if config.get("include_prompt") is False:
        raise _unsupported(file, "leaves prompts out of the pooling. Use another base.")
    return methods[0]


def _unsupported(file: Path, fault: str, code: Code = "unsupported") -> PackError:
    return PackError(f"{file}: {fault}", code)


def _read(file: Path, kind: type = dict) -> Any:
    """An empty ``kind`` if there is no file."""
    return read_json(file, kind) if file.is_file() else kind()
