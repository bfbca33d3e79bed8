"""Writes the statement of a mutation by rule: the behaviour that is wrong, without the place of the bug."""

import re
from collections.abc import Sequence

from glm5_jax.envs.swe.parsers.report import clean_text

_MAX_NAMES, _MAX_SYMPTOMS = 8, 4
_MAX_LINE = 200
_SYMPTOM = re.compile(
    r"\b(?:\w*(?:Error|Exception)\b.*|expected\b.*|Failed asserting\b.*|got\b.*|panic: .*|Failure/Error: .*)",
    re.I,
)
# Places in the code. A statement names none of them.
_PLACE = re.compile(
    r"\S*[\w-]\.(?:py|pyx|c|h|hpp|cc|cpp|go|java|js|mjs|ts|php|rb)\b\S*|\bline \d+|:\d+\b"
)


def write_statement(project: str, tests: Sequence[str], log: str) -> str:
    """Returns a statement from the names of failing tests and the messages in the log of their run."""
    names = [_describe(name) for name in tests]
    shown = "\n".join(f"- {name}" for name in dict.fromkeys(names[:_MAX_NAMES]))
    more = f"\n- and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    text = (
        f"Some behaviour of {project} is wrong. These checks of it fail:\n\n{shown}{more}\n\n"
        "Find the cause in the sources and correct it there. Tests are not part of the correction."
    )
    symptoms = _symptoms(log)
    if symptoms:
        listed = "\n".join(f"    {line}" for line in symptoms)
        text += f"\n\nMessages of the failing checks:\n\n{listed}"
    return text


def _describe(name: str) -> str:
    """Returns the name of a test without its file."""
    suite, _, last = name.rpartition("::")
    unit = re.split(r"[.\\/]", suite)[-1] if not _PLACE.search(suite) else ""
    return f"{unit}: {last}" if unit else last


def _symptoms(log: str) -> list[str]:
    lines: dict[str, None] = {}
    for line in clean_text(log).split("\n"):
        match = _SYMPTOM.search(line)
        if match and not _PLACE.search(line):
            lines.setdefault(match[0].strip()[:_MAX_LINE])
    return list(lines)[:_MAX_SYMPTOMS]
