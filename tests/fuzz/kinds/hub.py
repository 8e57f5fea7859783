"""What a hub answers, and the repository that it serves."""

import json
from types import SimpleNamespace

from huggingface_hub import constants

from mlx_packs.packs import hub
from mlx_packs.packs.manifest import ADAPTERS, MANIFEST
from tests.fuzz.kind import Kind, command
from tests.fuzz.kinds.pack import FACTS
from tests.fuzz.mutate import EDGES
from tests.fuzz.subjects import resealed, write_base, write_pack_on
from tests.helpers.local_hub import Repo, local_hub

NAMES = ("../../outside/evil", "/tmp/evil", "..\\evil", "x/../../evil.json", ".git/config", "")
NAMES += ("Pack.json", "HUB.JSON", "pack.json ", "a" * 300 + ".json", "é.json", "model.py")
NAMES += ("x\x1b[31m.json", "\u202ejson.exe")


class HubKind(Kind):
    """A repository of a stranger, pulled."""

    name = "hub"
    words = (*"me/other main siblings rfilename sha bytes ../x.json".split(), MANIFEST, ADAPTERS)
    share = 0.1

    def make(self, folder):
        write_pack_on(write_base(folder.with_name("base")), folder, facts=FACTS)
        self.context = local_hub()
        self.hub = self.context.__enter__()
        constants.ENDPOINT = self.hub.url
        template = self.hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HUGGINGFACE_CO_URL_TEMPLATE = template
        constants.HF_HUB_OFFLINE = False
        self.time, hub.time = hub.time, SimpleNamespace(sleep=lambda _: None)
        self._serve({file.name: file.read_bytes() for file in folder.iterdir()})

    def close(self):
        hub.time = self.time
        self.context.__exit__(None, None, None)

    def _serve(self, files: dict[str, bytes]) -> None:
        self.hub.tamper, self.hub.cut = None, {}
        self.hub.repos["me/p"] = Repo()
        self.hub.repos["me/p"].commit(files)

    def mutate(self, case):
        """Change the manifest, files with their hashes, names, the commit, or the answers."""
        files = dict(case.files)
        rng = case.rng
        part = rng.choices(("manifest", "files", "names", "answers", "cut"), (6, 3, 3, 3, 1))[0]
        case.mutator.note(part)

        if part == "manifest":
            files[MANIFEST] = case.mutator.json(files[MANIFEST])
            if rng.random() < 0.7:
                files[MANIFEST] = resealed(files[MANIFEST])
        elif part == "files":
            name = rng.choice([name for name in files if name != MANIFEST])
            files[name] = case.mutator.file(name, files[name])
            if rng.random() < 0.6:
                files[MANIFEST] = resealed(files[MANIFEST], {name: files[name]})
        elif part == "names":
            name = rng.choice(NAMES)
            case.mutator.note(name)
            files[name] = b"{}"
            manifest = json.loads(files[MANIFEST])
            manifest["files"] = {name: {}, **manifest["files"]}
            files[MANIFEST] = resealed(json.dumps(manifest).encode(), {name: b"{}"})

        self._serve(files)
        if part == "answers":
            self.hub.tamper = case.mutator.json
        elif part == "cut":
            name = rng.choice(list(files))
            self.hub.cut[name] = rng.choice((0, 1, len(files[name]) // 2, *EDGES[:1]))

    def cheap(self):
        return [command("pull", "me/p", "--out", "out/p")]

    def whole(self):
        return [
            command("inspect", "me/p"),
            command("apply", "me/p", "--model", "base", "--dry-run"),
            command("list", "--hub-cache"),
        ]
