"""Packs pulled from a substitute for the Hub: the bytes that were pushed, or an error."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

import mlx_packs as mp
from mlx_packs import Pack
from mlx_packs.packs.hub import MAIN
from mlx_packs.reading import sealed, sha256
from tests.helpers.errors import check
from tests.helpers.local_hub import LocalHub, Repo
from tests.helpers.packs import EVAL, edit_manifest, write_pack
from tests.packs.conftest import NAMES, contents, flip_last_bit

# huggingface_hub's upload of LFS files uses an argument that its HTTP library will drop
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def partial_of(hub: LocalHub, here: Path, out: str = "q") -> Path:
    """The folder of a download of ``me/p`` that was stopped."""
    folder = here / f".{out}.pull-{hub.repos['me/p'].branches[MAIN][:12]}"
    folder.mkdir()
    return folder


def facts_of(content: bytes) -> dict:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def serve(hub: LocalHub, pack: Path, change=None, **files: bytes) -> str:
    """Put a pack on the hub as ``me/evil``, its manifest changed; the commit."""
    result = {f.name: f.read_bytes() for f in pack.iterdir() if f.name in NAMES} | files
    if change is not None:
        manifest = json.loads(result["pack.json"])
        change(manifest)
        result["pack.json"] = json.dumps(sealed(manifest)).encode()
    return hub.repos.setdefault("me/evil", Repo()).commit(result)


def test_push_then_pull_gives_the_same_bytes(hub, here, run):
    write_pack(here / "p", eval=EVAL)
    code, out, err = run("push", "p", "me/p", "--license", "apache-2.0", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert set(report["files"]) == NAMES and "%|" not in err

    code, out, _ = run("pull", "me/p", "--out", "q", "--json")
    pulled = contents(here / "q")
    pin = json.loads(pulled.pop("hub.json"))
    assert pulled == contents(here / "p") and set(pulled) == NAMES
    commit = report["commit"]
    digest = sha256(here / "q" / "pack.json")
    source = {"repo": "me/p", "revision": MAIN, "commit": commit}
    assert pin == {**source, "manifest_sha256": digest}
    assert json.loads(out)["commit"] == commit
    assert f"hub     me/p@main · commit {commit}" in run("inspect", "q")[1]
    assert json.loads(run("inspect", "q", "--json")[1])["hub"]["commit"] == commit
    assert "hub" not in json.loads(run("inspect", "p", "--json")[1])
    assert [p.name for p in here.iterdir() if p.name.startswith(".")] == []


def test_pull_takes_a_branch_or_a_commit(pushed, hub, here):
    first = hub.repos["me/p"].branches[MAIN]
    mp.push(write_pack(here / "new", rank=3), "me/p")
    report = mp.push(write_pack(here / "side", rank=4), "me/p", revision="next/one")
    assert report["revision"] == "next/one" and hub.repos["me/p"].branches["next/one"]
    ranks = {
        name: mp.pull(f"me/p{at}", name).specs["model.layers.0.self_attn.q_proj"].rank
        for name, at in (("a", f"@{first}"), ("b", ""), ("c", "@next/one"))
    }
    assert ranks == {"a": 2, "b": 3, "c": 4}
    assert json.loads((here / "a" / "hub.json").read_text())["revision"] == first


def test_pull_replaces_a_pack_only_when_told_to(pushed, here, rejected, run):
    (here / "q").mkdir()
    (here / "q" / "mine.txt").write_text("mine")
    check(rejected("pull", "me/p", "--out", "q"), "exists", "out", "q")
    write_pack(here / "r", rank=5)
    check(rejected("pull", "me/p", "--out", "r"), "exists", "out", "--overwrite")
    assert run("pull", "me/p", "--out", "r", "--overwrite")[0] == 0
    assert contents(here / "r").items() >= contents(here / "p").items()


def test_a_connection_that_is_cut_goes_on_from_there(pushed, hub, here):
    hub.cut["adapters.safetensors"] = 1000
    mp.pull("me/p", "q")
    assert hub.ranges("adapters.safetensors")[-1] == "bytes=1000-"
    assert contents(here / "q").items() >= contents(here / "p").items()


def test_a_killed_download_resumes_and_leaves_nothing_in_place(hub, here):
    write_pack(here / "p", width=4096, rank=8)
    mp.push("p", "me/p")
    hub.requests.clear()
    hub.hold["adapters.safetensors"] = 300_000

    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(here / "hf")}
    environment["HF_HUB_DISABLE_XET"] = "1"
    command = [sys.executable, "-m", "mlx_packs.cli.main", "pull", "me/p", "--out", "q"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    assert hub.holding.wait(30)
    (partial,) = here.glob(".q.pull-*")
    file = partial / "adapters.safetensors"
    while not file.exists() or file.stat().st_size < 300_000:
        assert process.poll() is None

    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (here / "q").exists()

    hub.hold.clear()
    mp.pull("me/p", "q").verify()
    assert hub.ranges("adapters.safetensors")[-1] == "bytes=300000-"
    assert contents(here / "q").items() >= contents(here / "p").items()
    assert not list(here.glob(".q.*"))


@pytest.mark.parametrize("left", [100, 10_000_000])
def test_pull_starts_again_without_ranges_or_with_a_long_partial(pushed, hub, here, left):
    hub.no_ranges = True
    partial = partial_of(hub, here)
    (partial / "adapters.safetensors").write_bytes(b"x" * left)
    (partial / "stray.json").write_text("{}")
    mp.pull("me/p", "q").verify()
    assert set(contents(here / "q")) == NAMES | {"hub.json"}


def test_a_tampered_file_is_refused_with_its_hash(pushed, hub, here, rejected):
    data = (here / "p" / "adapters.safetensors").read_bytes()
    serve(hub, here / "p", **{"adapters.safetensors": data[:-1] + bytes([data[-1] ^ 1])})
    digest = pushed.manifest["files"]["adapters.safetensors"]["sha256"][:12]
    error = rejected("pull", "me/evil", "--out", "q")
    check(error, "unreadable", None, "adapters.safetensors", digest)
    assert not (here / "q").exists()
    serve(hub, here / "p")  # repaired: nothing bad was stored
    assert mp.pull("me/evil", "q").path == Path("q")


def test_a_file_of_another_size_is_refused_before_it_is_fetched(pushed, hub, here, rejected):
    serve(hub, here / "p", **{"adapters.safetensors": b"\0" * 1_000_000})
    check(rejected("pull", "me/evil", "--out", "q"), "unreadable", None, "1000000 bytes")
    assert hub.fetched() == {"pack.json"}


@pytest.mark.parametrize(
    "names",
    [
        *[["../../evil.json"], ["/tmp/evil.json"], ["a/b.json"], [".."], [".hidden.json"]],
        *[["evil.bin"], ["adapters.pkl"], ["run.py"], ["hub.json"], ["pack.json"]],
        *[["a\n.json"], ["\x1b[31m.json"], ["\u202e.json"], ["x" * 300 + ".json"]],
        *[["Pack.json"], ["HUB.JSON"], ["a.json", "A.json"]],  # a Mac ignores case
        *[["caf\u00e9.json"], ["cafe\u0301.json"], ["\u212aelvin.json", "kelvin.json"]],
    ],
    ids=ascii,
)
def test_names_that_no_disk_may_have_are_rejected_at_once(pushed, hub, here, rejected, names):
    def change(manifest):
        manifest["files"] |= dict.fromkeys(names, facts_of(b"{}"))

    files = {name: b"{}" for name in names if "/" not in name and name not in ("..", "pack.json")}
    serve(hub, here / "p", change, **files)
    for command in (["pull", "me/evil", "--out", "q"], ["pull", "me/evil"]):
        check(rejected(*command), "unsupported", None, "pack.json names", repr(names[0])[1:4])
        assert hub.fetched() == {"pack.json"}
        assert {p.name for p in here.iterdir()} == {"p"}  # nothing of it is kept, nor in the cache


@pytest.mark.parametrize(
    ("out", "code", "said"),
    [
        ("q" * 240, "unwritable", "too long"),
        ("q/" * 3000 + "q", "unwritable", "too long"),
        ("", "invalid", ""),
        ("..", "invalid", ""),
    ],
    ids=["name", "path", "none", "above"],
)
def test_a_folder_whose_name_is_too_long_is_refused_at_once(
    pushed, hub, here, rejected, out, code, said
):
    check(rejected("pull", "me/p", "--out", out), code, "out", said)
    assert hub.fetched() == set() and {p.name for p in here.iterdir()} == {"p"}


def test_pull_refuses_what_the_disk_has_no_room_for(pushed, hub, here, rejected, monkeypatch):
    def change(manifest):
        manifest["files"]["more.json"] = {"bytes": 2**52, "sha256": "0" * 64}

    serve(hub, here / "p", change, **{"more.json": b"{}"})
    check(
        rejected("pull", "me/evil", "--out", "q/r"), "unwritable", None, "4503599.6 GB", str(here)
    )
    assert hub.fetched() == {"pack.json"} and {p.name for p in here.iterdir()} == {"p"}
    total = sum(facts["bytes"] for facts in pushed.manifest["files"].values())
    disk = shutil.disk_usage(here)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk._replace(free=total - 1))
    check(rejected("pull", "me/p", "--out", "q"), "unwritable")
    partial = partial_of(hub, here)
    shutil.copy(here / "p" / "README.md", partial)  # what is here already needs no room
    assert mp.pull("me/p", "q").path == Path("q")


def test_files_of_another_pack_where_a_download_was_are_fetched_anew(pushed, hub, here):
    """As a pull leaves them that is killed right after it took the old pack's place."""
    stale = here / ".q.pull-000000000000"  # of another commit
    stale.mkdir()
    (stale / "adapters.safetensors").write_bytes(b"x" * 100)
    partial = partial_of(hub, here)
    shutil.copytree(here / "p", partial, dirs_exist_ok=True)
    for name in ("adapters.safetensors", "README.md"):
        flip_last_bit(partial / name)
    mp.pull("me/p", "q").verify()
    assert contents(here / "q") | {"hub.json": b""} == contents(here / "p") | {"hub.json": b""}
    assert not stale.exists()


def test_pickles_and_code_beside_a_pack_are_never_fetched(pushed, hub, here, run):
    serve(hub, here / "p", **{"adapter_model.bin": b"evil", "run.py": b"evil", "../y.json": b"{}"})
    assert run("pull", "me/evil", "--out", "q")[0] == 0
    assert hub.fetched() == NAMES and set(contents(here / "q")) == NAMES | {"hub.json"}


def test_symlinks_here_are_not_written_through(pushed, hub, here, rejected):
    target = here / "target.txt"
    target.write_text("mine")
    (here / "q").symlink_to(here / "elsewhere")
    check(rejected("pull", "me/p", "--out", "q"), "exists", "out", "q")
    partial = partial_of(hub, here, "r")
    (partial / "adapters.safetensors").symlink_to(target)
    check(rejected("pull", "me/p", "--out", "r"), "exists", None, "adapters.safetensors")
    assert target.read_text() == "mine"


def test_safetensors_that_are_none_are_refused(pushed, hub, here, rejected):
    junk = b"\x80\x04evil pickle" * 9

    def change(manifest):
        manifest["files"]["adapters.safetensors"] = facts_of(junk)

    serve(hub, here / "p", change, **{"adapters.safetensors": junk})
    check(rejected("pull", "me/evil", "--out", "q"), "unreadable", None, "adapters.safetensors")
    assert not (here / "q").exists()


def test_pull_names_what_is_wrong_with_a_name(pushed, hub, rejected):
    hub.repos["me/empty"] = Repo()
    hub.repos["me/empty"].commit({"config.json": b"{}"})
    for name in ("a/b/c", "../x", "me/.."):
        check(rejected("pull", name, "--out", "q"), "invalid", "pack", name)
    for name in ("me/p@", "me/p@../../x"):
        check(rejected("pull", name, "--out", "q"), "invalid", "revision", "me/p")
    for name in ("me/none", "me/p@none", "me/empty"):
        check(rejected("pull", name, "--out", "q"), "not-found", None, name.partition("@")[0])


def test_without_a_network_each_command_says_so_in_one_line(here, hub, monkeypatch, rejected):
    write_pack(here / "p")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for command in (
        ("pull", "me/p", "--out", "q"),
        ("push", "p", "me/p"),
        ("inspect", "me/p"),
        ("generate", "--pack", "me/p", "--prompt", "x"),
    ):
        check(rejected(*command), "network", None, "me/p", "http://127.0.0.1:9")
    assert {f.name for f in here.iterdir()} == {"p"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check(rejected("pull", "me/p"), "network", None, "me/p@main", "HF_HUB_OFFLINE")


def test_a_changed_pack_in_the_cache_is_fetched_again(pushed, hub):
    for harm in (
        lambda folder: edit_manifest(folder, lambda manifest: manifest.update(license="mit")),
        lambda folder: (folder / "hub.json").unlink(),
        lambda folder: (folder / "adapters.safetensors").write_bytes(b"x"),
    ):
        harm(mp.pull("me/p").path)
        hub.requests.clear()
        again = mp.pull("me/p")
        again.verify()
        assert again.manifest == pushed.manifest and hub.fetched() == NAMES


def test_a_token_goes_to_the_hub_and_nowhere_else(pushed, hub, here, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.elsewhere = hub.url.replace("127.0.0.1", "localhost")
    hub.repos["me/p"].commit({"note.txt": hub.url.encode()})  # a commit that is this test's alone
    sha = hub.repos["me/p"].branches[MAIN]
    mp.pull("me/p", "q")
    # a client of another process may knock at a port that was its own hub's: it asks for other paths
    of_pull = {
        (host, token) for host, path, token in hub.tokens if "objects" in path or sha in path
    }
    assert of_pull == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


def test_a_hub_id_stands_for_a_pack_and_is_fetched_once(pushed, hub, here):
    first = Pack.open("me/p")
    first.verify()
    assert first.path.is_relative_to(here / "hf" / "assets") and hub.requests
    hub.requests.clear()
    commit = hub.repos["me/p"].branches[MAIN]
    assert Pack.open("me/p").path == Pack.open(f"me/p@{commit}").path == first.path
    assert hub.requests == []


def test_pull_without_out_brings_the_cache_up_to_date(pushed, hub, here):
    old = Pack.open("me/p")
    mp.push(write_pack(here / "new", rank=3), "me/p")
    assert Pack.open("me/p").path == old.path
    new = mp.pull("me/p")
    assert Pack.open("me/p").path == new.path != old.path
    hub.repos["me/p"].branches[MAIN] = old.path.name  # the branch goes back
    assert mp.pull("me/p").path == Pack.open("me/p").path == old.path


def test_a_folder_comes_before_a_hub_id(here, hub, rejected):
    write_pack(here / "me" / "p")
    assert Pack.open("me/p").path == Path("me/p")
    check(rejected("inspect", "me/typo"), "not-found", None, "me/typo")
    assert hub.requests == []


def test_inspect_names_a_damaged_file_of_the_hub(here, run, caplog):
    write_pack(here / "p")
    (here / "p" / "hub.json").write_text("{}")
    code, out, _ = run("inspect", "p")
    assert code == 0 and "hub     " not in out
    assert [r.getMessage() for r in caplog.records] == [
        "p/hub.json: is ignored, since it is damaged. Pull the pack again."
    ]
