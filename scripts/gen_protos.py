"""Regenerates the Python modules of protos/*.proto. ``--check`` fails if they are out of date."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = (
    *("protos/inference.proto", "protos/control.proto"),
    *("protos/vllm_engine.proto", "protos/smg_common.proto"),
)


def generate(out: Path) -> None:
    """Writes ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below ``out``."""
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *PROTOS,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def stale() -> list[str]:
    """Generated files that differ from what the .proto files give now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted(Path(folder).rglob("*_pb2*"))
        return [
            str(path.relative_to(folder))
            for path in fresh
            if not (ROOT / path.relative_to(folder)).exists()
            or (ROOT / path.relative_to(folder)).read_bytes() != path.read_bytes()
        ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        generate(ROOT)
    elif different := stale():
        sys.exit(f"out of date, run scripts/gen_protos.py: {', '.join(different)}")


if __name__ == "__main__":
    main()
