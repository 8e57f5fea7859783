"""Packs to and from the Hugging Face Hub, byte for byte; HF_ENDPOINT is the address of another Hub.

What others see has no path of this machine, and the licence that is named; manifest and card are
rewritten in the pack's folder for that, so that both places have the same bytes. What came from a
commit stays unchanged: a pulled pack that would have to change is rejected.
"""

import copy
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from ..config.arguments import checked_arguments
from ..display import Display, display_of
from ..errors import PackError
from ..files import atomic_folder, atomic_write
from ..reading import DOCUMENT_BYTES, open_regular, read_metadata, sha256
from .facts import model_card
from .hub import check_names, errors_of_hub, fetch, split_name
from .manifest import ADAPTER_CONFIG, CARD, MAIN, MANIFEST, PIN, manifest_text, read_pin
from .pack import Pack

# a path of this machine inside a text: from / or ~ or C:\ through its last separator
_FOLDERS = re.compile(
    r"(?<![\w.~/:\\-])((~|[A-Za-z]:)?/(?!/)([^\s/'\"`,;]+/)+|[A-Za-z]:\\([^\s\\'\"`,;]+\\)+)"
)


@checked_arguments
def pull(
    name: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    progress: bool | Display = True,
) -> Pack:
    """Download a pack from the Hub atomically, and open it.

    A branch or tag is first resolved to its commit; ``hub.json`` next to the pack records both.

    Args:
        name: ``owner/name``, or ``owner/name@revision`` for a revision other than ``main``.
        out: Folder to write the pack to; by default the cache, where `Pack.open` looks up ``name``.
        overwrite: Whether to replace a pack at ``out``.
        progress: Whether to show the progress, as in `train_pack`.

    Raises:
        PackError: If the Hub cannot be reached, the pack is incomplete, or a hash differs.
    """
    return Pack.open(fetch(name, out, overwrite, display_of(progress)))


@checked_arguments
def push(
    pack: str | Path | Pack,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    samples: bool = False,
    progress: bool | Display = True,
) -> dict:
    """Check a pack and upload it to the Hub: manifest and listed files, in one commit.

    The files on the Hub are identical to those in the folder. If necessary, the folder is therefore
    rewritten first: a licence is added to the manifest and the card, paths of this machine are
    reduced to their last part, and held-out examples are removed. A pack that was pulled is
    rejected then.

    Args:
        pack: A pack or its folder.
        repo: ``owner/name``; the repository is created if it does not exist.
        private: Whether to create the repository as a private one.
        revision: Branch to push to; ``main`` by default.
        license: Identifier of the licence on the Hub (``apache-2.0``); None adds none.
        samples: Whether to upload the held-out examples and completions that the card shows.
        progress: Whether to show the progress, as in `train_pack`.

    Returns:
        ``repo``, ``revision``, ``commit``, ``url``, ``files``, ``bytes`` and ``changed``.

    Raises:
        PackError: If the pack is damaged, or the Hub rejects it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    show = display_of(progress)
    opened = pack if isinstance(pack, Pack) else Pack.open(pack)
    if opened.path is None:
        raise PackError(
            "push: the pack is not saved yet. Call pack.save(folder) first.", flag="pack"
        )

    if revision is not None:
        repo = f"{repo}@{revision}"
    repo, revision = split_name(repo)
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise PackError(f"--license {license}: must be the Hub's name for it, like apache-2.0.")

    opened.verify()
    check_names(opened.manifest, str(opened.path))
    with errors_of_hub(repo, "cannot be pushed"):
        opened, changed = prepare(opened, license, samples)
        api = HfApi()
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if private and api.model_info(repo).private is False:
            raise PackError(f"--private: {repo} already exists, and is public.", "conflict")

        for line in changed:
            show.line("changed", line)
        if revision != MAIN:
            api.create_branch(repo, branch=revision, exist_ok=True)

        names = [MANIFEST, *opened.manifest["files"]]
        steps = [CommitOperationAdd(name, str(opened.path / name)) for name in names]
        if ADAPTER_CONFIG not in names and api.file_exists(repo, ADAPTER_CONFIG, revision=revision):
            steps.append(CommitOperationDelete(ADAPTER_CONFIG))  # mlx-lm would take it for this one

        with _bars_of_hub(show.live):
            commit = api.create_commit(
                repo, steps, commit_message=f"Pack {opened.path.resolve().name}", revision=revision
            )
        total = sum((opened.path / name).stat().st_size for name in names)

    report = {"repo": repo, "revision": revision, "commit": commit.oid, "url": str(url)}
    return report | {"files": names, "bytes": total, "changed": changed}


def prepare(
    pack: Pack, license: str | None = None, samples: bool = False
) -> tuple[Pack, list[str]]:
    """Rewrite a saved pack in its folder, where others should not see it as it is.

    Returns the pack and a line for each change. Held-out examples go, unless ``samples``. Paths of
    this machine in files other than the manifest are an error.
    """
    manifest, changed = _without_paths(copy.deepcopy(pack.manifest))

    if not samples and manifest.pop("samples", None):
        changed.append("held-out examples removed from manifest and card; --samples sends them")

    if license and license != manifest.get("license"):
        manifest["license"] = license
        changed.append(f"licence {license}, in manifest and card")

    if changed and read_pin(pack.path) is not None:
        raise PackError(
            f"{pack.path}: was pulled, and has to change before it is pushed: {changed[0]}. Copy "
            f"the folder without its {PIN}, and push the copy.",
            "unsupported",
        )
    if changed:
        pack = _rewritten(pack, manifest)

    for name in pack.manifest["files"]:
        text = _text_of(pack.path / name)
        if match := re.search(_home(), text) or (name != CARD and _FOLDERS.search(text)):
            raise PackError(
                f"{pack.path / name}: has a path of this machine, {match[0][:80]!r}. Remove it "
                "before others see it.",
                "data",
            )
    return pack, changed


def _rewritten(pack: Pack, manifest: dict) -> Pack:
    with atomic_folder(pack.path, replace=True) as partial:
        shutil.copytree(pack.path, partial, symlinks=True, dirs_exist_ok=True)
        card = partial / CARD  # a link is replaced, never written through
        atomic_write(card, model_card(manifest, pack.path.resolve().name))
        manifest["files"][CARD] = {"bytes": card.stat().st_size, "sha256": sha256(card)}
        atomic_write(partial / MANIFEST, manifest_text(manifest))
    pack.manifest = manifest  # the caller's pack may be merged or pushed next
    return pack


def _without_paths(manifest: dict) -> tuple[dict, list[str]]:
    """A manifest whose texts have no path of this machine, and a line for each that had."""
    changed = []

    def clean(value: object, key: str) -> object:
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
    """The last part of a path; in another text, each path is cut."""
    if text.startswith(("/", "~/")) and "\n" not in text:
        return PurePosixPath(text).name
    if PureWindowsPath(text).drive and PureWindowsPath(text).root:
        return PureWindowsPath(text).name
    return re.sub(_home(), "~", _FOLDERS.sub("", re.sub(_home() + r"(?=[/\\])", "~", text)))


def _home() -> str:
    """A pattern of the home folder; one that matches nothing if that is the root."""
    home = str(Path.home())
    if len(home) <= 1:
        return r"(?!)"
    return re.escape(home) + r"(?![\w-])"


def _text_of(file: Path) -> str:
    """All of a file's text, or the metadata of a safetensors header."""
    if file.suffix == ".safetensors":
        return json.dumps(read_metadata(file))
    with open_regular(file, DOCUMENT_BYTES) as f:
        return f.read().decode(errors="replace")


@contextmanager
def _bars_of_hub(shown: bool) -> Iterator[None]:
    from huggingface_hub import utils

    hide = not shown and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            utils.enable_progress_bars()
