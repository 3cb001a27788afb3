"""`trimtab slo`: what clients are promised, by request class."""

from typing import Annotated, Any

import typer

from controller.cli.admin import AdminToken, AdminUrl, admin_api
from controller.cli.show import AsJson, print_json, print_table

app = typer.Typer(help="Show and change what clients are promised, by request class.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="CLASS", help="Value of the header x-slo-class, or 'default'")]


@app.command()
def show(admin_url: AdminUrl = None, admin_token: AdminToken = None, as_json: AsJson = False) -> None:
    """Print all classes."""
    with admin_api(admin_url, admin_token) as admin:
        _print(admin.get("/v1/slo"), as_json)


@app.command("set")
def set_slo(
    name: Name,
    ttft_ms: Annotated[float | None, typer.Option(help="Bound on the time to first token")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Bound on the time per further token")] = None,
    attainment: Annotated[float | None, typer.Option(help="Share of requests that must meet both, 0 to 1")] = None,
    weight: Annotated[float | None, typer.Option(help="Worth of one good request of this class")] = None,
    admin_url: AdminUrl = None,
    admin_token: AdminToken = None,
) -> None:
    """Add or change one class. What is not given stays; a new class starts from 'default'.

    * `trimtab slo set chat --ttft-ms 500 --tpot-ms 50 --attainment 0.95`
    """
    given = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "attainment": attainment, "weight": weight}
    with admin_api(admin_url, admin_token) as admin:
        classes = admin.get("/v1/slo")["classes"]
        slo = classes.get(name, classes["default"]) | {key: value for key, value in given.items() if value is not None}
        _print(admin.put(f"/v1/slo/{name}", slo))


@app.command()
def remove(name: Name, admin_url: AdminUrl = None, admin_token: AdminToken = None) -> None:
    """Remove one class; its requests then count as 'default'."""
    with admin_api(admin_url, admin_token) as admin:
        _print(admin.delete(f"/v1/slo/{name}"))


def _print(table: dict[str, Any], as_json: bool = False) -> None:
    if as_json:
        print_json(table)
        return
    columns = ("class", "TTFT ms", "TPOT ms", "attainment", "weight")
    rows = [
        (name, f"{slo['ttft_ms']:g}", f"{slo['tpot_ms']:g}", f"{slo['attainment']:g}", f"{slo['weight']:g}")
        for name, slo in sorted(table["classes"].items())
    ]
    print_table(f"SLOs, version {table['version']}", columns, rows)
