"""Start, API keys, and the end of `hypic serve`; each test has a server of its own."""

import subprocess

import grpc
import openai
import pytest

from prompts import chat, is_right
from server import BINARY, Server

LENGTH = 400  # tokens of an answer that is under way when the server is told to end


@pytest.fixture
def start():
    servers = []

    def start(*arguments):
        servers.append(Server(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def client_of(server, key="unused"):
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key=key, max_retries=0, timeout=60)


def test_sigterm_lets_answers_finish(start):
    server = start()
    client = client_of(server)
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt="Document: Otto Hansen.", max_tokens=LENGTH, temperature=0,
        stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = [next(stream)]
    server.terminate()
    chunks.extend(stream)
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == LENGTH
    assert server.wait() == 0, server.tail()
    assert server.get("/health")[0] == 0


def test_sigterm_while_idle(start):
    server = start()
    # Idle connections, one kept alive over HTTP/1.1 and one of HTTP/2, must not hold it up.
    client = client_of(server)
    client.models.list()
    with grpc.insecure_channel(server.grpc) as channel:
        grpc.channel_ready_future(channel).result(timeout=10)
        server.stop()


def test_api_keys(start, tmp_path, pb):
    keys = tmp_path / "keys"
    keys.write_text("# staff\nsesame\n")
    server = start("--api-key-file", str(keys))
    with pytest.raises(openai.AuthenticationError) as refused:
        client_of(server, "wrong").models.list()
    assert refused.value.code == "invalid_api_key" and "sesame" not in str(refused.value)
    assert client_of(server, "sesame").models.list().data
    assert server.get("/health")[0] == 200, "probes need no key"
    messages, services = pb
    with grpc.insecure_channel(server.grpc) as channel:
        stub = services.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Models(messages.ModelsRequest())
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert stub.Models(messages.ModelsRequest(), metadata=[("authorization", "Bearer sesame")]).models
    server.stop()
    assert "sesame" not in server.tail()


@pytest.mark.parametrize("workers", ["1", "4"])
def test_any_number_of_workers_answers_the_same(start, server, client, model, records, workers):
    other = start("--workers", workers)
    for record in records["medium"][30:33]:
        arguments = {"model": model, "messages": chat(record), "temperature": 0, "max_tokens": 40}
        here = client.chat.completions.create(**arguments).choices[0].message.content
        there = client_of(other).chat.completions.create(**arguments).choices[0].message.content
        assert here == there and is_right(record, here)
    other.stop()


def test_addresses_that_cannot_be_had(server):
    taken = server.http.removeprefix("http://")
    command = [str(BINARY), "serve", "--listen", taken, "--grpc-listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert taken in ended.stderr, ended.stderr


def test_model_that_is_not_there(tmp_path):
    command = [str(BINARY), "serve", "--model", str(tmp_path / "none"), "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert str(tmp_path / "none") in ended.stderr, ended.stderr
