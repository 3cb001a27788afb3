"""The admin API as an application over services that somebody else owns."""

from importlib.metadata import version

from fastapi import Depends, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from controller import console
from controller.admin import problems
from controller.admin.auth import BearerAuth
from controller.admin.forecasts import Forecaster
from controller.admin.live import live_routes
from controller.admin.routes import (
    fleet_routes,
    migration_routes,
    mode_routes,
    plan_routes,
    slo_routes,
    tuner_routes,
)
from controller.admin.services import Services
from engines.metrics import expose

DESCRIPTION = """Changes what routers do: SLOs, the plan, the tuner's mode, engines, migrations. Says why.

Everything under `/v1` needs `Authorization: Bearer <admin token>`. Errors are `application/problem+json`."""


def create_app(
    services: Services,
    token: SecretStr | None,
    forecaster: Forecaster | None = None,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """Without a token everybody who reaches the port may change things; `run` allows that on loopback only.

    Without a forecaster nothing can be predicted; without a registry there is nothing to scrape.
    """
    # FastAPI's own pages load scripts from other hosts; docs/api.md is made of /openapi.json instead.
    app = FastAPI(
        title="Trimtab admin", version=version("trimtab"), description=DESCRIPTION, docs_url=None, redoc_url=None
    )
    problems.install(app)
    guarded = [Depends(BearerAuth(token))]
    for routes in (plan_routes, slo_routes, mode_routes, fleet_routes, migration_routes):
        app.include_router(routes(services), dependencies=guarded)
    app.include_router(tuner_routes(services, forecaster), dependencies=guarded)
    app.include_router(live_routes(services), dependencies=guarded)
    console.install(app)
    exposed = registry or CollectorRegistry()

    @app.get("/metrics", summary="For Prometheus", tags=["health"])
    async def metrics(request: Request) -> Response:
        content, media_type = expose(exposed, request.headers.get("accept"))
        return Response(content, media_type=media_type)

    @app.get("/healthz", summary="Whether the controller and its store answer", tags=["health"])
    async def healthz() -> dict[str, str]:
        await services.store.ping()
        return {"status": "ok"}

    return app
