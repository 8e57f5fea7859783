"""The Tinker protocol on a server's port: its routes below ``/api/v1``, sessions and results."""

import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import PackError
from ..fields import not_found
from ..generation import TextWorker
from ..http import (
    BODY_BYTES,
    Handler,
    ServerSettings,
    error_response,
    failure,
    is_loopback,
    public_message,
    read_body,
)
from ..registry import BASE_NAME
from .models import Models, TrainedModel
from .protocol import (
    CreateModelBody,
    CreateSessionBody,
    LoadWeightsBody,
    ModelBody,
    OptimStepBody,
    ResultBody,
    SampleBody,
    SamplingSessionBody,
    SaveForSamplerBody,
    SaveWeightsBody,
    SessionBody,
)
from .results import Result, Results
from .rows import MEDIA_TYPE, MOST_DATUMS, read_forward_request
from .sampling import Samplers
from .states import SCHEME, find_saved, remove_saved

_POLL_SECONDS = 25.0  # that a client waits for a result; its own limit is 45
_CONFIG = {
    "parallel_fwdbwd_chunks": False,  # they arrive in their order
    "use_pyqwest_transport": False,  # with it a client's process may abort at its end
    "fwdbwd_max_chunk_len": MOST_DATUMS,
    "fwdbwd_max_chunk_bytes_count": BODY_BYTES // 2,
}
_FIRST = "first"  # in place of the number of the request that makes a model


class TrainingService:
    """Sessions of clients, their models, which are saved in ``folder``, and their samplers.

    The ``results`` of requests end while the port is open, so that clients can fetch theirs.
    """

    def __init__(self, generator: TextWorker, folder: Path, settings: ServerSettings) -> None:
        self._generator = generator
        self._folder = folder
        self._settings = settings
        self._models = Models(generator, folder)
        self._samplers = Samplers(generator, settings)
        self.results = Results()
        self._sessions: set[str] = set()

    def routes(self) -> dict[tuple[str, str], Handler]:
        handlers: dict[tuple[str, str], Handler] = {
            ("GET", "healthz"): _constant({"status": "ok"}),
            ("GET", "get_server_capabilities"): self.capabilities,
            ("GET", "samplers/{id:path}"): self.sampling_session,
            ("POST", "client/config"): _constant(_CONFIG),
            ("POST", "client/dynamic_config"): _constant({"sample_cancel_enabled": True}),
            # What a client reports of itself is neither read nor kept.
            ("POST", "telemetry"): _constant({"status": "accepted"}),
            ("POST", "create_session"): self.create_session,
            ("POST", "session_heartbeat"): self.heartbeat,
            ("POST", "sessions/{id}/finish"): self.finish_session,
            ("POST", "create_model"): self.create_model,
            ("POST", "get_info"): self.get_info,
            ("POST", "unload_model"): self.unload_model,
            ("POST", "forward_backward"): self.forward_backward,
            ("POST", "optim_step"): self.optim_step,
            ("POST", "save_weights"): self.save_weights,
            ("POST", "save_weights_for_sampler"): self.save_for_sampler,
            ("POST", "load_weights"): self.load_weights,
            ("POST", "create_sampling_session"): self.create_sampling_session,
            ("POST", "asample"): self.sample,
            ("POST", "retrieve_future"): self.retrieve,
            ("POST", "cancel_future"): self.cancel,
            ("DELETE", "training_runs/{id}/checkpoints/{kind}/{name}"): self.delete_checkpoint,
        }

        return {
            (method, f"/api/v1/{path}"): _protocol(handler)
            for (method, path), handler in handlers.items()
        }

    @property
    def load(self) -> dict[str, Any]:
        """The models that are loaded, requests that wait for passes, and passes so far."""
        return {
            "models": len(self._models.all),
            "waiting": self._models.waiting,
            "passes": self._models.passes,
        }

    # The service and sessions

    async def capabilities(self, _: Request) -> Response:
        model = {
            "model_name": self._sdk_name,
            "max_context_length": self._generator.limits.context,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def create_session(self, _: Request, __: CreateSessionBody) -> Response:
        session_id = uuid.uuid4().hex[:16]
        self._sessions.add(session_id)
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, _: Request, body: SessionBody) -> Response:
        if body.session_id not in self._sessions:
            return JSONResponse({"error": "This session has ended."}, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        """End a session; its models are unloaded, and what was not saved of them is gone."""
        session_id = request.path_params["id"]
        self._check_session(session_id)
        self._sessions.remove(session_id)

        for model in self._models.all:
            if model.session_id == session_id:
                await self._unload(model)
        return JSONResponse({})

    # Models

    async def create_model(self, _: Request, body: CreateModelBody) -> Response:
        self._check_session(body.session_id)
        self._check_base(body.base_model)
        model_id = _model_id(body.session_id, body.model_seq_id)

        work = partial(self._models.create, model_id, body.session_id, body.lora_config)
        done = _after(work, type="create_model", model_id=model_id)
        return self._started(done, model_id, (model_id, _FIRST))

    async def get_info(self, _: Request, body: ModelBody) -> Response:
        model = self._models.find(body.model_id)

        base = self._generator.base
        name = self._sdk_name
        data = {"arch": base.config["model_type"], "tokenizer_id": name}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_name": base.public_name,
                "model_data": {"model_name": name, **data},
                "is_lora": True,
                "lora_rank": model.rank,
            }
        )

    async def unload_model(self, _: Request, body: ModelBody) -> Response:
        model = self._models.find(body.model_id)

        done = _after(partial(self._unload, model), type="unload_model", model_id=model.id)
        return self._started(done, model.id)

    async def _unload(self, model: TrainedModel) -> None:
        await self._models.unload(model)
        await self._samplers.forget_steps(model.id)

    # Training

    async def forward_backward(self, request: Request) -> Response:
        content = await read_body(request, MEDIA_TYPE)
        body = await run_in_threadpool(read_forward_request, content)
        model = self._models.find(body.model_id)
        return self._started(self._models.forward(model, body), model.id, (model.id, body.seq_id))

    async def optim_step(self, _: Request, body: OptimStepBody) -> Response:
        model = self._models.find(body.model_id)

        async def update() -> Result:
            norm = await self._models.update(model, body.adam_params)
            return {"metrics": {"grad_norm": norm}}

        return self._started(update(), model.id, (model.id, body.seq_id))

    # Saved models

    async def save_weights(self, _: Request, body: SaveWeightsBody) -> Response:
        model = self._models.find(body.model_id)
        name = body.path or time.strftime("%Y%m%d-%H%M%S")
        facts = {"user_metadata": body.user_metadata}

        async def save() -> Result:
            saved = await self._models.save(model, "weights", name, facts, body.overwrite)
            return {"type": "save_weights", "path": saved.uri}

        return self._started(save(), model.id, (model.id, body.seq_id))

    async def save_for_sampler(self, _: Request, body: SaveForSamplerBody) -> Response:
        """Save a model for sampling; without a name it stays in memory."""
        model = self._models.find(body.model_id)
        name = body.path
        facts = {"user_metadata": body.user_metadata}

        async def save() -> Result:
            if name is not None:
                saved = await self._models.save(model, "sampler_weights", name, facts)
                return {"type": "save_weights_for_sampler", "path": saved.uri}

            number = body.sampling_session_seq_id or 0
            async with model.lock:  # an unload finds the step
                pack = await self._models.pack(model)
                session_id = await self._samplers.of_step(model.id, pack, number)
            return {"type": "save_weights_for_sampler", "sampling_session_id": session_id}

        return self._started(save(), model.id, (model.id, body.seq_id))

    async def load_weights(self, _: Request, body: LoadWeightsBody) -> Response:
        saved = find_saved(self._folder, body.path)
        if body.base_model is not None:
            self._check_base(body.base_model)

        self._check_session(body.session_id)
        model_id = _model_id(body.session_id, body.model_seq_id)

        work = partial(self._models.load, model_id, body.session_id, saved, body.optimizer)
        done = _after(work, type="load_weights", path=saved.uri, model_id=model_id)
        return self._started(done, model_id, (model_id, _FIRST))

    async def delete_checkpoint(self, request: Request) -> Response:
        params = request.path_params
        uri = f"{SCHEME}{params['id']}/{params['kind']}/{params['name']}"
        remove_saved(find_saved(self._folder, uri))
        return Response(status_code=204)

    # Sampling

    async def create_sampling_session(self, _: Request, body: SamplingSessionBody) -> Response:
        self._check_session(body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)

        if body.model_path is None:
            session_id = self._samplers.of_base()
        else:
            session_id = await self._samplers.of_saved(find_saved(self._folder, body.model_path))
        facts = {"type": "create_sampling_session", "sampling_session_id": session_id}
        return JSONResponse(facts)

    async def sampling_session(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        _, uri = self._samplers.find(session_id)
        facts = {"sampler_id": session_id, "base_model": self._sdk_name}
        return JSONResponse({**facts, "model_path": uri})

    async def sample(self, _: Request, body: SampleBody) -> Response:
        name, _ = self._samplers.find(body.sampling_session_id)
        self._samplers.check(body)
        key = (body.sampling_session_id, body.seq_id)
        return self._started(self._samplers.sample(body, name), None, key, body.num_samples)

    # Results

    async def retrieve(self, _: Request, body: ResultBody) -> Response:
        """Return the result of a request, or after a while that it is still computed."""
        try:
            result = await self.results.wait(body.request_id, _POLL_SECONDS)
        except KeyError:
            return JSONResponse({"error": "The server knows nothing of this request."}, 410)

        if result is None:
            again = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(again, 408)

        if isinstance(result, bytes):
            return Response(result, media_type=MEDIA_TYPE)
        return JSONResponse(result)

    async def cancel(self, _: Request, body: ResultBody) -> Response:
        self.results.cancel(body.request_id)
        return Response(status_code=204)

    def _started(
        self,
        work: Coroutine[Any, Any, Result],
        model_id: str | None,
        key: tuple[str, object] | None = None,
        samples: int = 0,
    ) -> Response:
        """Begin a request and return its id, or the id of the same request sent before.

        ``key`` has whose request it is and its number there, from 1; 0 and None are no number.
        """
        request_id = self.results.known(key) if key is not None and key[1] else None

        if request_id is not None:
            work.close()
        elif self.results.running >= self._generator.limits.waiting:
            work.close()
            self._generator.check_queue(True, f"{self.results.running} requests")
        else:
            request_id = self.results.start(work, key)

        answer: dict[str, Any] = {"request_id": request_id, "model_id": model_id}
        if samples:
            answer["sample_sequence_ids"] = [f"{request_id}-{i}" for i in range(samples)]
        return JSONResponse(answer)

    # Parts

    @property
    def _sdk_name(self) -> str:
        """The name of the base by which the SDK opens its tokenizer: on this machine its folder.

        Of a name with two slashes the SDK leaves out the last part, and of any what follows a ":".
        """
        base = self._generator.base
        path = str(base.path.resolve())
        if ":" in path or not is_loopback(self._settings.host):
            return base.public_name
        return path if path.count("/") != 2 else f"{path}/."

    def _check_session(self, session_id: str) -> None:
        if session_id not in self._sessions:
            raise not_found("session_id", session_id, "is not known here. Make a new client.")

    def _check_base(self, name: str) -> None:
        base = self._generator.base
        if name not in (BASE_NAME, base.name, base.public_name, self._sdk_name):
            reason = f"is not the base of this server, which is {base.public_name}."
            raise not_found("base_model", name, reason)


async def _after(work: Callable[[], Awaitable[None]], **facts: str) -> Result:
    """Do work, whose result is some facts."""
    await work()
    return facts


def _constant(content: Mapping[str, Any]) -> Handler:
    async def answer(_: Request) -> Response:
        return JSONResponse(content)

    return answer


def _model_id(session_id: str, number: int) -> str:
    """Return the id of a model, which clients know how to make, too."""
    return f"{session_id}:train:{number}"


def _protocol(handler: Handler) -> Handler:
    """Return a handler whose errors clients of the protocol do not take for passing ones.

    They send a request again after statuses 409 and 503, for five minutes.
    """

    @wraps(handler)
    async def answered(*arguments: Any) -> Response:
        try:
            return await handler(*arguments)
        except PackError as error:
            if error.code == "interrupted":
                return failure(410, public_message(error), error.code)
            response = error_response(error)
            if response.status_code == 409:
                response.status_code = 400
            return response

    return answered
