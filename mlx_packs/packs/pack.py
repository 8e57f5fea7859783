"""A pack: adapters and a manifest in a folder that can be checked, measured and swapped.

``pack.json`` describes the pack and has the hash of every file; ``adapters.safetensors`` has
mlx-lm's names and shapes; with one rank and scale throughout, ``adapter_config.json`` lets stock
``mlx_lm.generate --adapter-path`` read it. Safetensors and JSON only, never code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.spec import Specs, check_shapes
from ..config.arguments import checked_arguments
from ..errors import PackError
from ..files import atomic_folder, atomic_write, to_json
from ..reading import file_facts
from .adapter_config import adapter_config, cut, padded, padded_rank, stored_shapes
from .folder import check_output, open_folder, verify_hashes
from .manifest import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CARD,
    MAIN,
    MANIFEST,
    check_manifest,
    is_classifier,
    is_hub_name,
    is_reward_model,
    manifest_text,
    read_pin,
    replaced_of,
    specs_of,
)

if TYPE_CHECKING:
    from ..runtime import mx

LITE_MB = 10


@dataclass(repr=False)
class Pack:
    """A pack: a manifest and the adapters it describes. ``Pack(path)`` is ``Pack.open(path)``.

    Attributes:
        manifest: The contents of ``pack.json``.
        tensors: The adapters by name; None until `load_tensors` reads them.
        path: The folder of a pack that was saved or opened, otherwise None.
        parts: The packs and weights of a `weighted_sum` that was not saved.
        examples: The examples in memory that it was trained on, until it is opened again.
    """

    manifest: dict
    tensors: "Mapping[str, mx.array] | None" = None
    path: Path | None = None
    parts: tuple = ()
    examples: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.manifest, (str, Path)):
            vars(self).update(vars(Pack.open(self.manifest)))
        elif not isinstance(self.manifest, Mapping):
            raise PackError(
                f"manifest: must be a mapping or a path, but is a {type(self.manifest).__name__}.",
                flag="manifest",
            )

    def __repr__(self) -> str:
        base = self.manifest["base"]["id"]
        parameters = self.manifest["adapters"]["parameters"]

        scored = ""
        change = self.manifest.get("eval") or {}
        if isinstance(change.get("ppl_before"), float) and "ppl_after" in change:
            scored = f", PPL {change['ppl_before']:.2f} -> {change['ppl_after']:.2f}"
        return f"Pack({self.name!r} of {base}, {parameters:,} parameters{scored})"

    def _repr_html_(self) -> str:
        from .facts import notebook_html

        return notebook_html(self.manifest, Path(self.name).name)

    @property
    def _identity(self) -> object:
        """Equal for equal packs: the folder, or the parts of a weighted sum."""
        if self.path:
            return self.path.resolve()
        return self.parts or id(self)

    @classmethod
    @checked_arguments
    def open(cls, path: str | Path) -> "Pack":
        """Open a pack: read its manifest and check the sizes of its files. No tensor is loaded.

        Args:
            path: A folder, or, if there is none of that name, a Hub id (``owner/name@revision``).

        Raises:
            PackError: If there is no such pack, or one of its files is damaged.
        """
        folder = Path(path).expanduser()
        if is_hub_name(path):
            from .hub import cached

            folder = cached(str(path))
        return cls(open_folder(folder), None, folder)

    def verify(self) -> None:
        """Check the hash of every file of a saved pack.

        Raises:
            PackError: If a hash differs from the manifest's.
        """
        verify_hashes(self.path, self.manifest)

    def load_tensors(self) -> "Mapping[str, mx.array]":
        """Return the adapters, after checking hashes and shapes, and that all numbers are finite.

        Raises:
            PackError: If a check fails.
        """
        from ..tensors import read_tensors

        if self.tensors is None:
            self.verify()
            file = self.path / ADAPTERS
            tensors = read_tensors(file)
            shapes = stored_shapes(self.manifest)
            stored = {name: tensors[name].shape for name in shapes if name in tensors}
            check_shapes(shapes, stored, str(file))

            if "padded_rank" in self.manifest["adapters"]:
                tensors = cut(self.specs, tensors)
            self.tensors = tensors
        return self.tensors

    @property
    def specs(self) -> Specs:
        """The specification of every adapter in the manifest, by module path."""
        return specs_of(self.manifest)

    @property
    def _adapters_hash(self) -> str | None:
        """None if the pack is not saved."""
        return (self.manifest.get("files") or {}).get(ADAPTERS, {}).get("sha256")

    @property
    def is_reward_model(self) -> bool:
        """Whether it has the head of a reward model, which scores completions (`Base.rewards`)."""
        return is_reward_model(self.manifest)

    @property
    def is_classifier(self) -> bool:
        """Whether it classifies texts or chats (`Base.classify`)."""
        return is_classifier(self.manifest)

    @property
    def _beyond_lora(self) -> str:
        """A description of a part that is not LoRA on a linear layer; empty if there is none."""
        for path, spec in self.specs.items():
            if spec.kind == "embedding":
                return f"{path} is an embedding"
            if spec.kind != "lora":
                return f"{path} is {spec.kind}"

        if replaced := replaced_of(self.manifest):
            return f"{next(iter(replaced))} is stored in full"
        return ""

    def _part(self, name: str) -> dict:
        """An optional part of the manifest (``recipe``, ``eval``), or an empty mapping."""
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

        revision = pin["revision"]
        if revision == pin["commit"]:
            revision = revision[:7]
        if revision == MAIN:
            return pin["repo"]
        return f"{pin['repo']}@{revision}"

    @property
    def size_mb(self) -> float:
        """The size of all files of a saved pack, in megabytes (10^6 bytes)."""
        files = [f for f in self.path.iterdir() if f.is_file()]
        return sum(f.stat().st_size for f in files) / 1e6

    @checked_arguments
    def save(self, path: str | Path, overwrite: bool = False) -> "Pack":
        """Write the pack to a folder atomically, and return it.

        Args:
            path: The folder.
            overwrite: Whether to replace a pack that is there.

        Raises:
            PackError: If the folder exists and is not a pack, if it is a pack and ``overwrite`` is
                false, or if the manifest would be invalid.
        """
        return self._save_with(lambda _: None, path, overwrite)

    def _save_with(
        self, write_more: Callable[[Path], None], path: str | Path, overwrite: bool = False
    ) -> "Pack":
        """As `save`, with other files in the folder, which ``write_more`` writes before it appears.

        They are no part of the pack: the manifest does not name them.
        """
        from ..tensors import save_tensors
        from .facts import model_card

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

            card = model_card(self.manifest, folder.name)
            (partial / CARD).write_text(card, encoding="utf-8")

            written = (ADAPTERS, ADAPTER_CONFIG, CARD)
            files = file_facts(partial, (n for n in written if (partial / n).is_file()))
            profile = "lite" if files[ADAPTERS]["bytes"] <= LITE_MB * 1e6 else "heavy"
            manifest = {**self.manifest, "profile": profile, "files": files}

            try:
                check_manifest(manifest)
            except ValueError as error:
                raise PackError(f"{folder}: the manifest would be faulty ({error}).") from None

            (partial / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
            write_more(partial)

        self.path = folder
        self.manifest = manifest
        return self

    @checked_arguments
    def merge(self, out: str | Path, base: Any = None, **options: Any) -> dict:
        """Merge the pack into its base model, as `merge_pack`, and return the report.

        Args:
            out: Folder to write the merged model to.
            base: Its base model, as in `merge_pack`; None is the one that it was trained on.
            **options: Other arguments of `merge_pack`, such as ``requantize``.

        Raises:
            PackError: As in `merge_pack`, or if the base model cannot be found.
        """
        from .. import merge_pack

        return merge_pack(self, base, out, **options)

    @checked_arguments
    def export(self, to: str, out: str | Path, start: str | None = None) -> dict:
        """Convert the pack for another program, as `export_pack`, and return the report.

        Args:
            to: ``"peft"``, ``"mlx-lm"``, ``"gguf"``, ``"ollama"``, ``"lmstudio"`` or ``"swift"``.
            out: Folder to write.
            start: The base model as the program names it, as in `export_pack`.

        Raises:
            PackError: If the other format cannot store a part of the pack.
        """
        from .. import export_pack

        return export_pack(self, to, out, start)

    @checked_arguments
    def push(self, repo: str, **options: Any) -> dict:
        """Upload the saved pack to the Hub, as `mlx_packs.push`, and return the report.

        Args:
            repo: ``owner/name``; the repository is created if it does not exist.
            **options: Other arguments of `mlx_packs.push`, such as ``private``.

        Raises:
            PackError: If the pack is damaged, or the Hub rejects it or cannot be reached.
        """
        from .. import push

        return push(self, repo, **options)

    def _note(self, **facts: object) -> None:
        """Add facts to the manifest of a saved pack; its other files are unchanged."""
        self.manifest = {**self.manifest, **facts}
        atomic_write(self.path / MANIFEST, manifest_text(self.manifest))
