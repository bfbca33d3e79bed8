"""Filters candidates before anything runs: repository, pull request, issue link, patch parts and their sizes.

Each filter returns why a candidate is dropped, or None. `filter_candidates` runs them in order and reports a funnel.
Sources without a forge, such as Debian's patches, have the header of the patch (DEP-3) in place of an issue.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from glm5_jax.envs.funnel import Funnel
from glm5_jax.envs.swe.patches import FilePatch, PatchError, PatchParts, parse_patch, split_patch
from glm5_jax.envs.swe.paths import LANGUAGES

_KEYWORDS = r"(?:close[sd]?|fix(?:e[sd])?|resolve[sd]?)"
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPDX_FREE = re.compile(
    r"(?:MIT(?:-0)?|BSD-[0-4]-Clause(?:-\w+)*|0BSD|Apache-2\.0|ISC|Zlib|BSL-1\.0|PSF-2\.0|Python-2\.0|LGPL-[\w.-]+"
    r"|Unlicense|CC0-1\.0|PostgreSQL|Ruby)",
    re.IGNORECASE,
)
# Names of licences in metadata that are no SPDX names.
_LICENSE_NAMES = {
    "apache license 2.0": "Apache-2.0",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "mit license": "MIT",
    "bsd": "BSD-3-Clause",
    "bsd-3": "BSD-3-Clause",
    "expat": "MIT",
    "isc license": "ISC",
    "boost": "BSL-1.0",
    "psf": "PSF-2.0",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """Facts about a repository.

    Attributes:
      name: `owner/name`.
      license: name of the licence.
      languages: number of bytes by language, in lower case.
      num_stars, num_forks, num_issues, num_pulls: counts; None: there is no forge that counts.
    """

    name: str
    license: str
    languages: Mapping[str, int]
    num_stars: int | None = None
    num_forks: int | None = None
    num_issues: int | None = None
    num_pulls: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Change with the text that describes it.

    Attributes:
      repository: repository of the change.
      name: unique name.
      title, body: text of the pull request, or of the patch's header.
      commit_messages: messages of its commits.
      is_merged: whether it was accepted.
      diff: complete change as a unified diff.
      problem_statement: text of the linked issue, or what stands for it.
      has_header_links: whether links of a patch's header count as issues.
    """

    repository: Repository
    name: str
    title: str
    body: str
    diff: str
    problem_statement: str
    commit_messages: Sequence[str] = ()
    is_merged: bool = True
    has_header_links: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Limits of the filters. The first four are those of SWE-bench-Live.

    Attributes:
      min_issues_and_pulls: minimum number of issues and pull requests together.
      min_forks, min_stars: minimum number of forks and of stars.
      min_language_share: minimum share of the main language in bytes.
      max_code_files: maximum number of code files of a patch; the minimum is 1.
      max_added_lines: maximum number of lines that the code part adds; the minimum is 1.
      max_test_patch_bytes: maximum size of the test patch, in bytes.
    """

    min_issues_and_pulls: int = 200
    min_forks: int = 200
    min_stars: int = 0
    min_language_share: float = 0.6
    max_code_files: int = 10
    max_added_lines: int = 400
    max_test_patch_bytes: int = 300_000

    def __post_init__(self):
        if not 0 <= self.min_language_share <= 1:
            raise ValueError(f"min_language_share is {self.min_language_share}; use 0 to 1")
        for name in ("max_code_files", "max_added_lines", "max_test_patch_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; make it at least 1")


def filter_candidates(
    candidates: Iterable[Candidate], config: FilterConfig, funnel: Funnel
) -> list[Candidate]:
    """Returns the candidates that pass all filters, and adds a stage per filter to the funnel."""
    remaining = funnel.run(
        "repository", candidates, lambda c: repository_problem(c.repository, config)
    )
    remaining = funnel.run("pull_request", remaining, pull_problem)
    remaining = funnel.run("issue_link", remaining, link_problem)
    return funnel.run("patch", remaining, lambda c: patch_problem(c.diff, config))


def repository_problem(repository: Repository, config: FilterConfig) -> str | None:
    """Returns why a repository is left out, or None."""
    if not is_free_license(repository.license):
        return "licence is not free, or unknown"
    language = main_language_of(repository, config.min_language_share)
    if language is None:
        return "no language has the minimum share"
    if language not in LANGUAGES:
        return "language is not supported"
    activity = [repository.num_issues, repository.num_pulls]
    if None not in activity and sum(n or 0 for n in activity) < config.min_issues_and_pulls:
        return "too few issues and pull requests"
    if repository.num_forks is not None and repository.num_forks < config.min_forks:
        return "too few forks"
    if repository.num_stars is not None and repository.num_stars < config.min_stars:
        return "too few stars"
    return None


def main_language_of(repository: Repository, min_share: float) -> str | None:
    """Returns the language with at least this share of the bytes; None if there is none.

    C and its headers count for C++ where both occur, and JavaScript for TypeScript.
    """
    sizes = dict(repository.languages)
    for part, full in (("c", "cpp"), ("javascript", "typescript")):
        if 0 < sizes.get(part, 0) < sizes.get(full, 0):
            sizes[full] += sizes.pop(part)
    total = sum(sizes.values())
    if not total:
        return None
    name = max(sorted(sizes), key=sizes.__getitem__)
    return name if sizes[name] >= min_share * total else None


def is_free_license(name: str) -> bool:
    """Returns whether sources under this licence may be run and their patches shipped."""
    name = _LICENSE_NAMES.get(name.strip().lower(), name.strip())
    return bool(_SPDX_FREE.fullmatch(name))


def pull_problem(candidate: Candidate) -> str | None:
    """Returns why a change is left out by its text, or None."""
    if not candidate.is_merged:
        return "not merged"
    if not candidate.problem_statement.strip():
        return "problem statement is empty"
    return None


def link_problem(candidate: Candidate) -> str | None:
    """Returns why a change is left out by its links, or None."""
    texts = [candidate.title, candidate.body, *candidate.commit_messages]
    if any(linked_issues(text, candidate.repository.name) for text in texts):
        return None
    if candidate.has_header_links and dep3_links(candidate.body):
        return None
    return "no link to an issue"


def linked_issues(text: str, repository: str) -> list[int]:
    """Returns the numbers of issues that a text closes, fixes or resolves; comments of HTML do not count.

    An issue is `#N`, `owner/name#N` of this repository or its URL. Others' issues do not count.
    """
    text = _COMMENT.sub("", text)
    name = re.escape(repository)
    pattern = (
        rf"\b{_KEYWORDS}\b:?\s+"
        rf"(?:#|{name}#|https?://github\.com/{name}/issues/)(\d+)\b"
    )
    numbers = [int(match[1]) for match in re.finditer(pattern, text, re.IGNORECASE)]
    return list(dict.fromkeys(numbers))


_DEP3_FIELD = re.compile(r"([A-Z][A-Za-z-]*):[ \t]*(.*)")
_DEP3_LINKS = ("bug", "origin", "fixes", "applied-upstream", "forwarded")


def read_dep3(text: str) -> dict[str, str]:
    """Returns the fields of a patch's header by lower-case name, up to the diff; folded lines are joined.

    Text without a field name, such as the body of a mail, is added to `description`.
    """
    fields: dict[str, str] = {}
    name = ""
    for line in text.split("\n"):
        if line.startswith(("diff --git ", "--- ", "Index: ")) or line == "---":
            break
        if line.startswith((" ", "\t")) and name:
            value = "" if line.strip() == "." else line.strip()
            fields[name] += "\n" + value
        elif match := _DEP3_FIELD.fullmatch(line):
            name = match[1].lower()
            fields[name] = "\n".join(filter(None, [fields.get(name), match[2].strip()]))
        else:
            name = ""
            fields["description"] = f"{fields.get('description', '')}\n{line}".strip("\n")
    return fields


def dep3_links(text: str) -> list[str]:
    """Returns the URLs in the fields of a header that name a bug, an advisory or the change upstream."""
    fields = read_dep3(text)
    values = [value for name, value in fields.items() if name.startswith(_DEP3_LINKS)]
    urls = [url.rstrip(").,;>") for value in values for url in re.findall(r"https?://\S+", value)]
    return list(dict.fromkeys(urls))


def patch_problem(diff: str, config: FilterConfig) -> str | None:
    """Returns why a change is left out by its parts and their sizes, or None."""
    try:
        files = parse_patch(diff)
        parts = split_patch(diff)
    except PatchError:
        return "diff is malformed"
    return _parts_problem(files, parts, config)


def _parts_problem(
    files: Sequence[FilePatch], parts: PatchParts, config: FilterConfig
) -> str | None:
    if not parts.code:
        return "no code is changed"
    if not parts.test:
        return "no test is changed"
    if any(file.binary for file in files):
        return "binary hunk"
    code = parse_patch(parts.code)
    num_added = sum(file.count("+") for file in code)
    if len(code) > config.max_code_files:
        return "too many code files"
    if num_added < 1:
        return "no line of code is added"
    if num_added > config.max_added_lines:
        return "too many lines are added"
    if len(parts.test.encode("utf-8", "surrogateescape")) > config.max_test_patch_bytes:
        return "test patch is too large"
    return None
