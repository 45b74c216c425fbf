"""The served model, as /v1/models tells it and requests name it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gemray.openai.errors import HttpError, shown
from gemray.openai.gateway import Caller, Gateway
from gemray.v1 import generation_pb2 as pb

FRESH_S = 60.0
"""How long what is known of a model is believed before the server is asked again."""


@dataclass(frozen=True)
class Model:
    """What a server serves."""

    name: str
    fingerprint: str
    """Differs where answers may: OpenAI's system_fingerprint."""
    checkpoint_hash: str = ""
    """Empty for random weights."""

    @classmethod
    def of(cls, info: pb.GetModelInfoResponse) -> Model:
        """The model that a server tells of."""
        # A server of an older version has no names.
        parts = ("gemray", info.gemray_version, info.dtype, info.revision[:12], info.checkpoint_hash[:12])
        return cls(info.model_name or info.model_type, "-".join(part for part in parts if part), info.checkpoint_hash)


class ServedModel:
    """What the server behind a gateway serves; another model may come in its place at any time."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: Model | None = None
        self._known_at = 0.0
        self._since = int(time.time())

    async def now(self, caller: Caller) -> Model:
        """The model, as the server tells of it now; raises HttpError."""
        self._known, self._known_at = Model.of(await self._gateway.model_info(caller)), time.monotonic()
        return self._known

    async def check(self, asked: str | None, caller: Caller) -> Model:
        """The model that answers a request; raises HttpError where the request asks for another."""
        model = self._known
        is_old = time.monotonic() - self._known_at > FRESH_S
        if model is None or is_old or asked not in (None, model.name):
            model = await self.now(caller)
        if asked not in (None, model.name):
            message = f"model = {shown(asked)} is not served here: {shown(model.name)} is"
            raise HttpError(404, message, param="model", code="model_not_found")
        return model

    def body(self, model: Model) -> dict[str, Any]:
        """The model as an object of OpenAI's."""
        return {
            "id": model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "gemray",
            "checkpoint_hash": model.checkpoint_hash,
        }
