"""Asks and administers a SGLang server over HTTP, wherever it runs.

Owns the requests. Needs neither SGLang nor torch. Must not know how the server was started.
"""

import json
import time
import urllib.error
import urllib.request

from engine_cpu.replies import Completion, Reply, metric_sum

IDLE_TIMEOUT = 60.0
ADMIN_KEY = "administrator"
"""What the servers of this package ask administrators for."""


class EngineError(RuntimeError):
    """The server died, was too slow or refused a request."""


class EngineClient:
    """A client of one server. Calls block until they are answered; they raise EngineError."""

    def __init__(self, url: str) -> None:
        """`url` is where the server listens, without a path."""
        self.url = url

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            self._get("/health", None, 5.0)
        except OSError:
            return False
        return True

    def wait_healthy(self, timeout: float) -> None:
        """Block until the server answers; EngineError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if time.monotonic() > deadline:
                raise self._failure(f"SGLang did not answer within {timeout:.0f} s")
            time.sleep(0.5)

    def generate(
        self,
        prompt: str,
        tokens: int = 12,
        timeout: float = 120.0,
        replica: int | None = None,
    ) -> Completion:
        """Ask for `tokens` greedy tokens after `prompt`; blocks until they are there.

        `replica` is the data-parallel rank that answers; SGLang's choice if None.
        """
        begin = time.monotonic()
        body: dict[str, object] = {
            "text": prompt,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        if replica is not None:
            body["routed_dp_rank"] = replica
        meta = json.loads(self._request("/generate", body, timeout))["meta_info"]
        return Completion.of(meta, time.monotonic() - begin)

    def metric(self, name: str, **labels: str) -> float:
        """SGLang's metric ``sglang:<name>`` now, see `metric_sum`."""
        return metric_sum(self._request("/metrics", None, 30.0), name, labels)

    def stored_tokens(self) -> int:
        """Tokens this server has written to storage since it started, by SGLang's own count.

        Every rank counts its own, so that a prompt counts once for each.
        """
        return int(self.metric("backuped_tokens_total"))

    def wait_stored(self, tokens: int, timeout: float = 60.0) -> int:
        """Block until `stored_tokens` reaches `tokens`; returns the count."""
        deadline = time.monotonic() + timeout
        while (stored := self.stored_tokens()) < tokens:
            if time.monotonic() > deadline:
                raise self._failure(f"{stored} of {tokens} tokens stored after {timeout:.0f} s")
            time.sleep(0.2)
        return stored

    def detach(self) -> Reply:
        """Detach the storage back-end, once SGLang is idle."""
        return self.when_idle("DELETE", "/hicache/storage-backend")

    def clear_storage(self) -> Reply:
        """Let the storage back-end forget its pages."""
        return self._administer("POST", "/hicache/storage-backend/clear")

    def flush(self) -> Reply:
        """Drop what is cached on the device and in host memory; storage keeps what it has."""
        return self._administer("POST", "/flush_cache?timeout=30")

    def when_idle(self, method: str, path: str, body: object | None = None) -> Reply:
        """Administer a server that is idle; blocks until it is."""
        # SGLang is still writing back what it has answered, and refuses meanwhile.
        deadline = time.monotonic() + IDLE_TIMEOUT
        while "is not idle" in (reply := self._administer(method, path, body)).text:
            if time.monotonic() > deadline:
                raise self._failure(f"SGLang was not idle within {IDLE_TIMEOUT:.0f} s")
            time.sleep(0.1)
        return reply

    def _administer(self, method: str, path: str, body: object | None = None) -> Reply:
        try:
            return Reply(200, self._get(path, body, 120.0, method))
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(errors="replace"))
        except OSError as error:
            raise self._failure(f"SGLang did not serve {method} {path}: {error}") from error

    def _get(
        self, path: str, body: object | None, timeout: float, method: str | None = None
    ) -> str:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text: str = response.read().decode()
        return text

    def _request(self, path: str, body: object | None, timeout: float) -> str:
        try:
            return self._get(path, body, timeout)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.read().decode(errors='replace')[:300]}"
        except OSError as error:
            reason = str(error)
        raise self._failure(f"SGLang did not serve {path}: {reason}")

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{what} ({self.url})")
