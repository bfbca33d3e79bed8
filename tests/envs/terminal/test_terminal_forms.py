"""Forms of tests in which a reward can be forged are named, and those of ordinary tasks are not."""

import pytest

from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.forms import SHARED, forgeable
from tests.envs.terminal.folders import ORDINARY, PYTEST, TOML, own


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"test": 'eval "$(cat /app/prog)"'}, "tests/test.sh: evaluate a text"),
        ({"test": "source /app/env.sh"}, "tests/test.sh: run a file in their own shell"),
        ({"test": 'python3 -c "$(cat /app/x.py)"'}, "-c with a substitution"),
        ({"test": "cd /app && python3 -m doctest x.py"}, "run the attempt's own tests"),
        ({"test": "cd /app && pytest -q"}, "run the attempt's own tests"),
        ({"test": "if /app/prog; then echo 1; fi"}, "believe the exit code"),
        ({"test": "if cd /app && ./prog --check; then\necho 1; fi"}, "believe the exit code"),
        ({"test": "node /tests/check.js"}, "in an interpreter that loads"),
        ({"tests": "exec(open('/app/x.py').read())"}, "tests/test_outputs.py: execute a text"),
        ({"tests": "import pickle\nx = pickle.load(f)"}, "load objects that execute code"),
        ({"tests": "lib = ctypes.CDLL('/app/x.so')"}, "which is refused"),
    ],
)
def test_names_forms_that_can_be_forged(tmp_path, files, part):
    (found,) = forgeable(load_task(own(tmp_path, **files)))
    assert part in found


@pytest.mark.parametrize(
    "test",
    [
        ORDINARY,
        PYTEST,
        "# eval x\npip install pytest\ncmp /app/a /tests/b && echo 1 > /logs/verifier/reward.txt",
    ],
)
def test_names_nothing_of_ordinary_tests(tmp_path, test):
    files = {"test": test, "tests": "from app import f\ndef test():\n    assert f(3) == 4\n"}
    assert forgeable(load_task(own(tmp_path, **files))) == []


def test_names_shared_tasks(tmp_path):
    toml = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
    assert forgeable(load_task(own(tmp_path, toml=toml))) == [SHARED]
