"""Small projects for each test runner, with the statuses that their tests have by construction.

`runners` defines them by language. `make_reports.py` runs them and keeps the output of the runners in `reports/`. `$OUT`
is a folder for report files.
"""

from collections.abc import Mapping

from tests.envs.swe.runners import cpp, go, java, javascript, php, python, ruby
from tests.envs.swe.runners.project import Project

PROJECTS: Mapping[str, Project] = {
    name: project
    for language in (python, go, javascript, php, ruby, cpp, java)
    for name, project in language.PROJECTS.items()
}
