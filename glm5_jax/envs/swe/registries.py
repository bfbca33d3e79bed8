"""Downloads archives of sources from registries by their clients: Debian by apt-get, npm by npm.

    debian:PACKAGE=VERSION/FILE     file of a source package
    npm:NAME@VERSION                archive of a package

Nothing that is downloaded runs. apt uses the machine's mirrors with lists of its own, so that neither the sources of apt nor
the installed packages change.
"""

import os
import pathlib
import shutil
import tempfile

from glm5_jax.runtime.process import run_program

_TIMEOUT_S = 300.0


def download(url: str, place: pathlib.Path) -> None:
    """Downloads an archive into a file, as `fetch.Download`. Raises OSError."""
    registry, _, name = url.partition(":")
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".unfinished-") as folder:
        if registry == "debian":
            file = _fetch_debian(name, pathlib.Path(folder), place.parent / ".apt")
        elif registry == "npm":
            file = _fetch_npm(name, pathlib.Path(folder))
        else:
            raise OSError(f"registry {registry!r} is not known; use debian or npm")
        os.replace(file, place)


def _fetch_debian(name: str, folder: pathlib.Path, lists: pathlib.Path) -> pathlib.Path:
    package, _, file = name.partition("/")
    if not (lists / "lists").is_dir():
        _make_lists(lists)
    part = "--tar-only" if ".orig.tar" in file else "--diff-only"
    command = ["apt-get", *_apt_options(lists), "source", "--download-only", part, package]
    run_program(command, timeout_s=_TIMEOUT_S, cwd=folder)
    if not (folder / file).is_file():
        raise FileNotFoundError(f"{package} has no file {file} now")
    return folder / file


def _fetch_npm(name: str, folder: pathlib.Path) -> pathlib.Path:
    command = ["npm", "pack", "--ignore-scripts", name]
    run_program(command, timeout_s=_TIMEOUT_S, cwd=folder)
    return next(folder.glob("*.tgz"))


def _make_lists(place: pathlib.Path) -> None:
    """Downloads the lists of source packages of the machine's mirrors into a folder."""
    (place / "parts").mkdir(parents=True, exist_ok=True)
    for file in pathlib.Path("/etc/apt/sources.list.d").glob("*.sources"):
        text = file.read_text("utf-8", "replace")
        if "debian.org" in text or "Components: main" in text:
            (place / "parts" / file.name).write_text(
                text.replace("Types: deb\n", "Types: deb-src\n")
            )
    main = pathlib.Path("/etc/apt/sources.list")
    lines = main.read_text("utf-8", "replace").split("\n") if main.exists() else []
    sources = [f"deb-src {line[4:]}\n" for line in lines if line.startswith("deb ")]
    (place / "sources.list").write_text("".join(sources))
    (place / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    try:
        run_program(["apt-get", *_apt_options(place), "update"], timeout_s=_TIMEOUT_S, cwd=place)
    except OSError:
        shutil.rmtree(place / "lists")
        raise


def _apt_options(place: pathlib.Path) -> list[str]:
    options = {
        "Dir::Etc::sourcelist": place / "sources.list",
        "Dir::Etc::sourceparts": place / "parts",
        "Dir::State::lists": place / "lists",
        "Dir::Cache": place / "cache",
        "APT::Sandbox::User": "root",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
