"""Templates about text and data: logs, names of files, encodings, settings, tables and checksums."""

import configparser
import csv
import hashlib
import io
import random

from glm5_jax.envs.terminal.synthesis.templates.text_forms import (
    GUARD,
    fill,
    full_name,
    sentences,
    tests_of,
    tests_with_guard,
    words,
)


def csv_bytes(rows: list[list]) -> bytes:
    """Returns rows as a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


# -- log analysis ---------------------------------------------------------------------------------------

_LOG_TEST = """
def expected():
    errors, sizes = collections.Counter(), collections.Counter()
    for line in (APP / "@LOG@").read_text().splitlines():
        request, rest = line.split('"')[1:3]
        path = request.split()[1].split("?")[0]
        status, size = rest.split()
        errors[path] += status.startswith("5")
        sizes[path] += int(size)
    return sorted(((path, errors[path], sizes[path]) for path in sizes), key=lambda row: (-row[1], row[0]))


def test_report_has_a_row_for_each_path():
    rows = [line.split("\\t") for line in (APP / "@OUT@").read_text().splitlines()]
    assert {row[0] for row in rows} == {row[0] for row in expected()}


def test_report_has_right_numbers_in_order():
    text = "".join(f"{path}\\t{count}\\t{size}\\n" for path, count, size in expected())
    assert (APP / "@OUT@").read_text() == text
"""
_LOG_SOLUTION = """
awk -F'"' '{split($2, r, " "); split(r[2], p, "?"); split($3, s, " ");
  e[p[1]] += (s[1] >= 500); b[p[1]] += s[2]}
  END {for (k in b) printf "%s\\t%d\\t%d\\n", k, e[k], b[k]}' @LOG@ > "$HOME/rows"
LC_ALL=C sort -t "$(printf '\\t')" -k2,2nr -k1,1 "$HOME/rows" > @OUT@
"""


def log_analysis(rng: random.Random) -> dict:
    """Counts server errors and bytes by path in an access log."""
    log, out = f"{rng.choice(words(rng, 3))}-access.log", f"{words(rng, 1)[0]}-errors.tsv"
    paths = [f"/{word}" for word in words(rng, rng.randint(6, 12))]
    lines = []
    for _ in range(rng.randint(150, 300)):
        query = rng.choice(["", f"?page={rng.randint(1, 9)}", "?from=500"])
        stamp = f"{rng.randint(1, 28):02}/Oct/2025:{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:00 +0000"
        status = rng.choice([200, 200, 200, 304, 404, 500, 502, 503])
        lines.append(
            f"10.0.{rng.randint(0, 9)}.{rng.randint(1, 250)} - - [{stamp}] "
            f'"{rng.choice(["GET", "POST"])} {rng.choice(paths)}{query} HTTP/1.1" {status} {rng.randint(100, 90000)}'
        )
    files = {log: "".join(f"{line}\n" for line in lines).encode()}
    instruction = f"""
{rng.choice(["After last night's outage we need numbers.", "Someone reported slow pages, so we look at the log."])}
/app/{log} is an access log in the common format. Write /app/{out} with one line per request path, where a path is what
comes before a question mark. Each line has three fields, separated by tabs: the path, the number of responses with a
status of 500 or more, and the sum of the response sizes in bytes over all responses. Sort by the number of such
responses, largest first, and by path (in byte order) where it is equal. No header. Leave the log as it is.
"""
    return dict(
        topic="text processing",
        skills=("awk", "sort"),
        difficulty=1,
        title="Count server errors per path in an access log",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_LOG_TEST, files, ("collections",), log=log, out=out),
        solution=fill(_LOG_SOLUTION, log=log, out=out),
        guard_tests=(GUARD,),
    )


# -- regular expressions and names ----------------------------------------------------------------------

_RENAME_TEST = """
OLD = @OLD@


def expected():
    names = {}
    for old in sorted(OLD):
        match = re.fullmatch(r"@PREFIX@_(\\d{4})(\\d{2})(\\d{2})_(.+)\\.(?:JPG|jpeg)", old)
        if match is None:
            names[old] = OLD[old]
            continue
        stem = f"{match[1]}-{match[2]}-{match[3]}_{match[4].lower().replace(' ', '-')}"
        new, number = f"{stem}.jpg", 2
        while new in names:
            new, number = f"{stem}-{number}.jpg", number + 1
        names[new] = OLD[old]
    return names


def actual():
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (APP / "@FOLDER@").iterdir()}


def test_renamed_files_have_their_content():
    assert actual() == expected()


def test_no_old_name_is_left():
    assert not [path.name for path in (APP / "@FOLDER@").iterdir() if path.name.startswith("@PREFIX@_")]
"""
_RENAME_SOLUTION = """
cd @FOLDER@
LC_ALL=C ls > "$HOME/names"
while IFS= read -r old; do
  if [[ $old =~ ^@PREFIX@_([0-9]{4})([0-9]{2})([0-9]{2})_(.+)\\.(JPG|jpeg)$ ]]; then
    stem=${BASH_REMATCH[1]}-${BASH_REMATCH[2]}-${BASH_REMATCH[3]}_$(tr 'A-Z ' 'a-z-' <<< "${BASH_REMATCH[4]}")
    new=$stem.jpg; n=2
    while [ -e "$new" ]; do new=$stem-$n.jpg; n=$((n + 1)); done
    mv -- "$old" "$new"
  fi
done < "$HOME/names"
"""


def regex_rename(rng: random.Random) -> dict:
    """Renames pictures by a rule, with names that collide."""
    prefix, folder = rng.choice(["IMG", "DSC", "PXL"]), f"{words(rng, 1)[0]}-photos"
    names = []
    for word in words(rng, rng.randint(9, 14)):
        day = f"20{rng.randint(15, 25)}{rng.randint(1, 12):02}{rng.randint(1, 28):02}"
        label = rng.choice([word, word.title(), f"{word.title()} {rng.choice(['Bay', 'Hill'])}"])
        names.append(f"{prefix}_{day}_{label}.JPG")
    names += [name.replace(".JPG", ".jpeg") for name in rng.sample(names, 3)]
    names += ["notes.txt", f"{prefix}-old.JPG", "readme.md"]
    contents = {name: sentences(rng, 2).encode() + name.encode() for name in names}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    instruction = f"""
The camera names its pictures badly. In /app/{folder}, rename each file whose name is {prefix}_YYYYMMDD_LABEL.JPG or
{prefix}_YYYYMMDD_LABEL.jpeg to YYYY-MM-DD_label.jpg: the label in lower case, with each space replaced by a hyphen.
Go through the old names in byte order. If a new name is already taken, add -2 before .jpg, or -3 and so on. Files with
other names stay as they are, and no content changes.
"""
    tests = tests_of(_RENAME_TEST, ("re",), old=repr(digests), prefix=prefix, folder=folder)
    return dict(
        topic="file operations",
        skills=("bash", "regular expressions"),
        difficulty=2,
        title="Rename pictures by date and label",
        instruction=instruction,
        files={f"{folder}/{name}": data for name, data in contents.items()},
        tests=tests,
        solution=fill(_RENAME_SOLUTION, prefix=prefix, folder=folder),
    )


# -- encodings ------------------------------------------------------------------------------------------

_ENCODING_TEST = """
DIGESTS = @DIGESTS@


def test_texts_are_utf8_with_unix_lines():
    for name, digest in DIGESTS.items():
        assert hashlib.sha256((APP / "@OUT@" / name).read_bytes()).hexdigest() == digest, name


def test_no_other_file_is_there():
    assert {path.name for path in (APP / "@OUT@").iterdir()} == set(DIGESTS)
"""
_ENCODING_SOLUTION = """
mkdir -p @OUT@
tail -n +2 encodings.csv > "$HOME/rows"
while IFS=, read -r name encoding; do
  iconv -f "$encoding" -t UTF-8 "@FOLDER@/$name" | sed -e '1s/^\\xEF\\xBB\\xBF//' -e 's/\\r$//' > "@OUT@/$name"
done < "$HOME/rows"
"""
_CODECS = {
    "ISO-8859-1": "latin-1",
    "UTF-16": "utf-16",
    "UTF-8": "utf-8-sig",
    "WINDOWS-1252": "cp1252",
    "UTF-16BE": "utf-16-be",
}


def encoding_mix(rng: random.Random) -> dict:
    """Converts texts of several encodings to UTF-8."""
    folder, out = f"{words(rng, 1)[0]}-letters", rng.choice(["utf8", "converted"])
    rows, files, digests = [["name", "encoding"]], {}, {}
    for index, word in enumerate(words(rng, rng.randint(8, 14))):
        encoding = [*_CODECS][index % len(_CODECS)]
        text = f"{word} café für Ångström\n" + sentences(rng, rng.randint(2, 6))
        end = rng.choice(["\n", "\r\n"])
        rows.append([f"{word}.txt", encoding])
        files[f"{folder}/{word}.txt"] = text.replace("\n", end).encode(_CODECS[encoding])
        digests[f"{word}.txt"] = hashlib.sha256(text.encode()).hexdigest()
    files["encodings.csv"] = csv_bytes(rows)
    instruction = f"""
The texts in /app/{folder} came from different systems; /app/encodings.csv names the encoding of each (columns name and
encoding). Write each one to /app/{out}, which does not exist yet, under the same name: in UTF-8 without a byte order
mark, with lines that end in a line feed alone. Nothing else may be in that folder, and the originals stay.
"""
    return dict(
        topic="text processing",
        skills=("iconv", "sed"),
        difficulty=3,
        title="Convert texts of several encodings to UTF-8",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_ENCODING_TEST, files, digests=repr(digests), out=out),
        solution=fill(_ENCODING_SOLUTION, folder=folder, out=out),
        guard_tests=(GUARD,),
    )


# -- settings -------------------------------------------------------------------------------------------

_MIGRATION_TEST = """
def expected():
    old = configparser.ConfigParser(interpolation=None)
    old.read(APP / "@INI@")
    renames = dict(csv.reader((APP / "renames.csv").read_text().splitlines()[1:]))
    new = {}
    for section in old.sections():
        for key, value in old[section].items():
            if key.startswith("old_"):
                continue
            if value in ("yes", "no"):
                value = value == "yes"
            elif value.isdigit():
                value = int(value)
            new.setdefault(section, {})[renames.get(f"{section}.{key}", key)] = value
    return new


def test_settings_have_new_names_and_types():
    text = (APP / "@OUT@").read_text()
    assert json.loads(text) == expected()


def test_file_is_sorted_and_indented():
    text = (APP / "@OUT@").read_text()
    assert text == json.dumps(expected(), indent=2, sort_keys=True) + "\\n"
"""
_MIGRATION_SOLUTION = """
cat > "$HOME/migrate.py" <<'PY'
import configparser, csv, json
old = configparser.ConfigParser(interpolation=None)
old.read("@INI@")
with open("renames.csv") as file:
    renames = {row["old"]: row["new"] for row in csv.DictReader(file)}
typed = lambda v: {"yes": True, "no": False}.get(v, int(v) if v.isdigit() else v)
new = {}
for s in old.sections():
    for k, v in old[s].items():
        if k[:4] != "old_":
            new.setdefault(s, {})[renames.get(s + "." + k, k)] = typed(v)
print(json.dumps(new, indent=2, sort_keys=True))
PY
python3 "$HOME/migrate.py" > @OUT@
"""


def config_migration(rng: random.Random) -> dict:
    """Migrates an INI file to JSON with renamed keys."""
    ini, out = f"{words(rng, 1)[0]}.ini", f"{words(rng, 1)[0]}.json"
    config = configparser.ConfigParser()
    renames = [["old", "new"]]
    for section in words(rng, 4):
        config[section] = {}
        for key in words(rng, rng.randint(4, 7)):
            kinds = [str(rng.randint(1, 9999)), "yes", "no", f"/srv/{key}", "10s"]
            config[section][key] = rng.choice(kinds)
            if rng.random() < 0.4:
                renames.append(
                    [f"{section}.{key}", f"{key}_{rng.choice(['path', 'limit', 'mode'])}"]
                )
        config[section][f"old_{rng.choice(['cache', 'token'])}"] = "unused"
    text = io.StringIO()
    config.write(text)
    files = {ini: text.getvalue().encode(), "renames.csv": csv_bytes(renames)}
    instruction = f"""
The next release reads its settings as JSON. Convert /app/{ini} to /app/{out}: an object of sections, each an object of
settings. /app/renames.csv has the columns old (section.key) and new: rename these keys within their section. Leave out
keys that begin with old_. Values yes and no become true and false, values of digits only become numbers, and all others
stay texts. Indent by two spaces, sort all keys, and end the file with a line feed. Do not change the two inputs.
"""
    return dict(
        topic="data wrangling",
        skills=("python", "json"),
        difficulty=3,
        title="Migrate settings from INI to JSON",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(
            _MIGRATION_TEST, files, ("configparser", "csv", "json"), ini=ini, out=out
        ),
        solution=fill(_MIGRATION_SOLUTION, ini=ini, out=out),
        guard_tests=(GUARD,),
    )


# -- tables ---------------------------------------------------------------------------------------------

_SQL_TEST = """
def read(name):
    with open(APP / name, newline="") as file:
        return list(csv.reader(file))[1:]


def rows(query):
    with sqlite3.connect("file:/app/@DB@?mode=ro", uri=True) as connection:
        return connection.execute(query).fetchall()


def test_tables_hold_the_rows():
    customers = sorted((int(key), name, city) for key, name, city in read("customers.csv"))
    assert sorted(rows("SELECT id, name, city FROM customers")) == customers
    orders = sorted((int(key), int(who), int(cents)) for key, who, cents in read("orders.csv"))
    assert sorted(rows("SELECT id, customer_id, cents FROM orders")) == orders


def test_totals_are_by_city():
    cities = {key: city for key, _, city in read("customers.csv")}
    totals = collections.Counter()
    for _, who, cents in read("orders.csv"):
        totals[cities[who]] += int(cents)
    ranked = sorted(totals.items(), key=lambda row: (-row[1], row[0]))
    text = "city,cents\\n" + "".join(f"{city},{cents}\\n" for city, cents in ranked)
    assert (APP / "@OUT@").read_text().replace("\\r\\n", "\\n") == text
"""
_SQL_SOLUTION = """
sqlite3 @DB@ 'CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT)'
sqlite3 @DB@ 'CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, cents INTEGER)'
sqlite3 @DB@ '.import --csv --skip 1 customers.csv customers'
sqlite3 @DB@ '.import --csv --skip 1 orders.csv orders'
sqlite3 -csv -header @DB@ 'SELECT c.city AS city, sum(o.cents) AS cents FROM orders o JOIN customers c
  ON c.id = o.customer_id GROUP BY c.city ORDER BY 2 DESC, 1' > @OUT@
"""


def csv_to_sql(rng: random.Random) -> dict:
    """Imports CSV files to SQLite and sums by city."""
    database, out = f"{words(rng, 1)[0]}.db", f"{words(rng, 1)[0]}-totals.csv"
    cities = [word.title() for word in words(rng, 6)]
    customers = [["id", "name", "city"]]
    customers += [
        [n, rng.choice([full_name(rng), f"{full_name(rng)}, Ltd"]), rng.choice(cities)]
        for n in range(1, rng.randint(20, 35))
    ]
    orders = [["id", "customer_id", "cents"]]
    orders += [
        [n, rng.randint(1, len(customers) - 1), rng.randint(100, 99999)]
        for n in range(1, rng.randint(60, 120))
    ]
    files = {"customers.csv": csv_bytes(customers), "orders.csv": csv_bytes(orders)}
    instruction = f"""
Sales keeps its data in two CSV files with headers, /app/customers.csv and /app/orders.csv. Load them into a SQLite
database /app/{database}: a table customers with the columns id, name and city, and a table orders with the columns id,
customer_id and cents. id, customer_id and cents are integers. Then write /app/{out} with the header city,cents and one
row per city with orders: the city and the sum of the cents of its customers' orders, largest sum first, then by city.
Do not change the CSV files.
"""
    return dict(
        topic="databases",
        skills=("sqlite3", "csv"),
        difficulty=2,
        title="Load CSV files into SQLite and sum by city",
        instruction=instruction,
        files=files,
        packages=("sqlite3",),
        tests=tests_with_guard(
            _SQL_TEST, files, ("collections", "csv", "sqlite3"), db=database, out=out
        ),
        solution=fill(_SQL_SOLUTION, db=database, out=out),
        guard_tests=(GUARD,),
    )


# -- checksums ------------------------------------------------------------------------------------------

_AUDIT_TEST = """
def expected():
    listed = dict(reversed(line.split("  ", 1)) for line in (APP / "SHA256SUMS").read_text().splitlines())
    there = {path.relative_to(APP / "@FOLDER@").as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
             for path in (APP / "@FOLDER@").rglob("*") if path.is_file()}
    states = dict.fromkeys(there.keys() - listed.keys(), "unlisted")
    for name, digest in listed.items():
        states[name] = "missing" if name not in there else "ok" if there[name] == digest else "changed"
    return states


def test_audit_names_each_file_with_its_state():
    text = "".join(f"{name},{state}\\n" for name, state in sorted(expected().items()))
    assert (APP / "@OUT@").read_text() == text


def test_audit_counts():
    states = sorted(line.rpartition(",")[2] for line in (APP / "@OUT@").read_text().splitlines())
    assert states == sorted(expected().values())
"""
_AUDIT_SOLUTION = """
cut -d' ' -f3- SHA256SUMS > "$HOME/listed"
(cd @FOLDER@ && find . -type f -printf '%P\\n') > "$HOME/there"
LC_ALL=C sort -u "$HOME/listed" "$HOME/there" > "$HOME/all"
while IFS= read -r name; do
  sum=$(grep -F "  $name" SHA256SUMS | awk -v n="$name" 'substr($0, 67) == n {print $1}')
  if [ -z "$sum" ]; then state=unlisted
  elif [ ! -f "@FOLDER@/$name" ]; then state=missing
  elif [ "$(sha256sum < "@FOLDER@/$name" | cut -d' ' -f1)" = "$sum" ]; then state=ok
  else state=changed; fi
  printf '%s,%s\\n' "$name" "$state"
done < "$HOME/all" > @OUT@
"""


def checksum_audit(rng: random.Random) -> dict:
    """Compares files with a list of checksums."""
    folder, out = rng.choice(["release", "mirror", "vault"]), f"{words(rng, 1)[0]}-audit.csv"
    names = [
        f"{rng.choice(['bin', 'doc', 'lib'])}/{word}.{rng.choice(['dat', 'txt'])}"
        for word in words(rng, rng.randint(14, 22))
    ]
    contents = {name: sentences(rng, 3).encode() for name in names}
    order = rng.sample(names, len(names))
    unlisted, missing, changed = order[:2], order[2:5], order[5:8]
    lines = [
        f"{hashlib.sha256(contents[n]).hexdigest()}  {n}\n" for n in names if n not in unlisted
    ]
    rng.shuffle(lines)
    for name in changed:
        contents[name] += b"One more line.\n"
    files = {f"{folder}/{n}": data for n, data in contents.items() if n not in missing}
    files["SHA256SUMS"] = "".join(lines).encode()
    instruction = f"""
{rng.choice(["Before we publish the files again,", "After the disk was replaced,"])} compare /app/{folder} with its list
of checksums, /app/SHA256SUMS, whose paths are relative to that folder. Write /app/{out} with one line per file, the path
and its state, separated by a comma and sorted by path in byte order. The state is ok, changed (the checksum differs),
missing (listed, but not there) or unlisted (there, but not listed). No header. Change nothing else.
"""
    return dict(
        topic="security hygiene",
        skills=("sha256sum", "bash"),
        difficulty=2,
        title="Audit files against a list of checksums",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_AUDIT_TEST, files, (), folder=folder, out=out),
        solution=fill(_AUDIT_SOLUTION, folder=folder, out=out),
        guard_tests=(GUARD,),
    )
