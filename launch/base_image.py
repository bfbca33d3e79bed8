"""Builds a root file system from packages of Debian or Ubuntu, to use as a base image of terminal tasks.

    python -m launch.base_image ROOT [--image=ubuntu-24-04]

ROOT is a new folder. --image is one of

  ubuntu-24-04  Terminal-Bench's base image of that name; it can stand for debian and ubuntu too
  python-3-13   Terminal-Bench's base image of that name; it can stand for python too. It has `python`, and pip may
                install into it. The suite decides the version: 3.11 in bookworm, 3.12 in noble, 3.13 in trixie

Packages come from the sources of this machine's apt. --suite=trixie selects another suite, from --mirror=URL or the
default of mmdebstrap. Ubuntu's suites need --components=main,universe. --keyring=FILE verifies a suite if this machine has
no key of that distribution. --packages=a,b adds packages. The command needs root, mmdebstrap (apt-get install mmdebstrap),
2 GB of disk and one to three minutes. Then

    python -m launch.run --experiment=experiments/evaluate.py:harbor --experiment.tasks=DIR --experiment.agent=nop \\
      --experiment.images='{"ghcr.io/laude-institute/t-bench/ubuntu-24-04": "ROOT", "ubuntu": "ROOT"}' \\
      --experiment.build.network=True --workdir=OUT

builds the tasks in DIR on it. The root file system gets this machine's pip settings, without local package folders, and
the certificates that this machine trusts. A user's error is one line and exit code 2, a download error exit code 1.
"""

import ast
import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from experiments.arguments import Parser
from glm5_jax.runtime.console import ProgressBar
from glm5_jax.runtime.terminal import make_printable, print_error

MIN_FREE_BYTES = 2 << 30
BUNDLE = pathlib.Path("etc/ssl/certs/ca-certificates.crt")
# Texts of mmdebstrap's messages at the start of each phase. The last phase is this module's.
PHASES = (
    "running apt-get update",
    "downloading packages",
    "extracting archives",
    "installing essential packages",
    "installing remaining packages",
    "cleaning package lists",
    "setting up",
)
_ERROR_LINES = 3  # number of mmdebstrap's last messages in an error
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n", re.DOTALL)
# Like Docker's images: without package files after installation, and without manuals.
_APT_SETTINGS = 'APT::Keep-Downloaded-Packages "false";\nAcquire::Languages "none";\n'
_DPKG_OPTIONS = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
)


@dataclasses.dataclass(frozen=True)
class Contents:
    """Contents of a base image.

    Attributes:
      packages: names of packages, in addition to the essential ones.
      names: names of images that it can stand for.
      is_python: whether `python` and pip are those of Docker's python images.
    """

    packages: tuple[str, ...]
    names: tuple[str, ...]
    is_python: bool = False


_TERMINAL_BENCH = "ghcr.io/laude-institute/t-bench"
_COMMON = ("asciinema", "ca-certificates", "curl", "git", "procps", "tmux")
# ubuntu-24-04 has no pip: tasks install it, with the compiler that Debian recommends for it.
IMAGES = {
    "ubuntu-24-04": Contents((*_COMMON, "python3"), (f"{_TERMINAL_BENCH}/ubuntu-24-04", "ubuntu")),
    "python-3-13": Contents(
        (*_COMMON, "python-is-python3", "python3", "python3-pip", "python3-venv"),
        (f"{_TERMINAL_BENCH}/python-3-13", "python"),
        is_python=True,
    ),
}


class DownloadError(RuntimeError):
    """Raised if mmdebstrap fails."""


def main(arguments: Sequence[str]) -> int:
    """Builds the root file system and returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        check_machine(options.root)
        make_root(options)
    except (ValueError, DownloadError) as error:
        print_error(error)
        return 2 if isinstance(error, ValueError) else 1
    print(make_printable(f"made {options.root}: {_description(options.root)}"))
    table = json.dumps(dict.fromkeys(IMAGES[options.image].names, str(options.root)))
    print(f"use it with --experiment.images='{table}'")
    return 0


def _parser() -> Parser:
    parser = Parser("launch.base_image", __doc__ or "")
    parser.add_argument("root", type=lambda text: pathlib.Path(text).absolute())
    parser.add_argument("--image", choices=sorted(IMAGES), default="ubuntu-24-04")
    parser.add_argument("--suite")
    parser.add_argument("--mirror")
    parser.add_argument("--components", type=_names, default=("main",))
    parser.add_argument("--keyring", type=pathlib.Path)
    parser.add_argument("--packages", type=_names, default=())
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def check_machine(root: pathlib.Path) -> None:
    """Raises ValueError if no root file system can be made at a path of this machine."""
    if root.exists():
        raise ValueError(f"{root} exists; give a new folder, or remove it")
    if not root.parent.is_dir():
        raise ValueError(f"no folder {root.parent} for {root.name}; make it first")
    if os.getuid() != 0:
        raise ValueError("it needs root: files of a root file system have owners; run it with sudo")
    for program, package in (("mmdebstrap", "mmdebstrap"), ("apt-get", "apt")):
        if shutil.which(program) is None:
            raise ValueError(f"{program} is not installed; on Debian: apt-get install {package}")
    free = shutil.disk_usage(root.parent).free
    if free < MIN_FREE_BYTES:
        raise ValueError(
            f"{root.parent} has {free >> 20} MiB free; {MIN_FREE_BYTES >> 20} MiB are needed"
        )


def make_root(options) -> None:
    """Makes the root file system of the options. After a failure nothing is left of it.

    Raises ValueError for contradicting options, DownloadError if packages cannot be downloaded.
    """
    image = IMAGES[options.image]
    partial = options.root.with_name(options.root.name + ".partial")
    command = bootstrap_command(options, (*image.packages, *options.packages), partial)
    try:
        with ProgressBar(len(PHASES), unit="phase") as bar:
            _run_bootstrap(command, bar)
            bar.update(len(PHASES) - 1, PHASES[-1])
            set_up(partial, image, pip_settings(_output("pip", "config", "list")))
            partial.rename(options.root)
            bar.update(len(PHASES), "done")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def bootstrap_command(options, packages: Sequence[str], folder: pathlib.Path) -> list[str]:
    """Returns the command of mmdebstrap that makes the folder."""
    if options.suite is None:
        if options.mirror is not None:
            raise ValueError("--mirror is given without --suite; give both")
        suite, sources = machine_sources()
    else:
        suite, sources = options.suite, [options.mirror] if options.mirror else []
    return [
        *("mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"),
        f"--include={','.join(packages)}",
        f"--components={','.join(options.components)}",
        *(f"--aptopt={option}" for option in _proxies()),
        *(f"--dpkgopt={option}" for option in _DPKG_OPTIONS),
        *([f"--keyring={options.keyring}"] if options.keyring else []),
        *(suite, str(folder), *sources),
    ]


def machine_sources() -> tuple[str, list[str]]:
    """Returns the suite of the running system, and the lines of its apt sources.

    Raises ValueError if the system is not Debian or Ubuntu, or apt has no sources of its suite.
    """
    release = pathlib.Path("/etc/os-release")
    text = release.read_text() if release.exists() else ""
    codename = re.search(r'(?m)^VERSION_CODENAME="?([a-z]+)"?$', text)
    if codename is None:
        raise ValueError("this machine is not Debian or Ubuntu; give --suite and --mirror")
    suite = codename[1]
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
    targets = _output("apt-get", "indextargets", "--format", form, "Created-By: Packages")
    lines = source_lines(targets, suite)
    if not lines:
        raise ValueError(f"apt has no sources of {suite}; give --suite and --mirror")
    return suite, lines


def source_lines(targets: str, suite: str) -> list[str]:
    """Returns a line for each repository of the suite, its updates and security fixes in a list of apt's targets."""
    components: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for line in targets.splitlines():
        uri, release, component, origin = line.split(" ", 3)
        if origin in ("Debian", "Ubuntu") and release.split("-")[0] == suite:
            components[uri, release].append(component)
    return [f"deb {uri} {release} {' '.join(dict.fromkeys(names))}" for (uri, release), names in components.items()]  # fmt: skip


def _proxies() -> list[str]:
    """Returns apt's settings of proxies on this machine."""
    dump = _output("apt-config", "dump", "Acquire::http::Proxy", "Acquire::https::Proxy")
    return [line.rstrip(";") for line in dump.splitlines() if not line.endswith('"";')]


def _output(*command: str) -> str:
    """Returns the output of a program, empty if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout if done.returncode == 0 else ""


def _run_bootstrap(command: Sequence[str], bar: ProgressBar) -> None:
    lines: collections.deque[str] = collections.deque(maxlen=200)
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:  # fmt: skip
        try:
            for line in process.stderr or ():
                lines.append(line.strip())
                for number, phase in enumerate(PHASES[:-1]):
                    if phase in line:
                        bar.update(number, phase)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise DownloadError(failure(lines))


def failure(lines: Sequence[str]) -> str:
    """Returns the reason of mmdebstrap's failure, from its last lines, and the fix if it is known."""
    errors = [line for line in lines if line.startswith(("E:", "W: GPG"))] or list(lines)
    text = "; ".join(errors[-_ERROR_LINES:])
    if any("NO_PUBKEY" in line or "is not signed" in line for line in lines):
        text += ". This machine has no key of that distribution: install the package of its keyring, or give --keyring=FILE"
    return f"mmdebstrap failed: {text}"


def pip_settings(listing: str) -> dict[str, str]:
    """Returns settings of pip without local paths, from the output of `pip config list`."""
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in by_section:
            words = str(ast.literal_eval(value)).split()
            remote = [word for word in words if not word.startswith(("/", "~", "file:"))]
            by_section[section] |= {key: " ".join(remote)} if remote else {}
    settings: dict[str, str] = {}
    for section in by_section.values():  # later sections take precedence, like in pip
        settings |= section
    return settings


def set_up(root: pathlib.Path, image: Contents, settings: Mapping[str, str]) -> None:
    """Writes the files of container images that are not in packages, and this machine's network settings."""
    write = {
        "etc/apt/apt.conf.d/60container": _APT_SETTINGS,
        "etc/hostname": "sandbox\n",
        "etc/resolv.conf": "",
        "usr/sbin/policy-rc.d": "#!/bin/sh\n# No service is started as packages are installed.\nexit 101\n",
    }
    lines = [f"{name} = {value}" for name, value in {**settings, "cert": f"/{BUNDLE}"}.items()]
    write["etc/pip.conf"] = "\n".join(["[global]", *lines, ""])
    for path, text in write.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # it may be a link
        place.write_text(text)
    (root / "usr/sbin/policy-rc.d").chmod(0o755)
    if image.is_python:
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
    if add_certificates(root, pathlib.Path("/") / BUNDLE):
        subprocess.run(["chroot", root, "update-ca-certificates"], check=True, capture_output=True)


def add_certificates(root: pathlib.Path, bundle: pathlib.Path) -> int:
    """Adds the certificates of a bundle to those that a root file system trusts. Returns the number of new ones."""
    if not bundle.exists() or not (root / BUNDLE).exists():
        return 0
    known = {*_CERTIFICATE.findall((root / BUNDLE).read_text())}
    new = [text for text in _CERTIFICATE.findall(bundle.read_text()) if text not in known]
    folder = root / "usr/local/share/ca-certificates"
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(new):
        (folder / f"machine-{number}.crt").write_text(text)
    return len(new)


def _description(root: pathlib.Path) -> str:
    text = (root / "etc/os-release").read_text()
    name = re.search(r'(?m)^PRETTY_NAME="(.*)"$', text)
    pythons = sorted(
        path.name for path in root.glob("usr/bin/python3.*") if path.name[-1].isdigit()
    )
    size = sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())
    return ", ".join([name[1] if name else "a system", *pythons, f"{size >> 20} MiB"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
