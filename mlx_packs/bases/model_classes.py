"""The class of a decoder: of mlx-lm, or of mlx-vlm where mlx-lm lacks the model type."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_map

from ..config.choices import package_of
from ..runtime import mx
from .families import facts_of, name_in_text_model

_PARTS = ("text", "vision", "perceiver", "projector", "audio")  # of a config.json, for mlx-vlm
_KEPT = "language_model."


def classes_of(config: Mapping) -> tuple[Callable[[Any], nn.Module], Any]:
    """Return what makes a model of its arguments, and what has their ``from_dict``.

    Raises:
        ValueError: neither package has the model type.
    """
    from mlx_lm.utils import _get_classes

    if text_model := facts_of(config["model_type"]).text_model:
        return _classes_of_text_model(text_model)
    if package_of(config["model_type"]) == "mlx-lm" or find_spec("mlx_vlm") is None:
        return _get_classes(config)
    return _classes_of_mlx_vlm()


def _classes_of_text_model(model_type: str) -> tuple[Callable[[Any], nn.Module], Any]:
    """Return a language model of mlx-lm, whose weights are ``model.text_model`` in the files."""
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes({"model_type": model_type})

    def arguments(config: Mapping) -> Any:
        tied = config.get("tie_word_embeddings", False)
        own = {"tie_word_embeddings": tied, **config["text_config"], "model_type": model_type}
        return arguments_class.from_dict(own)

    def make(arguments: Any) -> nn.Module:
        model = model_class(arguments)
        plain = model.sanitize

        def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
            named = {name_in_text_model(stored): array for stored, array in weights.items()}
            named.pop(None, None)
            return plain(named)

        model.sanitize = sanitize
        return model

    return make, SimpleNamespace(from_dict=arguments)


def _classes_of_mlx_vlm() -> tuple[Callable[[tuple], nn.Module], SimpleNamespace]:
    from mlx_vlm.utils import get_model_type, update_module_configs

    def arguments(config: Mapping) -> tuple:
        family = get_model_type(config)
        if find_spec(f"mlx_vlm.models.{family}") is None:
            raise ValueError(f"Model type {family} not supported by mlx-lm or mlx-vlm")

        module = import_module(f"mlx_vlm.models.{family}")
        complete = {f"{part}_config": {} for part in ("text", "vision", "audio")} | dict(config)

        own = module.ModelConfig.from_dict(complete)
        return family, module.Model, update_module_configs(own, module, complete, _PARTS)

    def make(arguments: tuple) -> nn.Module:
        family, model_class, own = arguments
        whole = model_class(own)
        if not isinstance(whole.get("language_model"), nn.Module):
            raise ValueError(f"Model type {family} not supported: it is no language model")
        return LanguageModel(family, whole)

    return make, SimpleNamespace(from_dict=arguments)


class LanguageModel(nn.Module):
    """The language model of a model of mlx-vlm, called as one of mlx-lm, with mlx-vlm's names.

    ``family`` is a module of mlx_vlm.models. A vision tower of ``whole`` is neither kept nor read.
    """

    def __init__(self, family: str, whole: nn.Module) -> None:
        super().__init__()
        self.family = family
        self.language_model = whole.language_model
        self._to_own_names = getattr(whole, "sanitize", dict)

        for path, module in self.named_modules():
            if path.endswith(".indexer"):
                _stop_gradients(module)

    def __call__(self, inputs: mx.array, cache: Any = None, **arguments: Any) -> mx.array:
        """Map tokens [B, T] to logits [B, T, V]."""
        return self.language_model(inputs, cache=cache, **arguments).logits

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.layers

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights of the language model by the names that it has for them."""
        named = self._to_own_names(weights)
        return {name: array for name, array in named.items() if name.startswith(_KEPT)}

    def make_cache(self) -> list:
        """Return a cache for each block; mlx-lm's where mlx-vlm's is the same."""
        from mlx_lm.models.cache import KVCache, RotatingKVCache

        make = getattr(self.language_model, "make_cache", None)
        if make is None:
            return [KVCache() for _ in self.layers]

        def own(cache: Any) -> Any:
            kind = type(cache).__name__
            if kind == "KVCache":
                return KVCache()
            if kind == "RotatingKVCache":
                return RotatingKVCache(cache.max_size, cache.keep)
            return cache

        return [own(cache) for cache in make()]


def _stop_gradients(module: nn.Module) -> None:
    """Let no gradient pass through a module that chooses keys: MLX raises for those of indices."""
    kind = type(module)  # which is changed, as mlx-lm does to recompute, so that names stay

    def call(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return tree_map(_stopped, kind.__call__(self, *inputs, **named))

    def select(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return kind.select(self, *map(_stopped, inputs), **named)

    methods = {"__call__": call, "select": select}
    own = {name: method for name, method in methods.items() if hasattr(kind, name)}
    module.__class__ = type(kind.__name__, (kind,), own)


def _stopped(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.stop_gradient(value)
    return value
