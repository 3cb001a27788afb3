"""The admin API as an application over services that somebody else owns."""

from importlib.metadata import version

from fastapi import Depends, FastAPI
from pydantic import SecretStr

from controller.admin import problems
from controller.admin.auth import BearerAuth
from controller.admin.routes import fleet_routes, migration_routes, plan_routes, slo_routes
from controller.admin.services import Services

DESCRIPTION = """Changes what routers do: SLOs, the plan, engines, migrations.

Everything under `/v1` needs `Authorization: Bearer <admin token>`. Errors are `application/problem+json`."""


def create_app(services: Services, token: SecretStr | None) -> FastAPI:
    """Without a token everybody who reaches the port may change things; `run` allows that on loopback only."""
    app = FastAPI(title="Trimtab admin", version=version("trimtab"), description=DESCRIPTION)
    problems.install(app)
    guarded = [Depends(BearerAuth(token))]
    for routes in (plan_routes, slo_routes, fleet_routes, migration_routes):
        app.include_router(routes(services), dependencies=guarded)

    @app.get("/healthz", summary="Whether the controller and its store answer", tags=["health"])
    async def healthz() -> dict[str, str]:
        await services.store.ping()
        return {"status": "ok"}

    return app
