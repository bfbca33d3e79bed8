"""Templates about code: a Makefile, a history with a bad commit, a script with faults, and an order of packages."""

import hashlib
import json
import random
from typing import Any

from glm5_jax.envs.terminal.synthesis.templates.text_forms import (
    GUARD,
    fill,
    full_name,
    sentences,
    tests_of,
    tests_with_guard,
    words,
)

# -- builds ---------------------------------------------------------------------------------------------

_MAKEFILE = """# Builds @OUT@ from the chapters.
CHAPTERS = @CHAPTERS@
all: @OUT@

@OUT@: $(CHAPTERS) header.in
\tsed 's/@TITLE@/@BOOK@/' header.in > @OUT@
        cat $(CHAPTERS) >> @OUT@
\t./number.sh @OUT@

clean:
\trm -f @OUT@
"""
_NUMBER = """#!/bin/sh
# Numbers the lines of a file in place.
awk '{printf "%0@WIDTH@d %s\\n", NR, $0}' "$1" > "$1.new" && mv "$1.new" "$1"
"""
_MAKE_TEST = """
def project(tmp_path):
    folder = tmp_path / "scratch"
    shutil.copytree("/app", folder)
    for path in (tmp_path, folder, *folder.rglob("*")):
        path.chmod(0o777)
    return folder


def make(folder, *targets):
    return subprocess.run(["make", *targets], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)


def expected(folder):
    text = (folder / "header.in").read_text().replace("@TITLE@", "@BOOK@")
    text += "".join((folder / name).read_text() for name in "@CHAPTERS@".split())
    return "".join(f"{number:0@WIDTH@} {line}\\n" for number, line in enumerate(text.splitlines(), 1))


def test_builds_the_book(tmp_path):
    folder = project(tmp_path)
    assert make(folder).returncode == 0
    assert (folder / "@OUT@").read_text() == expected(folder)


def test_rebuilds_after_each_kind_of_change(tmp_path):
    folder = project(tmp_path)
    make(folder)
    for index, name in enumerate(["header.in", "@LAST@", "number.sh"]):
        now = (folder / "@OUT@").stat().st_mtime + 10 * (index + 1)
        os.utime(folder / name, (now, now))
        assert make(folder, "-q").returncode == 1, name
        make(folder)
        os.utime(folder / "@OUT@", (now + 1, now + 1))
        assert make(folder, "-q").returncode == 0


def test_clean_works_next_to_a_file_of_that_name(tmp_path):
    folder = project(tmp_path)
    make(folder)
    (folder / "clean").write_text("")
    assert make(folder, "clean").returncode == 0 and not (folder / "@OUT@").exists()
"""
_MAKE_SOLUTION = """
sed -i 's/^        cat/\\tcat/' Makefile
sed -i 's/^\\(@OUT@: $(CHAPTERS) header.in\\)$/\\1 number.sh/' Makefile
printf '\\n.PHONY: all clean\\n' >> Makefile
"""


def makefile_bug(rng: random.Random) -> dict:
    """Repairs a Makefile with three faults."""
    out, book, width = f"{words(rng, 1)[0]}.txt", full_name(rng), rng.randint(3, 5)
    chapters = [f"{word}.md" for word in words(rng, rng.randint(4, 7))]
    title = rng.choice(["TITLE", "BOOK_NAME"])
    values = {"out": out, "chapters": " ".join(chapters), "book": book, "width": width}
    files = {
        "Makefile": fill(_MAKEFILE.replace("@TITLE@", title), **values).encode(),
        "number.sh": fill(_NUMBER, **values).encode(),
        "header.in": f"{title}\n=====\n".encode(),
        **{name: sentences(rng, rng.randint(2, 5)).encode() for name in chapters},
    }
    guarded = {name: data for name, data in files.items() if name != "Makefile"}
    instruction = f"""
In /app, make should build {out} from the header and the chapters, but it stops with an error, and it never was right.
Repair /app/Makefile, and nothing else:

- make builds {out}: the header with {title} replaced by the name of the book, then the chapters, numbered by number.sh;
- {out} is built again after a change of any of its inputs, of which number.sh is one, and not without a change;
- make clean removes {out}, also if a file with the name clean exists.

Do not leave {out} or other new files there.
"""
    tests = _MAKE_TEST.replace("@TITLE@", title)
    return dict(
        topic="builds",
        skills=("make", "sed"),
        difficulty=3,
        title="Repair a Makefile",
        instruction=instruction,
        files=files,
        setup=("chmod 755 number.sh",),
        packages=("make",),
        verifier_packages=("make",),
        tests=tests_with_guard(
            tests, guarded, ("os", "shutil", "subprocess"), last=chapters[-1], **values
        ),
        solution=fill(_MAKE_SOLUTION, **values),
        guard_tests=(GUARD,),
    )


# -- version control ------------------------------------------------------------------------------------

_BISECT_TEST = """
def test_commit_is_the_first_bad_one():
    text = (APP / "@OUT@").read_text().strip()
    assert hashlib.sha256(text.encode()).hexdigest() == "@DIGEST@"


def test_author_of_the_commit():
    text = (APP / "@AUTHOR@").read_text().strip()
    assert hashlib.sha256(b"@OUT@:" + text.encode()).hexdigest() == "@AUTHOR_DIGEST@"
"""
_CHECK = """#!/bin/sh
# Ends with 0 if the prices in a checkout of the repository (its folder is the argument) add up.
awk -F= '{sum += $2} END {exit sum != @TOTAL@}' "$1/prices.txt"
"""
_BISECT_SOLUTION = """
cd repo
git bisect start HEAD "$(git rev-list --max-parents=0 HEAD)"
git bisect run ../check.sh .
bad=$(git rev-parse refs/bisect/bad)
git bisect reset
git show -s --format=%an "$bad" > ../@AUTHOR@
echo "$bad" > ../@OUT@
"""


class _History:
    """Commits of flat trees as a stream for `git fast-import`, with the hash of each commit."""

    def __init__(self):
        self.stream: list[bytes] = []
        self.commits: list[str] = []

    def commit(self, files: dict[str, bytes], author: str, message: str) -> None:
        """Adds a commit whose tree has exactly these files."""
        tree = b"".join(
            b"100644 " + name.encode() + b"\0" + bytes.fromhex(_object("blob", data))
            for name, data in sorted(files.items())
        )
        who = f"{author} <{author.split()[0].lower()}@example.org> {1_700_000_000 + 3600 * len(self.commits)} +0000"
        parent = f"parent {self.commits[-1]}\n" if self.commits else ""
        body = f"tree {_object('tree', tree)}\n{parent}author {who}\ncommitter {who}\n\n{message}\n"
        self.commits.append(_object("commit", body.encode()))
        text = f"{message}\n".encode()
        self.stream.append(
            f"commit refs/heads/main\nauthor {who}\ncommitter {who}\ndata {len(text)}\n".encode()
            + text
            + b"deleteall\n"
        )
        for name, data in sorted(files.items()):
            header = f"M 100644 inline {name}\ndata {len(data)}\n".encode()
            self.stream.append(header + data + b"\n")


def _object(kind: str, data: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


def git_bisect(rng: random.Random) -> dict:
    """Finds the commit that broke a check."""
    out, author_file = f"{words(rng, 1)[0]}-commit.txt", f"{words(rng, 1)[0]}-author.txt"
    names = words(rng, 8)
    prices = {name: rng.randint(100, 999) for name in names}
    total, notes, history = sum(prices.values()), "", _History()
    count, authors = rng.randint(40, 70), [full_name(rng) for _ in range(6)]
    bad = rng.randint(count // 3, count - 8)
    for number in range(count):
        one, other = rng.sample(names, 2)
        shift = rng.randint(1, 20)
        prices[one] += shift
        prices[other] -= shift + (1 if number == bad else 0)
        notes += f"{number}: {rng.choice(names)}\n"
        text = "".join(f"{name}={price}\n" for name, price in prices.items())
        files = {"notes.txt": notes.encode(), "prices.txt": text.encode()}
        author = rng.choice(authors)
        history.commit(files, author, f"Move prices of {one} and {other}")
        if number == bad:
            culprit = author
    digest = hashlib.sha256(history.commits[bad].encode()).hexdigest()
    author_digest = hashlib.sha256(f"{out}:{culprit}".encode()).hexdigest()
    instruction = f"""
The prices in the Git repository /app/repo no longer add up: /app/check.sh /app/repo ends with an error. It succeeded at
the first commit. Find the first commit on main at which it fails. Write its full hash to /app/{out}, and the name of its
author to /app/{author_file}. Leave the repository as it was, with main checked out.
"""
    values: dict[str, Any] = {"out": out, "author": author_file}
    return dict(
        topic="version control",
        skills=("git", "git bisect"),
        difficulty=4,
        title="Find the commit that broke a check",
        instruction=instruction,
        files={
            "check.sh": fill(_CHECK, total=total).encode(),
            "history": b"".join(history.stream),
        },
        setup=(
            "chmod 755 check.sh",
            "git init -q -b main repo",
            "git -C repo fast-import --quiet < history",
            "git -C repo -c core.trustctime=false checkout -q main",
            "rm -r history repo/.git/hooks repo/.git/logs",  # reflogs hold times
        ),
        packages=("git",),
        tests=tests_of(_BISECT_TEST, **values, digest=digest, author_digest=author_digest),
        solution=fill(_BISECT_SOLUTION, **values),
    )


# -- scripts --------------------------------------------------------------------------------------------

_COLLECT = """#!/bin/bash
# Usage: @SCRIPT@ SOURCE TARGET. Copies the *.@END@ files of SOURCE to TARGET and writes TARGET/count.
for file in $1/*.@END@; do
  cp $file $2/
done
count=0
ls $2 | grep .@END@ | while read name; do count=$((count + 1)); done
echo $count > $2/count
"""
_COLLECT_TEST = """
def collect(tmp_path, names):
    source, target = tmp_path / "scratch source", tmp_path / "scratch target"
    source.mkdir()
    for name in names:
        (source / name).write_text(name)
    tmp_path.chmod(0o777)
    code = subprocess.run(["/app/@SCRIPT@", str(source), str(target)], timeout=60).returncode
    return code, target


def test_copies_files_with_odd_names(tmp_path):
    names = ["scratch.@END@", "scratch two.@END@", "scratch*.@END@", "-scratch.@END@"]
    code, target = collect(tmp_path, [*names, "scratch.other"])
    assert code == 0
    assert sorted(path.name for path in target.iterdir()) == sorted([*names, "count"])
    assert all((target / name).read_text() == name for name in names)


def test_counts_only_what_it_copied(tmp_path):
    code, target = collect(tmp_path, ["scratch 1.@END@", "scratch 2.@END@", "scratch.@END@.old", "scratch-@END@"])
    assert code == 0 and (target / "count").read_text() == "2\\n"


def test_accepts_a_source_without_files(tmp_path):
    code, target = collect(tmp_path, ["scratch.other"])
    assert code == 0 and (target / "count").read_text() == "0\\n"


def test_fails_without_a_source(tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "scratch-target").mkdir(mode=0o777)
    (tmp_path / "scratch-target").chmod(0o777)
    paths = [str(tmp_path / name) for name in ("scratch-none", "scratch-target")]
    assert subprocess.run(["/app/@SCRIPT@", *paths]).returncode == 1
"""
_COLLECT_SOLUTION = """
sed -i '/^for file/,$d' @SCRIPT@
cat >> @SCRIPT@ <<'SH'
set -eu
[ -d "$1" ] || { echo "no folder $1" >&2; exit 1; }
mkdir -p -- "$2"
shopt -s nullglob
files=("$1"/*.@END@)
if [ ${#files[@]} -gt 0 ]; then cp -- "${files[@]}" "$2/"; fi
echo "${#files[@]}" > "$2/count"
SH
"""


def broken_script(rng: random.Random) -> dict:
    """Repairs a shell script that breaks on spaces and on empty folders."""
    script, end = f"{'-'.join(words(rng, 2))}.sh", rng.choice(["log", "csv", "txt", "dat"])
    instruction = f"""
/app/{script} SOURCE TARGET should copy the files of the folder SOURCE whose names end in .{end} (hidden ones and
subfolders aside) to the folder TARGET, and write their number to TARGET/count, as one line. It fails on many folders.
Repair it:

- names of folders and files may contain spaces, stars and a hyphen at the start;
- TARGET is made if it does not exist;
- a SOURCE without such files is fine: the number is 0;
- if SOURCE is not a folder, it ends with exit code 1.
"""
    values = {"script": script, "end": end}
    return dict(
        topic="debugging",
        skills=("bash",),
        difficulty=2,
        title="Repair a shell script that breaks on spaces",
        instruction=instruction,
        files={script: fill(_COLLECT, **values).encode()},
        setup=(f"chmod 755 {script}",),
        tests=tests_of(_COLLECT_TEST, ("subprocess",), **values),
        solution=fill(_COLLECT_SOLUTION, **values),
    )


# -- packages -------------------------------------------------------------------------------------------

_ORDER_TEST = """
def expected():
    needs = {name: set(parts) for name, parts in json.loads((APP / "@INDEX@").read_text()).items()}
    order = []
    while ready := sorted(name for name in needs if name not in order and needs[name] <= set(order)):
        order.append(ready[0])
    return order, sorted(needs.keys() - set(order))


def test_order_of_packages():
    assert (APP / "@ORDER@").read_text().split() == expected()[0]


def test_blocked_packages():
    assert (APP / "@BLOCKED@").read_text().split() == expected()[1]
"""
_ORDER_SOLUTION = """
cat > "$HOME/plan.py" <<'PY'
import json, sys
needs = json.load(open("@INDEX@"))
done = []
while True:
    ready = [n for n in sorted(needs) if n not in done and all(d in done for d in needs[n])]
    if not ready:
        break
    done.append(ready[0])
print("\\n".join(done if sys.argv[1] == "done" else sorted(set(needs) - set(done))))
PY
python3 "$HOME/plan.py" done > @ORDER@
python3 "$HOME/plan.py" rest > @BLOCKED@
"""


def dependency_order(rng: random.Random) -> dict:
    """Orders packages by their dependencies, and reports cycles."""
    order, blocked = f"{words(rng, 1)[0]}-order.txt", f"{words(rng, 1)[0]}-blocked.txt"
    index = rng.choice(["packages.json", "modules.json"])
    names = words(rng, rng.randint(14, 22))
    needs = {name: rng.sample(names[:n], min(n, rng.randint(0, 3))) for n, name in enumerate(names)}
    one, two, three = rng.sample(names[4:], 3)
    needs[one] = [*needs[one], two]
    needs[two] = [*needs[two], one]
    needs[three] = [*needs[three], one, "absent-package"]
    text = json.dumps({name: sorted(set(needs[name])) for name in sorted(names)}, indent=1)
    files = {index: f"{text}\n".encode()}
    instruction = f"""
/app/{index} maps each package to the packages that must be installed before it. Write an order of installation to
/app/{order}, one name a line: again and again, take the first package in alphabetical order of which all needed packages
are already in the list. Packages that can never be installed this way, because they are part of a cycle, need one that is,
or need a package that does not exist, go to /app/{blocked} instead, one name a line, sorted.
"""
    values = {"index": index, "order": order, "blocked": blocked}
    return dict(
        topic="packaging",
        skills=("python", "graphs"),
        difficulty=3,
        title="Order packages by their dependencies",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_ORDER_TEST, files, ("json",), **values),
        solution=fill(_ORDER_SOLUTION, **values),
        guard_tests=(GUARD,),
    )
