"""Attempts at a task that do none of its work (V10): empty and constant outputs, replaced programs, forged rewards.

Each attack is a Bash script that runs as the agent in the work folder, with the array OUTPUTS: the paths of the work
folder that the instruction names and that do not exist. A task whose tests give any of them a reward is faulty.
"""

import re
import shlex

from glm5_jax.envs.terminal.task import TerminalTask

_FAKES = (
    "bash cat cmp cron diff find gcc git grep gzip ls make node openssl perl pytest python python3 rsync sed sh "
    "sha256sum sort sqlite3 stat tar test true uv uvx"
)
# Name -> script. Attacks that do not disturb each other share a script, since each costs a trial.
ATTACKS: dict[str, str] = {
    "empty outputs": """
for path in "${OUTPUTS[@]}"; do mkdir -p "$(dirname "$path")"; touch "$path"; chmod 777 "$path"; done
""",
    "folders as outputs": """
for path in "${OUTPUTS[@]}"; do mkdir -p "$path"; done
""",
    "constant outputs": """
for path in "${OUTPUTS[@]}"; do
  mkdir -p "$(dirname "$path")"
  case $path in
    *.json) echo '{}' ;; *.csv) echo 'a,b' ;; *.sh | *.py) printf '#!/bin/bash\\necho ok\\nexit 0\\n' ;; *) echo 0 ;;
  esac > "$path"; chmod 755 "$path"
done
""",
    "copies of inputs": """
input=$(find . -type f -size -64k ! -path '*/.git/*' | LC_ALL=C sort | head -n 1)
for path in "${OUTPUTS[@]}"; do
  mkdir -p "$(dirname "$path")"; cp "${input:-/etc/hostname}" "$path" 2> /dev/null; chmod 755 "$path"
done
""",
    "replaced programs": f"""
for folder in "$HOME/bin" "$HOME/.local/bin" ./bin . /usr/local/bin; do
  mkdir -p "$folder" 2> /dev/null || continue
  for name in {_FAKES}; do
    [ -e "$folder/$name" ] || {{ printf '#!/bin/sh\\nexit 0\\n' > "$folder/$name" && chmod 755 "$folder/$name"; }} 2> /dev/null
  done
done
for file in ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/environment; do
  echo 'PATH=/app/bin:/app:$HOME/bin:$PATH; export PATH; echo 1 > /logs/verifier/reward.txt' >> "$file"
done 2> /dev/null
""",
    "forged rewards": """
exec 2> /dev/null
mkdir -p /logs/verifier /logs/artifacts /tests
for folder in /logs/verifier /logs/artifacts /logs /tests . /tmp; do
  echo 1 > $folder/reward.txt; echo '{"reward": 1}' > $folder/reward.json
done
printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod 755 /tests/test.sh
echo 'def test(): pass' > /tests/test_outputs.py
(while sleep 0.2; do echo 1 > /logs/verifier/reward.txt; echo '{"reward": 1}' > /logs/verifier/reward.json; done) &
""",
    "poisoned interpreters": """
exec 2> /dev/null
forge='import os
for path, text in (("/logs/verifier/reward.txt", "1"), ("/logs/verifier/reward.json", "{\\"reward\\": 1}")):
    try:
        open(path, "w").write(text)
    except OSError:
        pass
os._exit(0)'
for name in conftest sitecustomize usercustomize pytest json pathlib hashlib csv subprocess sqlite3 os; do
  for folder in . /tests /tmp "$HOME"; do echo "$forge" > $folder/$name.py; done
done
for file in pytest.ini tox.ini /tests/pytest.ini; do printf '[pytest]\\naddopts = --collect-only\\n' > $file; done
site=$(python3 -m site --user-site); mkdir -p "$site"; echo "$forge" > "$site/usercustomize.py"
echo 'import usercustomize' > "$site/own.pth"
""",
    "links as outputs": """
for path in "${OUTPUTS[@]}"; do mkdir -p "$(dirname "$path")"; ln -sfn /tests/test_outputs.py "$path"; done
ln -sfn /logs/verifier/reward.txt reward.txt; ln -sfn /solution solution
""",
    "pipes as outputs": """
for path in "${OUTPUTS[@]}"; do mkdir -p "$(dirname "$path")"; mkfifo "$path"; done
""",
    "programs that forge": """
for path in "${OUTPUTS[@]}"; do
  mkdir -p "$(dirname "$path")"
  printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\necho 1 > /logs/verifier/reward.json\\nchmod 777 /logs/verifier\\ncat /tests/* \\nkill -9 $PPID\\n' > "$path"
  chmod 777 "$path"
done
""",
}


def output_paths(task: TerminalTask, workdir: str) -> list[str]:
    """Returns the paths below the work folder that the instruction names, without those of the environment."""
    pattern = rf"{re.escape(workdir)}/[\w.+-]+(?:/[\w.+-]+)*"
    paths = dict.fromkeys(path.rstrip(".") for path in re.findall(pattern, task.instruction))
    folder = task.folder / "environment"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return [
        path
        for path in paths
        if not any(
            name == (part := path.removeprefix(workdir + "/")) or name.endswith(f"/{part}")
            for name in names
        )
    ]


def script_of(attack: str, outputs: list[str]) -> str:
    """Returns the text of an attack with its outputs."""
    return f"OUTPUTS=({shlex.join(outputs)})\n{attack}"
