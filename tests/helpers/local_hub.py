"""A substitute for the Hub's HTTP API, for tests: repositories in memory, served on this machine.

It speaks what huggingface_hub uses of it to make a repository, upload (regular and LFS files),
look up a revision and download with ranges; it can cut a download off, or hold it.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

REPO = r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)"


@dataclass
class Repo:
    """Commits as ``sha -> name -> bytes``, and branches by name."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    card: dict = field(default_factory=dict)

    def commit(self, files: dict[str, bytes | None], branch: str = "main") -> str:
        """Add files to a branch (None removes one); the commit's name."""
        content = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        content = {name: data for name, data in content.items() if data is not None}
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(content.items())}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = content, sha
        return sha

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class LocalHub:
    """Repositories by name, and what happened to them.

    ``requests``: method, path and Range of each.   ``tokens``: host, path and Authorization of each.
    ``cut``, ``hold``: bytes of a file to send before its connection is closed (once), or stands
    still until the hub is closed.   ``elsewhere``: address that LFS files are redirected to.
    ``tamper``: what becomes of every JSON answer.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: list[tuple[str, str, str | None]] = field(default_factory=list)
    elsewhere: str = ""
    tamper: Callable[[bytes], bytes] | None = None
    no_ranges: bool = False
    forbidden: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    hold: dict[str, int] = field(default_factory=dict)
    holding: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)

    def ranges(self, name: str) -> list[str | None]:
        """The Range of every download of a file, in order."""
        return [r for method, path, r in self.requests if method == "GET" and path.endswith(name)]

    def fetched(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {
            path.rsplit("/", 1)[-1]
            for method, path, _ in self.requests
            if method == "GET" and ("/resolve/" in path or "/objects/" in path)
        }


@contextmanager
def local_hub():
    hub = LocalHub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"

    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body would wait 40 ms for one another

    def log_message(self, *_):
        pass

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            pass  # the other side was killed

    def do_GET(self):
        method = self.command
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((method, path, self.headers.get("Range")))
        host = self.headers["Host"].partition(":")[0]
        self.hub.tokens.append((host, path, self.headers.get("Authorization")))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))

        routes = {
            ("POST", "/api/repos/create"): self._create,
            ("POST", "/api/validate-yaml"): self._validate,
            ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>.+))?"): self._info,
            ("GET", rf"/api/models/{REPO}/tree/(?P<revision>.+)"): self._tree,
            ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)"): self._branch,
            ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)"): self._preupload,
            ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)"): self._commit,
            ("POST", rf"/{REPO}\.git/info/lfs/objects/batch"): self._batch,
            ("PUT", r"/objects/(?P<oid>\w+)"): self._put,
            ("POST", r"/verify"): lambda: self._json({}),
            (method, rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)"): self._resolve,
            (method, r"/objects/(?P<oid>\w+)/(?P<name>.+)"): self._object,
        }

        for (verb, pattern), route in routes.items():
            if verb == method and (match := re.fullmatch(pattern, path)):
                return route(**match.groupdict())
        self._fail(404, "EntryNotFound")

    do_HEAD = do_POST = do_PUT = do_GET

    def _json(self, value, status: int = 200) -> None:
        data = json.dumps(value).encode()
        if self.hub.tamper:
            data = self.hub.tamper(data)
        self._bytes(data, status, {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._bytes(b'{"error": "no"}', status, {"X-Error-Code": code})

    def _bytes(self, data: bytes, status: int, headers: dict, name: str = "") -> None:
        begin = 0
        ranged = status == 200 and not self.hub.no_ranges
        if ranged and (match := re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")):
            status, begin = 206, int(match[1])
            headers |= {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}

        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(data) - begin}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return

        cut = self.hub.cut.pop(name, None)
        stop = cut if cut is not None else self.hub.hold.get(name)
        if stop is None:
            self.wfile.write(data[begin:])
            return

        self.wfile.write(data[begin : max(begin, stop)])
        self.wfile.flush()
        self.close_connection = True
        if cut is None:
            self.hub.holding.set()
            self.hub.closing.wait()

    def _look_up(self, repo: str, revision: str | None) -> tuple[Repo, str] | None:
        if repo not in self.hub.repos:
            return self._fail(404, "RepoNotFound")
        sha = self.hub.repos[repo].resolve(revision or "main")
        return (self.hub.repos[repo], sha) if sha else self._fail(404, "RevisionNotFound")

    def _create(self) -> None:
        if self.hub.forbidden:
            return self._fail(403, "Forbidden")
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            return self._json(answer, 409)
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(bool(private))
        self.hub.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json(answer)

    def _validate(self) -> None:
        text = json.loads(self.body)["content"]
        data = yaml.safe_load(text.split("---\n")[1])
        good = isinstance(data, dict) and isinstance(data.get("library_name"), str)
        self._json({} if good else {"errors": [{"message": "bad"}]}, 200 if good else 400)

    def _info(self, repo: str, revision: str | None) -> None:
        if entry := self._look_up(repo, revision):
            stored, sha = entry
            names = [{"rfilename": name} for name in sorted(stored.commits[sha])]
            about = {"private": stored.private, "cardData": stored.card}
            self._json({"id": repo, "sha": sha, "siblings": names, **about})

    def _tree(self, repo: str, revision: str) -> None:
        if entry := self._look_up(repo, revision):
            files = entry[0].commits[entry[1]].items()
            sizes = [{"path": n, "size": len(data), "oid": _git_oid(data)} for n, data in files]
            self._json([{"type": "file", **each} for each in sizes])

    def _branch(self, repo: str, branch: str) -> None:
        stored, sha = self._look_up(repo, None)
        if branch in stored.branches:
            return self._json({}, 409)
        stored.branches[branch] = sha
        self._json({})

    def _preupload(self, repo: str, revision: str) -> None:
        if self._look_up(repo, revision):
            paths = [file["path"] for file in json.loads(self.body)["files"]]
            modes = ["lfs" if path.endswith(".safetensors") else "regular" for path in paths]
            files = [
                {"path": path, "shouldIgnore": False, "uploadMode": mode}
                for path, mode in zip(paths, modes, strict=True)
            ]
            self._json({"files": files})

    def _batch(self, repo: str) -> None:
        objects = json.loads(self.body)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.url}/objects/{each['oid']}"}
                verify = {"href": f"{self.hub.url}/verify"}
                each["actions"] = {"upload": upload, "verify": verify}
        self._json({"transfer": "basic", "objects": objects})

    def _put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.objects[oid] = self.body
        self._json({})

    def _commit(self, repo: str, revision: str) -> None:
        files = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                files[value["path"]] = None
        sha = self.hub.repos[repo].commit(files, revision)
        self._json({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if not (entry := self._look_up(repo, revision)):
            return
        stored, sha = entry
        if name not in stored.commits[sha]:
            return self._fail(404, "EntryNotFound")

        data = stored.commits[sha][name]
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if not name.endswith(".safetensors"):
            return self._bytes(data, 200, headers | {"ETag": f'"{_git_oid(data)}"'}, name)

        oid = hashlib.sha256(data).hexdigest()
        self.hub.objects[oid] = data
        location = f"{self.hub.elsewhere or self.hub.url}/objects/{oid}/{name}"
        linked = {"X-Linked-Etag": oid, "X-Linked-Size": len(data)}
        self._bytes(b"", 302, headers | {"Location": location} | linked)

    def _object(self, oid: str, name: str) -> None:
        headers = {"ETag": f'"{oid}"', "Accept-Ranges": "bytes", "X-Repo-Commit": "0" * 40}
        self._bytes(self.hub.objects[oid], 200, headers, name)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
