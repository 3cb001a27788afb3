"""Packages that SGLang imports but that a CPU engine never calls, as stand-ins: importable, and an error when used.

SGLang imports `sgl_kernel`, `triton` and `torchvision` at start. The first does not import without a GPU driver, the
others are large; for a text model on a CPU none of what they hold is called. Each folder under `stand_ins/` holds a
package of one of these names that calls `stand_in`; `python -m engines.sglang.cpu.absent` prints which of them this
Python lacks, and only those are put on `PYTHONPATH`.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("sgl_kernel", "torchvision", "triton")


class _Named(type):
    """Of classes that stand for whatever a missing module holds. A class can be a base, an annotation, a dict key."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is not available: this is a stand-in on a CPU")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{cls.__module__}.{cls.__name__}", name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__


def _placeholder(module: str, name: str) -> type:
    return _Named(name, (), {"__module__": module})


class StandIn(ModuleType):
    """A module any of whose attributes exists, and raises `NotImplementedError` when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{self.__name__} is a stand-in and has no {name}")
        value = _placeholder(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    """Makes every submodule of one package a stand-in."""

    def __init__(self, package: str, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        self._prefix = f"{package}."
        self._attributes = attributes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._attributes.get(module.__name__, {}))


def stand_in(package: str, version: str, attributes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Turn the package that is being imported, and all its submodules, into stand-ins.

    `attributes`: module name → attributes that are more than placeholders.
    """
    known = attributes or {}
    sys.meta_path.append(_Finder(package, known))
    module = sys.modules[package]
    module.__class__ = StandIn
    vars(module).update({"__version__": version, **known.get(package, {})})


def decorator(*given: Any, **_options: Any) -> Any:
    """Both `@mark` and `@mark(option=…)`: the function stays as it is."""
    if len(given) == 1 and callable(given[0]) and not _options:
        return given[0]
    return _same


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def missing() -> list[str]:
    """Which of the packages that stand-ins exist for do not import in this Python."""
    return [name for name in NAMES if not _imports(name)]


def _imports(name: str) -> bool:
    try:
        import_module(name)
    except Exception:  # noqa: BLE001  a build for other hardware fails in its own way: it cannot be used, is all
        return False
    return True


if __name__ == "__main__":
    json.dump(missing(), sys.stdout)
