"""Load a base: any causal model of mlx-lm, from a folder, the Hugging Face cache or the Hub.

Offline first: a local folder never touches the network, a cached hub id is used as it is cached.
"""

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx.utils import tree_map

from . import runtime
from .bitsandbytes import from_bitsandbytes
from .errors import PackError
from .files import read_header
from .nn.nf4 import NF4Embedding, NF4Linear
from .nn.quantized import NF4, replace_modules
from .ops.nf4 import BLOCK_SIZES, NF4Weight
from .packing import Recipe, is_named, packing_named, packings_of, quantized_tensors
from .runtime import mx

if TYPE_CHECKING:
    from .pack import Pack

TINY = "tiny"
_SAMPLE_BYTES = 4096
# what mlx-lm downloads; code among it is run only with trust_remote_code
CHECKPOINT_FILES = (
    "*.json model*.safetensors *.jinja *.txt *.jsonl tokenizer.model *.tiktoken tiktoken.model *.py"
).split()


def tiny_base_path() -> Path:
    """The folder of the tiny Qwen3 that the package carries; an ordinary mlx-lm checkpoint."""
    return Path(__file__).parent / "tiny" / "base"


def public_name(name: str) -> str:
    """What a manifest calls a base or data: a hub id as it is, a folder without its path."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


@dataclass
class Base:
    """A frozen checkpoint with its tokenizer.

    ``name`` is what the user called it, ``path`` the folder, ``fingerprint`` a hash of its tensors.
    """

    name: str
    path: Path
    model: nn.Module
    tokenizer: object
    config: dict
    fingerprint: str
    quantization: dict = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table."""
        return int(text_config(self.config)["vocab_size"])

    @contextmanager
    def applied(self, pack: "str | Path | Pack", base_path: str = "quantized") -> Iterator["Base"]:
        """The base with a pack (or its folder) attached; detached on leaving, nothing reloaded.

        Raises: PackError if the pack does not fit this base.
        """
        from .pack import Pack

        opened = pack if isinstance(pack, Pack) else Pack.open(pack)
        attached = opened.attach(self, base_path=base_path)
        try:
            yield self
        finally:
            attached.detach()

    @property
    def public_name(self) -> str:
        """The name that leaves this machine in a manifest."""
        return public_name(self.name)

    def summary(self) -> str:
        """One line: architecture, blocks, quantization, size."""
        text = text_config(self.config)
        kind = quantization_name(self.quantization)
        size = sum(f.stat().st_size for f in weight_files(self.path))
        shown = f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
        blocks = text.get("num_hidden_layers", text.get("n_layer", "?"))
        model_type = self.config["model_type"]
        return f"{self.name} · {model_type} · {blocks} blocks · {kind} · {shown}"


def quantization_name(q: Mapping | None) -> str:
    """A quantization for people: ``affine 4-bit g64``, or ``dense``."""
    if not q:
        return "dense"
    double = " double-quantized" if q.get("double_quant") else ""
    kept = f" without {', '.join(q['keep'])}" if q.get("keep") else ""
    return f"{q.get('mode', 'affine')} {q['bits']}-bit g{q['group_size']}{double}{kept}"


def text_config(config: dict) -> dict:
    return config if "vocab_size" in config else config.get("text_config", config)


def resolve_base_path(name: str | Path) -> Path:
    """The checkpoint folder for ``tiny``, a local folder, or a hub id (cached first).

    Raises: PackError, one line with what to do, when there is none.
    """
    if str(name) == TINY:
        return tiny_base_path()
    if not str(name):
        raise PackError("--model: is empty; name a folder, a hub id (owner/name) or 'tiny'.")
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, False for a name that is too long
        if not (path / "config.json").is_file():
            raise PackError(f"{path}: is not a checkpoint, it has no config.json.")
        return path
    if os.path.exists(path):
        raise PackError(f"{path}: must be a checkpoint folder, but is a file.")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name), re.ASCII):
        alone = "/" not in str(name)
        hint = f" Its 4-bit form may be 'mlx-community/{name}'." if alone else ""
        raise PackError(f"--model {name}: no such folder, and not a hub id (owner/name).{hint}")
    return _hub_snapshot(str(name))


def _hub_snapshot(repo: str) -> Path:
    """The folder of a hub id: as it is cached, else (or if that is incomplete) downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    wanted = {"repo_id": repo, "allow_patterns": CHECKPOINT_FILES}
    cached = "not in the Hugging Face cache"
    try:
        path = Path(snapshot_download(**wanted, local_files_only=True))
        if _is_whole(path):
            return path
        cached = "only in part in the Hugging Face cache"
    except LocalEntryNotFoundError:
        pass
    except ValueError as error:  # the hub's rules for names
        raise PackError(f"--model {repo}: no such folder, and {_first_line(error)}") from None
    try:
        path = Path(snapshot_download(**wanted))  # without network, what is cached of it
        if _is_whole(path):
            return path
        reason = "some of its files are missing"
    except RepositoryNotFoundError:
        raise PackError(
            f"--model {repo}: no folder of that name, and the Hub has no such model (or it is "
            "private: hf auth login)."
        ) from None
    except (OSError, ValueError) as error:
        reason = _first_line(error)
    raise PackError(
        f"--model {repo}: not a folder here, {cached}, and it cannot be had from the Hub "
        f"({reason}). On a machine with network: hf download {repo}"
    )


def _is_whole(path: Path) -> bool:
    found = (path / "config.json").is_file() and weight_files(path)
    return bool(found) and not missing_shards(path)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120].rstrip(".")


def weight_files(path: Path) -> list[Path]:
    """The safetensors shards of a checkpoint folder, in order."""
    return sorted(path.glob("model*.safetensors"))


def missing_shards(path: Path) -> list[str]:
    """Shards that the index of a checkpoint folder names and that are not there.

    Raises: PackError if the index is no index.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PackError(f"{index}: is not an index of shards (no 'weight_map').") from None
    return sorted(named - {f.name for f in weight_files(path)})


def fingerprint(path: Path) -> str:
    """A hash of a checkpoint's tensors: names, dtypes, shapes and a sample of each one's bytes.

    It does not depend on how the tensors are spread over shards, and reads 4 KiB a tensor.
    """
    entries = {}
    for file in weight_files(path):
        header, start = read_header(file)
        with file.open("rb") as f:
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                middle = begin + max(0, (end - begin - _SAMPLE_BYTES) // 2)
                f.seek(start + middle)
                sample = f.read(min(_SAMPLE_BYTES, end - begin))
                entries[name] = (tensor["dtype"], tensor["shape"], sample)
    digest = hashlib.sha256()
    for name, (dtype, shape, sample) in sorted(entries.items()):
        digest.update(f"{name} {dtype} {shape}\n".encode() + sample)
    return digest.hexdigest()


def check_files(path: Path) -> None:
    """Refuse a folder without weights, with a truncated shard, or one that the index misses."""
    files = weight_files(path)
    if not files:
        raise PackError(f"{path}: has no model*.safetensors; is it a checkpoint folder?")
    for file in files:
        read_header(file)
    if missing := missing_shards(path):
        raise PackError(f"{path}: shard {missing[0]} is named in the index but not there.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise PackError(f"{path / 'config.json'}: is not valid JSON: {error}.") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise PackError(f"{path / 'config.json'}: has no 'model_type'.")


Weights = dict[str, mx.array]


def load_model_of(
    path: Path, trust_remote_code: bool, pack: Callable[[nn.Module, Weights], Weights]
) -> tuple[nn.Module, dict]:
    """mlx-lm's loader; ``pack`` gets the model and its lazy weights by the model's names."""
    from mlx_lm.utils import _get_classes, load_model

    if "model_file" in json.loads((path / "config.json").read_text()) and not trust_remote_code:
        raise PackError(f"{path}: brings code of its own; --trust-remote-code runs it.")
    # mlx-lm before 0.32, the last for Python 3.10, has no such argument and always runs the code
    known = "trust_remote_code" in inspect.signature(load_model).parameters

    def classes(config):
        model_class, arguments_class = _get_classes(config)

        def make(arguments):
            model = model_class(arguments)
            to_names_of_model = getattr(model, "sanitize", lambda weights: weights)

            def sanitize(weights):
                own = from_bitsandbytes(dict(weights), str(path))
                weights.clear()  # the caller keeps this one: nothing else may hold a dense weight
                return pack(model, dict(to_names_of_model(own)))

            model.sanitize = sanitize
            return model

        return make, arguments_class

    try:
        model, config = load_model(
            path, lazy=True, get_model_classes=classes,
            **({"trust_remote_code": True} if known else {}),
        )  # fmt: skip
        vars(model).pop("sanitize", None)
        return model, config
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) < 400 else reason[:400] + " …"
        raise PackError(f"{path}: tensors and config.json do not fit: {reason}") from None
    except RuntimeError as error:
        raise PackError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def load_base_tokenizer(path: Path, config: dict, trust_remote_code: bool) -> object:
    from mlx_lm.utils import load_tokenizer

    try:
        tokenizer = load_tokenizer(
            path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PackError(f"{path}: the tokenizer cannot be loaded: {reason}") from None
    # without its files, transformers makes an empty tokenizer of the kind that the config names
    if not tokenizer.encode("a b", add_special_tokens=False):
        raise PackError(f"{path}: the tokenizer cannot be loaded: there is no tokenizer.json.")
    return tokenizer


def _place_nf4(model: nn.Module, weights: Weights, dtype: mx.Dtype) -> None:
    """Put an NF4 module wherever the weights are packed; the tensors are loaded into it later."""
    modules = dict(model.named_modules())
    placed = []
    for path in [name.removesuffix(".absmax") for name in weights if name.endswith(".absmax")]:
        parts = [weights.get(f"{path}.{part}") for part in ("nested_absmax", "offset")]
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            kind = "nothing" if module is None else type(module).__name__
            raise PackError(
                f"{path}.absmax: NF4 is read for linears and embeddings, here is {kind}."
            )
        weight, absmax = weights[f"{path}.weight"], weights[f"{path}.absmax"]
        block_size = _block_size(weight, absmax)
        try:
            packed = NF4Weight(weight, absmax, *parts, block_size)
        except ValueError as error:
            raise PackError(f"{path}: packed tensors do not fit: {error}") from None
        for part in ("absmax", "nested_absmax", "offset"):
            values = weights.get(f"{path}.{part}")
            if values is not None and not mx.isfinite(values).all().item():
                raise PackError(f"{path}.{part}: has NaN or infinite values; the checkpoint is "
                                "damaged, get it again.")  # fmt: skip
        if list(packed.shape) != list(module.weight.shape):
            raise PackError(f"{path}: is packed for {list(packed.shape)}, but the config asks for "
                            f"{list(module.weight.shape)}.")  # fmt: skip
        if isinstance(module, nn.Embedding):
            placed.append((path, NF4Embedding(packed, dtype)))
        else:
            placed.append((path, NF4Linear(packed, module.get("bias"), dtype)))
    replace_modules(model, placed)


def _block_size(weight: mx.array, absmax: mx.array) -> int:
    """The block size that gives so many absmax; the default if none does."""
    fitting = [b for b in BLOCK_SIZES if -(-2 * weight.size // b) == absmax.size]
    return fitting[0] if len(fitting) == 1 else 64


def _quantize_weights(model: nn.Module, weights: Weights, recipe: Recipe) -> Weights:
    """Quantize a dense checkpoint as its weights are read; one dense weight exists at a time.

    Returns: the weights with packed ones instead; the model has the affine modules for them.
    """
    affine = {}
    for path, how in packings_of(model, recipe).items():
        name = f"{path}.weight"
        if how is None or name not in weights:
            continue
        dense = weights.pop(name)
        weights |= quantized_tensors(name, dense, how)
        del dense
        if how.mode == "affine":
            affine[path] = how.to_config()
    nn.quantize(model, class_predicate=lambda path, _: affine.get(path, False))
    return weights


def stored_as_asked(config: Mapping, quantize: str) -> bool:
    """Whether --quantize asks a checkpoint for the NF4 that it is stored in.

    Raises: PackError if it is quantized and asked to be so otherwise.
    """
    has = config.get("quantization") or config.get("quantization_config")
    if quantize == "none" or not has:
        return False
    if quantize != "nf4" or has.get("mode", has.get("bnb_4bit_quant_type")) != "nf4":
        raise PackError(f"--quantize {quantize}: the base is quantized already ({has}).")
    return True


def check_stored_nf4(
    packed: Sequence[tuple[str, bool]], name: str, double_quant: bool, keep: Sequence[str]
) -> None:
    """An NF4 base that is asked to be NF4 stays as it is, if that is what was asked for.

    Args:
        packed: paths of its NF4 modules, and whether each is double-quantized.
    """
    if other := next((path for path, double in packed if double != double_quant), None):
        has = "single" if double_quant else "double"
        raise PackError(f"--quantize nf4: {name} is NF4 already, {has}-quantized ({other}); leave "
                        "--no-double-quant as the base has it.")  # fmt: skip
    for kept in keep:
        if path := next((path for path, _ in packed if is_named(path, kept)), None):
            raise PackError(f"--keep {kept}: {name} is NF4 already, {path} too; take the "
                            "checkpoint that it was made from.")  # fmt: skip


def _nf4_quantization(model: nn.Module) -> dict:
    """What config.json would say of a checkpoint that bitsandbytes packed; {} if it did not."""
    module = next((m for m in model.modules() if isinstance(m, NF4)), None)
    if module is None:
        return {}
    return {"group_size": module.group_size, "bits": 4, "mode": "nf4",
            "double_quant": module.double_quant}  # fmt: skip


def _activation_dtype(config: dict, wanted: str) -> mx.Dtype:
    """What hidden states are computed in: float32 on a CPU, else as asked for or as stored."""
    if runtime.on_cpu():
        return mx.float32
    if wanted != "auto":
        return {"float16": mx.float16, "float32": mx.float32, "bfloat16": mx.bfloat16}[wanted]
    named = str(text_config(config).get("torch_dtype") or text_config(config).get("dtype"))
    return {"float16": mx.float16, "float32": mx.float32}.get(named, mx.bfloat16)


def load_base(
    name: str | Path = TINY,
    quantize: str = "none",
    trust_remote_code: bool = False,
    *,
    double_quant: bool = True,
    keep: Sequence[str] = (),
    compute_dtype: str = "auto",
) -> Base:
    """Load a checkpoint and its tokenizer, frozen, ready to carry adapters.

    On a CPU the floating tensors (scales, norms) are taken to float32: MLX multiplies bf16 there 30
    times slower than fp32. On a GPU they keep their dtype.

    Args:
        name: ``"tiny"``, a checkpoint folder or a hub id. Affine 2 to 8 bits, mixed bits by
            module, bf16/fp16/fp32, sharded or not: whatever mlx-lm's loader reads.
            NF4 as `packs quantize` and as bitsandbytes write it.
        quantize: ``"affine4"``, ``"affine8"`` or ``"nf4"`` quantizes a dense checkpoint tensor by
            tensor as it is read; with ``double_quant``, the absmax of NF4 are 8-bit too. A base
            that is NF4 already stays as it is.
        keep: names of modules that ``quantize`` leaves dense: leaf (lm_head), tail or path.
        compute_dtype: ``auto`` as stored, or ``bfloat16``, ``float16``, ``float32``; on a CPU
            always float32.
    Raises: PackError when there is no such checkpoint or its tensors do not fit its config.
    """
    recipe = None
    if quantize != "none":
        recipe = Recipe(packing_named(quantize, double_quant), tuple(keep))
    path = resolve_base_path(name)
    check_files(path)
    stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    as_stored = stored_as_asked(stored, quantize)
    recipe = None if as_stored else recipe
    dtype = _activation_dtype(stored, compute_dtype)

    def pack(model: nn.Module, weights: Weights) -> Weights:
        if recipe:
            weights = _quantize_weights(model, weights, recipe)
        _place_nf4(model, weights, dtype)
        return weights

    model, config = load_model_of(path, trust_remote_code, pack)
    if as_stored:
        packed = [(p, m.double_quant) for p, m in model.named_modules() if isinstance(m, NF4)]
        check_stored_nf4(packed, str(name), double_quant, keep)
    quantization = config.get("quantization") or _nf4_quantization(model)
    if recipe:
        quantization = recipe.packing.to_config() | ({"keep": list(keep)} if keep else {})
    if runtime.on_cpu() or compute_dtype != "auto":
        half = (mx.float16, mx.bfloat16)
        changed = half if runtime.on_cpu() else (*half, mx.float32)
        frozen = {id(v) for m in model.modules() if isinstance(m, NF4) for v in m.values()}
        model.update(
            tree_map(
                lambda a: a.astype(dtype) if a.dtype in changed and id(a) not in frozen else a,
                model.parameters(),
            )
        )
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    tokenizer = load_base_tokenizer(path, config, trust_remote_code)
    return Base(str(name), path, model, tokenizer, config, fingerprint(path), dict(quantization))
