"""A prompt, twice, and SGLang's memory dropped in between: the second must come from storage.

Command: ``prompt-twice.py HOST PORT``. Exit status 0 when it did. The environment gives ``TIMEOUT``
(seconds for the server to answer, and again for pages to be stored), ``REPEAT`` (of the sentence),
``PAGE_SIZE`` (tokens) and ``KEY`` (SGLang's API key, may be empty).

All requests take one connection, because a Service of several pods chooses one for each connection.
"""

import http.client
import json
import os
import re
import secrets
import sys
import time

SENTENCE = "the quick brown fox jumps over the lazy dog "
TIMEOUT = float(os.environ.get("TIMEOUT", "600"))
STORED = re.compile(r"^sglang:backuped_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def say(text: str) -> None:
    """A line in the pod's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Server:
    """One connection to a server. Its calls block; they raise OSError or HTTPException."""

    def __init__(self, host: str, port: int) -> None:
        self.connection = http.client.HTTPConnection(host, port, timeout=120)

    def ask(self, method: str, path: str, body: object = None) -> str:
        """The text of the answer; RuntimeError for a status that is not 200."""
        headers = {"Content-Type": "application/json"}
        if os.environ.get("KEY"):
            headers["Authorization"] = f"Bearer {os.environ['KEY']}"
        content = None if body is None else json.dumps(body)
        self.connection.request(method, path, content, headers)
        answer = self.connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
        return text

    def wait_until_it_answers(self) -> None:
        """TimeoutError if it does not."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                self.ask("GET", "/health")
                return
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                self.connection.close()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer within {TIMEOUT:.0f} s: {error}") from error
            time.sleep(2)

    def prompt(self, text: str) -> dict[str, object]:
        """What SGLang says of its greedy answer."""
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = self.ask("POST", "/generate", {"text": text, "sampling_params": sampling})
        meta: dict[str, object] = json.loads(answer)["meta_info"]
        return meta

    def stored_tokens(self) -> float:
        """Tokens that the server has stored since its start."""
        return sum(float(value) for value in STORED.findall(self.ask("GET", "/metrics")))

    def wait_until_stored(self, tokens: float) -> None:
        """TimeoutError if fewer are."""
        deadline = time.monotonic() + TIMEOUT
        while (stored := self.stored_tokens()) < tokens:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{stored:.0f} tokens are stored after {TIMEOUT:.0f} s")
            time.sleep(1)


def from_storage(server: Server) -> int:
    """Tokens of the second prompt that came from storage."""
    prompt = f"{secrets.token_hex(8)} {SENTENCE * int(os.environ.get('REPEAT', '100'))}"
    page = int(os.environ.get("PAGE_SIZE", "64"))
    stored = server.stored_tokens()
    tokens = int(str(server.prompt(prompt)["prompt_tokens"]))
    say(f"1. a prompt of {tokens} tokens is computed")
    server.wait_until_stored(stored + tokens // page * page)
    say("2. its pages are stored; SGLang drops what it has in GPU and host memory")
    server.ask("POST", "/flush_cache?timeout=30")
    details = server.prompt(prompt).get("cached_tokens_details")
    say(f"3. the same prompt, cached: {details}")
    return int(details.get("storage", 0)) if isinstance(details, dict) else 0


def main() -> int:
    """Returns the exit status."""
    server = Server(sys.argv[1], int(sys.argv[2]))
    try:
        server.wait_until_it_answers()
        tokens = from_storage(server)
    except (OSError, http.client.HTTPException, RuntimeError) as error:
        say(f"FAIL: {error}")
        return 1
    say(f"PASS: {tokens} tokens came from storage" if tokens else "FAIL: nothing came from storage")
    return 0 if tokens else 1


if __name__ == "__main__":
    sys.exit(main())
