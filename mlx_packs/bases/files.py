"""The files of a base: found by name (offline first) and checked.

Of its config.json every number that is used, here or in mlx-lm, is checked first.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import PackError, file_errors, reason_of, warn_once
from ..files import TINY_FOLDER, is_hub_id, is_pattern
from ..kinds import check_keys
from ..reading import FLOATS, check_regular, read_header, read_json, sha256
from .compressed_tensors import check_compressed, is_read_as_dense
from .readers import DENSE, is_local_model, local_model, names_file, reader_of
from .unsupported import check_method, unsupported_file, unsupported_weights

TINY = "tiny"
CONFIG = "config.json"
# in the config.json of a GGUF file whose K-quants stay quantized: errors of its types
K_QUANTS = "gguf_k_quants"
FINGERPRINT_PREFIX = "sha256:"
BITSANDBYTES = "bitsandbytes"  # quant_method in a config.json
RECORD = "quantization.json"  # written by `packs quantize`: what it did, and a hash of every shard
# what mlx-lm downloads; code among it is run only with trust_remote_code
CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates/*"  # besides chat_template.jinja, by name
CHECKPOINT_FILES = (
    "*.json model*.safetensors *.jinja *.txt *.jsonl tokenizer.model *.tiktoken tiktoken.model *.py"
).split()


def tiny_checkpoint() -> Path:
    """The bundled tiny Qwen3 is an ordinary mlx-lm checkpoint."""
    return TINY_FOLDER / "base"


def public_name(name: str) -> str:
    """The name of a base or data in a manifest: a hub id as it is, a folder without its path."""
    if name.startswith(DENSE):
        return DENSE + public_name(name.removeprefix(DENSE))
    path = Path(name).expanduser()
    if is_pattern(name):
        return path.name
    if path.exists():
        return path.resolve().name
    return name


def resolve_checkpoint(name: str | Path) -> Path:
    """The checkpoint folder for ``tiny``, a local folder or file, or a hub id (cached first).

    A file, such as a GGUF, is converted to a folder in the cache when it is first named.
    """
    if str(name) == TINY:
        return tiny_checkpoint()
    if not str(name):
        raise PackError("--model: is empty. Name a folder, a hub id (owner/name) or 'tiny'.")

    path = Path(name).expanduser()
    if is_local_model(str(name)) and not os.path.exists(path):
        path = local_model(str(name))

    if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
        if not (path / "config.json").is_file():
            raise PackError(
                f"{path}: is not a checkpoint, it has no config.json.{unsupported_weights(path)}",
                "not-found",
                "model",
            )
        return path

    if os.path.exists(path):
        if reader := reader_of(path):
            return reader.folder(path)
        raise PackError(
            f"{path}: must be a checkpoint folder, but is a file.{unsupported_file(path)}",
            "unsupported",
            "model",
        )

    if names_file(path.name):
        raise PackError(f"--model {name}: no such file.", "not-found", "model")

    if not is_hub_id(str(name)):
        hint = "`packs list --bases` lists the models on this disk."
        if path.name == str(name) and path.name.endswith("bit"):
            hint = f"Did you mean 'mlx-community/{name}'?"
        raise PackError(
            f"--model {name}: no such folder, and not a hub id (owner/name). {hint}", "not-found"
        )

    return _hub_snapshot(str(name))


def _hub_snapshot(repo: str) -> Path:
    """The cached folder of a hub id; it is downloaded if a file is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    cached = "not in the Hugging Face cache"
    try:
        path = cached_snapshot(repo)
        if path is not None:
            if is_complete(path):
                return path
            cached = "only in part in the Hugging Face cache"
    except ValueError as error:  # the hub's rules for names
        raise PackError(
            f"--model {repo}: no such folder, and {reason_of(error)}", "not-found"
        ) from None

    try:
        # without network, what is cached of it
        path = Path(snapshot_download(repo, allow_patterns=CHECKPOINT_FILES))
        if is_complete(path):
            return path
        reason = "some of its files are missing"
    except RepositoryNotFoundError:
        raise unknown_to_hub(repo) from None
    except (OSError, ValueError) as error:
        reason = reason_of(error).partition(" An error happened")[0]  # what follows is advice

    raise PackError(
        f"--model {repo}: not a folder here, {cached}, and could not be downloaded "
        f"({reason}). On a machine with network: `hf download {repo}`.",
        "network",
    )


def cached_snapshot(repo: str) -> Path | None:
    """Return the folder of a Hub id in the cache, maybe in part; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        request = {"repo_id": repo, "allow_patterns": CHECKPOINT_FILES}
        return Path(snapshot_download(**request, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def is_complete(path: Path) -> bool:
    has_files = (path / "config.json").is_file() and weight_files(path)
    return bool(has_files) and not _missing_shards(path)


def unknown_to_hub(repo: str) -> PackError:
    return PackError(
        f"--model {repo}: no folder of that name, and the Hub has no such model (or it is "
        "private: `hf auth login`).",
        "not-found",
    )


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder, in order.

    With an index they are the files that it names, so that older ones beside them are not read.
    """
    named = _named_shards(path)
    files = sorted(path.glob("model*.safetensors"))
    if named is None:
        return files
    return [file for file in files if file.name in named]


def files_not_read(path: Path) -> list[str]:
    """Names of safetensors files beside the weights that the index does not name."""
    read = weight_files(path)
    return [file.name for file in sorted(path.glob("model*.safetensors")) if file not in read]


def _named_shards(path: Path) -> set[str] | None:
    """None without an index."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return None
    content = read_json(index)
    with file_errors(f"{index}: is not an index of shards"):
        check_keys(content, {"weight_map": "a mapping", "weight_map.*": "text"})

    return set(content["weight_map"].values()) or None


def _missing_shards(path: Path) -> list[str]:
    named = _named_shards(path) or set()
    return sorted(named - {file.name for file in path.glob("model*.safetensors")})


_TEXT_BYTES = 256 << 20


def check_files(path: Path) -> dict:
    """Check that all weights are there and readable by MLX; return the config.json."""
    files = weight_files(path)
    if not any(path.glob("model*.safetensors")):
        other = unsupported_weights(path)
        raise PackError(
            f"{path}: has no model*.safetensors. Is it a checkpoint folder?{other}",
            "unsupported" if other else "not-found",
            "model",
        )

    check_readable(path)
    check_record(path)

    if missing := _missing_shards(path):
        raise PackError(
            f"{path}: shard {missing[0]} is named in the index but missing.", "unreadable"
        )

    tensors: dict[str, Mapping] = {}
    owners: dict[str, Path] = {}
    for file in files:
        header = read_header(file)[0]
        if twice := next((name for name in header if name in owners), None):
            raise PackError(
                f"{path}: {twice} is in {owners[twice].name} and in {file.name}. Move the files of "
                "the other model out of the folder.",
                "conflict",
                "model",
            )
        owners |= dict.fromkeys(header, file)
        tensors |= header

    if extra := files_not_read(path):
        more = " …" if len(extra) > 3 else ""
        shown = ", ".join(extra[:3]) + more
        warn_once("%s: the index does not name %s, so they are not read.", path, shown)

    config = read_config(path / CONFIG, tensors)
    check_method(path, config)
    check_compressed(path, config, tensors)
    return config


def text_files(path: Path) -> list[Path]:
    """The files beside the weights that a base's results may depend on."""
    # with modules of sentence-transformers, and named chat templates
    patterns = (*CHECKPOINT_FILES, MORE_TEMPLATES, "[0-9]*_*/config.json")
    files = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    others = ("model.safetensors.index.json", RECORD)  # by who computes
    return sorted(f for f in files if f.suffix != ".safetensors" and f.name not in others)


def check_readable(path: Path) -> None:
    """Check that what is read of a checkpoint folder, here or by a library, is regular files.

    Texts are limited to 256 MiB; the largest tokenizer known has 35 MB.
    """
    for pattern in (*CHECKPOINT_FILES, MORE_TEMPLATES):
        for file in path.glob(pattern):
            if file.is_symlink() and not file.exists():
                continue  # a cache of the Hub without this file
            limit = None if file.suffix == ".safetensors" else _TEXT_BYTES
            check_regular(file, limit)


_RECORD_KEYS = {
    "files": "a mapping with something in it",
    "files.*": "a mapping",
    "files.*.bytes": "an integer of 0 or more",
    "files.*.sha256": "text",
    **dict.fromkeys(("format", "source"), "text"),
    "versions": "a mapping",
    "quantization": "a mapping or null",
    **dict.fromkeys(("quantized", "dense"), "an integer of 0 or more"),
    **dict.fromkeys(("bits_per_weight", "bits_per_quantized_weight"), "a number"),
}


def read_record(path: Path) -> dict | None:
    """The record of `packs quantize`; None if it did not write this folder."""
    try:
        record = read_json(path / RECORD)
        check_keys(record, _RECORD_KEYS)
    except (OSError, PackError, ValueError):
        return None  # not there, or a file of somebody else

    if all(Path(name).name == name for name in record["files"]):
        return record
    return None


def check_record(path: Path, advance: Callable[[], None] | None = None) -> None:
    """Check sizes by the record, if there is one; with ``advance``, called per file, hashes too."""

    def differs(file: Path, fault: str) -> PackError:
        remedy = f"Copy or quantize it again, or remove {RECORD} if that was meant."
        return PackError(f"{file}: {fault} in {RECORD}. {remedy}", "unreadable")

    record = read_record(path) or {"files": {}}
    for name, facts in record["files"].items():
        file = path / name
        if not file.is_file():
            raise differs(file, "is missing, but named")
        if (size := file.stat().st_size) != facts["bytes"]:
            raise differs(file, f"has {size} bytes, but {facts['bytes']}")

        if advance is not None:
            if (digest := sha256(file)) != facts["sha256"]:
                expected = facts["sha256"]
                raise differs(file, f"has sha256 {digest[:12]}…, but {expected[:12]}…")
            advance()


_REMEDY = "Copy or download it again."
_SIZE = "an integer from 1 to 2147483647"  # MLX counts the rows of an array in 32 bits
_SIZES = f"{_SIZE} or a list of such?"  # some families have one for each block
_BLOCKS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MLX_QUANTIZATION = {
    "bits": "an integer above 0?",
    "group_size": "an integer above 0?",
    "mode": "text?",
}
# Keys of the language model, which is in ``text_config`` if there are other models.
_TEXT_KEYS = {
    **dict.fromkeys(_BLOCKS, "an integer from 1 to 10000?"),
    **dict.fromkeys(("hidden_size", "n_embd", "vocab_size", "type_vocab_size"), f"{_SIZE}?"),
    **dict.fromkeys(("num_attention_heads", "n_head", "intermediate_size", "n_inner"), _SIZES),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _SIZES),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "an integer of 0 or more?"),
    **dict.fromkeys(_EXPERTS, "an integer of 0 or more or a list of such?"),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "a finite number above 0?"
    ),
    "rope_theta": "a finite number above 0 or a list of such?",
    **dict.fromkeys(("rope_scaling", "rope_parameters"), "a mapping?"),
    "rope_scaling.factor": "a finite number above 0?",
    **dict.fromkeys(("rope_scaling.type", "rope_scaling.rope_type"), "text?"),
    **dict.fromkeys(("hidden_act", "torch_dtype", "dtype", "position_embedding_type"), "text?"),
    "tie_word_embeddings": "true or false?",
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "an integer or a list of such?"),
    **dict.fromkeys(("quantization", "quantization_config"), "a mapping?"),
    **{f"quantization.{key}": kind for key, kind in _MLX_QUANTIZATION.items()},
    "quantization.keep": "a list of texts?",
    "quantization_config.quant_method": "text?",
    K_QUANTS: "a mapping?",
    f"{K_QUANTS}.*": "a mapping?",
    **dict.fromkeys((f"{K_QUANTS}.*.float32", f"{K_QUANTS}.*.rounded"), "a number"),
}
_KEYS = {"model_type": "text", "model_file": "text?", "text_config": "a mapping?", **_TEXT_KEYS}


# What transformers takes for a size that the text_config of a LLaVA lacks, as that of 1.5 7B does.
_LLAVA_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}


def read_config(file: Path, tensors: Mapping[str, Mapping] | None = None) -> dict:
    """Return the config.json of a base.

    ``tensors`` are the headers of its tensors; counts of blocks and experts must not exceed them.
    Raises PackError if a value that a model is made of has another type, or is out of range.
    """
    config = read_json(file)
    with file_errors(file, _REMEDY):
        check_keys(config, _KEYS)
        check_keys(config.get("text_config") or {}, _TEXT_KEYS, "text_config")
        for module_path, settings in (config.get("quantization") or {}).items():
            if isinstance(settings, Mapping):
                check_keys(settings, _MLX_QUANTIZATION, f"quantization.{module_path}")

    if config.get("model_type") == "llava":
        config["text_config"] = _LLAVA_TEXT | (config.get("text_config") or {})
    if tensors is not None:
        for part in (config, config.get("text_config") or {}):
            _check_counts(file, part, tensors)
    return config


def _check_counts(file: Path, part: Mapping, tensors: Mapping[str, Mapping]) -> None:
    """Check that a config asks for no more blocks or experts than the tensors can have."""
    widest = max((size for tensor in tensors.values() for size in tensor["shape"]), default=0)
    limits = dict.fromkeys(_BLOCKS, len(tensors))  # each block has a tensor at least
    limits |= dict.fromkeys(_EXPERTS, max(len(tensors), widest))  # experts may be one stack

    for key, limit in limits.items():
        count = part.get(key) or 0
        if isinstance(count, int) and count > limit:
            raise PackError(
                f"{file}: {key} is {count}, but its files have {len(tensors)} tensors in all. "
                f"{_REMEDY}",
                "unreadable",
            )


def text_config(config: dict) -> dict:
    """The part of a config that describes the language model."""
    text = config.get("text_config") or {}
    if "num_hidden_layers" in text or "vocab_size" not in config:
        return text or config
    return config


def context_of(config: dict) -> int:
    """The tokens that a base reads at most, as its config.json says; 32,768 if it does not."""
    text = text_config(config)
    return text.get("max_position_embeddings") or text.get("n_positions") or 1 << 15


def vocab_size_of(config: dict, where: str | Path) -> int:
    """``where`` is the base, for errors."""
    size = text_config(config).get("vocab_size", config.get("vocab_size"))
    if size is None:
        raise PackError(f"{where}: its config.json has no vocab_size.", "unreadable")
    return size


def stored_quantization(config: Mapping) -> dict:
    """Return the quantization of a config, {} if it has none or is read as dense."""
    if is_read_as_dense(config):
        return {}
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization", "quantization_config"):
            if part.get(key):
                return dict(part[key])
    return {}


def short_fingerprint(value: str) -> str:
    """The twelve digits that people compare."""
    return value.removeprefix(FINGERPRINT_PREFIX)[:12]


def quantization_name(q: Mapping | None) -> str:
    """Spell a quantization for people: ``affine 4-bit g64``, ``bitsandbytes nf4``, or ``dense``."""
    if not q:
        return "dense"

    if q.get("quant_method") == BITSANDBYTES:
        kind = "8-bit" if q.get("load_in_8bit") else q.get("bnb_4bit_quant_type", "4-bit")
        return f"{BITSANDBYTES} {kind}"

    mode = q.get("mode", q.get("quant_method", "affine"))
    if "bits" not in q or "group_size" not in q:
        return mode

    name = f"{mode} {q['bits']}-bit g{q['group_size']}"
    if q.get("double_quant"):
        name += " double-quantized"
    if q.get("keep"):
        name += f" without {', '.join(q['keep'])}"
    return name


def quantized_as(path: Path, config: Mapping) -> str | None:
    """The quantization of a checkpoint, by its config or tensors; None if it is dense."""
    if stored := stored_quantization(config):
        return quantization_name(stored)
    for file in weight_files(path):
        for name, tensor in read_header(file)[0].items():
            if name.endswith(".weight") and tensor["dtype"] not in FLOATS:
                return f"{name} is {tensor['dtype']}"
    return None
