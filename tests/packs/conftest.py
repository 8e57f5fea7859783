"""A pack on this machine, and the same on a substitute for the Hub."""

import shutil
from pathlib import Path

import pytest

from mlx_packs import Pack
from tests.helpers.damage import flip_bit
from tests.helpers.local_hub import Repo
from tests.helpers.packs import EVAL, write_pack

NAMES = {"pack.json", "adapters.safetensors", "adapter_config.json", "README.md"}


@pytest.fixture(scope="module")
def local_pack(tmp_path_factory) -> Path:
    return write_pack(tmp_path_factory.mktemp("made") / "p", eval=EVAL).path


@pytest.fixture
def pushed(local_pack, hub, here) -> Pack:
    """A pack in ``p`` that is on the hub as ``me/p``."""
    shutil.copytree(local_pack, here / "p")
    hub.repos["me/p"] = Repo()
    hub.repos["me/p"].commit(contents(here / "p"))
    return Pack.open(here / "p")


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def flip_last_bit(file: Path) -> None:
    flip_bit(file, 8 * file.stat().st_size - 8)


def snapshot_of(pack: Path, cache: Path) -> Path:
    """A pack as huggingface_hub's own cache has it: links to blobs."""
    repo = cache / "models--me--p"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    for file in pack.iterdir():
        shutil.copyfile(file, repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot
