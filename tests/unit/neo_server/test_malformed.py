from __future__ import annotations

import pytest

from neo_server.malformed import why
from protos import inference_pb2 as pb

REQUEST = pb.GenerateRequest.DESCRIPTOR


def test_the_field_that_is_no_utf8_is_named() -> None:
    data = pb.GenerateRequest(text="abcX").SerializeToString().replace(b"X", b"\xff")
    assert why(data, REQUEST) == "text has byte 0xff at 3; it must be valid UTF-8"
    request = pb.GenerateRequest(text="é")
    request.stop_conditions.stop.extend(["a", "Xb"])
    data = request.SerializeToString().replace(b"X", b"\xc3")
    assert why(data, REQUEST).startswith("stop_conditions.stop has byte 0xc3 at 0")


@pytest.mark.parametrize("data", [b"\xff" * 9, b"\x12\x05ab"])
def test_what_is_no_message_is_called_so(data: bytes) -> None:
    assert (
        why(data, REQUEST)
        == f"the request has {len(data)} bytes; they must be a {REQUEST.full_name}"
    )
