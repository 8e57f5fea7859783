"""Packs from the Hugging Face Hub: of one commit, whole or not at all, checked to the byte.

Only what a manifest names is fetched, under plain names that end in .safetensors or .json, and a
pack appears in its place after every hash was right. huggingface_hub does the transfers; a download
that was killed goes on from what is there, which its own downloads no longer do.
"""

import glob
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from ..display import QUIET, Display, Task, size
from ..errors import PackError
from ..files import (
    atomic_write,
    exclusive_writer,
    read_header,
    replace_folder,
    sha256,
    to_json,
    unwritable,
)
from .manifest import (
    ADAPTERS,
    HUB_ID,
    MAIN,
    MANIFEST,
    PIN,
    read_manifest,
    read_pin,
)
from .pack import Pack, check_output

_REVISION = r"[\w][\w.-]*(/[\w][\w.-]*)*"
_FILE = r"[A-Za-z0-9][\w.-]*\.(safetensors|json)|README\.md"
_USUAL = (".gitattributes", MANIFEST, PIN)  # in a repository beside what a manifest names
_MAX_MANIFEST_BYTES = 64 << 20
_STEP = 1_000_000  # bytes between two signs of progress
_KEPT = "cannot be pulled whole (the same command goes on where it stopped)"
_TRIES = 3  # of a download in which nothing comes


def split_name(name: str) -> tuple[str, str]:
    """``owner/name`` or ``owner/name@revision`` as both parts. Raises: PackError if it is neither.

    A revision is a branch, a tag or a commit; without one it is ``main``.
    """
    repo, at, revision = name.partition("@")
    if not re.fullmatch(HUB_ID, repo, re.ASCII) or ".." in repo or "--" in repo:
        raise PackError(f"{name}: is not a hub id (owner/name, or owner/name@revision).")
    if at and (not re.fullmatch(_REVISION, revision, re.ASCII) or ".." in revision):
        raise PackError(f"{name}: '{revision}' is not a revision (a branch, a tag or a commit).")
    return repo, revision or MAIN


def pull(
    name: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    endpoint: str | None = None,
    display: Display | None = None,
) -> Pack:
    """Fetch a pack from the Hub, whole or not at all.

    A branch or tag is resolved to its commit first; ``hub.json`` beside the pack records both.

    Args:
        name: ``owner/name``, with ``@revision`` if it is not ``main``.
        out: folder to write; without it the cache, where ``owner/name`` is found as a pack.
    Raises: PackError if the Hub cannot be reached, the pack is not whole, or a hash differs.
    """
    repo, revision = split_name(str(name))
    show = display or Display(QUIET)
    with errors_of_hub(f"{repo}@{revision}", "cannot be pulled"):
        commit, listed = _resolve(repo, revision, endpoint)
    folder = _cache(repo) / commit if out is None else Path(out).expanduser()
    if folder.name in ("", ".."):
        raise PackError(f"--out {out}: must name the folder that the pack becomes.")
    if folder.is_symlink():
        raise PackError(f"--out {folder}: is a symlink; name a folder.")
    pin = {"repo": repo, "revision": revision, "commit": commit}
    if out is None and _is_whole(folder, commit):
        _pin(folder, pin)  # the newest one tells where a branch was last
    else:
        check_output(folder, overwrite or out is None)
        _fetch(pin, listed, folder, endpoint, show)
    return Pack.open(folder)


def cached(name: str) -> Path:
    """The folder of a hub id in the cache, as it is there; pulled if it is not.

    Raises: PackError as `pull` does.
    """
    repo, revision = split_name(name)
    found = [f.parent for f in _cache(repo).glob(f"[!.]*/{PIN}")]
    pins = {folder: read_pin(folder) or {} for folder in found}
    asked = [f for f, pin in pins.items() if revision in (pin.get("revision"), pin.get("commit"))]
    if asked:
        return max(asked, key=lambda folder: (folder / PIN).stat().st_mtime_ns)
    return pull(name, display=Display()).path


def _is_whole(folder: Path, commit: str) -> bool:
    """Whether a pack lies in the cache as it came: manifest and files with every hash right."""
    pin = read_pin(folder)
    try:
        if pin is None or pin["commit"] != commit:
            return False
        Pack.open(folder).verify()
        return pin.get("manifest_sha256") == sha256(folder / MANIFEST)
    except (PackError, OSError):
        return False


def _pin(folder: Path, pin: dict) -> None:
    """Note beside a pack where it comes from, and the hash of its manifest."""
    atomic_write(folder / PIN, to_json(pin | {"manifest_sha256": sha256(folder / MANIFEST)}))


def cache_roots() -> list[Path]:
    """Where packs of the Hub lie: what was pulled by name, and the Hub's own cache."""
    from huggingface_hub import constants

    return [Path(constants.HF_ASSETS_CACHE) / "mlx_packs", Path(constants.HF_HUB_CACHE)]


def _cache(repo: str) -> Path:
    return cache_roots()[0] / repo.replace("/", "--")


def _resolve(repo: str, revision: str, endpoint: str | None) -> tuple[str, list[str]]:
    """The commit of a revision, and the names of its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    info = HfApi(endpoint).model_info(repo, revision=revision, timeout=HF_HUB_ETAG_TIMEOUT)
    if not re.fullmatch(r"[0-9a-f]{7,64}", info.sha or ""):
        raise PackError(f"{repo}@{revision}: the Hub names no commit ({info.sha}).")
    listed = [file.rfilename for file in info.siblings or []]
    for name in listed:
        if PurePosixPath(name).is_absolute() or ".." in re.split(r"[/\\]", name):
            raise PackError(f"{repo}@{revision}: holds a file that leads elsewhere: {name!r}.")
    if MANIFEST not in listed:
        raise PackError(f"{repo}@{revision}: is no pack: it has no {MANIFEST}.")
    return info.sha, listed


def _fetch(pin: dict, listed: list[str], folder: Path, endpoint: str | None, show: Display) -> None:
    """Download a pack of one commit beside ``folder``, check it, and put it there.

    What was fetched stays there after a failure, and is gone on with if the commit is the same.
    """
    repo, commit, name = pin["repo"], pin["commit"], f"{pin['repo']}@{pin['revision']}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from None
    partial = folder.with_name(f".{folder.name}.pull-{commit[:12]}")
    with exclusive_writer(folder), errors_of_hub(name, _KEPT):
        _clear(partial)
        try:
            files = _fetch_files(repo, commit, name, listed, partial, endpoint, show)
        except PackError:  # refused, not broken off
            shutil.rmtree(partial)
            raise
        for stray in {file.name for file in partial.iterdir()} - {MANIFEST, *files}:
            (partial / stray).unlink()
        _pin(partial, pin)
        replace_folder(partial, folder)
        for other in folder.parent.glob(f".{glob.escape(folder.name)}.pull-*"):
            shutil.rmtree(other, ignore_errors=True)  # of commits that are past


def _fetch_files(
    repo: str,
    commit: str,
    name: str,
    listed: list[str],
    partial: Path,
    endpoint: str | None,
    show: Display,
) -> dict:
    """Download the manifest and what it names into a folder, each file checked.

    Returns: size and hash of each file. Raises: PackError for what is refused.
    """
    _download(repo, commit, partial / MANIFEST, None, endpoint, show)
    manifest = read_manifest(partial / MANIFEST)
    check_names(manifest, name)
    files = manifest["files"]
    total = sum(facts["bytes"] for facts in files.values())
    show.line("pull", f"{name} · commit {commit[:12]} · {len(files)} files · {size(total)}")
    if beyond := sorted(set(listed) - {*files, *_USUAL}):
        more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
        show.line("left", f"{', '.join(beyond[:5])}{more}: not of the pack, not fetched")
    if missing := [file for file in files if file not in listed]:
        raise PackError(f"{name}: {MANIFEST} names {missing[0]}, which is not there.")
    for file, facts in files.items():
        _download(repo, commit, partial / file, facts["bytes"], endpoint, show)
        _check_hash(partial / file, facts["sha256"], name)
    read_header(partial / ADAPTERS)
    return files


def _clear(partial: Path) -> None:
    """Make a folder for downloads, or see that one from before holds plain files alone."""
    if partial.is_symlink():
        raise PackError(f"{partial}: is a symlink; remove it.")
    partial.mkdir(exist_ok=True)
    for file in partial.iterdir():
        if file.is_symlink() or not file.is_file():
            raise PackError(f"{file}: is not a plain file; remove {partial}.")
    (partial / MANIFEST).unlink(missing_ok=True)


def _download(
    repo: str, commit: str, file: Path, wanted: int | None, endpoint: str | None, show: Display
) -> None:
    """Fetch a file of a commit, from where an earlier try left off.

    Args:
        wanted: its size by the manifest; None for the manifest itself.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    name = file.name
    if wanted is not None and file.is_file() and file.stat().st_size == wanted:
        return
    url = hf_hub_url(repo, name, revision=commit, endpoint=endpoint)
    found = get_hf_file_metadata(url, endpoint=endpoint).size
    if wanted is None and (found is None or found > _MAX_MANIFEST_BYTES):
        raise PackError(f"{repo}: {name} has {found} bytes, which no manifest has.")
    if wanted is not None and found not in (None, wanted):
        raise PackError(f"{repo}: {name} has {found} bytes, but {MANIFEST} says {wanted}.")
    total = found if wanted is None else wanted
    with file.open("ab", buffering=0) as f:  # what has come is there, however this ends
        if f.tell() > total:
            f.truncate(f.seek(0))
        with show.task("pull", -(-total // _STEP), f"MB {name}", f.tell() // _STEP) as bar:
            tries = 0
            while f.tell() < total:
                before = f.tell()
                try:
                    _receive(url, f, total, bar)
                except (ConnectionError, *HfHubHTTPError.__bases__[:1]) as error:
                    if isinstance(error, HfHubHTTPError):  # an answer, and it is no
                        raise
                    tries = 0 if f.tell() > before else tries + 1
                    if tries == _TRIES:
                        raise
                    time.sleep(tries)


def _receive(url: str, file: IO[bytes], total: int, bar: Task) -> None:
    """Add to a file what it lacks. Raises: what the HTTP library does when the connection ends."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    done = file.tell()
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        if done and response.status_code != 206:  # the whole file comes
            file.truncate(file.seek(0))
        for chunk in response.iter_bytes():
            if file.tell() + len(chunk) > total:
                raise PackError(f"{url}: sends more than the {total} bytes that it should.")
            done = file.tell() // _STEP
            file.write(chunk)
            for _ in range(file.tell() // _STEP - done):
                bar.advance()
    if file.tell() < total:
        raise ConnectionError(f"the connection ended after {file.tell()} of {total} bytes")


def check_names(manifest: dict, where: str) -> None:
    """Raises: PackError if a manifest names a file that no pack holds."""
    for name in manifest["files"]:
        if name in (MANIFEST, PIN) or not re.fullmatch(_FILE, name):
            raise PackError(
                f"{where}: {MANIFEST} names {name!r}; a pack holds only safetensors, JSON and its "
                "card, under plain names."
            )


def _check_hash(file: Path, wanted: str, where: str) -> None:
    """Raises: PackError unless a file has the hash that the manifest says."""
    if (found := sha256(file)) != wanted:
        raise PackError(
            f"{where}: {file.name} has sha256 {found[:12]}…, but {MANIFEST} says {wanted[:12]}…; "
            "it was changed or damaged, and is not kept."
        )


def http_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises when a request fails; its HTTP library differs by version."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, RuntimeError, *HfHubHTTPError.__bases__)


@contextmanager
def errors_of_hub(name: str, what: str) -> Iterator[None]:
    """Say in one line what went wrong between here and the Hub."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        raise PackError(f"{name}: is gated; ask for access on its page on the Hub.") from None
    except errors.RepositoryNotFoundError:
        raise PackError(
            f"{name}: the Hub has no such pack, or it is private (hf auth login)."
        ) from None
    except errors.RevisionNotFoundError:
        raise PackError(f"{name}: the Hub has the pack, but no such revision.") from None
    except errors.OfflineModeIsEnabled:
        raise PackError(f"{name}: {what}: HF_HUB_OFFLINE is set.") from None
    except http_errors() as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        unheard = isinstance(error, (ConnectionError, *errors.HfHubHTTPError.__bases__[:1]))
        hint = f"; no answer from {constants.ENDPOINT}" if unheard and status is None else ""
        if status in (401, 403):
            hint = "; hf auth login, with a token that may write"
        cause = (error.__cause__ if isinstance(error, RuntimeError) else None) or error
        text = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        raise PackError(f"{name}: {what}: {text[:160].rstrip('.')}{hint}.") from None
