"""Plug-ins: what other installed packages add by entry points, imported when it is used."""

import functools
import pkgutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from .errors import PackError

T = TypeVar("T")

# By the end of an entry point's group: the setting that names a plug-in, and its name in errors.
FLAGS = {"tasks": "task", "methods": "method", "readers": "model"}
_CALLED = {"tasks": "--task {}", "methods": "--method {}", "readers": "--model: format {}"}


@dataclass(frozen=True)
class Plugin:
    """One name that an installed package adds."""

    kind: str  # the end of its group, mlx_packs.<kind>
    name: str
    code: str  # module:attribute that its entry point names
    package: str
    version: str

    @property
    def label(self) -> str:
        return f"{self.package} {self.version}"

    def load(self, code: str) -> Any:
        """Return what ``module:attribute`` of the package is; it is imported now."""
        try:
            return pkgutil.resolve_name(code)
        except (Exception, SystemExit) as error:  # their code may raise anything
            lines = str(error).strip().splitlines()
            reason = ": ".join([type(error).__name__, *lines[:1]])
            raise self.fault(f"cannot be imported ({reason})") from error

    def facts(self, kind: type[T]) -> T:
        """Return what the entry point names, which must be of a class of ours."""
        facts = self.load(self.code)
        if not isinstance(facts, kind):
            raise self.fault(
                f"names {self.code} for it, which is no {kind.__module__}.{kind.__qualname__}"
            )
        return facts

    def with_methods_of(self, code: str, interface: type) -> Any:
        """Return a class of the package, which must have the public methods of an interface."""
        loaded = self.load(code)

        public = [name for name in dir(interface) if not name.startswith("_")]
        lacking = []
        for name in public:
            if not callable(getattr(interface, name)):
                continue
            method = getattr(loaded, name, None)
            if not callable(method) or getattr(method, "__isabstractmethod__", False):
                lacking.append(name)

        if lacking:
            place = f"{interface.__module__}.{interface.__qualname__}"
            raise self.fault(f"has no {', '.join(lacking)} in {code}, as {place} has")
        return loaded

    def fault(self, what: str) -> PackError:
        """Return the error of a package that is at fault; ``what`` it does follows its name."""
        called = _CALLED[self.kind].format(self.name)
        return PackError(
            f"{called}: the package {self.label} adds it, but {what}. Update the package, or "
            f"remove it: pip uninstall {self.package}.",
            "dependency",
            FLAGS[self.kind],
        )


@functools.cache
def installed(kind: str) -> dict[str, tuple[Plugin, ...]]:
    """Return what installed packages add to a kind, by name; none is imported."""
    names: dict[str, dict[str, Plugin]] = {}
    for distribution in metadata.distributions():
        for plugin in _plugins_of(distribution, kind):
            names.setdefault(plugin.name, {}).setdefault(plugin.package, plugin)

    return {name: tuple(names[name].values()) for name in sorted(names)}


def _plugins_of(distribution: metadata.Distribution, kind: str) -> list[Plugin]:
    """Return what one package adds to a kind; nothing where its metadata is damaged."""
    try:
        entries = [e for e in distribution.entry_points if e.group == f"mlx_packs.{kind}"]
        if not entries:
            return []  # its metadata takes longer to read

        package = distribution.metadata["Name"]
        return [Plugin(kind, e.name, e.value, package, distribution.version) for e in entries]
    except Exception:  # metadata of any package may be damaged
        return []


def find(kind: str, name: str, is_built_in: bool) -> Plugin | None:
    """Return the plug-in of a name, None where it is built in; a PackError if there are several."""
    plugins = installed(kind).get(name, ())
    if is_built_in and plugins:
        raise plugins[0].fault(f"mlx_packs has a {FLAGS[kind]} of this name")
    if len(plugins) > 1:
        raise plugins[0].fault(f"{plugins[1].label} adds it, too")

    return next(iter(plugins), None)
