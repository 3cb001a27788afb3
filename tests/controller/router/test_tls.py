import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from controller.router.app import router
from controller.settings import BadSettings, RouterSettings, load


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_a_router_with_a_certificate_speaks_tls_and_keeps_connections(certificate):
    cert, key = certificate
    engines = ["http://127.0.0.1:1"]
    settings = load(RouterSettings, model="m", port=0, engines=engines, tls_cert=cert, tls_key=key)
    trust = ssl.create_default_context(cafile=cert)
    async with router(settings) as running, httpx.AsyncClient(base_url=running.url, verify=trust) as http:
        assert running.url.startswith("https://")
        for _ in range(2):
            assert (await http.get("/health")).json() == {"status": "ok"}
        broken = await http.post("/v1/completions", content=b"{")
        assert broken.json()["error"]["code"] == "invalid_json"


def test_half_of_tls_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(BadSettings, match="set both for TLS, or neither"):
        load(RouterSettings, model="m", engines=["http://127.0.0.1:1"], tls_cert=tmp_path / "cert.pem")
