"""A pack: adapters and a manifest in a folder that can be checked, measured and swapped.

``pack.json`` says what the pack is and the hash of every file; ``adapters.safetensors`` has
mlx-lm's names and shapes; with one rank and scale throughout, ``adapter_config.json`` lets stock
``mlx_lm.generate --adapter-path`` read it. Safetensors and JSON only, never code.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from . import runtime
from .adapters import Attached, ModuleSpec, SliceSpec, Specs, attach
from .errors import PackError
from .files import read_header, save_tensors, sha256, to_json, whole_folder
from .geometry import Heads, block_prefixes
from .loading import Base, fingerprint, resolve_base_path
from .runtime import mx

FORMAT_VERSION = 1
MANIFEST = "pack.json"
ADAPTERS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
CARD = "README.md"
LITE_MB = 10


@dataclass
class Pack:
    """A pack in memory: manifest and adapters. ``path`` is its folder once saved or opened."""

    manifest: dict
    tensors: Mapping[str, mx.array] | None = None
    path: Path | None = None

    @classmethod
    def of(cls, attached: Attached, **facts) -> "Pack":
        """The pack of adapters that are attached to a base; ``facts`` go into the manifest."""
        base = attached.base
        heads = Heads.of(base.config)
        manifest = {
            "format_version": FORMAT_VERSION,
            "kind": "lora",
            "base": {
                "id": base.name,
                "fingerprint": base.fingerprint,
                "model_type": base.config["model_type"],
                "quantization": base.quantization or None,
                "num_layers": len(block_prefixes(base.model)),
                "num_heads": heads.heads,
                "num_kv_heads": heads.kv_heads,
                "head_dim": heads.head_dim,
                "hidden_size": heads.hidden,
            },
            "adapters": {
                "parameters": attached.parameter_count(),
                "groups": [[g.path for g in group.members] for group in attached.groups],
                "modules": [_spec_json(spec) for spec in attached.specs.values()],
            },
            **facts,
        }
        return cls(manifest, attached.tensors())

    @classmethod
    def open(cls, path: str | Path) -> "Pack":
        """Read a pack's manifest and check its files' sizes; loads no tensor.

        Raises: PackError naming the file and what is wrong with it.
        """
        folder = Path(path).expanduser()
        file = folder / MANIFEST
        if not folder.is_dir():
            raise PackError(f"{folder}: no such pack folder.")
        if not file.is_file():
            kind = "an mlx-lm adapter" if (folder / ADAPTERS).is_file() else "no pack"
            raise PackError(f"{folder}: is {kind}: it has no {MANIFEST}.")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = int(manifest["format_version"])
            files = manifest["files"]
            wanted = [ADAPTERS, *files]
            sizes = {n: (int(files[n]["bytes"]), str(files[n]["sha256"])) for n in wanted}
            if not {"id", "fingerprint", "model_type", "quantization"} <= set(manifest["base"]):
                raise KeyError("base")
            _specs_of(manifest)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackError(
                f"{file}: is not a manifest ({type(error).__name__} {error})."
            ) from None
        if version > FORMAT_VERSION:
            raise PackError(f"{file}: format {version} is newer than this program's "
                            f"({FORMAT_VERSION}); upgrade mlx-packs.")  # fmt: skip
        for name, (size, digest) in sizes.items():
            if Path(name).name != name:
                raise PackError(f"{file}: names a file outside the pack: {name!r}.")
            part = folder / name
            if not part.is_file() or part.is_symlink():
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
            read_header(self.path / ADAPTERS)
            tensors = mx.load(str(self.path / ADAPTERS))
            for name, tensor in tensors.items():
                if not mx.isfinite(tensor).all().item():
                    raise PackError(f"{self.path / ADAPTERS}: {name} holds NaN or infinity.")
            self.tensors = tensors
        return self.tensors

    @property
    def specs(self) -> Specs:
        """Every adapter that the manifest promises."""
        return _specs_of(self.manifest)

    @property
    def size_mb(self) -> float:
        """Megabytes (10^6) of all files of a saved pack."""
        files = [f for f in self.path.iterdir() if f.is_file()]
        return sum(f.stat().st_size for f in files) / 1e6

    def save(self, path: str | Path, overwrite: bool = False) -> "Pack":
        """Write the pack's folder, whole or not at all.

        Raises: PackError if the folder holds something else than a pack, or a pack and not
            ``overwrite``.
        """
        folder = Path(path).expanduser()
        check_output(folder, overwrite)
        with whole_folder(folder, replace=True) as partial:
            save_tensors(partial / ADAPTERS, dict(self.load_tensors()))
            if config := mlx_lm_config(self.specs):
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
            (partial / MANIFEST).write_text(to_json(manifest), encoding="utf-8")
        self.path, self.manifest = folder, manifest
        return self

    def check_base(self, name: str, found: str, config: dict) -> None:
        """Hold the pack against a base: model type, fingerprint.

        Raises: PackError naming both.
        """
        wanted = self.manifest["base"]
        if wanted["model_type"] != config["model_type"]:
            raise PackError(
                f"{self.path}: was trained on a {wanted['model_type']} ({wanted['id']}), but "
                f"{name} is a {config['model_type']}."
            )
        if wanted["fingerprint"] != found:
            raise PackError(
                f"{self.path}: was trained on {wanted['id']} (fingerprint "
                f"{wanted['fingerprint'][:12]}), but {name} is another base (fingerprint "
                f"{found[:12]})."
            )

    def attach(self, base: Base, base_path: str = "quantized") -> Attached:
        """Attach this pack to its base. Raises: PackError if it does not fit."""
        self.check_base(base.name, base.fingerprint, base.config)
        tensors = self.load_tensors()
        fallback = bool(self.manifest.get("recipe", {}).get("train_fp16_fallback"))
        attached = attach(base, specs=self.specs, base_path=base_path, fp16_fallback=fallback)
        try:
            attached.load(tensors, str(self.path / ADAPTERS if self.path else "pack"))
        except PackError:
            attached.detach()
            raise
        base.model.eval()
        return attached


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
    path = resolve_base_path(model)
    config = json.loads((path / "config.json").read_text())
    pack.check_base(model, fingerprint(path), config)
    header, _ = read_header(pack.path / ADAPTERS)
    wanted = {}
    for spec in pack.specs.values():
        out = sum(s.width for s in spec.slices)
        wanted[f"{spec.path}.lora_a"] = [spec.in_features, spec.rank]
        wanted[f"{spec.path}.lora_b"] = [spec.rank, out]
    for name in sorted(set(wanted) | set(header)):
        shape = header.get(name, {}).get("shape")
        if shape != wanted.get(name):
            raise PackError(f"{pack.path / ADAPTERS}: {name} is {shape}, but the manifest says "
                            f"{wanted.get(name)}.")  # fmt: skip
    return {
        "pack": str(pack.path),
        "model": str(model),
        "fits": True,
        "fingerprint": pack.manifest["base"]["fingerprint"],
        "projections": len(pack.specs),
        "dtype": sorted({t["dtype"] for t in header.values()}),
        "pack_mb": round(pack.size_mb, 3),
    }


def _spec_json(spec: ModuleSpec) -> dict:
    return {
        "path": spec.path,
        "in_features": spec.in_features,
        "slices": [asdict(s) for s in spec.slices],
    }


def _specs_of(manifest: dict) -> Specs:
    modules = manifest["adapters"]["modules"]
    return {
        m["path"]: ModuleSpec(
            m["path"],
            int(m["in_features"]),
            tuple(
                SliceSpec(s["name"], int(s["width"]), int(s["rank"]), float(s["alpha"]))
                for s in m["slices"]
            ),
        )
        for m in modules
    }


def mlx_lm_config(specs: Specs) -> dict | None:
    """``adapter_config.json`` for stock mlx-lm, or None where its one rank and scale do not do."""
    ranks = {spec.rank for spec in specs.values()}
    scales = {s.scale for spec in specs.values() for s in spec.slices if s.rank}
    if len(ranks) != 1 or len(scales) != 1:
        return None
    return {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {
            "rank": ranks.pop(),
            "scale": scales.pop(),
            "dropout": 0.0,
            "keys": list(specs),
        },
    }


def model_card(manifest: dict, name: str) -> str:
    """README.md of a pack: what it is, what it was measured to do, how to use it."""
    base = manifest["base"]
    specs = _specs_of(manifest)
    ranks = sorted({s.rank for spec in specs.values() for s in spec.slices if s.rank})
    targets = sorted({path.rsplit(".", 1)[-1] for path in specs})
    lines = [
        "---",
        "library_name: mlx",
        "tags: [mlx, lora, mlx-packs]",
        "---",
        "",
        f"# {name}",
        "",
        f"A LoRA pack for `{base['id']}` ({base['model_type']}, {base['num_layers']} blocks), rank "
        f"{', '.join(map(str, ranks))} on {', '.join(targets)}.",
        "",
    ]
    if result := manifest.get("eval"):
        drop = 1 - result["ppl_after"] / result["ppl_before"]
        lines += [
            f"Held-out perplexity: {result['ppl_before']:.2f} ± {result['ppl_before_se']:.2f} "
            f"before, {result['ppl_after']:.2f} ± {result['ppl_after_se']:.2f} with the pack "
            f"(-{drop:.0%}), on {result['rows']} rows of `{result['split']}`.",
            "",
        ]
    if mlx_lm_config(specs):
        lines += [
            "```",
            f"mlx_lm.generate --model {base['id']} --adapter-path . --prompt ...",
            "```",
            "",
        ]
    lines += [f"Base fingerprint: `{base['fingerprint']}`"]
    return "\n".join(lines) + "\n"


def versions_line() -> dict[str, str]:
    """Versions and device that a pack was made with."""
    return {**runtime.versions(), "device": runtime.device_name()}
