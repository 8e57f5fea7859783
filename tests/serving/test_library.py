"""Packs that are added by name, and those of a folder that is watched."""

import re
import shutil

import pytest

from mlx_packs.serving.library import Library
from tests.helpers.local_hub import Repo
from tests.helpers.packs import edit_manifest
from tests.helpers.serving import Running
from tests.serving.conftest import NAMES


def served(server) -> set[str]:
    return {pack["name"] for pack in server.json("GET", "/v1/packs")[1]["data"]}


@pytest.fixture
def copies(shelf, tmp_path):
    return shutil.copytree(shelf, tmp_path / "copies")


@pytest.fixture
def library(generator, copies):
    library = Library(generator, copies)
    library.scan()
    return library


def hashes(library) -> dict[str, str]:
    return {name: p._adapters_hash for name, p in library._worker.registry.packs.items()}


def test_new_changed_and_removed_packs_are_followed(library, copies):
    before = hashes(library)
    assert set(before) == set(NAMES)

    shutil.copytree(copies / "notes", copies / "team" / "more")
    shutil.rmtree(copies / "notes")
    shutil.copytree(copies / "med", copies / "notes")
    shutil.rmtree(copies / "law")
    library.scan()

    assert hashes(library) == {
        "notes": before["med"],
        "med": before["med"],
        "team/more": before["notes"],
    }
    assert library._worker.registry.entries["team/more"].source == "more"

    library.scan()
    assert len(hashes(library)) == 3


def test_a_pack_that_is_still_copied_is_served_when_it_is_complete(library, copies, shelf):
    (copies / "new").mkdir()
    shutil.copy(shelf / "law" / "pack.json", copies / "new")
    library.scan()
    assert "new" not in hashes(library)
    for file in (shelf / "law").iterdir():
        if file.name != "pack.json":
            shutil.copy(file, copies / "new")
    library.scan()
    assert hashes(library)["new"] == hashes(library)["law"]


def test_folders_whose_names_cannot_be_asked_for_are_left_out(library, copies):
    for name in ("base", "with space", "ü"):
        shutil.copytree(copies / "notes", copies / name)
    library.scan()
    assert set(hashes(library)) == set(NAMES)


def test_packs_are_added_under_their_own_and_other_names_and_removed(server, shelf):
    assert served(server) == set(NAMES)
    body = {"source": "notes", "name": "again"}
    status, answer = server.json("POST", "/v1/packs", body)
    assert (status, answer["name"], answer["changed"]) == (201, "again", True)
    assert server.json("POST", "/v1/packs", body)[1]["changed"] is False

    expected = server.chat("notes", "The list")["choices"]
    assert server.chat("again", "The list")["choices"] == expected

    for name in ("notes", "again"):
        assert server.json("DELETE", f"/v1/packs/{name}")[0] == 200
        assert server.json("DELETE", f"/v1/packs/{name}")[0] == 404
    assert served(server) == set(NAMES) - {"notes"}

    server.library.scan()  # it comes back when it changes, or when it is asked for
    assert served(server) == set(NAMES) - {"notes"}
    assert server.json("POST", "/v1/packs", {"source": "notes"})[0] == 201
    assert server.chat("notes", "The list")["choices"] == expected


def test_a_nested_pack_has_the_same_name_however_it_is_added(generator, copies):
    shutil.copytree(copies / "notes", copies / "team" / "more")
    with Running(generator, copies) as server:
        assert server.json("DELETE", "/v1/packs/team/more")[0] == 200
        status, answer = server.json("POST", "/v1/packs", {"source": "team/more"})
        assert (status, answer["name"]) == (201, "team/more")


def test_sources_elsewhere_are_not_found(shared_server, shelf, hub, here):
    shutil.copytree(shelf / "notes", here / "owner" / "pack")  # is no pack of the Hub
    sources = ["..", "../notes", "notes/../../notes", "/etc", "~/notes", ".", "owner/pack"]
    for source in (*sources, "a\0b", "x" * 1000, "x/" * 500):
        code, answer = shared_server.json("POST", "/v1/packs", {"source": source})
        assert code == 404 and set(answer) == {"error"}, source
    assert served(shared_server) == set(NAMES)


def test_a_pack_of_the_hub_is_added(server, shelf, hub):
    hub.repos["me/p"] = Repo()
    hub.repos["me/p"].commit({f.name: f.read_bytes() for f in (shelf / "notes").iterdir()})
    status, answer = server.json("POST", "/v1/packs", {"source": "me/p"})
    assert (status, answer["name"]) == (201, "me/p")
    packs = {pack["name"]: pack for pack in server.json("GET", "/v1/packs")[1]["data"]}
    assert packs["me/p"]["source"] == "me/p"
    assert server.chat("me/p", "a")["choices"] == server.chat("notes", "a")["choices"]


def test_names_that_cannot_be_asked_for_fetch_nothing(shared_server, monkeypatch):
    monkeypatch.setattr(shared_server.library, "load", None)
    for name in ("base", "a b", "x" * 200, "../x", "a+b", "a:1", "\n", "ü"):
        status, answer = shared_server.json("POST", "/v1/packs", {"source": "notes", "name": name})
        assert status == 400 and answer["error"]["param"] == "name", name


def test_a_pack_of_another_base_conflicts_and_its_folder_stays_secret(generator, copies):
    shutil.copytree(copies / "notes", copies / "other")
    edit_manifest(copies / "other", lambda manifest: manifest["base"].update(fingerprint="f" * 64))
    shutil.copytree(copies / "notes", copies / "broken")
    (copies / "broken" / "adapters.safetensors").write_bytes(b"short")

    with Running(generator, copies) as server:
        assert served(server) == set(NAMES)

        status, answer = server.json("POST", "/v1/packs", {"source": "other"})
        assert (status, answer["error"]["code"]) == (409, "mismatch")
        message = answer["error"]["message"]
        assert len(set(re.findall(r"fingerprint ([0-9a-f]+)", message))) == 2
        assert str(copies) not in message

        status, answer = server.json("POST", "/v1/packs", {"source": "broken"})
        assert status == 400 and str(copies) not in answer["error"]["message"]
        assert "broken" in answer["error"]["message"] or "adapters" in answer["error"]["message"]
        assert served(server) == set(NAMES)
