"""`packs serve`: many packs over one base, for clients of the OpenAI API."""

import json
import logging
import secrets
import socket
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..bases.sentence_config import MODULES
from ..config.choices import TASKS
from ..errors import PackError, flag_of, pip_install
from ..terminal import echo, printable
from . import options
from .options import option
from .output import wants_json
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..learning.folder import LearningFolder
    from ..packs.base import Base
    from ..packs.pack import Pack
    from ..serving.http import ServerSettings
    from ..serving.request import Limits

_OF_TEXT = ("matmul_path", "kv_memory", "prefill_chunk", "max_tokens", "template_kwargs")
_OF_TEXT += ("max_pixels", "allow_urls", "train", "learn")
# What a server answers with: generated text, or what the packs of a task give in its place.
_TEXT = "lm"
_VECTORS = "embedding"
_SERVED = tuple(name for name, facts in TASKS.items() if facts.pack.worker)
_TINKER_KEY = "tml-"
_LEARNED = "learned"  # what versions of the base are served as
_NEEDED = ("starlette", "uvicorn", "pydantic", "llguidance")


_server = partial(option, section="Server")
_memory = partial(option, section="Memory and speed")


@click.command(
    cls=TopicCommand,
    common="model flagged folder task host port api_key max_tokens learn json".split(),
)
@options.model_of_pack
@options.packs("Pack to serve, under the name of its folder or as NAME=PACK.", "[NAME=]PACK")
@_server(
    "--task",
    default="auto",
    type=click.Choice(("auto", _TEXT, *_SERVED)),
    help="Answers of the server: generated text (lm), embeddings (/v1/embeddings) or ranks of "
    "documents (/v1/rerank). auto follows the task of the packs, and without packs the base.",
)
@option(
    "--packs",
    "folder",
    section="Model and data",
    metavar="DIR",
    help="Serve every pack below this folder, and follow it: new, changed and removed packs.",
)
@_server(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on. Any other than 127.0.0.1 exposes the server to the network.",
)
@_server(
    "--port",
    default=8080,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 chooses one that is free.",
)
@_server(
    "--api-key",
    envvar="MLX_PACKS_API_KEY",
    metavar="KEY",
    help="Key that clients must send; better set as MLX_PACKS_API_KEY, which other users cannot "
    "see.",
)
@_server(
    "--no-key",
    is_flag=True,
    help="Ask for no token. Without it and without --api-key, requests that change the server "
    "(packs, feedback, training) must send the token that is printed at the start.",
)
@_memory(
    "--batch-size",
    default=32,
    type=click.IntRange(1, 1024),
    help="Requests that are computed at once.",
)
@_server(
    "--queue",
    default=256,
    type=click.IntRange(1),
    help="Maximum queue length; more requests are rejected with status 429.",
)
@_memory(
    "--matmul-path",
    default="auto",
    type=click.Choice(["auto", "quantized", "dense"]),
    help="How frozen weights are used: quantized, or dequantized once (dense). On CPUs auto is "
    "dense where a quarter of the free memory is enough.",
)
@_memory(
    "--kv-memory",
    metavar="SIZE",
    help="Memory for keys and values, such as 4GB.",
    default_text="half of the memory that the base leaves",
)
@_memory(
    "--prefill-chunk",
    default=512,
    type=click.IntRange(16),
    help="Tokens of a long prompt that are computed between two tokens of other answers.",
)
@option(
    "--max-tokens",
    section="Sampling",
    default=512,
    type=click.IntRange(1),
    help="Default maximum length of an answer, in tokens.",
)
@options.template_kwargs(
    "Variables of the chat template, such as '{\"enable_thinking\": false}', for requests without "
    "chat_template_kwargs of their own."
)
@_server(
    "--timeout",
    default=600.0,
    type=click.FloatRange(1),
    metavar="SECONDS",
    help="Time that a request may take.",
)
@_server(
    "--grace",
    default=10.0,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Time that running requests have to end after Ctrl-C or SIGTERM.",
)
@options.setting("max_pixels", "as all packs were trained, else 1003520", type=click.IntRange(0))
@_server(
    "--allow-urls",
    is_flag=True,
    help="Fetch the images that a request names by an HTTP URL, at most 20 MB each. Clients can "
    "then make this machine fetch any URL that it reaches. By default such a URL is an error.",
)
@_server(
    "--train",
    metavar="DIR",
    help="Let clients of the Tinker SDK train models on the base, and sample from them. Saved "
    "models are packs below this folder, which is made if it is missing.",
)
@_server(
    "--learn",
    metavar="DIR",
    help="Keep chat answers that somebody rates or corrects in this folder, which is made if it is "
    "missing, and serve the version of the first pack that packs learn DIR chose. Without a pack, "
    "the versions of the base are served as learned. README.txt in the folder lists the data.",
)
@options.trust_remote_code
@options.backend
@options.printed_as_json(
    "When the server is ready, print its address, models, token and memory as one line of JSON. "
    "All else goes to stderr."
)
def serve(
    model: str | None,
    packs: tuple[str, ...],
    folder: str | None,
    host: str,
    port: int,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Serve packs over HTTP to clients of the OpenAI API.

    The model of a request names the pack, or is base for the base model without one.
    Requests for different packs are computed in one batch. A page to try them is at /.
    """
    check_installed("serve")

    source_of = click.get_current_context().get_parameter_source
    default = click.core.ParameterSource.DEFAULT
    text_options = [name for name in _OF_TEXT if source_of(name) is not default]
    if settings["train"] is not None:
        _check_training(settings["train"], settings["api_key"])
    if settings["no_key"] and settings["api_key"]:
        raise PackError(
            "--no-key: cannot be combined with --api-key or MLX_PACKS_API_KEY. Leave one out.",
            "conflict",
            "no_key",
        )

    with ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))
        if settings["train"] is not None:
            stack.enter_context(_locked("train", settings["train"], "server"))
        named = _named(packs)
        if settings["learn"] is not None:
            model, named = _as_learned(settings["learn"], model, named)
        watched = _watched(folder)
        base = _load(model, list(named.values()), watched, trust_remote_code)

        task = _served_task(settings.pop("task"), base, named)
        if task != _TEXT and text_options:
            raise PackError(
                f"{flag_of(text_options[0])}: is about generated text, and this server gives "
                "vectors or scores. Leave it out.",
                "conflict",
            )
        _run(base, named, watched, listening, {"host": host, "task": task, **settings})


def _as_learned(
    folder: str, model: str | None, packs: "dict[str, Pack]"
) -> "tuple[str | None, dict[str, Pack]]":
    """Return the base model and the packs to serve, by default from the folder."""
    from ..learning.folder import FACTS, LearningFolder
    from ..packs.compatibility import check_generates

    for pack in list(packs.values())[:1]:
        check_generates(pack)

    path = Path(folder).expanduser()
    if packs or not (path / FACTS).is_file():
        return model, packs

    learned = LearningFolder.at(path)
    pack = learned.pack_of(0)
    if pack is not None:
        packs = {learned.name: pack}
    return model or learned.model, packs


def _served_task(given: str, base: "Base", packs: "dict[str, Pack]") -> str:
    """Return what a server does: as given, else as its packs were trained or its base is made."""
    if base.architecture == "encoder":
        if given not in ("auto", _VECTORS):
            raise PackError(f"--task {given}: {base.name} is an encoder.", "conflict")
        return _VECTORS
    if given != "auto":
        return given

    tasks = [pack._part("objective").get("task") for pack in packs.values()]
    is_embedder = not packs and (base.path / MODULES).is_file()
    served = (task for task in tasks if task in TASKS and TASKS[task].pack.worker)
    return next(served, _VECTORS if is_embedder else _TEXT)


def _check_training(states: str, api_key: str | None) -> None:
    """Raise a PackError if clients of the Tinker protocol could not connect, or save nothing."""
    folder = Path(states).expanduser()
    if folder.exists() and not folder.is_dir():
        raise PackError(f"--train {states}: is a file. Name a folder.", "exists", "train")
    if api_key and not api_key.startswith(_TINKER_KEY):
        raise PackError(
            f"--api-key: must start with {_TINKER_KEY} with --train, since the Tinker SDK sends no "
            "other keys.",
            flag="api_key",
        )


def _locked(setting: str, folder: str, file: str) -> AbstractContextManager[None]:
    """Let no other server write into a folder, which is made if it is missing."""
    from ..files import exclusive_writer, make_folder

    path = Path(folder).expanduser()
    make_folder(path)
    busy = "another server writes there. End it, or name another folder."
    return exclusive_writer(path / file, f"{flag_of(setting)} {folder}: {busy}")


def check_installed(command: str) -> None:
    """Raise a PackError if what a server needs is not installed."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise PackError(
            f"{command}: {missing[0]} is not installed. Run `{pip_install('serve')}`.",
            "dependency",
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise PackError(
            f"--port {port}: {host} cannot be listened on ({error.strerror or error}). "
            "Choose another --port, or 0 for a free one.",
            "busy",
        ) from None


def _named(texts: tuple[str, ...]) -> "dict[str, Pack]":
    """Return packs by name of ``PACK`` and ``NAME=PACK``."""
    from ..packs.pack import Pack
    from ..serving.registry import check_name

    packs: dict[str, Pack] = {}
    for text in texts:
        name, sign, source = text.partition("=")
        folder = Path(text).expanduser()
        if not sign or folder.is_dir():
            source = text
            name = folder.resolve().name if folder.exists() else text

        pack = Pack.open(source)
        check_name(name)
        if name in packs:
            raise PackError(
                f"--pack {text}: '{name}' names another pack already. Give it a name of its own: "
                f"NAME={source}.",
                "conflict",
            )
        packs[name] = pack

    return packs


def _watched(folder: str | None) -> Path | None:
    if folder is None:
        return None
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise PackError(f"--packs {folder}: no such folder.", "not-found", "packs")
    return path


def _load(
    model: str | None, packs: "list[Pack]", folder: Path | None, trust_remote_code: bool
) -> "Base":
    """Load the base that was named, or else the first pack's."""
    from ..packs.folder import list_packs
    from ..packs.pack import Pack

    if not packs and folder is not None:
        entries = [entry for entry in list_packs(folder) if entry["error"] is None]
        packs = [Pack.open(entry["pack"]) for entry in entries[:1]]
        if not packs and model is None:
            raise PackError(f"--packs {folder}: has no pack yet, so name its base: --model MODEL.")

    first = packs[0] if packs else None
    return options.load_base(model, first, trust_remote_code)


def _run(
    base: "Base",
    packs: "dict[str, Pack]",
    folder: Path | None,
    listening: socket.socket,
    given: dict,
) -> None:
    from ..learning.rows import FILES
    from ..memory.matmul_path import generation_path
    from ..runtime import memory_limits
    from ..serving.app import Server, ServerSettings, make_app
    from ..serving.feedback import Learning
    from ..serving.generation import TextWorker
    from ..serving.library import Library
    from ..serving.running import run

    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_Log()])

    task = given["task"]
    if code := TASKS[task].pack.worker:
        worker = TASKS.resolve(task, code)(base, given["batch_size"], given["queue"])
    else:
        path = given["matmul_path"]
        if path == "auto":
            path = generation_path(base.model)
            if path == "transient":  # its modules cannot have the adapters of several packs
                path = "quantized"
        worker = TextWorker(base, _limits(base, given), path)

    library = Library(worker, folder)
    token = ""
    if not given["api_key"] and not given["no_key"]:
        token = _TINKER_KEY + secrets.token_urlsafe(24)
    settings = ServerSettings(
        max_pixels=_max_pixels(given["max_pixels"], packs),
        allow_urls=given["allow_urls"],
        api_key=given["api_key"] or "",
        token=token,
        max_tokens=given["max_tokens"],
        template_kwargs=given["template_kwargs"],
        request_seconds=given["timeout"],
        host=given["host"],
    )

    with memory_limits(), ExitStack() as stack:
        worker.start()
        stack.callback(worker.close, 0.0)
        for name, pack in packs.items():
            library.load(name, pack.path)
        if folder is not None:
            library.scan()
        learning = None
        if given["learn"] is not None:
            opened = _opened(given["learn"], base, packs)
            stack.enter_context(_locked("learn", given["learn"], next(iter(FILES.values()))))
            learning = Learning(opened, library)
            learning.serve_current()
        _announce(worker.registry.names, listening, settings)
        if learning is not None:
            _say(
                f"learning  {learning.folder.name}, version {learning.version} · answers that "
                f"somebody rates are kept in {given['learn']} (see README.txt)"
            )
        training = None
        if given["train"] is not None and task == _TEXT:
            from ..serving.train.service import TrainingService

            _say(f"training  by the Tinker SDK at the same address · saved in {given['train']}")
            states = Path(given["train"]).expanduser()
            training = TrainingService(worker, states, settings)

        app = make_app(Server(worker, library, settings, training, learning))
        run(app, worker, training, given["grace"], listening)


def _opened(folder: str, base: "Base", packs: "dict[str, Pack]") -> "LearningFolder":
    """Return the folder of rated answers of the first pack, or else of the base."""
    from ..learning.folder import LearningFolder

    name, pack = next(iter(packs.items()), (_LEARNED, None))
    return LearningFolder.begin(Path(folder).expanduser(), name, base, pack)


def _max_pixels(given: int | None, packs: "dict[str, Pack]") -> int:
    """Return the limit of images: as given, else as all packs were trained, else the default."""
    from ..config.data import DataConfig

    if given is not None:
        return given
    trained = {pack._part("recipe").get("max_pixels") for pack in packs.values()}
    if len(trained) == 1 and trained != {None}:
        return trained.pop()
    return DataConfig.max_pixels


class _Log(logging.Handler):
    """Writes log records to standard error; records of errors have their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            echo(printable(line), err=True)


def _limits(base: "Base", given: dict) -> "Limits":
    from ..bases.files import context_of
    from ..runtime import mx, total_memory
    from ..serving.request import Limits

    kv_bytes = max(0, total_memory() - mx.get_active_memory()) // 2
    if size := given["kv_memory"]:
        kv_bytes = options.size_of("--kv-memory", size)

    return Limits(
        batch_size=given["batch_size"],
        waiting=given["queue"],
        kv_bytes=kv_bytes,
        prefill_chunk=given["prefill_chunk"],
        context=context_of(base.config),
    )


def _say(text: str) -> None:
    echo(text, err=wants_json())


def _announce(names: list[str], listening: socket.socket, settings: "ServerSettings") -> None:
    from ..runtime import mx
    from ..serving.http import is_loopback

    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{port}"
    page = f"{address}/"
    if settings.token:
        page += f"#token={settings.token}"  # which browsers do not send

    if wants_json():
        report = {"address": address, "models": names, "token": settings.token or None}
        echo(json.dumps({**report, "memory_gb": mx.get_active_memory() / 1e9}))
    _say(f"serving   {', '.join(names)}")
    _say(f"at        {address}/v1 · page {page}")
    if settings.token:
        _say(f"token     {settings.token} · needed to add packs, rate answers and train")

    if not is_loopback(host):
        key = "only changes need the token" if settings.token else "no key is needed"
        if settings.api_key:
            key = "a key is needed"
        _say(
            f"warning   Any machine that reaches {host} can use this server, and {key}; requests "
            "and answers are not encrypted."
        )
