"""Templates about files: archives, permissions, links, sizes, pieces of an image and incremental backups."""

import gzip
import hashlib
import io
import random
import tarfile

from glm5_jax.envs.terminal.synthesis.templates.text_forms import (
    GUARD,
    fill,
    full_name,
    sentences,
    tests_of,
    tests_with_guard,
    words,
)
from glm5_jax.envs.terminal.synthesis.templates.text_tasks import csv_bytes

# -- archives -------------------------------------------------------------------------------------------

_ARCHIVE_TEST = """
def table():
    with open(APP / "contents.csv", newline="") as file:
        return list(csv.DictReader(file))


def is_readable(name):
    try:
        with gzip.open(APP / "@FOLDER@" / name) as file:
            return len(file.read()) > 0
    except (OSError, EOFError, zlib.error):
        return False


def test_damaged_archives_are_listed():
    names = sorted({row["archive"] for row in table()})
    damaged = "".join(f"{name}\\n" for name in names if not is_readable(name))
    assert damaged and (APP / "@DAMAGED@").read_text() == damaged


def test_readable_archives_are_extracted():
    expected = {f"{row['archive'].split('.')[0]}/{row['file']}": row["sha256"]
                for row in table() if is_readable(row["archive"])}
    out = APP / "@OUT@"
    actual = {path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
              for path in out.rglob("*") if path.is_file()}
    assert actual == expected
"""
_ARCHIVE_SOLUTION = """
mkdir -p @OUT@
ls @FOLDER@ | LC_ALL=C sort > "$HOME/archives"
while read -r name; do gzip -t "@FOLDER@/$name" 2> "$HOME/errors" || echo "$name"; done < "$HOME/archives" > @DAMAGED@
while read -r name; do
  if ! grep -qxF "$name" @DAMAGED@; then
    mkdir -p "@OUT@/${name%%.*}"
    tar -xzf "@FOLDER@/$name" -C "@OUT@/${name%%.*}"
  fi
done < "$HOME/archives"
"""


def _archive(files: dict[str, bytes]) -> bytes:
    """Returns a gzipped tar file without times."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def archive_repair(rng: random.Random) -> dict:
    """Saves what can be read of archives of which some are truncated or overwritten."""
    folder, out = rng.choice(["backups", "dumps"]), rng.choice(["restored", "rescued"])
    damaged = f"{words(rng, 1)[0]}-damaged.txt"
    names = words(rng, rng.randint(7, 10))
    rows, files = [["archive", "file", "sha256"]], {}
    for index, name in enumerate(names):
        parts = {f"{w}.txt": sentences(rng, 8).encode() for w in words(rng, rng.randint(2, 4))}
        data = _archive(parts)
        if index % 4 == 1:
            data = data[: len(data) * 2 // 3]
        if index % 4 == 3:
            middle = len(data) // 2
            data = data[:middle] + bytes(rng.randbytes(24)) + data[middle + 24 :]
        files[f"{folder}/{name}.tar.gz"] = data
        rows += [[f"{name}.tar.gz", p, hashlib.sha256(d).hexdigest()] for p, d in parts.items()]
    files["contents.csv"] = csv_bytes(rows)
    instruction = f"""
A disk failed, and some archives in /app/{folder} are truncated or partly overwritten. Test each one: an archive is
readable if its gzip stream is complete and its checksum is right. Extract each readable NAME.tar.gz into
/app/{out}/NAME, and write the names of the other archives to /app/{damaged}, one a line, sorted. Take nothing from a
damaged archive. /app/contents.csv says what the archives once held (columns archive, file and sha256).
"""
    return dict(
        topic="archives",
        skills=("gzip", "tar"),
        difficulty=3,
        title="Extract the readable archives of a failed disk",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(
            _ARCHIVE_TEST,
            files,
            ("csv", "gzip", "zlib"),
            folder=folder,
            out=out,
            damaged=damaged,
        ),
        solution=fill(_ARCHIVE_SOLUTION, folder=folder, out=out, damaged=damaged),
        guard_tests=(GUARD,),
    )


# -- permissions ----------------------------------------------------------------------------------------

_MODE_TEST = """
MODES = @MODES@


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_files_have_their_modes():
    for path in (APP / "@FOLDER@").rglob("*"):
        if path.is_file():
            top = path.relative_to(APP / "@FOLDER@").parts[0]
            assert mode_of(path) == MODES[top], path


def test_folders_have_their_modes():
    folders = [APP / "@FOLDER@", *(path for path in (APP / "@FOLDER@").rglob("*") if path.is_dir())]
    assert len(folders) > 4 and all(mode_of(path) == 0o750 for path in folders)
"""
_MODE_SOLUTION = """
find @FOLDER@ -type d -exec chmod 750 {} +
find @FOLDER@/bin -type f -exec chmod 755 {} +
find @FOLDER@/etc -type f -exec chmod 640 {} +
find @FOLDER@/keys -type f -exec chmod 600 {} +
find @FOLDER@/share -type f -exec chmod 644 {} +
"""


def permission_fix(rng: random.Random) -> dict:
    """Restores the permissions of a tree by a rule per folder."""
    folder = f"{words(rng, 1)[0]}-service"
    modes = {"bin": 0o755, "etc": 0o640, "keys": 0o600, "share": 0o644}
    files, setup = {}, []
    for top in modes:
        for word in words(rng, rng.randint(3, 5)):
            path = f"{folder}/{top}/{rng.choice(['', 'extra/'])}{word}.{top[:3]}"
            files[path] = sentences(rng, 1).encode()
            setup.append(f"chmod {rng.choice(['777', '666', '600', '744'])} {path}")
    setup.append(f"find {folder} -type d -exec chmod 777 {{}} +")
    instruction = f"""
A careless copy lost the permissions in /app/{folder}. Set them again: each folder, /app/{folder} included, has mode 750.
Files below bin have mode 755, files below etc 640, files below keys 600 and files below share 644, at any depth. Do not
add, remove or change files.
"""
    digests = {path: data for path, data in files.items()}
    table = "{" + ", ".join(f"'{top}': {mode:#o}" for top, mode in modes.items()) + "}"
    return dict(
        topic="permissions",
        skills=("find", "chmod"),
        difficulty=2,
        title="Restore the permissions of a tree",
        instruction=instruction,
        files=files,
        setup=tuple(setup),
        tests=tests_with_guard(_MODE_TEST, digests, ("stat",), modes=table, folder=folder),
        solution=fill(_MODE_SOLUTION, folder=folder),
        guard_tests=(GUARD,),
    )


# -- links ----------------------------------------------------------------------------------------------

_LINK_TEST = """
def expected(column):
    with open(APP / "index.csv", newline="") as file:
        return {(row[column], row["file"]) for row in csv.DictReader(file)}


def links(folder):
    return {(path.parent.name, path.name): os.readlink(path) for path in (APP / folder).rglob("*") if path.is_symlink()}


def check(folder, column):
    actual = links(folder)
    assert actual.keys() == expected(column)
    assert all(target == f"../../@LIBRARY@/{name}" for (_, name), target in actual.items())


def test_links_by_year():
    check("by-year", "year")


def test_links_by_author():
    check("by-author", "author")


def test_only_links_and_folders():
    paths = [path for folder in ("by-year", "by-author") for path in (APP / folder).rglob("*")]
    assert paths and all(path.is_symlink() or path.is_dir() for path in paths)
"""
_LINK_SOLUTION = """
tail -n +2 index.csv > "$HOME/rows"
while IFS=, read -r file author year; do
  mkdir -p "by-year/$year"
  ln -s "../../@LIBRARY@/$file" "by-year/$year/$file"
done < "$HOME/rows"
while IFS=, read -r file author year; do
  mkdir -p "by-author/$author"
  ln -s "../../@LIBRARY@/$file" "by-author/$author/$file"
done < "$HOME/rows"
"""


def symlink_farm(rng: random.Random) -> dict:
    """Makes views of a library by links."""
    library = f"{words(rng, 1)[0]}-papers"
    authors = [full_name(rng).split()[1] for _ in range(5)]
    rows: list[list[str | int]] = [["file", "author", "year"]]
    files = {}
    for word in words(rng, rng.randint(12, 18)):
        name = f"{word}.{rng.choice(['pdf', 'epub'])}"
        files[f"{library}/{name}"] = sentences(rng, 2).encode()
        rows.append([name, rng.choice(authors), rng.randint(2015, 2019)])
    files["index.csv"] = csv_bytes(rows)
    instruction = f"""
Readers want two views of /app/{library}, whose files are described by /app/index.csv (columns file, author and year).
Make /app/by-year/YEAR/FILE and /app/by-author/AUTHOR/FILE for each row: symbolic links with relative targets of the form
../../{library}/FILE, so that they still work when /app is moved. The two views hold folders and links only.
"""
    return dict(
        topic="file operations",
        skills=("ln", "bash"),
        difficulty=2,
        title="Make views of a library by relative links",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_LINK_TEST, files, ("csv", "os"), library=library),
        solution=fill(_LINK_SOLUTION, library=library),
        guard_tests=(GUARD,),
    )


# -- sizes ----------------------------------------------------------------------------------------------

_USAGE_TEST = """
def expected():
    rows = []
    for top in (APP / "@FOLDER@").iterdir():
        sizes = sorted((path.stat().st_size, path.relative_to(top).as_posix())
                       for path in top.rglob("*") if path.is_file())
        largest = min(name for size, name in sizes if size == sizes[-1][0])
        rows.append((top.name, sum(size for size, _ in sizes), len(sizes), largest))
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def rows():
    return [line.split("\\t") for line in (APP / "@OUT@").read_text().splitlines()]


def test_sizes_and_counts_in_order():
    assert [row[:3] for row in rows()] == [[name, str(size), str(count)] for name, size, count, _ in expected()]


def test_largest_files():
    assert [row[3] for row in rows()] == [largest for *_, largest in expected()]
"""
_USAGE_SOLUTION = """
ls @FOLDER@ > "$HOME/tops"
while read -r top; do
  (cd "@FOLDER@/$top" && find . -type f -printf '%s\\t%P\\n' | LC_ALL=C sort -k1,1nr -k2,2) > "$HOME/list"
  awk -F'\\t' -v top="$top" 'NR == 1 {big = $2} {n += $1} END {printf "%s\\t%d\\t%d\\t%s\\n", top, n, NR, big}' "$HOME/list"
done < "$HOME/tops" > "$HOME/usage"
LC_ALL=C sort -t "$(printf '\\t')" -k2,2nr -k1,1 "$HOME/usage" > @OUT@
"""


def disk_usage(rng: random.Random) -> dict:
    """Reports sizes of folders."""
    folder, out = rng.choice(["home", "projects", "share"]), f"{words(rng, 1)[0]}-usage.tsv"
    files = {}
    for top in words(rng, rng.randint(5, 8)):
        for word in words(rng, rng.randint(3, 7)):
            path = f"{folder}/{top}/{rng.choice(['', 'old/', 'a/b/'])}{word}.bin"
            files[path] = rng.randbytes(rng.randint(10, 3000))
    instruction = f"""
/app/{folder} is filling up. For each folder directly in it, write one line to /app/{out}: the folder's name, the sum of
the sizes of all files below it in bytes (their length, not the blocks on disk), the number of these files, and the path
of the largest one relative to that folder (the first in byte order, if several are equally large). Separate the four
fields by tabs. Sort by the sum, largest first, then by name. No header.
"""
    return dict(
        topic="file operations",
        skills=("find", "awk"),
        difficulty=2,
        title="Report sizes of folders and their largest files",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_USAGE_TEST, files, (), folder=folder, out=out),
        solution=fill(_USAGE_SOLUTION, folder=folder, out=out),
        guard_tests=(GUARD,),
    )


# -- sparse files ---------------------------------------------------------------------------------------

_SPARSE_TEST = """
def test_image_has_its_size():
    assert (APP / "@OUT@").stat().st_size == int((APP / "size").read_text())


def test_image_has_its_content():
    assert hashlib.sha256((APP / "@OUT@").read_bytes()).hexdigest() == "@DIGEST@"
"""
_SPARSE_SOLUTION = """
truncate -s "$(cat size)" @OUT@
tail -n +2 map.csv > "$HOME/map"
while IFS=, read -r piece offset; do
  dd if="@FOLDER@/$piece" of=@OUT@ bs=1 seek="$offset" conv=notrunc status=none
done < "$HOME/map"
"""


def sparse_files(rng: random.Random) -> dict:
    """Assembles a sparse image from pieces with offsets."""
    folder, out = f"{words(rng, 1)[0]}-pieces", f"{words(rng, 1)[0]}.img"
    size = rng.randint(200_000, 400_000)
    image, files = bytearray(size), {}
    rows: list[list[str | int]] = [["piece", "offset"]]
    at = first = rng.randint(0, 5000)
    while at < size - 12_000:
        data = rng.randbytes(rng.randint(400, 6000))
        name = f"{rng.getrandbits(24):06x}.bin"
        image[at : at + len(data)] = data
        rows.append([name, at])
        files[f"{folder}/{name}"] = data
        at += len(data) + rng.randint(2_000, 40_000)
    # A later row overwrites a part of an earlier one.
    data = rng.randbytes(300)
    image[first + 100 : first + 400] = data
    files[f"{folder}/last.bin"] = data
    files |= {
        "map.csv": csv_bytes([*rows, ["last.bin", first + 100]]),
        "size": f"{size}\n".encode(),
    }
    instruction = f"""
The copy of a disk stopped, and what was saved is in pieces. Assemble the image /app/{out} from them: it has the number of
bytes that /app/size says. /app/map.csv (columns piece and offset) says at which byte each file of /app/{folder} lies;
apply its rows in order, since a later piece replaces what it overlaps. Everything that no piece covers is zero bytes.
"""
    digest = hashlib.sha256(image).hexdigest()
    return dict(
        topic="recovery from broken states",
        skills=("dd", "truncate"),
        difficulty=4,
        title="Assemble a sparse image from pieces",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_SPARSE_TEST, files, (), out=out, digest=digest),
        solution=fill(_SPARSE_SOLUTION, folder=folder, out=out),
        guard_tests=(GUARD,),
    )


# -- backups --------------------------------------------------------------------------------------------

_BACKUP_TEST = """
def backup(source, target):
    subprocess.run(["/app/@SCRIPT@", str(source), str(target)], check=True, timeout=60)


def run_twice(tmp_path):
    source, target = tmp_path / "scratch source", tmp_path / "scratch target"
    (source / "a").mkdir(parents=True)
    for name in ("a/scratch one", "scratch two", "scratch three"):
        (source / name).write_text(name)
    (source / "scratch.@SKIPPED@").write_text("left out")
    backup(source, target)
    (source / "scratch two").write_text("changed!")
    (source / "scratch three").unlink()
    backup(source, target)
    return target


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_run_makes_a_snapshot(tmp_path):
    target = run_twice(tmp_path)
    assert contents(target / "1") == {
        "a/scratch one": "a/scratch one", "scratch two": "scratch two", "scratch three": "scratch three"}
    assert contents(target / "2") == {"a/scratch one": "a/scratch one", "scratch two": "changed!"}


def test_unchanged_files_are_hard_links(tmp_path):
    target = run_twice(tmp_path)
    inodes = [[(target / number / name).stat().st_ino for number in ("1", "2")]
              for name in ("a/scratch one", "scratch two")]
    assert [one == two for one, two in inodes] == [True, False]


def test_latest_points_to_the_last_snapshot(tmp_path):
    assert os.readlink(run_twice(tmp_path) / "latest") == "2"
"""
_BACKUP_SOLUTION = """
cat > @SCRIPT@ <<'SH'
#!/bin/bash
set -eu
source=$1 target=$2
mkdir -p "$target"
last=0
while [ -d "$target/$((last + 1))" ]; do last=$((last + 1)); done
new=$((last + 1))
mkdir "$target/$new"
(cd "$source" && find . -type d -printf '%P\\0') | while IFS= read -r -d '' folder; do mkdir -p "$target/$new/$folder"; done
(cd "$source" && find . -type f ! -name '*.@SKIPPED@' -printf '%P\\0') | while IFS= read -r -d '' file; do
  if cmp -s "$source/$file" "$target/$last/$file"; then ln "$target/$last/$file" "$target/$new/$file"
  else cp "$source/$file" "$target/$new/$file"; fi
done
ln -sfn "$new" "$target/latest"
SH
chmod 755 @SCRIPT@
"""


def incremental_backup(rng: random.Random) -> dict:
    """Writes a script that makes snapshots with hard links."""
    script, skipped = (
        f"{'-'.join(words(rng, 2))}.sh",
        rng.choice(["tmp", "swp", "part", "bak"]),
    )
    instruction = f"""
Write an executable program /app/{script} that makes incremental backups: {script} SOURCE TARGET copies the folder SOURCE
to a new folder TARGET/N, where N is 1 for the first backup, 2 for the next, and so on; TARGET may not exist yet. Files
whose name ends in .{skipped} are left out. A file with the same content as in the backup before is a hard link to that
one, so that it needs no more space; all other files are copies. At the end the symbolic link TARGET/latest has the number
of the new backup as its target. Paths may contain spaces. There is no rsync.
"""
    return dict(
        topic="backup",
        skills=("bash", "ln", "cmp"),
        difficulty=5,
        title="Write a script for incremental backups",
        instruction=instruction,
        files={},
        tests=tests_of(_BACKUP_TEST, ("os", "subprocess"), script=script, skipped=skipped),
        solution=fill(_BACKUP_SOLUTION, script=script, skipped=skipped),
    )
