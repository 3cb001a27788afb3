"""Who may change things: one bearer token, separate from the public key."""

import secrets

from fastapi import HTTPException, Request
from pydantic import SecretStr

CHALLENGE = {"www-authenticate": 'Bearer realm="trimtab admin"'}


class BearerAuth:
    """FastAPI dependency that lets only holders of the token through; without a token, everybody."""

    def __init__(self, token: SecretStr | None) -> None:
        self._token = None if token is None else token.get_secret_value().encode()

    async def __call__(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise HTTPException(401, "Send the admin token as 'Authorization: Bearer …'.", CHALLENGE)
        if not secrets.compare_digest(given.strip().encode(), self._token):
            raise HTTPException(401, "This is not the admin token; the clients' API key does not work here.", CHALLENGE)
