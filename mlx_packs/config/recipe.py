"""The recipe of a run: its configuration, resolved from flags, files and defaults."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

from ..errors import PackError, any_of, flag_of
from ..files import TINY_FOLDER
from .choices import DECODER_TASKS, ENCODER, METHODS, MODELS, task_defaults
from .data import DataConfig
from .external import from_mlx_lm
from .fields import Settings, fields_where, option, read_settings, unknown_setting
from .lora import LoRAConfig
from .optimizer import with_arguments
from .schema import TrainConfig
from .tasks import Phase

ADAPTER_SETTINGS = fields_where(LoRAConfig, method="lora")  # without meaning for method full
DATA_SETTINGS = frozenset({"data", "hf_dataset"})  # which name the examples
S = TypeVar("S", bound=Settings)

_output = partial(option, section="Output")
_data = partial(option, section="Model and data")


@dataclass(frozen=True, repr=False)
class RunOptions(Settings):
    """Settings of a run beside training: its base model, where it writes, what it starts from."""

    model: str = _data(
        "tiny",
        "Base model, as a folder, a GGUF file, a Hugging Face id, a model of Ollama (ollama:NAME), "
        "or 'tiny' (bundled).",
        metavar="MODEL",
        shown_default="tiny for the bundled data, else required",
    )
    out: str | None = _output(
        None,
        "Folder to write the pack to.",
        shown_default="packs/<data>",
        metavar="DIR",
        flags=("--out", "--adapter-path"),
    )
    resume_adapter_file: str | None = option(
        None,
        "Start from the adapters of a pack, or of a file with mlx-lm's names.",
        section="Adapter",
        metavar="PACK",
    )
    report_to: str | None = _output(
        None,
        "Log to tensorboard, wandb or swanlab; several are separated by commas.",
        metavar="NAMES",
    )
    project_name: str | None = _output(None, "Name of the project for --report-to.", metavar="NAME")
    trust_remote_code: bool = _data(
        False, "Allow executing Python code shipped with the model.", flags=("--trust-remote-code",)
    )
    overwrite: bool = _output(
        False,
        "Replace the pack and the run of --out.",
        flags=("--overwrite",),
    )
    seeds: int | None = option(
        None,
        "Train N packs, one after another, with the seeds from --seed on, into --out: seed-0, "
        "seed-1 and so on. Their report, seeds.json, has the mean and standard error of every "
        "number.",
        section="Optimization",
        metavar="N",
        at_least=2,
        at_most=64,  # the standard error is an eighth of the deviation
        memory=True,
    )
    resume: bool = _output(
        False,
        "Continue the run of --out with its original settings; another --iters or --epochs also "
        "changes the learning rate from here on.",
        flags=("--resume",),
    )


@dataclass(frozen=True)
class Recipe:
    """All settings of a run, resolved: what the manifest of its pack records."""

    lora: LoRAConfig = LoRAConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig = DataConfig()
    run: dict = field(default_factory=dict)  # the settings of `RunOptions` that were specified
    # names of the settings that flags and files specify
    specified: frozenset[str] = field(default=frozenset(), compare=False)
    # whether something names the examples, be it the run that is resumed
    names_data: bool = field(default=False, compare=False)

    @property
    def model(self) -> str:
        return self.run.get("model", RunOptions.model)

    def to_json(self) -> dict:
        """Return all settings that have a meaning by name, as `resolve` reads them."""
        unused = set()
        if self.train.trains_base:
            unused.update(ADAPTER_SETTINGS)
        if not self.train.phases:  # an empty list would be a fault
            unused.add("phases")
        if not self.train.task_config:  # as versions before it
            unused.add("task_config")

        settings = {
            **{k: v for k, v in sorted(self.run.items()) if v not in (None, False)},
            **vars(self.data),
            **vars(self.lora),
            **vars(self.train),
            "max_grad_norm": self.train.max_grad_norm or 0.0,  # None would read as its default
            "phases": [phase.to_json() for phase in self.train.phases],
        }
        return {name: value for name, value in settings.items() if name not in unused}


_PARTS = {"lora": LoRAConfig, "train": TrainConfig, "data": DataConfig, "run": RunOptions}
_OWNERS = {f.name: part for part, cls in _PARTS.items() for f in dataclasses.fields(cls)}


_PAIRS = (("alpha", "scale"), ("iters", "epochs"), ("warmup_steps", "warmup_ratio"))
_INSTEAD = (*_PAIRS, *(pair[::-1] for pair in _PAIRS))


def merged(*layers: Mapping, where: str = "") -> dict:
    """Return one flat mapping; later layers override earlier ones, under whatever name either used.

    A schedule as a mapping has a rate and a warm-up, so it overrides both in earlier layers.
    """
    result: dict = {}
    optimizers = [layer["optimizer"] for layer in layers if layer.get("optimizer")]
    for layer in layers:
        flat = with_arguments(from_mlx_lm(layer, where), *optimizers[-1:])
        if isinstance(flat.get("lr_schedule"), Mapping):
            replaced = ("learning_rate", "warmup_steps", "warmup_ratio")
            result = {k: v for k, v in result.items() if k not in replaced}
        for key, other in _INSTEAD:
            if key in flat and other not in flat:
                result.pop(other, None)
        result |= flat

    if "scale" in result:
        result["alpha"] = result.pop("scale") * result.get("rank", LoRAConfig.rank)
    return result


def resolve(
    values: Mapping,
    where: str = "",
    under: Sequence[Mapping] = (),
    defaults: Mapping | None = None,
) -> Recipe:
    """Return the recipe of a flat mapping of keys (ours and mlx-lm's).

    ``values`` are from the file ``where``, or from flags and Python. They override the mappings
    ``under``, from the weakest to the strongest, and these ``defaults``, which do not count as
    specified.

    Raises:
        PackError: a key is unknown, or a value is wrong.
    """
    specified = frozenset(merged(*under, values, where=where))
    flat = merged(defaults or {}, *under, values, where=where)
    names_data = bool(DATA_SETTINGS & flat.keys())

    train = flat.pop("train", None)
    test = flat.pop("test", None)
    if not where and (train is False or (test and not train)):
        raise PackError(
            "--test: without --train, or with 'train: false', nothing would be trained. Use "
            "`packs eval`.",
            "conflict",
        )

    parts: dict[str, dict] = {part: {} for part in _PARTS}
    for key, value in flat.items():
        if key not in _OWNERS:
            raise unknown_setting(key, _OWNERS, where)
        parts[_OWNERS[key]][key] = value

    configs = {part: cls.from_mapping(parts[part], where) for part, cls in _PARTS.items()}
    run = configs.pop("run")
    options = {name: getattr(run, name) for name in parts["run"]}
    return Recipe(**configs, run=options, specified=specified, names_data=names_data)


def resolve_new(values: Mapping, under: Sequence[Mapping] = ()) -> Recipe:
    """Return the recipe of a run that begins; what it does not specify suits the base.

    ``values`` are flags, or settings by name from Python; ``under`` and errors are as of `resolve`.
    """
    specified = merged(*under, values)
    run = RunOptions.from_mapping({k: v for k, v in specified.items() if _OWNERS.get(k) == "run"})
    task = str(specified.get("task", TrainConfig.task))
    method = str(specified.get("method", TrainConfig.method))
    return resolve(values, under=under, defaults=base_defaults(run.model, task, method))


def from_configs(
    lora: LoRAConfig | None,
    train: TrainConfig | None,
    run: dict,
) -> Recipe:
    """Return the recipe of configurations from Python; what they do not specify suits the base.

    ``run`` has settings of `RunOptions`, the model among them.

    Raises:
        PackError: a setting is wrong, or settings exclude each other.
    """
    train = train or TrainConfig()
    specified = {k: v for k, v in vars(train).items() if k in train.specified and v != ()}
    defaults = base_defaults(run["model"], train.task, train.method)
    of_base = merged(defaults, specified)

    names = [name for name in defaults if name in of_base.keys() - train.specified]
    of_train = {name: of_base[name] for name in names if _OWNERS[name] == "train"}
    train = dataclasses.replace(train, **of_train)

    if lora is None:
        of_lora = {name: of_base[name] for name in names if _OWNERS[name] == "lora"}
        lora = LoRAConfig.from_mapping(of_lora)

    recipe = Recipe(lora, train, run=run)
    check_method(recipe)
    return recipe


@cache
def tiny_recipe() -> dict:
    """Return the defaults of the bundled base."""
    return read_settings(TINY_FOLDER / "recipe.yaml")


def base_defaults(model: str, task: str, method: str) -> dict:
    """Return the settings that the bundled base has other defaults of, if the task has none."""
    if model != RunOptions.model or task_defaults(task):
        return {}

    unused = ADAPTER_SETTINGS if method in METHODS and METHODS[method].trains_base else ()
    return {name: value for name, value in tiny_recipe().items() if name not in unused}


def check_method(recipe: Recipe) -> None:
    """Raise a PackError for a setting of adapters with ``method: full``."""
    if not recipe.train.trains_base:
        return
    for name in ADAPTER_SETTINGS:
        if name in recipe.specified or recipe.lora.changed([name]):
            raise PackError(
                f"{flag_of(name)}: is a setting of adapters, and --method full trains none. Leave "
                "it out, or use --method lora.",
                "conflict",
            )


def check_named(recipe: Recipe) -> None:
    """Raise a PackError for a model without examples, or examples without a model.

    The bundled model and the bundled examples are only defaults of each other.
    """
    phases = recipe.train.phases or [Phase()]
    if "model" in recipe.run:
        if recipe.names_data or recipe.model == RunOptions.model or all(p.data for p in phases):
            return
        raise PackError(
            f"--data: name the examples to train {recipe.model} on; the bundled ones are for the "
            "bundled model (--data tiny).",
            flag="data",
        )

    has_own = recipe.data.changed(DATA_SETTINGS) or any(p.data for p in phases)
    if has_own and not recipe.run.get("resume"):
        from ..runtime import host_memory  # an import of MLX, which other runs of this do not need

        names = models_for(host_memory()) if recipe.train.task in DECODER_TASKS else [ENCODER]
        raise PackError(
            f"--model: name the model to train. {any_of(names)} would fit this machine. The "
            "bundled one (--model tiny) only shows how training works.",
            flag="model",
        )


def models_for(memory: int) -> list[str]:
    """Return three models that can be trained in the memory of a machine, the smallest first."""
    fitting = [name for name, gb in MODELS.items() if gb * 1e9 <= memory]
    return fitting[-3:] or [next(iter(MODELS))]
