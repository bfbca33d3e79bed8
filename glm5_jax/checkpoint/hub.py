"""Fetches checkpoints from the HuggingFace hub: `owner/name`, or `owner/name@revision` for a branch, tag or commit.

Files are in the hub's cache (~/.cache/huggingface, or HF_HOME), where other libraries find them too. HF_ENDPOINT,
HF_TOKEN and HF_HUB_OFFLINE have their usual meaning.
"""

import functools
import os
import pathlib
import re

_REPOSITORY = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
# Weights in other formats are left out, and code, which this project never runs.
_PATTERNS = ("*.safetensors", "*.json", "*.jinja")


def fetch_checkpoint(path: str | os.PathLike, revision: str | None = None) -> pathlib.Path:
    """Returns the local folder of a checkpoint, after a download if the path is a repository of the hub.

    A path is a repository if it has the form `owner/name`, does not exist here, and no folder `owner` exists here. A
    process downloads a repository once, and then uses the same commit.

    Args:
      path: local path or repository.
      revision: branch, tag or commit; None: that of the path, or the default branch.

    Raises ValueError if the hub does not provide the repository, and for a revision of a local path.
    """
    text = os.fspath(path)
    match = _REPOSITORY.fullmatch(text)
    if match is None or pathlib.Path(text).exists() or pathlib.Path(text).parent.exists():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {text} is a local path; leave the revision out, or give owner/name"
            )
        return pathlib.Path(text)
    if revision is not None and match["revision"] not in (None, revision):
        raise ValueError(f"{text} has another revision than {revision!r}; give one of them")
    return download_snapshot(match["name"], revision or match["revision"])


@functools.lru_cache
def download_snapshot(name: str, revision: str | None) -> pathlib.Path:
    """Returns the folder of a repository in the hub's cache. Raises ValueError if the hub does not provide it."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ValueError(
            f"checkpoint {name} does not exist here; to fetch it from the HuggingFace hub: pip install -e '.[hub]'"
        ) from None
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(_PATTERNS))
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        wanted = name if revision is None else f"{name}@{revision}"
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"checkpoint {wanted} does not exist here, and the HuggingFace hub does not provide it ({reason}); give a "
            "folder, or owner/name@revision of a repository that you may read"
        ) from error
    return pathlib.Path(folder)
