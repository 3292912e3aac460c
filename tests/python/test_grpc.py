"""A gRPC client generated from proto/ against `hypic serve`."""

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from prompts import chat, is_right

SERVICE = "hypic.v1.Inference"
ENDLESS = 20_000  # tokens: more than an answer that is cut could ever get to


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel, pb):
    return pb[1].InferenceStub(channel)


def chat_request(pb, record, salt, documents=None, **fields):
    messages = pb[0]
    parts = [messages.Part(text=text, segment=True) for text in documents or record["documents"]]
    user = messages.Message(role="user", parts=[*parts, messages.Part(text=record["question"])])
    system = messages.Message(role="system", parts=[messages.Part(text=record["system"])])
    fields.setdefault("max_tokens", 40)
    fields.setdefault("sampling", messages.Sampling(temperature=0))
    options = messages.PromptOptions(salt=salt)
    return messages.GenerateRequest(chat=messages.ChatPrompt(messages=[system, user]), options=options, **fields)


def endless(pb, salt):
    messages = pb[0]
    text = messages.TextPrompt(segments=["Document: Otto Hansen lives in Dover.\n"], query="Question:")
    options = messages.PromptOptions(salt=salt)
    sampling = messages.Sampling(temperature=0)
    return messages.GenerateRequest(text=text, options=options, sampling=sampling, max_tokens=ENDLESS, ignore_eos=True)


def collect(call):
    """Text and token ids per choice, reasons per choice, log-probabilities of choice 0, and the report."""
    texts, ids, reasons, logprobs, report = {}, {}, {}, [], None
    for response in call:
        assert report is None, "the report comes last"
        event = response.WhichOneof("event")
        if event == "delta":
            delta = response.delta
            assert delta.choice not in reasons, "nothing follows the end of a choice"
            texts[delta.choice] = texts.get(delta.choice, "") + delta.text
            ids.setdefault(delta.choice, []).extend(delta.token_ids)
            if delta.choice == 0:
                logprobs.extend(delta.logprobs)
        elif event == "finished":
            assert response.finished.choice not in reasons
            reasons[response.finished.choice] = response.finished.reason
        elif event == "report":
            report = response.report
    assert report is not None, "the stream ended without a report"
    return texts, ids, reasons, logprobs, report


def check_accounts(usage):
    kinds = usage.exact_tokens + usage.composed_tokens + usage.seam_tokens + usage.computed_tokens
    assert kinds == usage.prompt_tokens


def failure(call):
    with pytest.raises(grpc.RpcError) as failed:
        list(call)
    return failed.value


def test_generate_reports_every_segment(stub, pb, records, salt):
    messages = pb[0]
    record = records["medium"][1]
    count = len(record["documents"])
    texts, ids, reasons, _, report = collect(stub.Generate(chat_request(pb, record, salt)))
    assert is_right(record, texts[0]) and reasons == {0: messages.FINISH_REASON_STOP}
    assert report.usage.completion_tokens == len(ids[0])
    check_accounts(report.usage)
    for segment in list(report.segments)[-count:]:
        assert segment.source == messages.SEGMENT_SOURCE_COMPUTED and segment.worker and segment.reused == 0

    reordered = chat_request(pb, record, salt, documents=record["documents"][::-1])
    texts, _, _, _, report = collect(stub.Generate(reordered))
    assert is_right(record, texts[0])
    check_accounts(report.usage)
    assert report.usage.composed_tokens > 0
    for segment in list(report.segments)[-count:]:
        assert segment.source == messages.SEGMENT_SOURCE_MEMORY and 0 < segment.reused < segment.tokens
    assert 0 < report.timings_ms.first_token <= report.timings_ms.total


def test_same_answer_as_over_http(stub, client, model, pb, records, salt):
    record = records["medium"][2]
    texts, _, _, _, report = collect(stub.Generate(chat_request(pb, record, salt)))
    extra = {"hypic": {"salt": salt}}
    answer = client.chat.completions.create(
        model=model, messages=chat(record), temperature=0, max_tokens=40, extra_body=extra
    )
    assert answer.choices[0].message.content == texts[0]
    assert answer.usage.prompt_tokens == report.usage.prompt_tokens
    assert answer.hypic["usage"]["composed_tokens"] > 0, "both ways share entries"


def test_options(stub, pb, records, salt):
    messages = pb[0]
    record = records["short"][0]
    request = chat_request(pb, record, salt)
    collect(stub.Generate(request))
    request.options.mode = messages.MODE_FULL
    texts, _, _, _, report = collect(stub.Generate(request))
    assert is_right(record, texts[0])
    assert report.usage.computed_tokens == report.usage.prompt_tokens
    request.options.mode = messages.MODE_HYPIC
    request.options.seam = 16
    request.options.anchor = messages.ANCHOR_NONE
    request.options.compose = messages.COMPOSE_RULE_ADD
    _, _, _, _, report = collect(stub.Generate(request))
    check_accounts(report.usage)
    assert report.usage.composed_tokens == 0, "entries of another seam and anchor are other entries"
    assert report.usage.seam_tokens > 16


def test_tokens_logprobs_and_several_answers(stub, pb, salt):
    messages = pb[0]
    tokens = messages.TokenPrompt(segments=[messages.TokenIds(ids=range(5, 40))], query=[7, 8, 9])
    request = messages.GenerateRequest(
        tokens=tokens, max_tokens=6, n=2, logprobs=3, ignore_eos=True,
        sampling=messages.Sampling(temperature=0), options=messages.PromptOptions(salt=salt),
    )  # fmt: skip
    texts, ids, reasons, logprobs, report = collect(stub.Generate(request))
    assert texts[0] == texts[1] and ids[0] == ids[1] and len(ids[0]) == 6
    assert reasons == {0: messages.FINISH_REASON_LENGTH, 1: messages.FINISH_REASON_LENGTH}
    assert (report.usage.prompt_tokens, report.usage.completion_tokens) == (38, 12)
    assert [segment.tokens for segment in report.segments] == [35]
    assert [entry.chosen.token_id for entry in logprobs] == ids[0]
    for entry in logprobs:
        values = [top.logprob for top in entry.top]
        assert len(values) == 3 and values == sorted(values, reverse=True) and values[0] <= 1e-6
        assert entry.top[0] == entry.chosen


def test_models(stub, model, pb):
    messages = pb[0]
    listed = stub.Models(messages.ModelsRequest()).models
    assert [entry.id for entry in listed] == [model]
    assert listed[0].context == 32_768
    assert stub.GetModel(messages.GetModelRequest(id=model)) == listed[0]
    with pytest.raises(grpc.RpcError) as failed:
        stub.GetModel(messages.GetModelRequest(id="no-such-model"))
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


def test_wrong_requests_are_refused_by_name(stub, pb, records, salt):
    messages = pb[0]
    good = chat_request(pb, records["short"][0], salt)

    def refused(**fields):
        request = messages.GenerateRequest()
        request.CopyFrom(good)
        request.MergeFrom(messages.GenerateRequest(**fields))
        error = failure(stub.Generate(request))
        param = dict(error.trailing_metadata() or ()).get("hypic-param", "")
        return error.code(), param

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert refused(n=0) == (invalid, "n")
    assert refused(sampling=messages.Sampling(top_p=0)) == (invalid, "sampling.top_p")
    assert refused(logprobs=21) == (invalid, "logprobs")
    assert refused(text=messages.TextPrompt(segments=["a"])) == (invalid, "text.query")
    assert refused(model="no-such-model") == (grpc.StatusCode.NOT_FOUND, "model")
    error = failure(stub.Generate(messages.GenerateRequest()))
    assert error.code() == invalid and "prompt" in error.details()


def test_messages_above_four_mebibytes(stub, pb):
    messages = pb[0]
    # Refused for what it asks, after it was read: the usual limit of message sizes would refuse it unread.
    text = messages.TextPrompt(segments=["x" * (6 << 20)], query="y")
    error = failure(stub.Generate(messages.GenerateRequest(text=text, n=0)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()


def test_deadline(server, stub, pb, salt):
    began = time.monotonic()
    error = failure(stub.Generate(endless(pb, salt), timeout=0.3))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 5
    server.wait_until_idle()


def test_cancel(server, stub, pb, records, salt):
    record = records["short"][0]
    began = time.monotonic()
    for _ in range(8):
        call = stub.Generate(endless(pb, salt))
        assert next(call).WhichOneof("event") == "delta"
        call.cancel()
        # Some messages may have been on their way.
        assert failure(call).code() == grpc.StatusCode.CANCELLED
        texts, *_ = collect(stub.Generate(chat_request(pb, record, salt), timeout=20))
        assert is_right(record, texts[0])
    assert time.monotonic() - began < 30
    server.wait_until_idle()


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health(channel, service):
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.RpcError) as failed:
        stub.Check(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert failed.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection(channel, version):
    # Both versions have the same messages; the package knows the older name only.
    info = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, described = info(iter(requests), timeout=10)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names
    assert any(b"GenerateRequest" in file for file in described.file_descriptor_response.file_descriptor_proto)
