"""docs/api.md says what the admin API is."""

import re

import pytest
from starlette.testclient import TestClient

from controller.admin.api_page import PAGE, document, page
from controller.admin.app import create_app
from controller.admin.services import Services
from controller.store import MemoryStore


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(document()), "run `python -m controller.admin.api_page`"


def test_every_call_and_type_is_on_the_page_and_every_link_leads_somewhere() -> None:
    api, text = document(), page(document())
    for path, methods in api["paths"].items():
        assert all(f"| `{method.upper()} {path}` |" in text for method in methods)
    titles = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert titles == sorted(api["components"]["schemas"])
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= {title.lower() for title in titles}


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_of_the_api_loads_anything_from_another_host(path: str) -> None:
    app = create_app(Services.wire(MemoryStore(), "m"), token=None)
    assert TestClient(app).get(path).status_code == 404
