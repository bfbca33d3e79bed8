"""Templates of terminal tasks: twenty kinds, each a function of a random generator.

    source = make_task("log-analysis", seed=7)
    folder = write_task(root / source.name, source.folder_files())

The same template and seed always give the same bytes.
"""

import random
from collections.abc import Callable, Iterator

from glm5_jax.envs.terminal.synthesis.task_source import SyntheticTask
from glm5_jax.envs.terminal.synthesis.templates import (
    code_tasks,
    file_tasks,
    system_tasks,
    text_tasks,
)

TEMPLATES: dict[str, Callable[[random.Random], dict]] = {
    "log-analysis": text_tasks.log_analysis,
    "regex-rename": text_tasks.regex_rename,
    "encoding-mix": text_tasks.encoding_mix,
    "config-migration": text_tasks.config_migration,
    "csv-to-sql": text_tasks.csv_to_sql,
    "checksum-audit": text_tasks.checksum_audit,
    "archive-repair": file_tasks.archive_repair,
    "permission-fix": file_tasks.permission_fix,
    "symlink-farm": file_tasks.symlink_farm,
    "disk-usage-report": file_tasks.disk_usage,
    "sparse-files": file_tasks.sparse_files,
    "incremental-backup": file_tasks.incremental_backup,
    "cron-line": system_tasks.cron_line,
    "service-on-port": system_tasks.service_on_port,
    "dead-process": system_tasks.dead_process,
    "certificate-renewal": system_tasks.certificate_renewal,
    "makefile-bug": code_tasks.makefile_bug,
    "git-bisect": code_tasks.git_bisect,
    "broken-script": code_tasks.broken_script,
    "dependency-order": code_tasks.dependency_order,
}


def make_task(template: str, seed: int) -> SyntheticTask:
    """Returns the task of a template and a seed. Raises ValueError for an unknown template."""
    if template not in TEMPLATES:
        raise ValueError(f"template is {template!r}; known are {', '.join(TEMPLATES)}")
    rng = random.Random(f"{template}/{seed}")
    return SyntheticTask(name=f"{template}-{seed:04}", **TEMPLATES[template](rng))


def make_tasks(count: int, first_seed: int = 0) -> Iterator[SyntheticTask]:
    """Yields tasks: one of each template for the first seed, then for the next seed, and so on."""
    names = [*TEMPLATES]
    for index in range(count):
        yield make_task(names[index % len(names)], first_seed + index // len(names))
