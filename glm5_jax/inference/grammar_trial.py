"""Compiles grammars in a child process first, because those of clients are compiled by native code.

A hostile schema can end that code by a segmentation fault, such as `{"const": -9223372036854775808}` in llguidance 1.9, or
take seconds and hundreds of megabytes, such as `{"type": "integer", "multipleOf": 1000003}`. The child process has limits
of processor time and memory. The server's own process compiles only what the child process has compiled.
"""

import atexit
import contextlib
import functools
import hashlib
import pathlib
import resource
import signal
import sys
import threading
from collections.abc import Iterator

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from glm5_jax.runtime.process import PipeWorker, serve
from glm5_jax.text.tokenizer import NUM_BYTES, SPECIAL_TOKENS

MAX_CPU_S = 2.0  # of one grammar; large ones of ordinary clients take 0.2 s
MAX_BYTES = 2**25  # of one grammar; large ones of ordinary clients take 10 MB
MAX_CONCURRENT = 3  # grammars that are compiled at once, each in a thread of the server
_MAX_WAIT_S = 0.25  # for a slot, because most grammars take some milliseconds
_MAX_KNOWN = 1024  # grammars whose result is remembered
_TIMEOUT_S = 120.0  # of a call on a busy machine
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class GrammarBusy(Exception):
    """Raised if too many grammars are being compiled."""


class GrammarTrial:
    """Compiler of grammars in a child process, which starts with the first one. Any thread may call it."""

    def __init__(self):
        self._slots = threading.BoundedSemaphore(MAX_CONCURRENT)
        self._lock = threading.Lock()  # of the worker and of what is known
        self._worker: PipeWorker | None = None
        self._known: dict[bytes, str] = {}  # problem by the digest of the grammar, oldest first

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Counts as one of the grammars that are being compiled while entered. Raises GrammarBusy."""
        # The first grammars wait for the start of the child process.
        if not self._slots.acquire(timeout=_MAX_WAIT_S if self._known else _TIMEOUT_S):
            raise GrammarBusy(
                f"{MAX_CONCURRENT} other grammars are being compiled, which is the maximum; try again"
            )
        try:
            yield
        finally:
            self._slots.release()

    def problem(self, grammar: str) -> str:
        """Returns why a grammar in llguidance's JSON cannot be enforced; "" if it can. Raises GrammarBusy."""
        digest = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        problem = self._known.get(digest)
        if problem is None:
            with self.slot(), self._lock:
                problem = self._known.get(digest)  # another thread may have tried it meanwhile
                if problem is None:
                    problem = self._known[digest] = self._try(grammar)
                if len(self._known) > _MAX_KNOWN:
                    del self._known[next(iter(self._known))]
        return problem

    def close(self) -> None:
        """Ends the child process; the next grammar starts another one."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _try(self, grammar: str) -> str:
        if self._worker is None:
            self._worker = self._start()
        try:
            return self._worker.call("compile_problem", _TIMEOUT_S, grammar=grammar)
        except (ChildProcessError, TimeoutError):
            self._worker = None
        size = f"{MAX_BYTES // 2**20} MB"
        return f"compiling it crashes, or takes more than {MAX_CPU_S:g} s or {size}"

    def _start(self) -> PipeWorker:
        command = [sys.executable, "-m", "glm5_jax.inference.grammar_trial"]
        worker = PipeWorker(command, cwd=_ROOT)  # the package need not be installed
        # Raises here, and not with a grammar, if the process cannot start.
        worker.call("limit_memory", _TIMEOUT_S)
        return worker


shared_trial = GrammarTrial()
atexit.register(shared_trial.close)


def matcher_problem(matcher: LLMatcher) -> str:
    """Returns the error of a matcher at the start of a reply, with its first mask; "" if there is none."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def compile_problem(grammar: str) -> str:
    """Returns the error of a grammar; "" if there is none. Beyond the limits of `limit_memory` this process ends."""
    # The default action of the timer's signal also ends native code.
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        return matcher_problem(LLMatcher(_byte_tokenizer(), grammar, log_level=0))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_memory() -> None:
    """Limits the memory of this process to what it has at the moment and `MAX_BYTES`."""
    _byte_tokenizer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = pathlib.Path("/proc/self/statm")
    if sizes.exists():  # only Linux has it, and this limit
        pages = int(sizes.read_text().split()[5])
        limit = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _ByteTokens:
    """Tokenizer of single bytes and the family's special tokens, with the attributes that llguidance reads."""

    bos_token_id = None
    eos_token_id = NUM_BYTES  # the first special token
    tokens = [bytes([i]) for i in range(NUM_BYTES)] + [name.encode() for name in SPECIAL_TOKENS]
    special_token_ids = list(range(NUM_BYTES, NUM_BYTES + len(SPECIAL_TOKENS)))

    def __call__(self, data: bytes) -> list[int]:
        return list(data)


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteTokens()), n_vocab=len(_ByteTokens.tokens))


if __name__ == "__main__":
    serve(compile_problem, limit_memory)
