"""A pack: adapters and a manifest in a folder that can be checked, measured and swapped.

``pack.json`` describes the pack and has the hash of every file; ``adapters.safetensors`` has
mlx-lm's names and shapes; with one rank and scale throughout, ``adapter_config.json`` lets stock
``mlx_lm.generate --adapter-path`` read it. Safetensors and JSON only, never code.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import runtime
from ..adapters.for_merge import attach_merged
from ..adapters.imported import attach_inference_only, is_inference_only
from ..adapters.lora import Attached, attach
from ..adapters.spec import Specs, check_shapes, weights_of
from ..adapters.targets import tied_tables
from ..adapters.trainable import Trainable
from ..bases.files import check_files, quantization_name, resolve_checkpoint
from ..bases.fingerprint import (
    changed_texts,
    fingerprint,
    is_fingerprint_of,
    is_sampled,
    sampled_fingerprint,
    say_changed,
    short_fingerprint,
    text_hashes,
)
from ..bases.geometry import block_prefixes
from ..bases.model import BaseModel
from ..bases.shapes import Group, Heads
from ..bases.weight_formats import format_name
from ..errors import PackError
from ..files import atomic_folder, atomic_write, to_json
from ..hashes import file_facts
from ..report.page import render_fragment
from ..runtime import mx
from ..tensors import read_tensors, save_tensors
from .adapter_config import adapter_config, cut, padded, padded_rank, stored_shapes
from .card import model_card
from .facts import manifest_facts
from .folder import check_output, open_folder, verify_hashes
from .hub import cached, is_hub_name
from .manifest import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CARD,
    FORMAT_VERSION,
    MAIN,
    MANIFEST,
    check_manifest,
    check_quantization,
    is_reward_model,
    manifest_text,
    read_pin,
    replaced_json,
    replaced_of,
    shapes_of,
    spec_json,
    specs_of,
)

LITE_MB = 10


@dataclass(repr=False)
class Pack:
    """A pack: a manifest and the adapters that it describes.

    Attributes:
        manifest: The contents of ``pack.json``.
        tensors: The adapters by name; None until `load_tensors` reads them.
        path: The folder of a pack that was saved or opened, otherwise None.
        parts: The packs and weights of a `weighted_sum` that was not saved.
    """

    manifest: dict
    tensors: Mapping[str, mx.array] | None = None
    path: Path | None = None
    parts: tuple = ()

    def __repr__(self) -> str:
        """Return name, base, size and perplexity, in one line."""
        base, adapters = self.manifest["base"]["id"], self.manifest["adapters"]
        change = self.manifest.get("eval") or {}
        scored = ""
        if isinstance(change.get("ppl_before"), float) and "ppl_after" in change:
            scored = f", PPL {change['ppl_before']:.2f} -> {change['ppl_after']:.2f}"
        return f"Pack({self.name!r} of {base}, {adapters['parameters']:,} weights{scored})"

    def _repr_html_(self) -> str:
        """Return name, results and loss curve for a notebook."""
        return render_fragment(manifest_facts(self.manifest, Path(self.name).name))

    @property
    def _identity(self) -> object:
        """A value that is equal for equal packs: the folder, or the parts of a weighted sum."""
        return self.path.resolve() if self.path else self.parts or id(self)

    @classmethod
    def _of(cls, attached: Trainable, dtype: str = "float32", **facts: object) -> "Pack":
        """Return a pack with the parameters that were trained on a base model, in a dtype.

        ``facts`` are optional parts of the manifest.
        """
        adapters = {
            "parameters": weights_of(attached.specs.values())
            + sum(math.prod(shape) for shape in attached.replaced.values()),
            "groups": _paths_of(attached.groups),
            "dtype": dtype,
            **({"for_merge": attached.for_merge} if attached.for_merge != "none" else {}),
            **_modules_json(attached.base, attached.specs, attached.replaced),
        }
        facts = {"method": attached.method, **facts}
        tensors = {n: t.astype(getattr(mx, dtype)) for n, t in attached.tensors().items()}
        return cls(_manifest_of(attached.base, adapters, facts), tensors)

    @classmethod
    def _untrained(
        cls,
        base: BaseModel,
        specs: Specs,
        tensors: Mapping[str, mx.array],
        full_tensors: Mapping[str, mx.array] | None = None,
        **facts: object,
    ) -> "Pack":
        """Return a pack with adapters from another source, after checking each against the base model.

        Tensors have their names on disk, and ``full_tensors`` replace those of the base model.
        ``facts`` are optional parts of the manifest.
        """
        full_tensors = full_tensors or {}
        factors = [shape for spec in specs.values() for shape in spec.shapes.values()]
        adapters = {
            "parameters": sum(math.prod(shape) for shape in factors),
            "groups": [],
            **_modules_json(base, specs, {n: t.shape for n, t in full_tensors.items()}),
        }
        pack = cls(_manifest_of(base, adapters, facts), {**tensors, **full_tensors})
        attached = pack.attach(base)
        attached.detach()
        inference_only = [[path] for path, spec in specs.items() if is_inference_only(spec)]
        adapters["groups"] = _paths_of(attached.groups) + inference_only
        return pack

    @classmethod
    def open(cls, path: str | Path) -> "Pack":
        """Open a pack: read its manifest and check the sizes of its files. No tensor is loaded.

        Args:
            path: A folder, or, if there is none of that name, a Hub id (``owner/name@revision``).

        Raises:
            PackError: If there is no such pack, or one of its files is damaged.
        """
        folder = Path(path).expanduser()
        if is_hub_name(path):
            folder = cached(str(path))
        return cls(open_folder(folder), None, folder)

    def verify(self) -> None:
        """Check the hash of every file of a saved pack.

        Raises:
            PackError: If a hash differs from that of the manifest.
        """
        verify_hashes(self.path, self.manifest)

    def load_tensors(self) -> Mapping[str, mx.array]:
        """Return the adapters, after checking hashes and shapes, and that all numbers are finite.

        Raises:
            PackError: If a check fails.
        """
        if self.tensors is None:
            self.verify()
            file = self.path / ADAPTERS
            tensors = read_tensors(file)
            shapes = stored_shapes(self.manifest)
            stored = {name: tensors[name].shape for name in shapes if name in tensors}
            check_shapes(shapes, stored, str(file))
            is_padded = "padded_rank" in self.manifest["adapters"]
            self.tensors = cut(self.specs, tensors) if is_padded else tensors
        return self.tensors

    @property
    def specs(self) -> Specs:
        """The specification of every adapter in the manifest, by module path."""
        return specs_of(self.manifest)

    @property
    def _adapters_hash(self) -> str | None:
        """The SHA-256 of the adapters' file of a saved pack, otherwise None."""
        return (self.manifest.get("files") or {}).get(ADAPTERS, {}).get("sha256")

    @property
    def is_reward_model(self) -> bool:
        """Whether it has the head of a reward model, which scores completions (`Base.rewards`)."""
        return is_reward_model(self.manifest)

    @property
    def for_merge(self) -> str:
        """The format of the merge that the pack was trained for (``--for-merge``), or ``none``."""
        return self.manifest["adapters"].get("for_merge", "none")

    @property
    def _beyond_lora(self) -> str:
        """A description of a part that is not LoRA on a linear layer; empty if there is none."""
        if self.for_merge != "none":
            return f"it is trained for packs merge --requantize {self.for_merge}"
        for path, spec in self.specs.items():
            if spec.kind != "lora":
                return f"{path} is {'an ' * (spec.kind == 'embedding')}{spec.kind}"
        replaced = replaced_of(self.manifest)
        return f"{next(iter(replaced))} is stored in full" if replaced else ""

    def _part(self, name: str) -> dict:
        """Return an optional part of the manifest (``recipe``, ``eval``), or an empty mapping."""
        return self.manifest.get(name) or {}

    @property
    def name(self) -> str:
        """The name in messages: the folder, or the packs and weights of a weighted sum."""
        if self.path:
            return str(self.path)
        parts = [f"{p['weight']:g} {p['pack']}" for p in self.manifest.get("sum_of") or ()]
        return " + ".join(parts) or "this pack"

    @property
    def short_name(self) -> str:
        """The name off this machine: the Hub id of a pulled pack, else the name of the folder."""
        if self.path is None:
            return self.name
        if (pin := read_pin(self.path)) is None:
            return self.path.resolve().name
        revision = pin["revision"] if pin["revision"] != pin["commit"] else pin["commit"][:7]
        return pin["repo"] + ("" if revision == MAIN else f"@{revision}")

    @property
    def size_mb(self) -> float:
        """The size of all files of a saved pack, in megabytes (10^6 bytes)."""
        files = [f for f in self.path.iterdir() if f.is_file()]
        return sum(f.stat().st_size for f in files) / 1e6

    def save(self, path: str | Path, overwrite: bool = False) -> "Pack":
        """Write the pack to a folder atomically, and return it.

        Args:
            path: The folder.
            overwrite: Whether to replace a pack that is there.

        Raises:
            PackError: If the folder exists and is not a pack, if it is a pack and ``overwrite`` is
                false, or if the manifest would be invalid.
        """
        folder = Path(path).expanduser()
        check_output(folder, overwrite)
        tensors = dict(self.load_tensors())
        if rank := padded_rank(self.manifest):
            tensors = padded(self.specs, tensors, rank)
            self.manifest["adapters"]["padded_rank"] = rank
        with atomic_folder(folder, replace=True) as partial:
            save_tensors(partial / ADAPTERS, tensors)
            if config := adapter_config(self.manifest):
                (partial / ADAPTER_CONFIG).write_text(to_json(config))
            (partial / CARD).write_text(model_card(self.manifest, folder.name), encoding="utf-8")
            written = (ADAPTERS, ADAPTER_CONFIG, CARD)
            files = file_facts(partial, (n for n in written if (partial / n).is_file()))
            profile = "lite" if files[ADAPTERS]["bytes"] <= LITE_MB * 1e6 else "heavy"
            manifest = {**self.manifest, "profile": profile, "files": files}
            try:
                check_manifest(manifest)
            except ValueError as error:
                raise PackError(f"{folder}: the manifest would be faulty ({error}).") from None
            (partial / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
        self.path, self.manifest = folder, manifest
        return self

    def _note(self, **facts: object) -> None:
        """Add facts to the manifest of a saved pack; its other files are unchanged."""
        self.manifest = {**self.manifest, **facts}
        atomic_write(self.path / MANIFEST, manifest_text(self.manifest))

    def check_base(self, base: BaseModel) -> None:
        """Check that a base model is the one that the pack was trained on.

        Raises:
            PackError: If its model type, fingerprint, quantization or pooling differs.
        """
        current = base.path, base.fingerprint
        self._check_base(base.name, current, base.config, base.quantization)
        pooling = getattr(base.model, "sentence_config", None)  # which decoders lack
        trained = self._part("objective")
        for name, value in (pooling.to_json() if pooling else {}).items():
            if trained.get(name, value) != value:
                raise PackError(
                    f"{self.name}: was trained with {name} {trained[name]}, but "
                    f"{base.name} has {name} {value} (its modules.json).",
                    "mismatch",
                )

    def _check_base(
        self, name: str, current: tuple[Path, str], config: dict, quantization: Mapping | None
    ) -> None:
        """Compare model type, fingerprint, quantization; without one the base is dense.

        ``current`` are folder and fingerprint of the base.
        """
        ours, where = self.manifest["base"], self.name
        if ours["model_type"] != config["model_type"]:
            raise PackError(
                f"{where}: was trained on a {ours['model_type']} ({ours['id']}), but "
                f"{name} is a {config['model_type']}.",
                "mismatch",
            )
        path, value = current
        if not is_fingerprint_of(path, ours["fingerprint"], value, where):
            value = sampled_fingerprint(path) if is_sampled(ours["fingerprint"]) else value
            raise PackError(
                f"{where}: was trained on {ours['id']} (fingerprint "
                f"{short_fingerprint(ours['fingerprint'])}), but {name} is another base "
                f"(fingerprint {short_fingerprint(value)}).",
                "mismatch",
            )
        was, now = (quantization_name(q) for q in (ours["quantization"], quantization))
        if was != now:
            mode = format_name(ours["quantization"])
            how = f"with load_base(…, quantize='{mode}')" if mode != "none" else "without quantize"
            raise PackError(
                f"{where}: was trained on {ours['id']} as {was}, but {name} is {now}. Packs of "
                f"different quantization take a command each; from Python, load the base {how}.",
                "mismatch",
                "quantize",
            )
        if names := changed_texts(path, ours["text_files"]) if ours.get("text_files") else []:
            say_changed(where, path, tuple(names))

    def _check_checkpoint(self, model: str | Path) -> tuple[Path, dict]:
        """Check a checkpoint by its headers, as `check_base` does; return its folder and config."""
        path = resolve_checkpoint(model)
        config = check_files(path)
        if quantization := config.get("quantization"):
            try:
                check_quantization("quantization", quantization)
            except ValueError as error:
                raise PackError(f"{path / 'config.json'}: {error}.", "unreadable") from None
        if not quantization and (
            is_converted_on_loading(config) or self._quantize_for(config) != "none"
        ):
            quantization = self.manifest["base"]["quantization"]  # as it will be once it is loaded
        self._check_base(str(model), (path, fingerprint(path)), config, quantization)
        return path, config

    def _quantize_for(self, config: dict) -> str:
        """Return the ``quantize`` of `load_base` that makes a checkpoint the pack's base model."""
        if config.get("quantization") or is_converted_on_loading(config):
            return "none"
        return format_name(self.manifest["base"]["quantization"])

    @property
    def _quantize_options(self) -> dict:
        """The other options of `load_base` for `_quantize_for`: ``double_quant`` and ``keep``."""
        q = self.manifest["base"]["quantization"] or {}
        return {"double_quant": bool(q.get("double_quant")), "keep": tuple(q.get("keep") or ())}

    def attach(self, base: BaseModel, matmul_path: str = "quantized") -> Attached:
        """Check a base model, attach the pack to it, and return the attached adapters.

        `Base.applied` and `Base.swap_pack` do this and also detach the pack again. The head of a
        reward model is ``score`` of the attached adapters; the base itself has none.

        Raises:
            PackError: If the pack does not fit the base model.
        """
        self.check_base(base)
        tensors = self.load_tensors()
        fallback = bool(self._part("recipe").get("train_fp16_fallback"))
        where = str(self.path / ADAPTERS if self.path else "pack")
        check_shapes(shapes_of(self.manifest), {n: t.shape for n, t in tensors.items()}, where)
        if self.for_merge != "none":
            return attach_merged(base, self.specs, tensors, self.for_merge, matmul_path)
        inference_only = {p: spec for p, spec in self.specs.items() if is_inference_only(spec)}
        trainable = {p: spec for p, spec in self.specs.items() if p not in inference_only}
        replaced = replaced_of(self.manifest)
        attached = attach(base, specs=trainable, matmul_path=matmul_path, fp16_fallback=fallback)
        try:
            factors = {n: tensors[n] for spec in trainable.values() for n in spec.shapes}
            attached.load(factors, where)
            attach_inference_only(attached, inference_only, replaced, tensors, where)
        except PackError:
            attached.detach()
            raise
        base.model.eval()
        return attached


def _paths_of(groups: Iterable[Group]) -> list[list[str]]:
    return [[geometry.path for geometry in group.members] for group in groups]


def _modules_json(
    base: BaseModel, specs: Specs, replaced: Mapping[str, tuple[int, ...]]
) -> dict[str, list]:
    """Return the modules of a manifest, each with the tensor of the base's files that it adapts."""
    origins = {path: base.weight_map.get(f"{path}.weight") for path in specs}
    modules = {"modules": [spec_json(spec, origins[path]) for path, spec in specs.items()]}
    if replaced:
        heads = tied_tables(base.model, replaced) if specs else ()
        modules["replaced"] = [replaced_json(n, s, n in heads) for n, s in replaced.items()]
    return modules


def _manifest_of(base: BaseModel, adapters: dict, facts: Mapping[str, object]) -> dict:
    """Return the manifest of adapters on a base; ``facts`` are its optional parts."""
    heads = Heads.of(base.config)
    return {
        "format_version": FORMAT_VERSION,
        "base": {
            "id": base.public_name,
            "fingerprint": base.fingerprint,
            "sampled_fingerprint": sampled_fingerprint(base.path),
            "text_files": text_hashes(base.path),
            "model_type": base.config["model_type"],
            "quantization": base.quantization or None,
            "num_layers": len(block_prefixes(base.model)),
            "num_heads": heads.heads,
            "num_kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "hidden_size": heads.hidden,
        },
        "adapters": adapters,
        "versions": versions_line(),
        **facts,
    }


def is_converted_on_loading(config: dict) -> bool:
    """Return whether a checkpoint is quantized in a format that mlx-lm converts as it loads."""
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})
    return not config.get("quantization") and any(c.get("quantization_config") for c in configs)


def versions_line() -> dict[str, str]:
    """Return versions and device, for a manifest."""
    return {**runtime.versions(), "device": runtime.device_name()}
