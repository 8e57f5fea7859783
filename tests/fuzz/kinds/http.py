"""What clients send to a server: bodies of requests."""

import json
from contextlib import ExitStack
from pathlib import Path

from mlx_packs import load_base
from mlx_packs.errors import PackError
from mlx_packs.serving.embedding import EmbeddingWorker
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Limits
from tests.fuzz.kind import SUBJECT, Kind, library
from tests.fuzz.subjects import write_base, write_pack_on
from tests.helpers.encoders import write_encoder
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running, strict_json

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
COMMON = {"model": "one", "max_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1}
COMMON |= {"logit_bias": {"5": 1.5}, "stop": ["a", "bc"], "min_p": 0.1, "presence_penalty": 0.5}
TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "1", "tool_call_id": "c1"},
]
CHAT = {"messages": TURNS, "tools": [TOOL], "logprobs": True, "top_logprobs": 2, "stream": True}
CHAT |= {"stream_options": {"include_usage": True}}
CHAT |= {"chat_template_kwargs": {"enable_thinking": False}}
FORM = {"messages": [{"role": "user", "content": "u"}], "max_completion_tokens": 8}
FORM |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
BODIES = {
    "chat": COMMON | CHAT,
    "form": COMMON | FORM,
    "completion": COMMON | {"prompt": ["a b"], "n": 2},
    "tokens": {"model": "one", "prompt": [5, 6], "max_tokens": 1},
    "embedding": {"model": "one", "input": ["a", "b c"], "encoding_format": "base64"},
    "pack": {"source": "one", "name": "two"},
}
PATHS = dict.fromkeys(("chat", "form"), "/v1/chat/completions")
PATHS |= dict.fromkeys(("completion", "tokens"), "/v1/completions")
PATHS |= {"embedding": "/v1/embeddings", "pack": "/v1/packs"}


def judge(status: int, answer: bytes) -> None:
    """Raise a PackError for a request that was rejected, and another error for a defect."""
    if status == 500 or not 200 <= status < 600:
        raise RuntimeError(f"status {status}: {answer[:500]!r}")
    if status >= 400:
        error = strict_json(answer)["error"]
        if set(error) != {"message", "type", "param", "code"}:
            raise RuntimeError(f"status {status}: {answer[:500]!r}")
        raise PackError(f"status {status}: {error['message'][:300]}")


def check_events(text: str) -> None:
    """Raise an error for a stream that ends in a fault of the server."""
    for event in text.split("\n\n"):
        data = event.removeprefix("data: ")
        if data in ("", "[DONE]"):
            continue

        content = strict_json(data)
        if content.get("error", {}).get("type") == "server_error":
            raise RuntimeError(f"{content}")


class BodyKind(Kind):
    """The JSON of a request to a server of a small base, or of an encoder, and its pack."""

    name = "body"
    words = (*BODIES["chat"], *BODIES["form"], "prompt", "input", "name", "source", "type", "text")
    words += ("role", "content", "one", "base", "one+one", "one:nan", "user", "json_object", "$ref")

    def make(self, folder):
        self._open = ExitStack()
        base = write_base(folder.with_name("base"))
        write_pack_on(base, folder.with_name("packs") / "one")
        limits = Limits(8, 64, 64 << 20, 512, 340)
        self.server = self._serve(TextWorker(load_base(base), limits), folder.with_name("packs"))
        folder.mkdir()
        for name, body in BODIES.items():
            (folder / f"{name}.json").write_text(json.dumps(body))
        encoder = write_encoder(folder.with_name("encoder"))
        packs = folder.with_name("encoders")
        random_pack(load_base(encoder), targets=()).save(packs / "one")
        self.embedding = self._serve(EmbeddingWorker(load_base(encoder), 8, 64), packs)

    def _serve(self, worker: TextWorker | EmbeddingWorker, packs: Path) -> Running:
        worker.start()
        self._open.callback(worker.close, 0.0)
        return self._open.enter_context(Running(worker, packs))

    def close(self):
        self._open.close()

    chosen = "chat"

    def mutate(self, case):
        self.chosen = case.rng.choice(list(BODIES))
        case.edit(f"{self.chosen}.json")

    def _post(self, name: str) -> None:
        server = self.embedding if name == "embedding" else self.server
        body = Path(SUBJECT, f"{name}.json").read_bytes()
        status, headers, answer = server.request("POST", PATHS[name], body)

        if not (self.server.worker.is_alive and self.embedding.worker.is_alive):
            raise RuntimeError("a worker has died")
        if headers.get("content-type", "").startswith("text/event-stream"):
            check_events(answer.decode())
            return

        judge(status, answer)
        content = strict_json(answer)
        if status == 201 and content["name"] != "one":
            judge(*server.request("DELETE", f"/v1/packs/{content['name']}")[::2])

    def cheap(self):
        return [library(lambda name=name: self._post(name), PATHS[name]) for name in BODIES]

    def calls(self, case):
        return [library(lambda: self._post(self.chosen), PATHS[self.chosen])]
