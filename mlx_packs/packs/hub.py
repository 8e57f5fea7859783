"""Fetch the folder of a pack from the Hugging Face Hub: one commit, atomic, every hash checked.

Only what a manifest names is fetched, under plain names that end in .safetensors or .json, and a
pack appears in its place after every hash was right. A download that was killed resumes from what
is there; huggingface_hub's own ones start again, or keep it in steps of 10 MB.
"""

import glob
import io
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..display import Display, Task, size
from ..errors import PackError, reason_of
from ..files import (
    atomic_write,
    exclusive_writer,
    make_folder,
    replace_folder,
    to_json,
    write_errors,
)
from ..reading import DOCUMENT_BYTES, decode, read_header, sha256
from .folder import cache_root, check_hash, check_output, open_folder, verify_hashes
from .manifest import ADAPTERS, HUB_ID, MAIN, MANIFEST, PIN, parse_manifest, read_pin

_REVISION = r"[\w][\w.-]*(/[\w][\w.-]*)*"
_FILE = r"[A-Za-z0-9][\w.-]*\.(safetensors|json)|README\.md"
_LONGEST_NAME = 128  # of a file: there is room for it on every file system
_STEP = 1_000_000  # bytes between two signs of progress
_INCOMPLETE = "cannot be pulled completely (the same command resumes it)"
_TRIES = 3  # of a download in which nothing comes


def split_name(name: str) -> tuple[str, str]:
    """Without a revision it is ``main``."""
    repo, at, revision = name.partition("@")
    if not re.fullmatch(HUB_ID, repo, re.ASCII) or ".." in repo or "--" in repo:
        raise PackError(
            f"{name}: is not a hub id (owner/name, or owner/name@revision). Pack.save "
            "writes a pack to a folder, and Pack.open opens one.",
            flag="pack",
        )

    if at and (not re.fullmatch(_REVISION, revision, re.ASCII) or ".." in revision):
        raise PackError(
            f"{name}: '{revision}' is not a revision (a branch, a tag or a commit).",
            flag="revision",
        )

    return repo, revision or MAIN


def fetch(name: str, out: str | Path | None, overwrite: bool, show: Display) -> Path:
    repo, revision = split_name(str(name))
    with errors_of_hub(f"{repo}@{revision}", "cannot be pulled"):
        commit, listed = _resolve(repo, revision)

    folder = _cache(repo) / commit if out is None else Path(out).expanduser()
    if folder.name in ("", ".."):
        raise PackError(f"--out {out}: must name the folder that the pack becomes.")

    with write_errors(folder, "out"), suppress(FileNotFoundError):
        _partial(folder, commit).lstat()  # whose name may be too long

    if folder.is_symlink():
        raise PackError(f"--out {folder}: is a symbolic link. Name a folder.", "exists")

    pin = {"repo": repo, "revision": revision, "commit": commit}
    if out is None and _is_complete(folder, commit):
        _pin(folder, pin)  # the newest one records where a branch was last
    else:
        check_output(folder, overwrite or out is None)
        _fetch(pin, listed, folder, show)
    return folder


def cached(name: str) -> Path:
    """The folder of a hub id; it is fetched if it is not in the cache."""
    repo, revision = split_name(name)
    folders = [f.parent for f in _cache(repo).glob(f"[!.]*/{PIN}")]
    pins = {folder: read_pin(folder) or {} for folder in folders}
    of_revision = [
        f for f, pin in pins.items() if revision in (pin.get("revision"), pin.get("commit"))
    ]

    if of_revision:
        return max(of_revision, key=lambda folder: (folder / PIN).stat().st_mtime_ns)

    try:
        return fetch(name, None, False, Display())
    except PackError as error:
        if error.code not in ("network", "not-found"):
            raise
        text = f"{name}: there is no such folder here. As a pack of the Hub: {error.message}"
        raise PackError(text, error.code, error.flag) from None


def _is_complete(folder: Path, commit: str) -> bool:
    """Whether the cache has a pack unchanged: manifest and files with every hash right."""
    pin = read_pin(folder)
    try:
        if pin is None or pin["commit"] != commit:
            return False
        verify_hashes(folder, open_folder(folder))
        return pin.get("manifest_sha256") == sha256(folder / MANIFEST)
    except (PackError, OSError):
        return False


def _pin(folder: Path, pin: dict) -> None:
    """Record beside a pack where it comes from, and the hash of its manifest."""
    atomic_write(folder / PIN, to_json(pin | {"manifest_sha256": sha256(folder / MANIFEST)}))


def _cache(repo: str) -> Path:
    return cache_root() / repo.replace("/", "--")


def _resolve(repo: str, revision: str) -> tuple[str, list[str]]:
    """The commit of a revision, and the names of its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_ETAG_TIMEOUT

    try:
        info = HfApi().model_info(repo, revision=revision, timeout=HF_HUB_ETAG_TIMEOUT)
        listed = [file.rfilename for file in info.siblings or []]
        if not all(isinstance(name, str) for name in listed):
            raise TypeError("a file's name is no text")
        if not re.fullmatch(r"[0-9a-f]{7,64}", info.sha):
            raise TypeError(f"its commit is {info.sha}")
    except (KeyError, TypeError, AttributeError) as error:  # huggingface_hub checks no types
        text = f"the Hub's answer about it cannot be read ({reason_of(error)})"
        raise PackError(f"{repo}@{revision}: {text}. Try again later.", "network") from None

    if MANIFEST not in listed:
        raise PackError(f"{repo}@{revision}: is not a pack: it has no {MANIFEST}.", "not-found")
    return info.sha, listed


def _fetch(pin: dict, listed: list[str], folder: Path, show: Display) -> None:
    """Download a pack of one commit beside ``folder``, check it, and rename it.

    What was fetched stays after a failure, and the download resumes if the commit is the same.
    """
    name = f"{pin['repo']}@{pin['revision']}"
    partial = _partial(folder, pin["commit"])
    with errors_of_hub(name, "cannot be pulled"):
        manifest, files = _fetch_manifest(pin, name, show)

    if missing := [file for file in files if file not in listed]:
        raise PackError(f"{name}: {MANIFEST} names {missing[0]}, which is not there.", "not-found")

    _check_space(name, files, partial)

    make_folder(folder.parent)
    with exclusive_writer(folder), errors_of_hub(name, _INCOMPLETE):
        _clear(partial)
        try:
            (partial / MANIFEST).write_bytes(manifest)
            for file, facts in files.items():
                _download(pin, partial / file, facts, show)
                check_hash(partial / file, facts["sha256"], f"{name}: {file}")
            read_header(partial / ADAPTERS)
        except PackError:  # rejected, not interrupted
            shutil.rmtree(partial)
            raise

        for stray in {file.name for file in partial.iterdir()} - {MANIFEST, *files}:
            (partial / stray).unlink()

        _pin(partial, pin)
        replace_folder(partial, folder)

        for other in folder.parent.glob(f".{glob.escape(folder.name)}.pull-*"):
            shutil.rmtree(other, ignore_errors=True)  # of commits that are past


def _partial(folder: Path, commit: str) -> Path:
    """Files of a commit are downloaded to this folder, beside the pack's."""
    return folder.with_name(f".{folder.name}.pull-{commit[:12]}")


def _fetch_manifest(pin: dict, name: str, show: Display) -> tuple[bytes, dict]:
    """The bytes of a manifest, and sizes and hashes of the files that it names."""
    url, total = _locate(pin, MANIFEST)
    if total is None or total > DOCUMENT_BYTES:
        raise PackError(f"{name}: {MANIFEST} has {total} bytes, which none has.", "unreadable")

    content = io.BytesIO()
    _receive_all(url, content, total, show)

    where = f"{name}: {MANIFEST}"
    manifest = parse_manifest(decode(content.getvalue(), where), where)
    check_names(manifest, name)

    files = manifest["files"]
    total = sum(facts["bytes"] for facts in files.values())
    show.line("pull", f"{name} · commit {pin['commit'][:12]} · {len(files)} files · {size(total)}")
    return content.getvalue(), files


def _check_space(name: str, files: dict, partial: Path) -> None:
    there = next(folder for folder in partial.absolute().parents if folder.is_dir())

    missing = 0
    for file, facts in files.items():
        part = partial / file
        done = part.stat().st_size if part.is_file() else 0
        missing += max(0, facts["bytes"] - done)

    if missing > (free := shutil.disk_usage(there).free):
        raise PackError(
            f"{name}: needs {size(missing)} more on the disk, but {there} has {size(free)} free. "
            "Make room there, or name a folder on another disk with --out.",
            "unwritable",
        )


def _clear(partial: Path) -> None:
    """Make a folder for downloads, or check that an earlier one has only regular files."""
    if partial.is_symlink():
        raise PackError(f"{partial}: is a symbolic link. Remove it.", "exists")
    partial.mkdir(exist_ok=True)
    for file in partial.iterdir():
        if file.is_symlink() or not file.is_file():
            raise PackError(f"{file}: is not a regular file. Remove {partial}.", "exists")
    (partial / MANIFEST).unlink(missing_ok=True)


def _locate(pin: dict, name: str) -> tuple[str, int | None]:
    """The address of a file of a commit, and its size if the Hub states it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(pin["repo"], name, revision=pin["commit"])
    return url, get_hf_file_metadata(url).size


def _download(pin: dict, file: Path, facts: dict, show: Display) -> None:
    """Fetch a file of a commit, which must have the expected size, from where a try stopped.

    A pull that is killed while it takes the old pack's place leaves files of that one.
    """
    expected = facts["bytes"]
    if file.is_file() and file.stat().st_size == expected:
        if sha256(file) == facts["sha256"]:
            return
        file.unlink()

    url, total = _locate(pin, file.name)
    if total not in (None, expected):
        raise PackError(
            f"{pin['repo']}: {file.name} has {total} bytes, but {MANIFEST} says {expected}.",
            "unreadable",
        )

    with file.open("ab", buffering=0) as f:  # what has arrived stays, however this ends
        if f.tell() > expected:
            f.truncate(f.seek(0))
        _receive_all(url, f, expected, show)


def _receive_all(url: str, file: IO[bytes], total: int, show: Display) -> None:
    """Append the missing bytes to a file, and resume if the connection ends."""
    from huggingface_hub.errors import HfHubHTTPError

    name = url.rpartition("/")[2]
    with show.task("pull", -(-total // _STEP), f"MB {name}", file.tell() // _STEP) as bar:
        tries = 0
        while file.tell() < total:
            before = file.tell()
            try:
                _receive(url, file, total, bar)
            except (ConnectionError, *HfHubHTTPError.__bases__[:1]) as error:
                if isinstance(error, HfHubHTTPError):  # an answer, which is an error
                    raise
                tries += 1
                if file.tell() > before:
                    tries = 0
                if tries == _TRIES:
                    raise
                time.sleep(tries)


def _receive(url: str, file: IO[bytes], total: int, bar: Task) -> None:
    """Append to a file what it lacks; errors of the HTTP library pass through."""
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
                raise PackError(
                    f"{url}: sends more than the {total} bytes that it should.", "unreadable"
                )
            done = file.tell() // _STEP
            file.write(chunk)
            for _ in range(file.tell() // _STEP - done):
                bar.advance()

    if file.tell() < total:
        raise ConnectionError(f"the connection ended after {file.tell()} of {total} bytes")


def check_names(manifest: dict, where: str) -> None:
    """Check that a manifest names no files that a pack may not have on every disk.

    A Mac's disk ignores case and the normal form of Unicode. Two names must not be one file there.
    """
    names = {name: name for name in (MANIFEST, PIN)}
    for name in manifest["files"]:
        if len(name) > _LONGEST_NAME or not re.fullmatch(_FILE, name, re.ASCII):
            shown = f"{name[:40]}…" if len(name) > _LONGEST_NAME else name
            raise PackError(
                f"{where}: {MANIFEST} names {shown!r}. A pack has only safetensors, JSON and its "
                f"card, under plain names of at most {_LONGEST_NAME} characters.",
                "unsupported",
            )

        if other := names.get(name.lower()):
            raise PackError(
                f"{where}: {MANIFEST} names {name!r}, which is {other!r} on a disk that ignores "
                "case. Rename one of them.",
                "unsupported",
            )

        names[name.lower()] = name


@contextmanager
def errors_of_hub(name: str, what: str) -> Iterator[None]:
    """Raise errors between here and the Hub as a PackError of one line."""
    from huggingface_hub import constants, errors

    known = {
        errors.GatedRepoError: ("is gated. Ask for access on its page.", "network"),
        errors.RepositoryNotFoundError: (
            "the Hub has no such pack, or it is private (`hf auth login`).",
            "not-found",
        ),
        errors.RevisionNotFoundError: ("the Hub has the pack, but no such revision.", "not-found"),
        errors.OfflineModeIsEnabled: (f"{what}: HF_HUB_OFFLINE is set.", "network"),
    }
    try:
        yield
    except tuple(known) as error:
        text, code = next(known[kind] for kind in known if isinstance(error, kind))
        raise PackError(f"{name}: {text}", code) from None
    except (OSError, ValueError, RuntimeError, *errors.HfHubHTTPError.__bases__) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        unanswered = isinstance(error, (ConnectionError, *errors.HfHubHTTPError.__bases__[:1]))
        hint = f" No answer from {constants.ENDPOINT}." if unanswered and status is None else ""
        if status in (401, 403):
            hint = " Run `hf auth login`, with a token that may write."

        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        text = next(iter(str(cause).strip().splitlines()), "") or type(cause).__name__
        raise PackError(f"{name}: {what}: {text[:160].rstrip('.')}.{hint}", "network") from None
