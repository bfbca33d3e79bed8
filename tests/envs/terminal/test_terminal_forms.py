"""Names forms of tests in which a reward can be forged, and not those of ordinary tasks."""

import pytest

from glm5_jax.envs.terminal import load_task
from glm5_jax.envs.terminal.forms import SHARED, forgeable_forms
from tests.envs.terminal.folders import ORDINARY, PYTEST, TOML, make_task


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"test": 'eval "$(cat /app/prog)"'}, "tests/test.sh: evaluate a text"),
        ({"test": "source /app/env.sh"}, "tests/test.sh: run a file in their own shell"),
        ({"test": "cd /app && . ./env.sh"}, "run a file in their own shell"),
        ({"test": "export $(cat /app/.env | xargs)"}, "set variables by a file"),
        ({"test": "export PATH=/app/bin:$PATH"}, "in a folder of the attempt's first"),
        ({"test": 'python3 -c "$(cat /app/x.py)"'}, "into a program"),
        ({"test": 'bash -c "$(cat /app/x)"'}, "into a program"),
        ({"test": 'x=$(/app/prog)\nawk "BEGIN { exit !($x > 0.9) }"'}, "into a program"),
        ({"test": "python3 - <<EOF\nassert $(/app/prog) == 4\nEOF"}, "into a program"),
        ({"test": 'x=$(/app/prog)\necho "$x > 3" | bc'}, "into a program"),
        ({"test": 'x=$(/app/prog)\n[[ "$x" -eq 42 ]]'}, "calculate with a text"),
        ({"test": "read -r x < /app/out\n(( x > 3 )) && true"}, "calculate with a text"),
        ({"test": 'i=$(/app/prog)\n[ "${names[$i]}" = b ]'}, "calculate with a text"),
        ({"test": 'n=$(/app/prog)\n[ "${t:0:$n}" = abc ]'}, "calculate with a text"),
        ({"test": 'n=$(/app/prog)\n[ -v "$n" ]'}, "calculate with a text"),
        ({"test": '[[ "$(cat /tests/key)" == $(/app/prog) ]]'}, "without quotes"),
        ({"test": "x=$(/app/prog)\n[ $x = 42 ]"}, "without quotes"),
        ({"test": 'grep -q "$(/app/prog)" /tests/key'}, "look in the answers"),
        ({"test": "sort /tests/key > /tmp/want"}, "write answers"),
        ({"test": "python3 /tests/ref.py > /tmp/expected.txt"}, "write answers"),
        (
            {"test": "s=$(python3 /tests/score.py)\necho $s > /logs/verifier/reward.txt"},
            "take the reward",
        ),
        (
            {"test": "python3 /tests/score.py | tee /logs/verifier/reward.txt"},
            "take the reward",
        ),
        ({"test": "cd /app && make -s test"}, "tell a builder to run"),
        ({"test": "cargo test --release"}, "tell a builder to run"),
        (
            {"test": "gcc /tmp/a.c /app/b.c -o /tmp/t\n/tmp/t\nif [ $? -eq 0 ]; then echo 1; fi"},
            "the exit code",
        ),
        ({"test": "gcc /tests/main.c /app/lib.c"}, "compilers cannot read"),
        ({"test": "want=$(sed -n 1p /tests/key)"}, "no right to read"),
        ({"test": "awk '{ print $1 }' /tests/key | cmp - /app/out"}, "no right to read"),
        ({"test": 'x="$(timeout 5 /app/prog --in=/tests/in.txt)"'}, "no right to read"),
        ({"test": "find /app -name '*.txt' | xargs cat | cmp - /tests/key"}, "split file names"),
        ({"test": "sort $(ls /app/*.txt) | cmp - /tests/key"}, "split file names"),
        ({"test": 'for f in $(find /app); do cat "$f"; done > /srv/x'}, "split file names"),
        (
            {"test": "pytest /tests/a.py > /tmp/log; grep -q '2 passed' /tmp/log"},
            "test program prints",
        ),
        ({"test": "cp /app/*.json /logs/verifier/"}, "where the reward is"),
        ({"test": "cat /app/score > /logs/verifier/reward.txt"}, "where the reward is"),
        ({"test": "diff -q /tmp/got /app/expected.txt"}, "with a file that the attempt"),
        (
            {"test": "cat ~/out.txt", "dockerfile": "FROM debian\nWORKDIR /root\n"},
            "root's home folder",
        ),
        ({"test": "cd /app && python3 -m doctest x.py"}, "run the attempt's own tests"),
        ({"test": "cd /app && pytest -q"}, "run the attempt's own tests"),
        ({"test": "if /app/prog; then echo 1; fi"}, "believe the exit code"),
        ({"test": "if cd /app && ./prog --check; then\necho 1; fi"}, "believe the exit code"),
        ({"test": "node /tests/check.js"}, "in an interpreter that loads"),
        ({"tests": "exec(open('/app/x.py').read())"}, "tests/test_outputs.py: execute a text"),
        ({"tests": "import pickle\nx = pickle.load(f)"}, "load objects that execute code"),
        ({"tests": "import pandas\nx = pandas.read_pickle('/app/x')"}, "load objects that execute"),
        ({"tests": "logging.config.dictConfig(json.load(f))"}, "load objects that execute"),
        ({"tests": "import jinja2\njinja2.Template(text).render()"}, "render a template"),
        ({"tests": "from lxml import etree\netree.parse('/app/x.xml')"}, "entities"),
        ({"tests": "assert open(data['path']).read() == want"}, "a path that the attempt"),
        ({"tests": "run([sys.executable, '-c', code])"}, "a Python of the user"),
        ({"tests": "worst = max(worst, abs(a - b))"}, "neither more nor less"),
        ({"tests": "assert ordered(data) == sorted(data)"}, "may have changed"),
        ({"tests": "assert count(db) == db.execute('select 1').fetchone()[0]"}, "may have changed"),
        ({"tests": "assert got.strip() in open('/tests/key').read()"}, "such as an empty one"),
        ({"tests": "assert got in expected_lines"}, "such as an empty one"),
        ({"tests": "for a, b in zip(f(), want):\n    assert a == b"}, "zip without strict"),
        ({"test": "python3 /tests/ref.py > /tmp/b.txt"}, "where the attempt's programs can read"),
        (
            {"test": 'x=$(/app/prog)\ncase "$(cat /tests/key)" in\n  $x) echo 1;;\nesac'},
            "(grep, case",
        ),
        ({"test": 'x=$(/app/prog)\n[[ "$(cat /tests/key)" =~ ^$x$ ]]'}, "(grep, case"),
        ({"test": 'x=$(/app/prog)\n[[ "$(cat /tests/key)" == *"$x"* ]]'}, "(grep, case"),
        ({"test": 'x=$(/app/prog)\nexpr "$(cat /tests/key)" : "$x"'}, "(grep, case"),
        ({"test": 'x="$(/app/prog)"\ncmp "$x" /tests/key'}, "read a path that the attempt"),
        ({"test": "/app/prog | xargs cat | cmp - /tests/key"}, "read a path that the attempt"),
        ({"test": 'cp "$(cat /app/path)" /srv/x'}, "read a path that the attempt"),
        ({"tests": "lib = ctypes.CDLL('/app/x.so')"}, "which is refused"),
    ],
)
def test_names_forms_that_can_be_forged(tmp_path, files, part):
    (form,) = forgeable_forms(load_task(make_task(tmp_path, **files)))
    assert part in form


@pytest.mark.parametrize(
    "test",
    [
        ORDINARY,
        PYTEST,
        "# eval x\npip install pytest\ncmp /app/a /tests/b && echo 1 > /logs/verifier/reward.txt",
        "python3 -m pytest /tests/a.py > /logs/verifier/pytest.txt 2>&1\nif [ $? -eq 0 ]; then echo 1; fi",
        'x=$(/app/prog)\n[[ "${x:-0}" == "42" ]] && [ "${a[0]}" = 1 ] && grep -q 42 /app/out',
        'declare -A m\nx=$(/app/prog)\n[ "${m[$x]}" = 1 ] && grep -q "$x" /app/log',
        'got=$(/app/prog)\nif [ "$got" = 42 ] && [ "$got" -eq 42 ]; then echo 1; fi',
        "s=$(date +%s)\nn=$(ls /app | wc -l)\nif (( n > 3 )) && [[ $s -gt 5 ]]; then n=$((n + 1)); fi",
        'export PATH="$HOME/.local/bin:$PATH"\n/app/prog > /tmp/out && cmp /tmp/out /tests/key',
        "cd /app && make && ./prog > /tmp/out; cmp /tmp/out /tests/key",
        'd=$(mktemp -d)\n/app/prog > "$d/out"; cmp "$d/out" /tests/key; n=$(wc -l < /app/x); [ "$n" = 3 ]',
        'x=$(/app/prog)\ncase "$x" in 42) echo 1;; *) echo 0;; esac\n[[ "$x" =~ ^[0-9]+$ ]]',
        'x=$(/app/prog)\necho "$x" | sort | cmp - /tests/key; find /app -name "*.c" | xargs wc -l',
        "/app/prog < /tests/in.txt | sed s/a/b/ | cmp - /tests/key; find /app -print0 | xargs -0 cat > /srv/x",
    ],
)
def test_names_no_form_of_ordinary_tests(tmp_path, test):
    files = {"test": test, "tests": "from app import f\ndef test():\n    assert f(3) == 4\n"}
    assert forgeable_forms(load_task(make_task(tmp_path, **files))) == []


def test_names_shared_tasks(tmp_path):
    toml = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "shared"')
    assert forgeable_forms(load_task(make_task(tmp_path, toml=toml))) == [SHARED]
