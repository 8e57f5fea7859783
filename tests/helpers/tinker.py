"""A small client of the Tinker protocol, without the SDK."""

import json
from collections.abc import Sequence

import numpy as np

from mlx_packs.runtime import mx
from mlx_packs.serving.train.rows import MEDIA_TYPE, MESSAGES
from tests.helpers.serving import Running

PROTO = {"Content-Type": MEDIA_TYPE}
ADAM = {"learning_rate": 1e-3}


def tensor(values: object, message: object) -> None:
    """Write an array into a message, as float32 or int64."""
    array = np.asarray(values)
    is_integer = array.dtype.kind == "i"
    array = array.astype(np.int64 if is_integer else np.float32)
    message.dense, message.dtype = array.tobytes(), 2 if is_integer else 1
    message.shape.extend(array.shape)


def forward_request(
    model_id: str,
    data: Sequence[tuple[list[int], dict]],
    loss: str = "cross_entropy",
    seq_id: int = 0,
    forward_only: bool = False,
) -> bytes:
    """Return the bytes of a request; a datum is its tokens and its arrays by name."""
    request = MESSAGES.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            tensor(values, datum.loss_fn_inputs.add(key=name).value)
    return request.SerializeToString()


class TinkerClient:
    """A session on a server, whose requests fail the test unless told which error is expected."""

    def __init__(self, server: Running) -> None:
        self.server = server
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        self.session = self.post("create_session", body)["session_id"]
        self.models = 0

    def post(self, path: str, body: object, status: int = 200) -> dict:
        actual, answer = self.server.json("POST", f"/api/v1/{path}", body)
        assert actual == status, answer
        return answer

    def result(self, answer: dict) -> object:
        """Return what a request comes to: JSON, or a message's bytes."""
        body = {"request_id": answer["request_id"]}
        status, headers, content = self.server.request("POST", "/api/v1/retrieve_future", body)
        assert status == 200, content
        if headers["content-type"].startswith(MEDIA_TYPE):
            return content
        return json.loads(content)

    def call(self, path: str, body: object) -> dict:
        """Return the result of a request, which is JSON."""
        return self.result(self.post(path, body))

    def create(self, rank: int = 4, seed: int = 0, **config: bool) -> str:
        body = {"session_id": self.session, "model_seq_id": self.models, "base_model": "base"}
        self.models += 1
        config = {"train_unembed": False, **config}
        return self.call(
            "create_model", body | {"lora_config": {"rank": rank, "seed": seed, **config}}
        )["model_id"]

    def forward(self, model_id: str, data: Sequence[tuple[list[int], dict]], *args, **options):
        """Return the loss and the log-probabilities of each datum, or the error."""
        body = forward_request(model_id, data, *args, **options)
        status, _, content = self.server.request("POST", "/api/v1/forward_backward", body, PROTO)
        answer = json.loads(content)
        assert status == 200, answer
        result = self.result(answer)
        if isinstance(result, dict):
            return result["error"], result["category"]

        output = MESSAGES.ForwardBackwardOutput.FromString(result)
        (metric,) = output.metrics
        arrays = [each.fields[0].value for each in output.loss_fn_outputs]
        return metric.value, [np.frombuffer(array.data, np.float32) for array in arrays]

    def step(self, model_id: str, **adam: float) -> dict:
        return self.call("optim_step", {"model_id": model_id, "adam_params": ADAM | adam})

    def sample(self, session: str, prompt: list[int], count: int = 1, **options):
        """Return the message with the sampled sequences."""
        params = {"max_tokens": 6, "temperature": 0, **options.pop("params", {})}
        body = {"sampling_session_id": session, "prompt": {"chunks": [{"tokens": prompt}]}}
        body |= {"num_samples": count, "sampling_params": params, **options}
        result = self.call("asample", body)
        if isinstance(result, dict):
            return result
        return MESSAGES.SampleResponse.FromString(result)

    def session_on(self, path: str | None = None) -> str:
        """Return a new sampling session, on the base or on a saved model."""
        body = {"session_id": self.session, "sampling_session_seq_id": 0}
        body |= {"model_path": path} if path else {"base_model": "base"}
        return self.post("create_sampling_session", body)["sampling_session_id"]


def likelihoods(base, tokens: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, by the whole model."""
    logits = base.model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(scores, mx.array(tokens[1:])[:, None], axis=-1)[:, 0])


def sample_body(session: str) -> dict:
    prompt = {"chunks": [{"tokens": [1, 2]}]}
    return {"sampling_session_id": session, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
