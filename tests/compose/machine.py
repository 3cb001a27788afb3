"""Podman on a machine without Docker, and stand-ins for the public images, built from Debian packages.

Everything lies in one folder, which may be kept from run to run; nothing of the machine's own Podman is touched.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("podman", "podman-compose", "runc", "mmdebstrap")
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python-is-python3", "redis-server", "prometheus")
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
HOOKS = (
    # As in the image of Python, packages are installed by pip alone.
    'rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
    # As in the images of Redis and Prometheus, who serves owns where the data goes.
    'install -d -o 65534 -g 65534 "$1/prometheus"',
    'chroot "$1" install -d -o redis -g redis /data',
    # Whom this machine trusts, a build on it trusts.
    f"copy-in {CERTIFICATES} {Path(CERTIFICATES).parent}",
)
STORAGE = """[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""
# Sandboxes allow neither higher limits nor systemd's cgroups.
CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""


def missing_tools() -> Sequence[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


@dataclass(frozen=True, slots=True)
class Machine:
    """Runs commands with a Podman whose images and state lie in `folder`."""

    folder: Path

    @classmethod
    def prepared(cls, folder: Path) -> "Machine":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
        (folder / "containers.conf").write_text(CONTAINERS.format(folder=folder))
        return cls(folder)

    @property
    def environment(self) -> Mapping[str, str]:
        """Without what could tell compose another file, project or profile."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "TRIMTAB_"))}
        return kept | {
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
        }

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What the command printed; raises `AssertionError` with all it said when it fails."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        return done.stdout

    def succeeds(self, *command: str) -> bool:
        return subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode == 0

    def stand_in(self) -> str:
        """One image that can stand for those of Python, Redis and Prometheus; made unless it is there."""
        recipe = hashlib.sha256(repr((SUITE, PACKAGES, HOOKS)).encode()).hexdigest()[:12]
        image = f"localhost/trimtab-stand-in:{recipe}"
        if not self.succeeds("podman", "image", "exists", image):
            self._make(image)
        return image

    def _make(self, image: str) -> None:
        packed = self.folder / "stand-in.tar"
        hooks = [f"--customize-hook={hook}" for hook in HOOKS]
        try:
            self.run("mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", *hooks, SUITE, str(packed))
            self.run("podman", "import", str(packed), image)
        finally:
            packed.unlink(missing_ok=True)


def build_arguments() -> str:
    """For `podman build`: the network of this machine, and how its pip finds packages, where that is written down."""
    settings = Path(os.environ.get("PIP_CONFIG_FILE", "/etc/pip.conf"))
    return "--network=host" + (f" --volume={settings}:/etc/pip.conf:ro" if settings.is_file() else "")
