"""Reads manifests of real pairs: patches of Debian packages, and releases of npm packages.

A line of a manifest names two archives by their digests, and one patch:

    {"instance_id": "guzzle__psr7-717", "language": "php", "license": "MIT", "project": "php-guzzlehttp-psr7",
     "version": "2.4.5-1+deb12u1", "patch": "0003-Reject-....patch",
     "archive": {"url": "debian:php-guzzlehttp-psr7=2.4.5-1+deb12u1/...orig.tar.xz", "sha256": "..."},
     "packaging": {"url": "debian:php-guzzlehttp-psr7=2.4.5-1+deb12u1/...debian.tar.xz", "sha256": "..."}}

For the pair of two releases, `packaging` is the archive of the second one, and `patch` is empty.
"""

import os
import pathlib
from collections.abc import Sequence

import msgspec

from glm5_jax.envs.swe.fetch import SourceFile
from glm5_jax.envs.swe.filters import dep3_links, read_dep3
from glm5_jax.envs.swe.instance import InstanceError, Issue, read_records
from glm5_jax.envs.swe.pairs import SourcePair
from glm5_jax.envs.swe.sources import SourceTree, debian_pair, read_series


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pair of a manifest.

    Attributes:
      instance_id: name of the instance.
      project, version: name and version of the project.
      language: language of the project.
      license: SPDX name.
      archive: sources.
      packaging: Debian's packaging with the patches, or the sources of the next release.
      patch: name of the patch in the series; empty for a release.
      folders: the only folders whose changes count; empty: all.
    """

    instance_id: str
    project: str
    version: str
    language: str
    license: str
    archive: SourceFile
    packaging: SourceFile
    patch: str = ""
    folders: tuple[str, ...] = ()


def read_manifest(path: str | os.PathLike) -> list[ManifestEntry]:
    """Returns the entries of a manifest. Raises InstanceError that names the line and the field."""
    entries = read_records(path, ManifestEntry)
    names = [entry.instance_id for entry in entries]
    if len(names) > len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise InstanceError(f"{path}: two pairs are named {twice}; rename one")
    return entries


def files_of(entries: Sequence[ManifestEntry]) -> list[SourceFile]:
    """Returns the files of a manifest, each once."""
    files = [file for entry in entries for file in (entry.archive, entry.packaging)]
    return list({file.sha256: file for file in files}.values())


def pairs_of(entries: Sequence[ManifestEntry], cache: pathlib.Path) -> list[SourcePair]:
    """Returns the pairs whose files are in the cache. Raises TreeError for an archive without the patch."""
    return [
        _pair(entry, cache)
        for entry in entries
        if all((cache / file.sha256).exists() for file in (entry.archive, entry.packaging))
    ]


def _pair(entry: ManifestEntry, cache: pathlib.Path) -> SourcePair:
    archive, packaging = cache / entry.archive.sha256, cache / entry.packaging.sha256
    if entry.patch:
        series = read_series(packaging)
        before, after = debian_pair(archive, series, entry.patch)
        issue = issue_of(series[entry.patch], entry.patch)
    else:
        before, after = SourceTree(archive=archive), SourceTree(archive=packaging)
        title = f"Changes of {entry.project} after {entry.version}"
        issue = Issue(kind="changelog", title=title)
    return SourcePair(
        name=entry.instance_id,
        project=entry.project,
        language=entry.language,
        kind="real" if entry.patch else "release",
        before=before,
        after=after,
        issue=issue,
        license=entry.license,
        version=entry.version,
        url=entry.archive.url,
        folders=entry.folders,
    )


def issue_of(patch: str, name: str) -> Issue:
    """Returns the issue that the header of a Debian patch describes (DEP-3)."""
    fields = read_dep3(patch)
    text = fields.get("description") or fields.get("subject") or name
    title, _, body = text.partition("\n")
    links = dep3_links(patch)
    return Issue(kind="dep3", url=links[0] if links else "", title=title.strip(), body=body.strip())
