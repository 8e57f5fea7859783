"""A pack: adapters and a manifest in a folder that can be checked, measured and swapped.

``pack.json`` says what the pack is and the hash of every file; ``adapters.safetensors`` has
mlx-lm's names and shapes; with one rank and scale throughout, ``adapter_config.json`` lets stock
``mlx_lm.generate --adapter-path`` read it. Safetensors and JSON only, never code.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import runtime
from ..adapters.imported import attach_inference_only, is_inference_only
from ..adapters.lora import Attached, attach
from ..adapters.method import Trainable
from ..adapters.spec import Specs
from ..bases.files import (
    check_files,
    fingerprint,
    quantization_name,
    resolve_checkpoint,
    weight_files,
)
from ..bases.geometry import Heads, block_prefixes
from ..bases.model import BaseModel
from ..bases.weight_formats import format_name
from ..errors import PackError
from ..files import (
    atomic_folder,
    atomic_write,
    read_header,
    read_tensors,
    save_tensors,
    sha256,
    to_json,
)
from ..runtime import mx
from .manifest import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CARD,
    FORMAT_VERSION,
    HUB_ID,
    MAIN,
    MANIFEST,
    adapter_config,
    check_manifest,
    check_quantization,
    is_of_encoder,
    model_card,
    read_manifest,
    read_pin,
    replaced_of,
    shapes_of,
    spec_json,
    specs_of,
)

LITE_MB = 10


@dataclass
class Pack:
    """A pack in memory: manifest and adapters. ``path`` is its folder once saved or opened.

    ``parts``: of a sum that was not saved, which packs it is of, with their weights.
    """

    manifest: dict
    tensors: Mapping[str, mx.array] | None = None
    path: Path | None = None
    parts: tuple = ()

    @property
    def identity(self):
        """What is equal for two that are the same pack: the folder, or the parts of a sum."""
        return self.path.resolve() if self.path else self.parts or id(self)

    @classmethod
    def of(cls, attached: Trainable, dtype: str = "float32", **facts) -> "Pack":
        """The pack of what was learned beside or in a base; ``facts`` go into the manifest.

        dtype: of its tensors; `rounded` ones lose nothing.
        """
        groups = [[g.path for g in group.members] for group in attached.groups]
        adapters = {
            "parameters": attached.parameter_count(),
            "groups": groups,
            "modules": modules_json(attached.base, attached.specs),
            "dtype": dtype,
        }
        if attached.replaced:
            adapters["replaced"] = [
                {"name": name, "shape": list(shape)} for name, shape in attached.replaced.items()
            ]
        facts = {"method": attached.method, **facts}
        tensors = {n: t.astype(getattr(mx, dtype)) for n, t in attached.tensors().items()}
        return cls(manifest_of(attached.base, adapters, **facts), tensors)

    @classmethod
    def open(cls, path: str | Path) -> "Pack":
        """Read a pack's manifest and check its files' sizes; loads no tensor.

        path: a folder, or where there is none of that name a hub id (``owner/name@revision``).
        Raises: PackError naming the file and what is wrong with it.
        """
        folder = Path(path).expanduser()
        if _is_hub_name(path):
            from .hub import cached

            folder = cached(str(path))
        file = folder / MANIFEST
        if not folder.is_dir():
            raise PackError(f"{folder}: no such pack folder.")
        if not file.is_file():
            foreign = (folder / ADAPTER_CONFIG).is_file()
            hint = f" As an adapter of another tool: packs import {folder}" if foreign else ""
            kind = "an mlx-lm adapter" if (folder / ADAPTERS).is_file() else "no pack"
            raise PackError(f"{folder}: is {kind}: it has no {MANIFEST}.{hint}")
        manifest = read_manifest(file)
        for name, facts in manifest["files"].items():
            size, digest = facts["bytes"], facts["sha256"]
            if Path(name).name != name:
                raise PackError(f"{file}: names a file outside the pack: {name!r}.")
            part = folder / name
            if not part.is_file() or (part.is_symlink() and not _is_hub_blob(part)):
                raise PackError(f"{part}: is named in {MANIFEST} but is not a file here.")
            if part.stat().st_size != size:
                raise PackError(
                    f"{part}: has {part.stat().st_size} bytes, but {MANIFEST} says "
                    f"{size} (sha256 {digest[:12]}…). Copy the pack again."
                )
        return cls(manifest, None, folder)

    def verify(self) -> None:
        """Hash every file of a saved pack. Raises: PackError naming the one that differs."""
        for name, facts in self.manifest["files"].items():
            if (found := sha256(self.path / name)) != facts["sha256"]:
                raise PackError(
                    f"{self.path / name}: sha256 is {found[:12]}…, but {MANIFEST} says "
                    f"{facts['sha256'][:12]}…; the file was changed or damaged."
                )

    def load_tensors(self) -> Mapping[str, mx.array]:
        """The adapters, after checking hashes and that every number is finite."""
        if self.tensors is None:
            self.verify()
            self.tensors = read_tensors(self.path / ADAPTERS)
        return self.tensors

    @property
    def specs(self) -> Specs:
        """Every adapter that the manifest promises."""
        return specs_of(self.manifest)

    @property
    def method(self) -> str:
        """What was trained: ``lora``, or ``full``, whose weights are all brought whole."""
        return self.manifest.get("method") or "lora"

    @property
    def adapters_hash(self) -> str | None:
        """The SHA-256 of the file of a saved pack's adapters."""
        return (self.manifest.get("files") or {}).get(ADAPTERS, {}).get("sha256")

    @property
    def beyond_lora(self) -> str:
        """What of it is no LoRA of a linear, in words; empty if nothing is."""
        for path, spec in self.specs.items():
            if is_inference_only(spec):
                return f"{path} is {spec.kind}"
        whole = replaced_of(self.manifest)
        return f"{next(iter(whole))} is brought whole" if whole else ""

    def part(self, name: str) -> dict:
        """An optional part of the manifest (recipe, objective, eval), empty where there is none."""
        return self.manifest.get(name) or {}

    @property
    def name(self) -> str:
        """What messages call it: its folder, or the packs that it is the sum of."""
        if self.path:
            return str(self.path)
        parts = [f"{p['weight']:g} {p['pack']}" for p in self.manifest.get("sum_of") or ()]
        return " + ".join(parts) or "this pack"

    @property
    def short_name(self) -> str:
        """What it is called off this machine: as on the Hub if it was pulled, else its folder."""
        if self.path is None:
            return self.name
        if (pin := read_pin(self.path)) is None:
            return self.path.resolve().name
        revision = pin["revision"] if pin["revision"] != pin["commit"] else pin["commit"][:7]
        return pin["repo"] + ("" if revision == MAIN else f"@{revision}")

    @property
    def size_mb(self) -> float:
        """Megabytes (10^6) of all files of a saved pack."""
        files = [f for f in self.path.iterdir() if f.is_file()]
        return sum(f.stat().st_size for f in files) / 1e6

    def save(self, path: str | Path, overwrite: bool = False) -> "Pack":
        """Write the pack's folder, whole or not at all.

        Raises: PackError if the folder holds something else than a pack, or a pack and not
            ``overwrite``, or if the manifest is none that can be opened.
        """
        folder = Path(path).expanduser()
        check_output(folder, overwrite)
        with atomic_folder(folder, replace=True) as partial:
            save_tensors(partial / ADAPTERS, dict(self.load_tensors()))
            config = adapter_config(self.manifest)
            if config and not is_of_encoder(self.manifest):
                (partial / ADAPTER_CONFIG).write_text(to_json(config))
            (partial / CARD).write_text(model_card(self.manifest, folder.name), encoding="utf-8")
            names = [ADAPTERS, ADAPTER_CONFIG, CARD]
            files = {
                name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)}
                for name in names
                if (partial / name).is_file()
            }
            weight = files[ADAPTERS]["bytes"] / 1e6
            profile = {"profile": "lite" if weight <= LITE_MB else "heavy"}
            manifest = {**self.manifest, **profile, "files": files}
            try:
                check_manifest(manifest)
            except ValueError as error:
                raise PackError(f"{folder}: the manifest would be faulty ({error}).") from None
            (partial / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
        self.path, self.manifest = folder, manifest
        return self

    def note(self, **facts) -> None:
        """Add facts to the manifest of a saved pack; its other files stay as they are."""
        self.manifest = {**self.manifest, **facts}
        atomic_write(self.path / MANIFEST, to_json(self.manifest))

    def check_base(
        self, name: str, fingerprint: str, config: dict, quantization: Mapping | None
    ) -> None:
        """Compare the pack's base with another: model type, fingerprint, quantization.

        Args:
            name: what messages call the other base.
            fingerprint: of its files.
            config: its config.json.
            quantization: how it is quantized; None is dense.

        Raises:
            PackError: they differ.
        """
        ours, where = self.manifest["base"], self.name
        if ours["model_type"] != config["model_type"]:
            raise PackError(
                f"{where}: was trained on a {ours['model_type']} ({ours['id']}), but "
                f"{name} is a {config['model_type']}.",
                "mismatch",
            )
        if ours["fingerprint"] != fingerprint:
            raise PackError(
                f"{where}: was trained on {ours['id']} (fingerprint "
                f"{ours['fingerprint'][:12]}), but {name} is another base (fingerprint "
                f"{fingerprint[:12]}).",
                "mismatch",
            )
        was, now = (quantization_name(q) for q in (ours["quantization"], quantization))
        if was != now:
            mode = format_name(ours["quantization"])
            how = f"with load_base(…, quantize='{mode}')" if mode != "none" else "without quantize"
            raise PackError(
                f"{where}: was trained on {ours['id']} as {was}, but {name} is {now}. Load it "
                f"{how}.",
                "mismatch",
                "quantize",
            )

    def check_reading(self, base: BaseModel) -> None:
        """Check that an encoder pools as the one that the pack was trained on.

        Raises:
            PackError: it does not.
        """
        trained = self.part("objective")
        if not base.is_encoder or trained.get("task") != "embedding":
            return
        for name, value in base.model.sentence_config.to_json().items():
            if trained.get(name, value) != value:
                raise PackError(
                    f"{self.name}: was trained with {name} {trained[name]}, but "
                    f"{base.name} has {name} {value} (its modules.json).",
                    "mismatch",
                )

    def check_checkpoint(self, model: str | Path) -> tuple[Path, dict]:
        """Hold the pack against a checkpoint from its headers and config.json alone.

        Returns: the checkpoint's folder and config. Raises: PackError as `check_base` does.
        """
        path, config = _read_checkpoint(model)
        stored = config.get("quantization")
        if not stored and (_is_foreign(config) or self.quantize_for(config) != "none"):
            stored = self.manifest["base"]["quantization"]  # as it will be once it is loaded
        self.check_base(str(model), fingerprint(path), config, stored)
        return path, config

    def quantize_for(self, config: dict) -> str:
        """What to tell `load_base` to quantize, so that a checkpoint is what was trained on."""
        if config.get("quantization") or _is_foreign(config):
            return "none"
        return format_name(self.manifest["base"]["quantization"])

    @property
    def quantize_options(self) -> dict:
        """What `load_base` needs beside the mode of `quantize_for`."""
        q = self.manifest["base"]["quantization"] or {}
        return {"double_quant": bool(q.get("double_quant")), "keep": tuple(q.get("keep") or ())}

    def attach(self, base: BaseModel, matmul_path: str = "quantized") -> Attached:
        """Attach this pack to its base. Raises: PackError if it does not fit."""
        self.check_base(base.name, base.fingerprint, base.config, base.quantization)
        self.check_reading(base)
        tensors = self.load_tensors()
        fallback = bool(self.part("recipe").get("train_fp16_fallback"))
        where = str(self.path / ADAPTERS if self.path else "pack")
        fixed = {path: spec for path, spec in self.specs.items() if is_inference_only(spec)}
        plain = {path: spec for path, spec in self.specs.items() if path not in fixed}
        replaced = replaced_of(self.manifest)
        apart = {name for spec in fixed.values() for name in spec.shapes} | set(replaced)
        attached = attach(base, specs=plain, matmul_path=matmul_path, fp16_fallback=fallback)
        try:
            attached.load({n: t for n, t in tensors.items() if n not in apart}, where)
            attach_inference_only(attached, fixed, replaced, tensors, where)
        except PackError:
            attached.detach()
            raise
        base.model.eval()
        return attached


def round_adapters(attached: Trainable, dtype: str) -> None:
    """Take every adapter to the nearest number of a dtype, so that a pack of it loses nothing.

    Raises: PackError if one is too large for it.
    """
    rounded = {n: t.astype(getattr(mx, dtype)) for n, t in attached.tensors().items()}
    for name, tensor in rounded.items():
        if not mx.isfinite(tensor).all().item():
            raise PackError(f"{name}: is too large for {dtype}; use --pack-dtype bfloat16.")
    attached.load(rounded, f"--pack-dtype {dtype}")


def _is_hub_blob(link: Path) -> bool:
    """Whether a link is one of a snapshot in the Hub's cache, to a file that belongs to it."""
    snapshots, target = link.parent.parent, link.resolve()
    return snapshots.name == "snapshots" and target.parent == snapshots.resolve().parent / "blobs"


def _is_hub_name(path: str | Path) -> bool:
    """Whether a pack's name can only be meant for the Hub: nothing here begins like it."""
    named = re.fullmatch(HUB_ID + r"(@[\w./-]+)?", str(path), re.ASCII)
    return bool(named) and not Path(Path(path).parts[0]).exists()


def modules_json(base: BaseModel, specs: Specs) -> list[dict]:
    """The modules of a manifest, each with the tensor of the base's files that it adapts."""
    return [spec_json(spec, base.weight_map.get(f"{path}.weight")) for path, spec in specs.items()]


def manifest_of(base: BaseModel, adapters: dict, **facts) -> dict:
    """The manifest of adapters on a base; ``facts`` are its optional parts."""
    heads = Heads.of(base.config)
    return {
        "format_version": FORMAT_VERSION,
        "base": {
            "id": base.public_name,
            "fingerprint": base.fingerprint,
            "model_type": base.config["model_type"],
            "quantization": base.quantization or None,
            "num_layers": len(block_prefixes(base.model)),
            "num_heads": heads.heads,
            "num_kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "hidden_size": heads.hidden,
        },
        "adapters": adapters,
        **facts,
    }


def grouped(pack: Pack, base: BaseModel) -> Pack:
    """A pack that was not trained, with its projection groups; every name and shape is held.

    Raises: PackError if it does not fit the base.
    """
    attached = pack.attach(base)
    members = [[g.path for g in group.members] for group in attached.groups]
    attached.detach()
    fixed = [[path] for path, spec in pack.specs.items() if is_inference_only(spec)]
    pack.manifest["adapters"]["groups"] = members + fixed
    return pack


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuse to write over something that is not a pack, or over a pack without being told to."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise PackError(f"--out {folder}: is a file; choose another name.")
    if not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).is_file():
        raise PackError(f"--out {folder}: is there and holds something else; choose another name.")
    if not overwrite:
        raise PackError(
            f"--out {folder}: holds a pack already; choose another name or pass --overwrite."
        )


def check_against(pack: Pack, model: str) -> dict:
    """Check a pack against a base from headers alone; loads no weights of either.

    Returns: what was checked. Raises: PackError for the first thing that does not fit.
    """
    pack.verify()
    path, config = pack.check_checkpoint(model)
    header, _ = read_header(pack.path / ADAPTERS)
    wanted = {name: list(shape) for name, shape in shapes_of(pack.manifest).items()}
    for name in sorted(set(wanted) | set(header)):
        shape = header.get(name, {}).get("shape")
        if shape != wanted.get(name):
            raise PackError(
                f"{pack.path / ADAPTERS}: {name} is {shape}, but the manifest says "
                f"{wanted.get(name)}."
            )
    checked = _check_geometry(pack, str(model), path, config)
    return {
        "pack": str(pack.path),
        "model": str(model),
        "fits": True,
        "geometry": "checked" if checked else "not in the headers",
        "fingerprint": pack.manifest["base"]["fingerprint"],
        "projections": len(pack.specs),
        "whole": len(replaced_of(pack.manifest)),
        "dtype": sorted({t["dtype"] for t in header.values()}),
        "pack_mb": round(pack.size_mb, 3),
    }


def _read_checkpoint(model: str | Path) -> tuple[Path, dict]:
    """The folder and config of a checkpoint whose files are whole."""
    path = resolve_checkpoint(model)
    check_files(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization"):
        try:
            check_quantization("quantization", config["quantization"])
        except ValueError as error:
            raise PackError(f"{path / 'config.json'}: {error}.") from None
    return path, config


def _is_foreign(config: dict) -> bool:
    """Whether a checkpoint is quantized in a format that mlx-lm converts as it loads."""
    text = config.get("text_config")
    configs = (config, text if isinstance(text, dict) else {})
    return not config.get("quantization") and any(c.get("quantization_config") for c in configs)


def _check_geometry(pack: Pack, model: str, path: Path, config: dict) -> bool:
    """Hold the adapters against the shapes in a checkpoint's headers.

    Returns: False where the headers cannot tell, as mlx-lm renames or converts these tensors.
    Raises: PackError naming the module and both shapes.
    """
    stored: dict[str, dict] = {}
    for file in weight_files(path):
        stored |= read_header(file)[0]
    if is_of_encoder(pack.manifest):
        stored = {name.removeprefix("bert."): tensor for name, tensor in stored.items()}
    specs = pack.specs.values()
    if _is_foreign(config):
        return False
    for name, shape in replaced_of(pack.manifest).items():
        dense = name in stored and f"{name.rpartition('.')[0]}.scales" not in stored
        if dense and stored[name]["dtype"] != "U8" and stored[name]["shape"] != list(shape):
            raise PackError(
                f"{pack.path}: {name} is {list(shape)}, but that of {model} is "
                f"{stored[name]['shape']}."
            )
    if not specs:
        return any(name in stored for name in replaced_of(pack.manifest))
    if not any(f"{s.path}.weight" in stored for s in specs):
        return False
    for spec in specs:
        if f"{spec.path}.weight" not in stored:
            if spec.experts is not None:  # mlx-lm stacks experts that lie one by one as it loads
                continue
            raise PackError(f"{pack.path}: {spec.path}: {model} has no such module.")
        shape = list(stored[f"{spec.path}.weight"]["shape"])
        if f"{spec.path}.scales" in stored:
            q = config.get("quantization") or {}
            own = q.get(spec.path)
            bits = (own if isinstance(own, dict) else q).get("bits")
            if not isinstance(bits, int) or bits < 1:
                return False
            shape[-1] = shape[-1] * 32 // bits
        elif f"{spec.path}.absmax" in stored:
            shape[-1] *= 2  # NF4: two codes a byte
        stack = [] if spec.experts is None else [spec.experts]
        wanted = [*stack, sum(spec.widths), spec.in_features]
        if spec.kind == "embedding":
            wanted.reverse()
        if shape != wanted:
            raise PackError(
                f"{pack.path}: {spec.path}: the adapter is for a weight of {wanted}, but that of "
                f"{model} is {shape}."
            )
    return True


def versions_line() -> dict[str, str]:
    """Versions and device that a pack was made with."""
    return {**runtime.versions(), "device": runtime.device_name()}
