"""Stores layers of sandboxes in a folder, by the digest of what they were made from, and makes the layers of tools.

    STORE/sha256-<digest>/layer/        files of the layer
    STORE/sha256-<digest>/record.json   what was run to make it, with exit codes and seconds

A layer appears under its name only when it is complete, so a killed builder leaves nothing that is used. Layers of tools
hold what programs of this machine need beside /usr: their folders of /etc, Node modules, and pytest.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from glm5_jax.envs.sandbox import HOST, Layer, Sandbox, SandboxConfig
from glm5_jax.envs.swe.recipes.plan import WORKDIR, RecipeError
from glm5_jax.envs.swe.recipes.python import PYTEST_FOLDER
from glm5_jax.envs.terminal.image import copy_distributions

NODE_MODULES = "/tools/node/node_modules"
_DPKG_STATUS = pathlib.Path("/var/lib/dpkg/status")
# Folders of /etc that programs of a language read.
_ETC = {"php": ("php",), "java": ("maven", "java-17-openjdk", "java-21-openjdk")}
_PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")

# Fills a sandbox and returns the record of what it ran.
FillLayer = Callable[[Sandbox], Awaitable[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweLimits:
    """Limits of the sandboxes in which projects are built and tested. Raises ValueError for values out of range.

    Attributes:
      memory_bytes, disk_bytes: memory, and written files, in bytes.
      cpus: number of processors.
      max_processes: maximum number of processes and threads.
      build_timeout_s: time limit of one command that sets up or rebuilds, in seconds.
      test_timeout_s: maximum time of one run of the tests, in seconds; attempts have a limit from gold's times too.
    """

    memory_bytes: int = 3 << 30
    disk_bytes: int = 2 << 30
    cpus: float = 2.0
    max_processes: int = 512
    build_timeout_s: float = 1800.0
    test_timeout_s: float = 1800.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"{field.name} is {getattr(self, field.name)!r}; use a number above 0"
                )

    def sandbox(self, base: Layer, **changes: Any) -> SandboxConfig:
        """Returns the options of a sandbox over a layer."""
        return SandboxConfig(
            base=base,
            workdir=WORKDIR,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            max_processes=self.max_processes,
            max_files=400_000,
            output_bytes=16 << 20,
            timeout_s=self.build_timeout_s,
            **{"cpus": self.cpus, **changes},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """Layer of the store.

    Attributes:
      digest: `sha256:` and the digest of the inputs.
      layer: files to start sandboxes from.
      record: what was run to make it.
    """

    digest: str
    layer: Layer
    record: Any = None


HOST_LAYER = StoredLayer(digest="host", layer=HOST)


class LayerStore:
    """Store of layers in a folder.

    Args:
      folder: folder of the store; it is made if it is missing.
      limits: limits of the sandboxes in which layers are made.
    """

    def __init__(self, folder: str | os.PathLike, limits: SweLimits = SweLimits()):
        self.folder = pathlib.Path(folder).absolute()  # sandboxes start in other folders
        self.limits = limits
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob(".sha256-*"):  # of builders that were killed
            if not pathlib.Path("/proc", unfinished.suffix[1:]).exists():
                shutil.rmtree(unfinished, ignore_errors=True)
        self._locks: dict[str, asyncio.Lock] = {}

    async def layer(self, below: StoredLayer, inputs: Any, fill: FillLayer) -> StoredLayer:
        """Returns the layer that `fill` makes over another; one of equal inputs is made once.

        inputs: everything that decides what `fill` writes, as data of JSON.
        """
        text = json.dumps([below.digest, inputs], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        async with self._locks.setdefault(key, asyncio.Lock()):
            place = self.folder / f"sha256-{key}"
            if not (place / "record.json").exists():
                await self._make(place, below, fill)
            record = json.loads((place / "record.json").read_text("utf-8"))
        layer = Layer((place / "layer", *below.layer.folders), below.layer.host_programs)
        return StoredLayer(digest=f"sha256:{key}", layer=layer, record=record)

    def find(self, digest: str, below: StoredLayer) -> StoredLayer | None:
        """Returns a layer of the store by its digest; None if it was not made here."""
        place = self.folder / digest.replace(":", "-")
        if not digest.startswith("sha256:") or not (place / "record.json").exists():
            return None
        layer = Layer((place / "layer", *below.layer.folders), below.layer.host_programs)
        record = json.loads((place / "record.json").read_text("utf-8"))
        return StoredLayer(digest=digest, layer=layer, record=record)

    async def _make(self, place: pathlib.Path, below: StoredLayer, fill: FillLayer) -> None:
        unfinished = place.with_name(f".{place.name}.{os.getpid()}")
        await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
        (unfinished / "layer").mkdir(parents=True)
        try:
            async with Sandbox(self.limits.sandbox(below.layer)) as box:
                record = await fill(box)
                await box.snapshot(unfinished / "layer")
            (unfinished / "record.json").write_text(json.dumps(record), "utf-8")
            try:
                os.replace(unfinished, place)
            except OSError:  # another process has finished the same layer
                if not (place / "record.json").exists():
                    raise
        finally:
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)


async def tools_layer(
    store: LayerStore, language: str, node_modules: pathlib.Path | None = None
) -> StoredLayer:
    """Returns the layer with the tools of a language.

    Raises RecipeError if Node modules are needed and `node_modules` is None.
    """
    if language in _ETC:
        folders = [name for name in _ETC[language] if pathlib.Path("/etc", name).is_dir()]

        async def fill(box: Sandbox) -> list[str]:
            for name in folders:
                await box.put(f"/etc/{name}", pathlib.Path("/etc", name), user="root")
            return folders

        return await store.layer(HOST_LAYER, ["etc", folders, _versions_of(language)], fill)
    if language in ("javascript", "typescript"):
        return await _node_layer(store, node_modules)
    if language == "python":
        return await _python_layer(store)
    return HOST_LAYER


async def _node_layer(store: LayerStore, folder: pathlib.Path | None) -> StoredLayer:
    if folder is None or not folder.is_dir():
        raise RecipeError(
            f"node_modules is {folder}; give a folder in which npm installed mocha, jest, vitest and typescript"
        )

    async def fill(box: Sandbox) -> dict[str, str]:
        await box.put(NODE_MODULES, folder, user="root", mode=0o755)
        return npm_versions(folder)

    return await store.layer(HOST_LAYER, ["node", npm_versions(folder)], fill)


async def _python_layer(store: LayerStore) -> StoredLayer:
    async def fill(box: Sandbox) -> list[str]:
        with copy_distributions(_PYTEST) as folder:
            await box.put(PYTEST_FOLDER, folder, user="root", mode=0o755)
        # Leaves compiled modules, which saves a second of each run.
        await box.exec(["python3", "-m", "compileall", "-q", PYTEST_FOLDER], user="root")
        return list(_PYTEST)

    return await store.layer(HOST_LAYER, ["python", _PYTEST], fill)


def npm_versions(folder: pathlib.Path) -> dict[str, str]:
    """Returns the versions of the packages in a folder of Node modules, by name."""
    versions = {}
    for file in sorted([*folder.glob("*/package.json"), *folder.glob("@*/*/package.json")]):
        try:
            versions[str(file.parent.relative_to(folder))] = str(
                json.loads(file.read_text("utf-8"))["version"]
            )
        except (ValueError, KeyError):
            continue
    return versions


def installed_versions(names: Sequence[str]) -> Mapping[str, str]:
    """Returns the versions of Debian packages that are installed on this machine, by name."""
    versions: dict[str, str] = {}
    text = _DPKG_STATUS.read_text("utf-8", "replace") if _DPKG_STATUS.exists() else ""
    for paragraph in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.split("\n") if ": " in line[:40])
        if fields.get("Package") in names and fields.get("Status", "").endswith(" installed"):
            versions[fields["Package"]] = fields.get("Version", "")
    return versions


def _versions_of(language: str) -> dict[str, str]:
    names = {"php": ("php-cli", "phpunit"), "java": ("openjdk-17-jdk-headless", "junit5")}
    return dict(installed_versions(names.get(language, ())))
