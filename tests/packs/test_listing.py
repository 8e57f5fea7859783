"""`packs list`: every pack below a folder or in the Hub's caches, from manifests alone."""

import errno
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

import mlx_packs as mp
from mlx_packs import Pack
from tests.helpers.errors import raises
from tests.helpers.interpreter import run_python
from tests.helpers.packs import BASE, EVAL, edit_manifest, write_pack
from tests.packs.conftest import snapshot_of

MEASURED = {"created": "2026-11-21T10:00:00Z"}
ONE = {"bytes": 1, "sha256": "0" * 64}


@pytest.fixture
def shelf(tmp_path) -> Path:
    """Three packs at several depths, what is no pack, and a link that leads round."""
    write_pack(tmp_path / "b", eval=EVAL, measured=MEASURED, license="mit")
    write_pack(tmp_path / "deep" / "er" / "a", rank=3)
    write_pack(tmp_path / "deep" / "c", base=BASE | {"id": "tiny"})
    write_pack(tmp_path / "b" / "inner")  # a pack is not looked into
    write_pack(tmp_path / ".hidden" / "p")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapters.safetensors").write_bytes(b"")
    (tmp_path / "deep" / "round").symlink_to(tmp_path)
    return tmp_path


def test_list_finds_packs_at_any_depth_with_what_they_are(shelf):
    result = {entry["name"]: entry for entry in mp.list_packs(shelf)}
    assert sorted(result) == ["b", "deep/c", "deep/er/a"]
    b = result["b"]
    assert (b["base"], b["ranks"], b["ppl_before"], b["ppl_after"]) == (BASE["id"], [2], 10.0, 5.0)
    assert (b["created"], b["license"]) == (MEASURED["created"], "mit")
    assert b["error"] is b["hub"] is None
    assert b["pack_mb"] == round(Pack.open(shelf / "b").size_mb, 3)
    assert result["deep/er/a"]["ranks"] == [3] and result["deep/er/a"]["ppl_after"] is None
    assert [entry["name"] for entry in mp.list_packs(shelf / "b")] == ["b"]


DEEP = "[" * 200_000 + "]" * 200_000
NO_ADAPTERS = "adapters.safetensors: is named in pack.json but is not a file here"


def loop(pack: Path) -> None:
    (pack / "pack.json").unlink()
    (pack / "pack.json").symlink_to(pack / "pack.json")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda p: (p / "pack.json").write_text("{"), "pack.json: is not a manifest"),
        (lambda p: (p / "adapters.safetensors").unlink(), NO_ADAPTERS),
        (lambda p: (p / "pack.json").write_text(DEEP), ""),
        (loop, ""),
        (lambda p: os.truncate(p / "pack.json", 1 << 36), ""),
        (lambda p: edit_manifest(p, lambda m: m["files"].update({"x" * 3000: ONE})), ""),
    ],
    ids="json adapters deep loop huge name".split(),
)
def test_one_bad_pack_is_listed_with_its_fault_among_the_others(shelf, run, harm, reason):
    harm(shelf / "b")
    code, out, err = run("list", shelf)
    assert code == 0 and out.count("damaged: ") == 1 and "deep/c" in out, err
    listed = json.loads(run("list", shelf, "--json")[1])["packs"]
    (entry,) = [e for e in listed if e["error"]]
    assert entry["name"] == "b" and reason in entry["error"] and reason[:30] in out


def test_a_folder_that_cannot_be_read_is_listed(shelf, run, monkeypatch):
    scan = os.scandir

    def scandir(folder):
        if Path(folder).name == "deep":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    code, out, _ = run("list", shelf)
    assert code == 0 and "deep  damaged: deep: Permission denied" in out and "Some-4bit" in out


def test_list_says_so_when_there_is_nothing(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("list") == (0, "no packs below .\n", "")
    assert run("list", "--json") == (0, '{\n  "packs": []\n}\n', "")
    code, _, err = run("list", "nowhere")
    assert code == 2 and err.startswith("packs: nowhere: no such folder")
    (tmp_path / "file").write_text("")
    assert run("list", "file")[0] == 2


def test_list_shows_pulled_packs(local_pack, tmp_path, run, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.chdir(tmp_path)
    assert run("list", "--hub-cache") == (0, "no packs in the cache of pulled packs\n", "")

    commit = "a" * 40
    pulled = write_pack(tmp_path / "assets" / "mlx_packs" / "me--mine" / commit).path
    pin = {"repo": "me/mine", "revision": "main", "commit": commit}
    (pulled / "hub.json").write_text(json.dumps(pin))

    snapshot = snapshot_of(local_pack, tmp_path / "hub")

    (listed,) = mp.list_packs(None, hub_cache=True)
    assert (listed["name"], listed["error"], listed["hub"]) == ("me/mine@aaaaaaa", None, pin)
    (pulled / "hub.json").write_bytes(b"\xff")
    assert mp.list_packs(None, hub_cache=True)[0]["hub"] is None
    Pack.open(snapshot).verify()

    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(pulled / "README.md")  # not of its repository
    with raises("not-found", None, "README.md"):
        Pack.open(snapshot)

    assert len(json.loads(run("list", ".", "--hub-cache", "--json")[1])["packs"]) == 4


def test_list_loads_neither_mlx_nor_the_hub(shelf):
    run_python(
        "import sys; from mlx_packs import cli, list_packs; "
        f"assert len(list_packs({str(shelf)!r})) == 3; "
        "assert not {'mlx.core', 'mlx_lm', 'numpy', 'huggingface_hub', 'rich'} & set(sys.modules)"
    )
