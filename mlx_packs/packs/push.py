"""Packs to the Hugging Face Hub: checked, made ready where they lie, uploaded byte for byte.

What others see holds no path of this machine, and a licence that somebody gave; if a pack is not so
yet, its manifest and card are rewritten in its folder, so that here and there the bytes are one.
Of a pack that was pulled that is done in a copy: what came from a commit stays what it was.
"""

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from ..display import QUIET, Display
from ..errors import PackError
from ..files import atomic_folder, atomic_write, sha256, to_json
from .hub import cache_roots, check_names, errors_of_hub, http_errors, split_name
from .manifest import ADAPTER_CONFIG, CARD, HUB_ID, MAIN, MANIFEST, model_card, read_pin
from .pack import Pack

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# a path of this machine inside a text: from / or ~ or C:\ through its last separator
_FOLDERS = re.compile(
    r"(?<![\w.~/:\\-])((~|[A-Za-z]:)?/(?!/)([^\s/'\"`,;]+/)+|[A-Za-z]:\\([^\s\\'\"`,;]+\\)+)"
)


def push(
    pack: str | Path | Pack,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    endpoint: str | None = None,
    display: Display | None = None,
) -> dict:
    """Check a pack and upload it: the manifest and what it names, byte for byte, in one commit.

    Before that the pack is made ready where it lies (one that was pulled: in a copy), if need be: a
    licence is written into its manifest and card, a path of this machine is cut to its last part,
    and a card without the Hub's metadata is written anew.

    Args:
        repo: ``owner/name``; it is made if it is not there.
        license: the Hub's name for one (``apache-2.0``); without it the base's, if the Hub has it.
    Returns: ``repo``, ``revision``, ``commit``, ``url``, ``files``, ``bytes``, ``changed``.
    Raises: PackError if the pack is damaged, or the Hub refuses it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    show = display or Display(QUIET)
    opened = pack if isinstance(pack, Pack) else Pack.open(pack)
    if opened.path is None:
        raise PackError("push: the pack is not saved yet; pack.save(folder) comes first.")
    given, revision = split_name(repo if revision is None else f"{repo}@{revision}")
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise PackError(f"--license {license}: must be the Hub's name for it, like apache-2.0.")
    opened.verify()
    check_names(opened.manifest, str(opened.path))
    with _of_ones_own(opened) as own, errors_of_hub(given, "cannot be pushed"):
        opened, changed = make_ready(own, license)
        api = HfApi(endpoint)
        url = api.create_repo(given, private=private or None, exist_ok=True)
        if private and api.model_info(given).private is False:
            raise PackError(f"--private: {given} is there already, and is public.")
        if not opened.manifest.get("license") and (found := _license_of_base(opened, api)):
            opened, more = make_ready(opened, found)
            changed += more
        for line in changed:
            show.line("changed", line)
        if revision != MAIN:
            api.create_branch(given, branch=revision, exist_ok=True)
        names = [MANIFEST, *opened.manifest["files"]]
        steps = [CommitOperationAdd(name, str(opened.path / name)) for name in names]
        if ADAPTER_CONFIG not in names and api.file_exists(
            given, ADAPTER_CONFIG, revision=revision
        ):
            steps.append(CommitOperationDelete(ADAPTER_CONFIG))  # mlx-lm would take it for this one
        with _bars_of_hub(show.live):
            done = api.create_commit(
                given, steps, commit_message=f"Pack {opened.path.resolve().name}", revision=revision
            )
        total = sum((opened.path / name).stat().st_size for name in names)
    report = {"repo": given, "revision": revision, "commit": done.oid, "url": str(url)}
    return report | {"files": names, "bytes": total, "changed": changed}


@contextmanager
def _of_ones_own(pack: Pack) -> Iterator[Pack]:
    """The pack where it may be rewritten: a copy of its files, if it was pulled."""
    folder = pack.path.resolve()
    in_cache = any(folder.is_relative_to(root.resolve()) for root in cache_roots())
    if read_pin(folder) is None and not in_cache:
        yield pack
        return
    with tempfile.TemporaryDirectory() as above:
        copy = Path(above) / pack.short_name.rpartition("/")[2]
        copy.mkdir()
        for name in (MANIFEST, *pack.manifest["files"]):
            shutil.copyfile(folder / name, copy / name)
        yield Pack.open(copy)


def make_ready(pack: Pack, license: str | None = None) -> tuple[Pack, list[str]]:
    """A saved pack as it may be seen by others, rewritten where it lies if something was not.

    Returns: the pack, and a line for each change. Raises: PackError if a path of this machine is
        in a file other than the manifest.
    """
    manifest, changed = _without_paths(copy.deepcopy(pack.manifest))
    if license and license != manifest.get("license"):
        manifest["license"] = license
        changed.append(f"licence {license}, in manifest and card")
    if changed or not _has_metadata(pack.path / CARD, manifest):
        changed = changed or ["the card, which had no metadata for the Hub"]
        pack = _rewritten(pack, manifest)
    for name in pack.manifest["files"]:
        text = _text_of(pack.path / name)
        if found := re.search(_home(), text) or (name != CARD and _FOLDERS.search(text)):
            raise PackError(
                f"{pack.path / name}: holds a path of this machine, "
                f"{found[0][:80]!r}; take it out before others see it."
            )
    return pack, changed


def _rewritten(pack: Pack, manifest: dict) -> Pack:
    """The pack with another manifest and the card of it, in its place."""
    with atomic_folder(pack.path, replace=True) as partial:
        shutil.copytree(pack.path, partial, symlinks=True, dirs_exist_ok=True)
        card = partial / CARD  # a link is replaced, never written through
        atomic_write(card, model_card(manifest, pack.path.resolve().name))
        manifest["files"][CARD] = {"bytes": card.stat().st_size, "sha256": sha256(card)}
        atomic_write(partial / MANIFEST, to_json(manifest))
    return Pack.open(pack.path)


def _has_metadata(card: Path, manifest: dict) -> bool:
    """Whether a card begins with the metadata that the Hub reads of this pack."""
    if not card.is_file():
        return False
    wanted = model_card(manifest, "").split("\n---\n", 1)[0]
    return card.read_text(encoding="utf-8", errors="replace").startswith(wanted + "\n---\n")


def _license_of_base(pack: Pack, api: "HfApi") -> str | None:
    """What the Hub says of the base; None where it says nothing or does not know the base."""
    base = pack.manifest["base"]["id"]
    if not re.fullmatch(HUB_ID, base, re.ASCII):
        return None
    try:
        found = (api.model_info(base).card_data or {}).get("license")
    except http_errors():
        return None
    return found if isinstance(found, str) else None


def _without_paths(manifest: dict) -> tuple[dict, list[str]]:
    """A manifest whose texts hold no path of this machine, and a line for each that did."""
    changed = []

    def clean(value, key: str):
        if isinstance(value, dict):
            return {k: clean(v, f"{key}.{k}" if key else k) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v, key) for v in value]
        if isinstance(value, str) and (short := _without_folders(value)) != value:
            changed.append(f"{key}: {value} → {short}")
            return short
        return value

    return clean(manifest, ""), changed


def _without_folders(text: str) -> str:
    """A path as its last part; in another text, each path in it."""
    if text.startswith(("/", "~/")) and "\n" not in text:
        return PurePosixPath(text).name
    if PureWindowsPath(text).drive and PureWindowsPath(text).root:
        return PureWindowsPath(text).name
    return re.sub(_home(), "~", _FOLDERS.sub("", re.sub(_home() + r"(?=[/\\])", "~", text)))


def _home() -> str:
    """The home folder as a pattern; one that fits nothing if it is the root."""
    home = str(Path.home())
    return re.escape(home) + r"(?![\w-])" if len(home) > 1 else r"(?!)"


def _text_of(file: Path) -> str:
    """What a file of a pack says in words: all of it, or the notes in a safetensors header."""
    if file.suffix != ".safetensors":
        return file.read_text(encoding="utf-8", errors="replace")
    with file.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return json.dumps(header.get("__metadata__") or {})


@contextmanager
def _bars_of_hub(shown: bool) -> Iterator[None]:
    """Let huggingface_hub draw its bars, or not."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
