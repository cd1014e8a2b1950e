"""SGLang in containers: on a CPU, and on a GPU where there is one."""

import shutil
import subprocess
from typing import Any

from docker.types import DeviceRequest, Ulimit
from engine_cpu.client import EngineClient

from .harness import ProjectContainer
from .runs import Run


class EngineContainer(ProjectContainer):
    """SGLang on a CPU with the connector on the store that the environment names."""

    PORT = 30000
    START_TIMEOUT = 400.0

    def __init__(self, run: Run, image: str, store: str, **options: Any) -> None:
        super().__init__(run, image, **options)
        self.with_exposed_ports(self.PORT)
        self.with_envs(HICACHE_NIXL_STORE=store, HICACHE_NIXL_STAGING="64MiB")

    def client(self) -> EngineClient:
        """A client of the server, once it is healthy; another one after each start."""
        self.wait_healthy(self.START_TIMEOUT)
        return EngineClient(
            f"http://{self.get_container_host_ip()}:{self.get_exposed_port(self.PORT)}"
        )


class GPUEngineContainer(EngineContainer):
    """SGLang on every GPU of this machine, with host memory in hugepages, pinned and registered.

    Have the hugepages before it starts: a container takes those of its host.
    """

    MODEL = "Qwen/Qwen3-0.6B"
    START_TIMEOUT = 1200.0

    def __init__(self, run: Run, image: str, store: str, **options: Any) -> None:
        super().__init__(
            run,
            image,
            store,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])],
            ulimits=[Ulimit(name="memlock", soft=-1, hard=-1)],
            shm_size="8g",
            **options,
        )
        self.with_envs(HICACHE_NIXL_HUGEPAGES="required", SGLANG_HUGEPAGE_SIZE="2MB")
        self.with_command(["--model-path", self.MODEL, "--enable-metrics", "--hicache-size", "1"])


def no_gpu() -> str | None:
    """Why no container can have a GPU here; None if one can."""
    if not _output("nvidia-smi", "--list-gpus"):
        return "no NVIDIA GPU here: nvidia-smi lists none"
    if "nvidia" not in _output("docker", "info", "--format", "{{json .Runtimes}}"):
        return "the Docker daemon has no NVIDIA runtime: install the NVIDIA container toolkit"
    return None


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
