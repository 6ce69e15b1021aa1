"""The registry of formats: built-in ones, and formats that packages register by entry point."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from megackpt.backends.base import Backend, Properties
from megackpt.errors import BackendError

ENTRY_POINTS = "megackpt.backends"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """One entry of the registry. ``install``: what the error says if the import fails."""

    name: str
    version: int
    load: Callable[[], type[Backend]]
    install: str

    def kind(self) -> type[Backend]:
        """The class. Raises BackendError, whatever a plug-in raises."""
        try:
            return self.load()
        except BackendError:
            raise
        except ImportError as error:
            raise BackendError(
                f"the format {self.name!r} needs a package that is not installed ({error}): "
                f"{self.install}"
            ) from error
        except (Exception, SystemExit) as error:  # from the code of the plug-in
            raise BackendError(
                f"the format {self.name!r} cannot be imported: {type(error).__name__}: {error}"
            ) from error


def _built_in(name: str, version: int, place: str, needs: str) -> Format:
    load = EntryPoint(name, f"megackpt.{place}", ENTRY_POINTS).load
    return Format(name, version, load, f"pip install {needs}")


# In the order in which they are asked to recognise a directory.
BUILT_IN = (
    _built_in("torch_dist", 1, "backends.torch_dist:TorchDist", "torch"),
    _built_in("safetensors", 1, "backends.safetensors:Safetensors", "numpy"),
    _built_in("orbax", 1, "backends.orbax:Orbax", "tensorstore"),
    _built_in(
        "zarr", 2, "backends.zarr:Zarr", "numcodecs google-crc32c tensorstore zarr"
    ),
    _built_in(
        "torch_checkpointing",
        2,
        "backends.torch_checkpointing:TorchCheckpointing",
        "torch",
    ),
    _built_in("torch", 1, "backends.torch_file:TorchFile", "torch"),
    _built_in("delta", 1, "deltas.delta_format:Delta", "numcodecs"),
    _built_in("deepspeed", 2, "backends.deepspeed:DeepSpeed", "torch"),
)


@functools.cache  # reading the entry points of all packages takes milliseconds
def formats() -> tuple[Format, ...]:
    """Every known format, the built-in ones first. A broken plug-in raises when it is used."""
    reserved = {entry.name for entry in BUILT_IN}
    plugged: dict[tuple[str, int], list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINTS):
        name, _, number = point.name.partition("@")
        if name in reserved:
            logger.warning(
                "the package %s registers a format %r, which is built in: it is ignored "
                "(to use it, pass an object of its class, or call register_default_strategy)",
                _package(point),
                point.name,
            )
            continue
        version = 1
        if number:
            # Version 0 does not exist: its use is an error.
            version = 0
            if number.isdecimal():
                version = int(number)
        plugged.setdefault((name, version), []).append(point)
    found = list(BUILT_IN)
    for (name, version), points in plugged.items():
        found.append(_plug_in(name, version, points))
    return tuple(found)


def _package(point: EntryPoint) -> str:
    if point.dist is None:
        return point.value
    return point.dist.name


def _plug_in(name: str, version: int, points: Sequence[EntryPoint]) -> Format:
    """The format of an entry point ``name`` or ``name@version``."""
    packages = " and ".join(map(_package, points))

    def load() -> type[Backend]:
        where = f"the format {name!r} of {packages} is broken"
        if len(points) > 1:
            raise BackendError(
                f"{where}: all of them register it. Uninstall all but one"
            )
        if not version:
            raise BackendError(
                f"{where}: in the entry point {points[0].name!r} the version after @ is not a "
                "number >= 1"
            )
        kind: object = points[0].load()
        if not isinstance(kind, type) or not issubclass(kind, Backend):
            raise BackendError(
                f"{where}: {points[0].value} is not a subclass of megackpt.backends.base.Backend"
            )
        if inspect.isabstract(kind):
            raise BackendError(
                f"{where}: {kind.__name__} lacks {', '.join(sorted(kind.__abstractmethods__))}"
            )
        properties = getattr(kind, "properties", None)
        if not isinstance(properties, Properties):
            raise BackendError(
                f"{where}: {kind.__name__}.properties is not a Properties, but {properties!r}"
            )
        own = properties.name, properties.version
        if own != (name, version):
            raise BackendError(
                f"{where}: the entry point {points[0].name!r} is of {(name, version)}, and "
                f"{kind.__name__}.properties of {own}: loads would not find its checkpoints"
            )
        if version not in properties.reads:
            raise BackendError(
                f"{where}: {kind.__name__}.properties.reads lacks its own version, {version}"
            )
        return kind

    return Format(name, version, load, f"pip install {packages}")


def kinds(name: str) -> Iterator[type[Backend]]:
    """The classes of this name, the newest version first. Each is imported when it is reached."""
    named = [entry for entry in formats() if entry.name == name]
    if not named:
        known = sorted({entry.name for entry in formats()})
        raise BackendError(f"unknown format {name!r}: known are {', '.join(known)}")
    for entry in sorted(named, key=attrgetter("version"), reverse=True):
        yield entry.kind()


def backend_named(name: str, version: int | None = None, /, **options: Any) -> Backend:
    """The backend of this name that reads this version (None: its newest)."""
    for kind in kinds(name):
        if version is None or version in kind.properties.reads:
            return made(kind, name, options)
    reads = sorted({v for kind in kinds(name) for v in kind.properties.reads})
    raise BackendError(
        f"version {version} of the format {name!r} is not known to this release: it has {reads}"
    )


def made(kind: type[Backend], name: str, options: Mapping[str, Any]) -> Backend:
    try:
        return kind(**options)
    except BackendError:
        raise
    except (Exception, SystemExit) as error:  # from the code of a plug-in
        taken = [word for word in inspect.signature(kind).parameters if word != "self"]
        unknown = [repr(word) for word in options if word not in taken]
        why = str(error)
        if unknown and isinstance(error, TypeError):
            why = f"it has no option {', '.join(unknown)}"
        raise BackendError(
            f"the format {name!r} does not take the options {dict(options)!r}: {why} "
            f"(it takes {', '.join(taken) or 'none'})"
        ) from error
