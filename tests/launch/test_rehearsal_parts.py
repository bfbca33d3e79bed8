"""The parts of a rehearsal, with a job in this process."""

import http.server
import threading

import pytest

from glm5_jax.runtime.placement import EXIT_RESTART
from launch.rehearsal.job import Death, RehearsalFailed, run_server_parts


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every request, and keeps its path."""

    def do_GET(self):
        self.server.paths.append(self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.reply if self.path == "/metrics" else b"{}")

    do_POST = do_GET

    def log_message(self, *_):
        pass


class ServerJob:
    """Job whose server is in this process, and which ends when a stop is requested.

    Attributes:
      num_starts: number of starts.
      deaths: programs that have died.
    """

    def __init__(self):
        self.num_starts, self.deaths, self._is_stopped = 0, [], False

    def start(self):
        self.num_starts, self._is_stopped = self.num_starts + 1, False

    def poll(self):
        return EXIT_RESTART if self._is_stopped else None

    def request_stop(self):
        self._is_stopped = True

    def stop_problems(self):
        return []


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.paths = []
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_server_replies_before_and_after_stop(server):
    job = ServerJob()
    run_server_parts(job, f"http://127.0.0.1:{server.server_port}", timeout_s=60)
    assert job.num_starts == 2
    assert server.paths == ["/health", "/v1/completions"] * 2


def test_split_server_must_have_received_pages(server):
    url = f"http://127.0.0.1:{server.server_port}"
    server.reply = b"glm5_received_tokens_total 0.0"
    with pytest.raises(RehearsalFailed, match="has received no pages of the prompt"):
        run_server_parts(ServerJob(), url, timeout_s=60, receives_pages=True)
    server.reply = b"# TYPE\nglm5_received_tokens_total 96.0\n"
    run_server_parts(ServerJob(), url, timeout_s=60, receives_pages=True)


def test_dead_server_fails_rehearsal(tmp_path):
    job = ServerJob()
    job.deaths.append(Death("serve-0", 1, tmp_path / "serve-0.log"))
    with pytest.raises(RehearsalFailed, match="serve-0 ended with code 1"):
        run_server_parts(job, "http://127.0.0.1:1", timeout_s=60)
