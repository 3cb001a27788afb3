"""A real Prometheus with this project's configuration, scraping every second."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.boards import PROMETHEUS
from tests.support.up import wait_until

BINARY = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
WHY_SKIPPED = "there is no Prometheus on this machine: apt-get install prometheus"
SCRAPE_S = 1


class Prometheus:
    """Answers of its HTTP API; a query that it refuses raises `AssertionError` with its own words."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=30)
        self.began_s = time.time()

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **given: object) -> Any:
        answer = self._http.get(path, params={name: str(value) for name, value in given.items()}).json()
        assert answer["status"] == "success", f"{given}: {answer.get('error')}"
        return answer["data"]

    def series(self, expr: str) -> Sequence[Mapping[str, Any]]:
        """Values of an expression since this began to watch, second by second."""
        found: Sequence[Mapping[str, Any]] = self.get(
            "/query_range", query=expr, start=self.began_s - 5, end=time.time(), step=SCRAPE_S
        )["result"]
        return found

    def has_data(self, expr: str) -> bool:
        """Whether the expression ever had a value that can be drawn."""
        values = (value for series in self.series(expr) for _, value in series["values"])
        return any(value not in {"NaN", "+Inf", "-Inf"} for value in values)

    def healthy_targets(self) -> int:
        return sum(target["health"] == "up" for target in self.get("/targets")["activeTargets"])


@contextlib.contextmanager
def running_prometheus(
    folder: Path, port: int, targets: Mapping[str, Sequence[str]], model: str
) -> Iterator[Prometheus]:
    """Our configuration with other intervals and targets (addresses by what serves there), until the block ends."""
    config = _configured(folder / "config", targets, model)
    log = folder / "prometheus.log"
    command = [
        str(BINARY),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, "Prometheus serves")
        assert process.poll() is None, log.read_text()
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(timeout=30)


def _configured(folder: Path, targets: Mapping[str, Sequence[str]], model: str) -> Path:
    shutil.copytree(PROMETHEUS, folder)
    for what, addresses in targets.items():
        groups = [{"targets": list(addresses), "labels": {"model": model}}]
        (folder / "targets" / f"{what}.yml").write_text(yaml.safe_dump(groups))
    path = folder / "prometheus.yml"
    config = yaml.safe_load(path.read_text())
    config["global"] = {f"{name}_interval": f"{SCRAPE_S}s" for name in ("scrape", "evaluation")}
    path.write_text(yaml.safe_dump(config))
    return path


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/ready").is_success
    except httpx.TransportError:
        return False
