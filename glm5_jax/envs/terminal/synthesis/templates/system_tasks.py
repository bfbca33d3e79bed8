"""Templates about systems: schedules, services, processes and certificates."""

import base64
import random

from glm5_jax.envs.terminal.synthesis.templates.text_forms import (
    GUARD,
    fill,
    tests_of,
    tests_with_guard,
    words,
)
from glm5_jax.envs.terminal.synthesis.templates.text_tasks import csv_bytes

# -- schedules ------------------------------------------------------------------------------------------

_CRON_TEST = """
RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
# Command -> minutes, hours, days of the month, months and days of the week (0 is Sunday) of its times.
TIMES = @TIMES@


def values(field, low, high):
    result = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        result |= set(range(int(first), int(last or (high if step else first)) + 1, int(step or 1)))
    assert result and min(result) >= low and max(result) <= high
    return result


def jobs():
    lines = [line for line in (APP / "@OUT@").read_text().splitlines() if line.strip() and line[0] != "#"]
    rows = [line.split(None, 5) for line in lines]
    pairs = {row[5]: zip(row[:5], RANGES, strict=True) for row in rows}
    return {command: [values(field, *limits) for field, limits in pair] for command, pair in pairs.items()}


def test_each_command_is_there_once():
    assert sorted(jobs()) == sorted(TIMES)


def test_times_are_right():
    full = [set(range(low, high + 1)) for low, high in RANGES]
    for command, expected in TIMES.items():
        actual = jobs()[command]
        for kind, (have, want) in enumerate(zip(actual, expected, strict=True)):
            if kind == 4:
                have, want = ({day % 7 for day in days} for days in (have, want or full[4]))
            assert have == (set(want) or full[kind]), (command, kind)
"""


def cron_line(rng: random.Random) -> dict:
    """Writes a crontab from descriptions."""
    out = rng.choice(["crontab", "jobs.cron", "schedule.cron"])
    names = [f"/usr/local/bin/{word}-{kind}" for word, kind in zip(words(rng, 4), ["sync", "report", "clean", "check"])]  # fmt: skip
    minute, hour, step = rng.randint(1, 59), rng.randint(1, 22), rng.choice([5, 10, 15, 20])
    day, first, month = rng.randint(2, 28), rng.randint(6, 9), rng.randint(1, 12)
    every = list(range(0, 60, step))
    jobs = [
        (f"at {hour:02}:{minute:02} on Monday to Friday", f"{minute} {hour} * * 1-5", ([minute], [hour], [], [], [1, 2, 3, 4, 5])),
        (f"every {step} minutes, beginning at the full hour, from {first:02}:00 until the hour of 18 is over", f"*/{step} {first}-18 * * *", (every, [*range(first, 19)], [], [], [])),
        (f"at half past midnight on day 1 and day {day} of each month", f"30 0 1,{day} * *", ([30], [0], [1, day], [], [])),
        (f"at {hour:02}:00 on every Sunday in month {month}", f"0 {hour} * {month} 0", ([0], [hour], [], [month], [0])),
    ]  # fmt: skip
    rows = list(zip(names, jobs))
    rng.shuffle(rows)
    lines = "\n".join(f"- {name} {text}" for name, (text, _, _) in rows)
    instruction = f"""
The administrator will install a crontab that you write to /app/{out}: lines with the five fields of time and the command,
for these jobs:

{lines}

Use numbers, lists, ranges and steps, no names of days or months. Give each command without arguments, once, and no other
jobs. Fields that do not matter are *.
"""
    solution = "\n".join(f"echo '{line} {name}' >> {out}" for name, (_, line, _) in rows)
    return dict(
        topic="scheduling",
        skills=("cron",),
        difficulty=2,
        title="Write a crontab from descriptions",
        instruction=instruction,
        files={},
        tests=tests_of(_CRON_TEST, times=repr({name: job[2] for name, job in rows}), out=out),
        solution=solution,
    )


# -- services -------------------------------------------------------------------------------------------

_SERVICE_TEST = """
PORT = 18473


@contextlib.contextmanager
def service():
    process = subprocess.Popen(["/app/@SCRIPT@", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None:
                    break
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def get(path):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
    connection.request("GET", path)
    reply = connection.getresponse()
    return reply.status, reply.getheader("Content-Type", "").split(";")[0], json.loads(reply.read())


def table():
    with open(APP / "@DATA@", newline="") as file:
        return [{"id": int(row["id"]), "name": row["name"], "stock": int(row["stock"])} for row in csv.DictReader(file)]


def test_serves_each_item():
    with service():
        for row in table()[:8]:
            assert get(f"/@ROUTE@/{row['id']}") == (200, "application/json", row)


def test_lists_items_with_a_minimum():
    with service():
        for least in (0, @LEAST@, 10**6):
            rows = sorted((row for row in table() if row["stock"] >= least), key=lambda row: row["id"])
            assert get(f"/@ROUTE@?stock={least}") == (200, "application/json", rows)


def test_refuses_unknown_items():
    with service():
        for path in ("/@ROUTE@/999999", "/scratch"):
            status, kind, body = get(path)
            assert (status, kind) == (404, "application/json") and isinstance(body["error"], str)
"""
_SERVICE_SOLUTION = """
cat > server.py <<'PY'
import csv, http.server, json, os, sys, urllib.parse
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "@DATA@"), newline="") as file:
    rows = {int(r["id"]): {"id": int(r["id"]), "name": r["name"], "stock": int(r["stock"])} for r in csv.DictReader(file)}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        parts = url.path.strip("/").split("/")
        status, body = 404, {"error": "not known"}
        if parts == ["@ROUTE@"]:
            least = int(urllib.parse.parse_qs(url.query).get("stock", ["0"])[0])
            status, body = 200, [rows[k] for k in sorted(rows) if rows[k]["stock"] >= least]
        elif parts[0] == "@ROUTE@" and len(parts) == 2 and parts[1].isdigit() and int(parts[1]) in rows:
            status, body = 200, rows[int(parts[1])]
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
PY
printf '#!/bin/bash\\nexec python3 "$(dirname "$0")/server.py" "$1"\\n' > @SCRIPT@
chmod 755 @SCRIPT@
"""


def service_on_port(rng: random.Random) -> dict:
    """Writes a small HTTP service over a table."""
    script, route = (
        rng.choice(["serve.sh", "start.sh", "run.sh"]),
        rng.choice(["items", "parts", "goods"]),
    )
    data = f"{words(rng, 1)[0]}.csv"
    ids = rng.sample(range(100, 999), rng.randint(20, 40))
    rows = [["id", "name", "stock"]]
    rows += [[n, f"{rng.choice(words(rng, 5))} {n % 7}", rng.randint(0, 90)] for n in ids]
    files = {data: csv_bytes(rows)}
    instruction = f"""
The shop needs its stock over HTTP. Write an executable program /app/{script} that gets a port as its only argument and
serves on 127.0.0.1 in the foreground until it is killed. The data are in /app/{data} (columns id, name and stock; id and
stock are integers). All replies are JSON, with the header Content-Type: application/json:

- GET /{route}/ID: the object of that row with the keys id, name and stock;
- GET /{route}?stock=N: a list of the objects whose stock is at least N, sorted by id;
- anything else, an unknown ID included: status 404 and an object with the key error, whose value is a text.

Python's standard library is there, and nothing can be installed. Do not change the data.
"""
    imports = ("contextlib", "csv", "http.client", "json", "socket", "subprocess", "time")
    values = {"script": script, "route": route, "data": data}
    return dict(
        topic="networking on loopback",
        skills=("python", "http"),
        difficulty=4,
        title="Serve a table over HTTP on a port",
        instruction=instruction,
        files=files,
        tests=tests_with_guard(_SERVICE_TEST, files, imports, **values, least=rng.randint(20, 70)),
        solution=fill(_SERVICE_SOLUTION, **values),
        guard_tests=(GUARD,),
    )


# -- processes ------------------------------------------------------------------------------------------

_WORKER = """#!/bin/bash
# Usage: @SCRIPT@ start|stop|status. Keeps its process id in $RUN_DIR/@NAME@.pid.
RUN_DIR=${RUN_DIR:-/app/run}
pid_file=$RUN_DIR/@NAME@.pid

is_running() {
  [ -e "$pid_file" ]
}

case "$1" in
start)
  if is_running; then echo "already running" >&2; exit 1; fi
  sleep 600 > /dev/null 2>&1 &
  echo $! > "$pid_file"
  ;;
stop)
  if ! is_running; then echo "not running" >&2; exit 1; fi
  kill "$(cat "$pid_file")"
  ;;
status)
  if is_running; then echo running; else echo stopped; fi
  ;;
esac
"""
_WORKER_TEST = """
def control(folder, word):
    run = subprocess.run(["/app/@SCRIPT@", word], env={**os.environ, "RUN_DIR": str(folder)},
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=30)
    return run.returncode, run.stdout.strip()


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@contextlib.contextmanager
def started(folder):
    try:
        yield control(folder, "start")
    finally:
        control(folder, "stop")


def folder_of(tmp_path, text=None):
    tmp_path.chmod(0o777)
    if text is not None:
        (tmp_path / "@NAME@.pid").write_text(text)
        (tmp_path / "@NAME@.pid").chmod(0o666)
    return tmp_path


def test_starts_after_a_crash(tmp_path):
    folder = folder_of(tmp_path, f"{dead_process()}\\n")
    assert control(folder, "status") == (0, "stopped")
    with started(folder) as result:
        assert result[0] == 0 and control(folder, "status") == (0, "running")


def test_starts_with_an_empty_pid_file(tmp_path):
    with started(folder_of(tmp_path, "")) as result:
        assert result[0] == 0


def test_refuses_to_start_twice(tmp_path):
    with started(folder_of(tmp_path)):
        before = (tmp_path / "@NAME@.pid").read_text()
        assert control(tmp_path, "start")[0] == 1
        assert (tmp_path / "@NAME@.pid").read_text() == before


def test_stop_removes_the_pid_file(tmp_path):
    folder = folder_of(tmp_path)
    control(folder, "start")
    assert control(folder, "stop")[0] == 0
    assert not (folder / "@NAME@.pid").exists() and control(folder, "stop")[0] == 1
"""
_WORKER_SOLUTION = """
sed -i 's/^  \\[ -e "$pid_file" \\]$/  [ -s "$pid_file" ] \\&\\& kill -0 "$(cat "$pid_file")" 2> \\/dev\\/null/' @SCRIPT@
sed -i 's/^  kill "$(cat "$pid_file")"$/&\\n  rm -f "$pid_file"/' @SCRIPT@
"""


def dead_process(rng: random.Random) -> dict:
    """Repairs a control script that a stale process id confuses."""
    name = words(rng, 1)[0]
    script = f"{name}ctl{rng.choice(['', '.sh'])}"
    values = {"script": script, "name": name}
    files = {
        script: fill(_WORKER, **values).encode(),
        f"run/{name}.pid": f"{rng.randint(3_000_000, 4_000_000)}\n".encode(),
    }
    instruction = f"""
Since the machine crashed, /app/{script} start says "already running", although nothing runs: /app/run/{name}.pid holds the
number of a process that is gone. Repair /app/{script} so that it cannot happen again:

- a pid file counts only if it holds the number of a process that exists; an empty file does not count;
- start then starts the program, with exit code 0, and stores its number; if it runs already, start changes nothing and
  ends with exit code 1;
- stop ends the process and removes the pid file; if nothing runs, it ends with exit code 1;
- status prints running or stopped, as before.

Keep the way it is called, the variable RUN_DIR and the name {name}.pid.
"""
    return dict(
        topic="processes and services",
        skills=("bash", "kill"),
        difficulty=4,
        title="Repair a control script with a stale pid file",
        instruction=instruction,
        files=files,
        setup=(f"chmod 755 {script}",),
        guard_tests=("test_refuses_to_start_twice",),
        tests=tests_of(_WORKER_TEST, ("contextlib", "os", "subprocess"), **values),
        solution=fill(_WORKER_SOLUTION, **values),
    )


# -- certificates ---------------------------------------------------------------------------------------

_CA_CONFIG = """[ca]
default_ca = own
[own]
database = /var/tmp/ca/index.txt
new_certs_dir = /var/tmp/ca
serial = /var/tmp/ca/serial
default_md = default
policy = any
[any]
commonName = supplied
[authority]
basicConstraints = critical, CA:TRUE
[req]
distinguished_name = name
[name]
"""
_TLS_TEST = """
def openssl(*arguments):
    run = subprocess.run(["openssl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return run.returncode, run.stdout


def dates():
    text = openssl("x509", "-in", "/app/tls/server.crt", "-noout", "-dates")[1]
    return [ssl.cert_time_to_seconds(line.partition("=")[2]) for line in text.splitlines()]


def test_certificate_is_signed_by_the_authority():
    middle = int(sum(dates()) // 2)
    code, text = openssl("verify", "-attime", str(middle), "-CAfile", "/app/tls/ca.crt", "/app/tls/server.crt")
    assert code == 0 and "OK" in text
    serial = openssl("x509", "-in", "/app/tls/server.crt", "-noout", "-serial")[1].split("=")[1]
    assert int(serial, 16) == @SERIAL@


def test_certificate_is_valid_for_its_days():
    start, end = dates()
    assert round((end - start) / 86400) == @DAYS@


def test_certificate_has_the_key():
    key = openssl("pkey", "-in", "/app/tls/server.key", "-pubout")[1]
    assert openssl("x509", "-in", "/app/tls/server.crt", "-noout", "-pubkey")[1] == key


def test_certificate_has_the_names():
    text = openssl("x509", "-in", "/app/tls/server.crt", "-noout", "-ext", "subjectAltName")[1]
    names = [name.strip() for name in text.splitlines()[1].split(",")]
    hosts = (APP / "tls" / "hosts.txt").read_text().split()
    assert sorted(names) == sorted(f"DNS:{host}" for host in hosts)
    subject = openssl("x509", "-in", "/app/tls/server.crt", "-noout", "-subject", "-nameopt", "multiline")[1]
    assert subject.split("=")[-1].strip() == hosts[0]
"""
_TLS_SOLUTION = """
cd tls
names=$(sed 's/^/DNS:/' hosts.txt | paste -sd, -)
printf '[req]\\ndistinguished_name = name\\n[name]\\n' > "$HOME/req.cnf"
openssl req -new -config "$HOME/req.cnf" -key server.key -subj "/CN=$(head -n 1 hosts.txt)" -out "$HOME/server.csr"
printf 'subjectAltName = %s\\n' "$names" > "$HOME/names.ext"
openssl x509 -req -in "$HOME/server.csr" -CA ca.crt -CAkey ca.key -set_serial @SERIAL@ -days @DAYS@ -extfile "$HOME/names.ext" -out server.crt
"""


def _ed25519_key(rng: random.Random) -> bytes:
    """Returns a private key in PEM (RFC 8410)."""
    der = bytes.fromhex("302e020100300506032b657004220420") + rng.randbytes(32)
    text = base64.b64encode(der).decode()
    return f"-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n".encode()


def certificate_renewal(rng: random.Random) -> dict:
    """Renews an expired certificate with the key and authority that are there."""
    domain = f"{words(rng, 1)[0]}.example"
    hosts = [f"{word}.{domain}" for word in words(rng, rng.randint(2, 4))]
    days, serial = rng.choice([90, 180, 365, 397]), rng.randint(1000, 9999)
    files = {
        "tls/ca.key": _ed25519_key(rng),
        "tls/server.key": _ed25519_key(rng),
        "tls/hosts.txt": "".join(f"{host}\n" for host in hosts).encode(),
        "tls/ca.cnf": _CA_CONFIG.encode(),
    }
    # `openssl ca` is the command that can set both dates, so that each build gives the same certificates.
    sign = "openssl ca -batch -notext -config tls/ca.cnf"
    setup = (
        "mkdir -p /var/tmp/ca",
        "touch /var/tmp/ca/index.txt",
        "echo 01 > /var/tmp/ca/serial",
        f"openssl req -new -config tls/ca.cnf -key tls/ca.key -subj '/CN={domain} authority' -out /var/tmp/ca/ca.csr",
        f"{sign} -selfsign -extensions authority -keyfile tls/ca.key -in /var/tmp/ca/ca.csr -startdate 20200101000000Z "
        "-enddate 20600101000000Z -out tls/ca.crt",
        f"openssl req -new -config tls/ca.cnf -key tls/server.key -subj /CN={hosts[0]} -out /var/tmp/ca/server.csr",
        f"{sign} -cert tls/ca.crt -keyfile tls/ca.key -in /var/tmp/ca/server.csr -startdate 20220101000000Z "
        "-enddate 20240101000000Z -out tls/server.crt",
        "rm -r /var/tmp/ca tls/ca.cnf",
    )
    guarded = {name: data for name, data in files.items() if name != "tls/ca.cnf"}
    instruction = f"""
The certificate /app/tls/server.crt has expired. Renew it with openssl: for the same key, /app/tls/server.key, signed by
our authority, whose certificate and key are /app/tls/ca.crt and /app/tls/ca.key. It is valid from now on for {days} days,
names exactly the hosts in /app/tls/hosts.txt as DNS names (subjectAltName), and has the first of them as its common
name (CN), which is the whole subject. Use the serial number {serial}. Write it over the old one, and change no other file
in that folder.
"""
    return dict(
        topic="security hygiene",
        skills=("openssl", "x509"),
        difficulty=4,
        title="Renew an expired certificate",
        instruction=instruction,
        files=files,
        setup=setup,
        packages=("openssl",),
        verifier_packages=("openssl",),
        tests=tests_with_guard(_TLS_TEST, guarded, ("ssl", "subprocess"), days=days, serial=serial),
        solution=fill(_TLS_SOLUTION, serial=serial, days=days),
        guard_tests=(GUARD, "test_certificate_has_the_key"),
    )
