from __future__ import annotations

import json
import logging

import pytest

from neo_native.logs import JsonFormatter, log_format


def record(**extra: object) -> logging.LogRecord:
    made = logging.getLogger("somewhere").makeRecord(
        *("somewhere", logging.WARNING, "file.py", 7, 'lost "%s" \n twice', ("é",), None),
        extra=dict(extra),
    )
    made.created, made.msecs = 0.25, 250.0
    return made


def test_a_record_is_one_line_of_json() -> None:
    line = JsonFormatter("gpu_worker-0").format(record())
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "process": "gpu_worker-0",
        "pid": record().process,
        "logger": "somewhere",
        "message": 'lost "é" \n twice',
    }


def test_fields_are_added_and_replace_nothing() -> None:
    found = json.loads(JsonFormatter("p").format(record(fields={"running": 3, "level": "none"})))
    assert found["running"] == 3
    assert found["level"] == "warning"


def test_an_exception_is_a_field() -> None:
    made = record()
    try:
        raise KeyError("gone")
    except KeyError as error:
        made.exc_info = (KeyError, error, error.__traceback__)
    found = json.loads(JsonFormatter("p").format(made))
    assert found["exception"].endswith("KeyError: 'gone'")


def test_another_format_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEO_LOG_FORMAT", raising=False)
    assert log_format() == "text"
    monkeypatch.setenv("NEO_LOG_FORMAT", "xml")
    with pytest.raises(ValueError, match="NEO_LOG_FORMAT is 'xml'; it must be text or json"):
        log_format()
