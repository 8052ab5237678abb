"""The client of docs/node-client.md, as it stands there, against a running server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.server import REPO, request_of, running_server

PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """A directory with the packages, fetched once. Skips where there is no Node, or no registry."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node here")
    folder = REPO / ".cache" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / "node_modules" / name).is_dir() for name in PACKAGES):
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *PACKAGES],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {PACKAGES}: {done.stderr[-200:]}")
    return folder


def test_the_client_of_the_docs_prints_what_the_server_generates(
    node_folder: Path, demo_model: Path, tmp_path: Path
) -> None:
    text = (REPO / "docs" / "node-client.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```js\n(.*?)```", text, re.DOTALL)
    script = node_folder / "client.js"
    script.write_text(code, encoding="utf-8")
    with running_server(demo_model, tmp_path, "--no-profile", "--max-model-len", "256") as server:
        done = subprocess.run(
            ["node", str(script), server.address, PROMPT],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        expected = server.generate(request_of(PROMPT, 32, ignore_eos=False))
        output, _, counted = done.stdout.rpartition("\n[")
        assert output == expected.text
        assert counted == f"{expected.finish.num_output_tokens} tokens]\n"
        wrong = subprocess.run(
            ["node", str(script), server.address, ""],
            cwd=REPO,
            capture_output=True,
            text=True,
            check=False,
        )
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("INVALID_ARGUMENT: prompt")
