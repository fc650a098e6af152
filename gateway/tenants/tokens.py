"""JWTs that the SDK gets in exchange for its key, when `jwt_auth` is on.

The JWTs are signed with HS256, because only the gateways that issue them verify them.
"""

from __future__ import annotations

import secrets
import time

import jwt

from gateway.config import GatewayConfig
from gateway.database.store import Store
from gateway.views import urn_of

_ALGORITHM = "HS256"
_KEY_ID = "key_id"
_REQUIRED = ["exp", "iat", "sub", "org_id", "email", _KEY_ID]
"""The claims that the SDK reads, and the id of the key for which the JWT was issued. A JWT is valid only while its key
is valid."""


class InvalidToken(Exception):
    """A JWT that is expired, forged or damaged; the message says which."""


class Tokens:
    """Issues JWTs, and checks them."""

    def __init__(self, config: GatewayConfig) -> None:
        self.are_used = config.jwt_auth
        self._organization = config.organization
        self._lifetime_s = config.jwt_lifetime_s
        self._secret = config.jwt_secret.get_secret_value()

    async def start(self, store: Store) -> None:
        """Reads the secret, or makes it. Must be called before any other method."""
        if self.are_used and not self._secret:
            self._secret = await store.settings.get("jwt_secret", default=secrets.token_hex(32))

    def issue(self, owner: str, *, key_id: str, email: str) -> str:
        now = int(time.time())
        claims = {
            "iat": now,
            "exp": now + self._lifetime_s,
            "sub": urn_of(owner),
            "org_id": self._organization,
            "email": email,
            _KEY_ID: key_id,
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def key_id_of(self, token: str) -> str:
        """The id of the key for which the JWT was issued. Raises InvalidToken when the JWT is expired, forged or
        damaged."""
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                # `iat` is not checked: the clock of the gateway that issued the JWT may be ahead.
                options={"require": _REQUIRED, "verify_iat": False},
            )
        except jwt.ExpiredSignatureError:
            raise InvalidToken("the JWT has expired; exchange the key for another one at auth/token") from None
        except jwt.InvalidTokenError as error:
            raise InvalidToken(f"the JWT was not issued by this server ({error})") from None
        return str(claims[_KEY_ID])
