"""Packs pushed to a substitute for the Hub: what is sent, under which card, and what is never sent."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import mlx_packs as mp
from mlx_packs import Pack
from mlx_packs.packs.hub import MAIN
from mlx_packs.packs.share import prepare
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises
from tests.helpers.local_hub import LocalHub, Repo
from tests.helpers.packs import BASE, EVAL, edit_manifest, record_as_is, write_pack
from tests.packs.conftest import NAMES, contents, flip_last_bit, snapshot_of

# huggingface_hub's upload of LFS files uses an argument that its HTTP library will drop
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def on_hub(hub: LocalHub, name: str) -> dict[str, bytes]:
    """The files of the branch ``main``."""
    return hub.repos[name].commits[hub.repos[name].branches[MAIN]]


def mac_names(pack: Path) -> None:
    for name in ("Readme.json", "README.json"):
        (pack / name).write_bytes(b"{}")
        record_as_is(pack, name)


def link(pack: Path) -> None:
    (pack / "README.md").rename(pack.parent / "card")
    (pack / "README.md").symlink_to(pack.parent / "card")


def path_in_config(pack: Path) -> None:
    (pack / "adapter_config.json").write_text(json.dumps({"model": f"{Path.home()}/private/x"}))
    record_as_is(pack, "adapter_config.json")


def path_in_adapters(pack: Path) -> None:
    file = str(pack / "adapters.safetensors")
    tensors = mx.load(file)
    mx.eval(tensors)
    mx.save_safetensors(file, tensors, {"from": f"{Path.home()}/private/x"})
    record_as_is(pack)


@pytest.mark.parametrize(
    ("harm", "code", "names"),
    [
        (mac_names, "unsupported", ["README.json", "ignores case"]),
        (link, "not-found", ["README.md"]),
        (
            lambda p: flip_last_bit(p / "adapters.safetensors"),
            "unreadable",
            ["adapters.safetensors"],
        ),
        (path_in_config, "data", ["adapter_config.json", str(Path.home())]),
        (path_in_adapters, "data", ["adapters.safetensors", str(Path.home())]),
    ],
)
def test_push_refuses_a_pack_before_it_sends_anything(hub, here, rejected, harm, code, names):
    pack = write_pack(here / "p")
    digest = pack.manifest["files"]["adapters.safetensors"]["sha256"][:12]
    harm(here / "p")
    error = rejected("push", "p", "me/p")
    check(error, code, None, *names)
    assert code != "unreadable" or digest in error.message
    assert hub.requests == []


def test_push_writes_a_card_that_the_hub_understands(hub, here):
    facts = {
        "eval": EVAL,
        "data": {"source": "notes", "fingerprint": {"train": "abc"}, "rows": {"train": 1200}},
    }
    write_pack(here / "p", **facts)
    mp.push("p", "me/p", license="apache-2.0")
    text = (here / "p" / "README.md").read_text()
    card = ModelCard(text).data
    assert card.library_name == "mlx" and card.base_model == BASE["id"] and "lora" in card.tags
    assert card.license == "apache-2.0" and card.to_dict()["base_model_relation"] == "adapter"
    fingerprint = BASE["fingerprint"][:12]
    for part in ("PPL 10.00 → 5.00", fingerprint, "1,200 train examples", "fingerprint abc"):
        assert part in text
    Pack.open("p").verify()

    write_pack(here / "q", base=BASE | {"id": "tiny"})  # no id of the Hub
    card = ModelCard((here / "q" / "README.md").read_text()).data
    assert card.base_model is None and card.license is None


def test_a_licence_is_given_and_never_invented(hub, here, rejected):
    write_pack(here / "a")
    mp.push("a", "me/a", progress=False)
    assert "license" not in json.loads((here / "a" / "pack.json").read_text())
    mp.push("a", "me/a", license="mit", progress=False)
    assert "- licence: mit" in (here / "a" / "README.md").read_text()
    check(rejected("push", "a", "me/a", "--license", "My own!"), "invalid", "license", "My own!")


@pytest.mark.parametrize("out", ["q", None], ids=["folder", "cache"])
def test_a_pulled_pack_is_pushed_only_as_it_is(pushed, hub, out):
    pulled = mp.pull("me/p", out)
    before = contents(pulled.path)
    with raises("unsupported", None, "hub.json"):
        mp.push(pulled.path, "me/own", license="mit")
    assert not mp.push(pulled.path, "me/own")["changed"]
    assert on_hub(hub, "me/own")["pack.json"] == before["pack.json"]
    assert contents(pulled.path) == before


def test_nothing_is_written_through_the_links_of_a_snapshot(local_pack, hub, here):
    snapshot = snapshot_of(local_pack, here / "other")
    prepare(Pack.open(snapshot), "mit")
    assert Pack.open(snapshot).manifest["license"] == "mit"
    assert contents(here / "other" / "models--me--p" / "blobs") == contents(local_pack)


def test_a_link_to_a_pack_stays_a_link_when_the_pack_is_written(hub, here):
    write_pack(here / "p")
    (here / "link").symlink_to("p")
    mp.push("link", "me/p", license="mit")
    assert Pack.open("p").manifest["license"] == "mit"
    Pack.open("p").save("link", overwrite=True)
    assert (here / "link").is_symlink() and {f.name for f in here.iterdir()} == {"p", "link"}


def test_other_files_stay_when_a_pack_is_rewritten(hub, here):
    write_pack(here / "p", license=None)
    (here / "p" / "notes.txt").write_text("mine")
    assert mp.push("p", "me/p", license="mit")["changed"] == ["licence mit, in manifest and card"]
    assert mp.push("p", "me/p")["changed"] == []
    assert (here / "p" / "notes.txt").read_text() == "mine"
    assert set(on_hub(hub, "me/p")) == NAMES | {".gitattributes"}


def test_push_sends_samples_on_request_alone(hub, here):
    samples = [{"prompt": "a held-out row", "wanted": "its answer", "before": "b", "after": "c"}]

    def sent(**options) -> str:
        write_pack(here / "p", samples=samples)
        mp.push("p", "me/p", **options)
        files = on_hub(hub, "me/p")
        return (files["pack.json"] + files["README.md"]).decode()

    shown = sent(samples=True)
    assert shown.count("a held-out row") == 2 and "its answer" in shown
    shutil.rmtree(here / "p")
    assert "held-out row" not in sent() and "samples" not in mp.Pack.open("p").manifest


def test_push_leaves_no_path_of_this_machine_in_what_it_sends(hub, here):
    home = Path.home()
    recipe = {
        "resume_adapter_file": f"{home}/private/notes/adapters",
        "model": "/data/x/base",
        "keep": ["lm_head"],
        "chat_feature": "messages",
        "data": "org/set",
        "win": "C:\\Users\\me\\notes",
        "regex": "(\\.q_proj|\\.k_proj)",
    }
    measured = {"ops": {"fallbacks": {"nf4": f"clang: {home}/lib/a.metal:3: error at /opt/x/b.h"}}}
    write_pack(here / "p", recipe=recipe, measured=measured, data={"source": "https://a.b/c/d"})

    changed = mp.push("p", "me/p")["changed"]
    assert any(line.startswith("recipe.resume_adapter_file: ") for line in changed)

    sent = on_hub(hub, "me/p")
    manifest = json.loads(sent["pack.json"])
    shortened = {"resume_adapter_file": "adapters", "model": "base", "win": "notes"}
    assert manifest["recipe"] == recipe | shortened
    assert manifest["measured"]["ops"]["fallbacks"]["nf4"] == "clang: a.metal:3: error at b.h"
    assert manifest["data"]["source"] == "https://a.b/c/d"
    assert not any(str(home).encode() in data for name, data in sent.items())


def test_a_config_of_an_earlier_pack_does_not_stay_on_the_hub(hub, here):
    """Stock mlx-lm would read the new adapters with the old rank."""
    mp.push(write_pack(here / "p"), "me/p")
    write_pack(here / "q")
    (here / "q" / "adapter_config.json").unlink()
    edit_manifest(here / "q", lambda manifest: manifest["files"].pop("adapter_config.json"))
    mp.push("q", "me/p")
    sent = on_hub(hub, "me/p")
    assert set(sent) == {".gitattributes"} | NAMES - {"adapter_config.json"}


def test_private_is_private_and_what_the_hub_forbids_is_said(hub, here, rejected):
    write_pack(here / "p").push("me/secret", private=True, progress=False)
    assert hub.repos["me/secret"].private
    assert on_hub(hub, "me/secret")["pack.json"] == (here / "p" / "pack.json").read_bytes()
    hub.repos["me/open"] = Repo()
    before = hub.repos["me/open"].commit({"a.json": b"{}"})
    check(rejected("push", "p", "me/open", "--private"), "conflict", "private", "me/open")
    assert hub.repos["me/open"].branches[MAIN] == before
    hub.forbidden = True
    check(rejected("push", "p", "me/p"), "network", None, "me/p", "403", "hf auth login")


def test_a_folder_is_no_repository_and_what_was_not_saved_no_pack(trained_copy):
    with raises("invalid", "pack", "Pack.save", "./x"):
        Pack.open("o").push("./x")
    with raises("invalid", "pack"):
        mp.push(Pack({}, {}), "me/p")
