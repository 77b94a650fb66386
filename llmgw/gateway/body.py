"""What is read of a request's body, and the one thing that may be changed in it. Pure functions.

Only `model` and `stream` are looked at; all other bytes go on as they came. Invariant: the model that we read is the
model that any reader of the sent body finds: a body in which the key could stand twice is written anew with it once.
"""

from __future__ import annotations

from typing import Final

import msgspec

from llmgw.gateway.wire import Trouble


class Peek(msgspec.Struct, frozen=True):
    """The two fields that matter here."""

    model: str
    stream: bool | None = None


_PEEK: Final = msgspec.json.Decoder(Peek)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()
_KEY: Final = b'"model"'


def peek(body: bytes | bytearray) -> Peek | Trouble:
    """Which model is asked for, and whether as a stream."""
    try:
        return _PEEK.decode(body)
    except msgspec.ValidationError as error:
        param = "stream" if "$.stream" in str(error) else "model"
        return Trouble(status=400, code="invalid_body", message=f"request body: {error}", param=param)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Trouble(status=400, code="invalid_json", message=f"the request's body is no JSON object: {error}")


def ambiguous(body: bytes | bytearray) -> bool:
    r"""Whether `model` may stand there more than once, plainly or with escapes (`\u006d` is an m) as a key."""
    return body.count(_KEY) != 1 or (b"\\" in body and b"\\u006" in body)


def rename(body: bytes | bytearray, model: str) -> bytes:
    """`body` asking for `model`, once; every other value byte by byte as it was. Of doubled keys the last one stays."""
    fields: dict[str, object] = dict(_FIELDS.decode(body))
    fields["model"] = model
    return _ENCODER.encode(fields)
