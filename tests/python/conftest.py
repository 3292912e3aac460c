import importlib
import itertools
import json
import os
import subprocess
import sys

import openai
import pytest

from server import ROOT, Server

PROTO = ROOT / "proto"
EVAL = ROOT / "tests" / "models" / "demo" / "eval.jsonl"

_salts = itertools.count()


@pytest.fixture(scope="session")
def server():
    """One server for all tests; at the end it must drain and exit with 0, so nothing may be left running on it."""
    server = Server()
    try:
        yield server
        assert server.process.poll() is None, f"ended by itself with {server.process.returncode}:\n{server.tail()}"
        server.stop()
    finally:
        server.kill()


@pytest.fixture(scope="session")
def client(server):
    # A retry would hide a failure.
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture
def salt():
    """Unlike all others: what a test sends is not yet in the server's cache."""
    return f"test-{os.getpid()}-{next(_salts)}"


@pytest.fixture(scope="session")
def records():
    """Held-out prompts of the demo model with known answers, by the kind of their documents."""
    kinds = {}
    for line in EVAL.read_text().splitlines():
        record = json.loads(line)
        kinds.setdefault(record["id"].split("-")[0], []).append(record)
    return kinds


@pytest.fixture(scope="session")
def pb(tmp_path_factory):
    """Messages and stubs as a user generates them: (inference_pb2, inference_pb2_grpc)."""
    out = tmp_path_factory.mktemp("stubs")
    arguments = [f"-I{PROTO}", f"--python_out={out}", f"--grpc_python_out={out}", "hypic/v1/inference.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    sys.path.insert(0, str(out))
    try:
        messages = importlib.import_module("hypic.v1.inference_pb2")
        yield messages, importlib.import_module("hypic.v1.inference_pb2_grpc")
    finally:
        sys.path.remove(str(out))
