"""The `openai` package against `hypic serve`."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from prompts import chat, check_accounts, is_right

ENDLESS = 20_000  # tokens: more than a cancelled answer could ever get to


def ask(client, model, messages, salt=None, hypic=None, **arguments):
    extra = {"hypic": {**({"salt": salt} if salt else {}), **(hypic or {})}}
    arguments.setdefault("temperature", 0)
    arguments.setdefault("max_tokens", 40)
    return client.chat.completions.create(model=model, messages=messages, extra_body=extra, **arguments)


def test_models(client, model):
    listed = client.models.list().data
    assert [entry.id for entry in listed] == [model]
    assert listed[0].object == "model" and listed[0].created > 1_500_000_000
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_right_twice_and_most_of_it_reused(client, model, records, salt):
    wrong = []
    asked = records["medium"][:6]
    for record in asked:
        count = len(record["documents"])
        # Some of these have the same system text.
        own = f"{salt}-{record['id']}"
        first = ask(client, model, chat(record), own)
        check_accounts(first.usage, first.hypic)
        assert all(segment["source"] == "computed" for segment in first.hypic["segments"][-count:])
        assert all(segment["worker"] for segment in first.hypic["segments"][-count:])

        reordered = chat(record, list(reversed(record["documents"])), "Say what the documents say, and nothing else.")
        second = ask(client, model, reordered, own)
        check_accounts(second.usage, second.hypic)
        usage = second.hypic["usage"]
        assert all(segment["source"] == "memory" for segment in second.hypic["segments"][-count:])
        assert usage["composed_tokens"] == sum(segment["reused"] for segment in second.hypic["segments"])
        assert usage["exact_tokens"] == 0, "nothing before the documents was seen before"
        assert usage["composed_tokens"] > usage["prompt_tokens"] / 2
        for answer in (first, second):
            choice = answer.choices[0]
            assert choice.finish_reason == "stop" and choice.message.role == "assistant"
            if not is_right(record, choice.message.content):
                wrong.append((record["id"], choice.message.content))
    # The model itself is right in 59 of 60 such prompts.
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("mode", ["full", "prefix", "hypic"])
def test_repeated_prompt(client, model, records, salt, mode):
    record = records["short"][0]
    first, second = (ask(client, model, chat(record), salt, {"mode": mode}) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert is_right(record, first.choices[0].message.content)
    for answer in (first, second):
        check_accounts(answer.usage, answer.hypic)
    usage = second.hypic["usage"]
    if mode == "full":
        assert usage["exact_tokens"] == usage["composed_tokens"] == 0
    elif mode == "prefix":
        assert usage["exact_tokens"] > 0 and usage["composed_tokens"] == 0
    else:
        assert usage["composed_tokens"] > 0


def test_parts_as_segments_is_the_same_as_marking_them(client, model, records, salt):
    record = records["short"][1]
    marked = ask(client, model, chat(record), salt)
    messages = chat(record)
    messages[1]["content"] = [{"type": "text", "text": part["text"]} for part in messages[1]["content"]]
    parts = ask(client, model, messages, salt, {"segments": "parts"})
    assert parts.choices[0].message.content == marked.choices[0].message.content
    lengths = [[segment["tokens"] for segment in answer.hypic["segments"]] for answer in (marked, parts)]
    assert lengths[0] == lengths[1]
    plain = ask(client, model, messages, salt)
    assert len(plain.hypic["segments"]) < len(parts.hypic["segments"]), "unmarked text is not split"


def test_separator(client, model, records, salt):
    record = records["short"][2]
    text = "@@".join([*record["documents"], record["question"]])
    messages = [{"role": "system", "content": record["system"]}, {"role": "user", "content": text}]
    split = ask(client, model, messages, salt, {"separator": "@@"})
    marked = ask(client, model, chat(record), salt)
    assert split.choices[0].message.content == marked.choices[0].message.content
    assert split.usage.prompt_tokens == marked.usage.prompt_tokens
    assert marked.hypic["usage"]["composed_tokens"] > 0, "both ways make the same entries"


def stream_chat(client, model, messages, salt, **arguments):
    """Text per choice, finish reasons per choice, and the chunk with the usage."""
    texts, reasons, last = {}, {}, None
    stream = ask(client, model, messages, salt, stream=True, stream_options={"include_usage": True}, **arguments)
    for chunk in stream:
        assert last is None, "the usage comes last"
        assert chunk.object == "chat.completion.chunk" and chunk.model == model
        if not chunk.choices:
            last = chunk
            continue
        assert chunk.usage is None
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows a finish reason"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert last is not None, "no chunk with the usage"
    return texts, reasons, last


def test_streaming_says_the_same(client, model, records, salt):
    record = records["medium"][7]
    whole = ask(client, model, chat(record), salt)
    texts, reasons, last = stream_chat(client, model, chat(record), salt)
    assert texts == {0: whole.choices[0].message.content}
    assert reasons == {0: whole.choices[0].finish_reason}
    check_accounts(last.usage, last.hypic)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_streaming_without_usage(client, model, records, salt):
    chunks = list(ask(client, model, chat(records["short"][3]), salt, stream=True))
    assert all(chunk.choices for chunk in chunks) and all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(bool(choice.finish_reason) for chunk in chunks for choice in chunk.choices) == 1
    assert chunks[0].choices[0].delta.role == "assistant"


def test_events_on_the_wire(server, model):
    body = {"model": model, "prompt": "Document: ", "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True}
    with server.request("/v1/completions", json.dumps(body).encode()) as response:
        assert response.headers.get_content_type() == "text/event-stream"
        events = [event for event in response.read().decode().split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        json.loads(event.removeprefix("data: "))


def test_completions_with_segments(client, model, records, salt):
    record = records["short"][4]
    # What the chat template makes of the record, written out.
    segments = [f"<|im_start|>system\n{record['system']}<|im_end|>\n<|im_start|>user\n", *record["documents"]]
    prompt = f"{record['question']}<|im_end|>\n<|im_start|>assistant\n"
    hypic = {"segments": segments, "salt": salt, "special_tokens": True}
    arguments = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0}
    answer = client.completions.create(**arguments, extra_body={"hypic": hypic})
    assert is_right(record, answer.choices[0].text), answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    check_accounts(answer.usage, answer.hypic)
    assert len(answer.hypic["segments"]) == len(segments)

    hypic["segments"] = [segments[0], *reversed(segments[1:])]
    again = client.completions.create(**arguments, extra_body={"hypic": hypic})
    assert is_right(record, again.choices[0].text), again.choices[0].text
    check_accounts(again.usage, again.hypic)
    assert again.hypic["usage"]["composed_tokens"] > 0

    stream = client.completions.create(
        **arguments, extra_body={"hypic": hypic}, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == again.choices[0].text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == again.usage.completion_tokens


def test_completions_of_token_ids(client, model, salt):
    segments = [[5 + i for i in range(20)], [400 + i for i in range(30)]]

    def complete(segments):
        hypic = {"segments": segments, "salt": salt, "anchor": "none"}
        extra = {"hypic": hypic, "ignore_eos": True}
        return client.completions.create(model=model, prompt=[7, 8, 9], max_tokens=5, temperature=0, extra_body=extra)

    first = complete(segments)
    assert first.usage.prompt_tokens == 53 and first.usage.completion_tokens == 5
    assert first.choices[0].finish_reason == "length"
    assert [segment["tokens"] for segment in first.hypic["segments"]] == [20, 30]
    # Without anchors the first segment has no other entry than later ones.
    swapped = complete(segments[::-1])
    check_accounts(swapped.usage, swapped.hypic)
    assert [segment["source"] for segment in swapped.hypic["segments"]] == ["memory", "memory"]
    assert swapped.hypic["usage"]["composed_tokens"] == 50 - swapped.hypic["usage"]["seam_tokens"]


def test_max_tokens(client, model, records, salt):
    record = records["short"][5]
    whole = ask(client, model, chat(record), salt).choices[0].message.content
    for name in ("max_tokens", "max_completion_tokens"):
        arguments = {"max_tokens": openai.omit, name: 2}
        cut = ask(client, model, chat(record), salt, **arguments)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
        assert whole.startswith(cut.choices[0].message.content) and cut.choices[0].message.content != whole


def test_stop_texts(client, model, records, salt):
    record = records["short"][6]
    whole = ask(client, model, chat(record), salt).choices[0].message.content
    # Wherever tokens begin and end, some of these lie across an edge.
    for start in range(1, len(whole) - 4):
        stop = whole[start : start + 4]
        expected = whole[: whole.index(stop)]
        cut = ask(client, model, chat(record), salt, stop=[stop, "\0never"])
        assert (cut.choices[0].message.content or "") == expected and cut.choices[0].finish_reason == "stop"
        if start % 5 == 0:
            texts, reasons, _ = stream_chat(client, model, chat(record), salt, stop=stop)
            assert texts.get(0, "") == expected and reasons == {0: "stop"}
    # A stop text that only begins is not held back for good.
    held = ask(client, model, chat(record), salt, stop=whole[-3:] + "...")
    assert held.choices[0].message.content == whole


def test_several_answers_with_a_seed(client, model, records, salt):
    def draw(seed, **arguments):
        # At temperature 2 and without an end, two answers do not agree by chance.
        bias = {"2": -100}
        answer = ask(
            client, model, chat(records["short"][7]), salt,
            n=2, seed=seed, temperature=2, max_tokens=24, logit_bias=bias, **arguments,
        )  # fmt: skip
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.completion_tokens == 48
        return [choice.message.content for choice in answer.choices]

    first = draw(11)
    assert first[0] != first[1]
    assert draw(11) == first
    assert draw(12) != first
    texts, reasons, last = stream_chat(
        client, model, chat(records["short"][7]), salt,
        n=2, seed=11, temperature=2, max_tokens=24, logit_bias={"2": -100},
    )  # fmt: skip
    assert [texts[0], texts[1]] == first and reasons == {0: "length", 1: "length"}
    assert last.usage.completion_tokens == 48


def test_logprobs(client, model, records, salt):
    record = records["short"][8]
    answer = ask(client, model, chat(record), salt, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    text = answer.choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(text)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert all(value <= 1e-6 and math.isfinite(value) for value in values)
        assert entry.logprob == values[0], "greedy takes the likeliest"
        assert sum(map(math.exp, values)) <= 1 + 1e-4
    chosen_only = ask(client, model, chat(record), salt, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in chosen_only)
    assert [e.logprob for e in chosen_only] == pytest.approx([e.logprob for e in entries], abs=1e-3)
    assert ask(client, model, chat(record), salt).choices[0].logprobs is None

    streamed = []
    for chunk in ask(client, model, chat(record), salt, stream=True, logprobs=True, top_logprobs=2):
        for choice in chunk.choices:
            streamed.extend(choice.logprobs.content if choice.logprobs and choice.logprobs.content else [])
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_completion_logprobs(client, model):
    arguments = {"model": model, "prompt": "Document: Otto Hansen.", "max_tokens": 4, "temperature": 0, "logprobs": 3}
    logprobs = client.completions.create(**arguments, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs):
        assert chosen == max(top.values())


@pytest.mark.parametrize(
    ("arguments", "hypic", "name"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, {}, "tools"),
        ({"response_format": {"type": "json_object"}}, {}, "response_format"),
        ({"temperature": -1}, {}, "temperature"),
        ({"top_p": 0}, {}, "top_p"),
        ({"n": 0}, {}, "n"),
        ({"max_tokens": 0}, {}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, {}, "top_logprobs"),
        ({"presence_penalty": 3}, {}, "presence_penalty"),
        ({"logit_bias": {"99999": 1}}, {}, "logit_bias"),
        ({}, {"mdoe": "full"}, "hypic.mdoe"),
        ({}, {"mode": "fast"}, "hypic.mode"),
        ({}, {"compose": "multiply"}, "hypic.compose"),
        ({}, {"anchor": "here"}, "hypic.anchor"),
        ({}, {"seam": -1}, "hypic.seam"),
        ({}, {"separator": ""}, "hypic.separator"),
        ({}, {"segments": ["a"]}, "hypic.segments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(client, model, records, arguments, hypic, name):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, model, chat(records["short"][0]), hypic=hypic, **arguments)
    assert refused.value.param == name, refused.value.message
    assert refused.value.type == "invalid_request_error"
    assert name.split(".")[-1] in refused.value.message


def test_part_of_another_type_is_refused(client, model):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, model, [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}])
    assert refused.value.param == "messages[0].content[1].type"


def test_unknown_fields_are_let_pass(client, model, records):
    extra = {"metadata": {"a": "b"}, "some_future_field": 1}
    answer = client.chat.completions.create(
        model=model, messages=chat(records["short"][0]), temperature=0, user="someone", extra_body=extra
    )
    assert is_right(records["short"][0], answer.choices[0].message.content)


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "a"}])
    assert (refused.value.status_code, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_empty_query(client, model, prompt, stream):
    extra = {"hypic": {"segments": []}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=prompt, stream=stream, extra_body=extra)
    assert refused.value.param == "prompt"


def test_separator_at_the_end_leaves_no_query(client, model):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="Document: a.@@", extra_body={"hypic": {"separator": "@@"}})
    assert refused.value.param == "prompt" and "query" in refused.value.message


@pytest.mark.parametrize(("prompt", "says"), [([5] * 40_000, "32768"), ([5, 1_000_000], "1000000")], ids=["long", "id"])
def test_prompts_that_the_model_cannot_take(client, model, prompt, says):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=prompt, max_tokens=4)
    assert refused.value.param == "prompt" and says in refused.value.message


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_has_room_for(client, model, name):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}], **{name: 40_000})
    assert refused.value.param == name and "32768" in refused.value.message


def test_bad_bodies(server):
    for body, status in [(b"{", 400), (b"[]", 400), (b"\xff", 400)]:
        with server.request("/v1/chat/completions", body) as response:
            assert response.status == status
            error = json.load(response)["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
    with server.request("/v1/nothing") as response:
        assert response.status == 404 and "message" in json.load(response)["error"]
    with server.request("/v1/chat/completions") as response:
        assert response.status == 405


def test_cancel_mid_stream(server, client, model, records, salt):
    record = records["short"][9]
    ask(client, model, chat(record), salt)
    began = time.monotonic()
    for _ in range(8):
        extra = {"ignore_eos": True, "hypic": {"salt": salt}}
        stream = client.chat.completions.create(
            model=model, messages=chat(record), temperature=0, max_tokens=ENDLESS, stream=True, extra_body=extra
        )
        for _, chunk in zip(range(3), stream):
            assert not any(choice.finish_reason for choice in chunk.choices)
        stream.close()
        # Eight answers that go on behind the client's back would be 160,000 tokens of work.
        assert is_right(record, ask(client, model, chat(record), salt).choices[0].message.content)
    assert time.monotonic() - began < 30
    server.wait_until_idle()
    assert server.get("/health")[0] == 200 and server.get("/ready")[0] == 200


def test_eight_at_once_answer_as_one_alone(client, model, records, salt):
    asked = [*records["short"][10:22], *records["medium"][10:14]]
    alone = [ask(client, model, chat(record), salt + "-alone").choices[0].message.content for record in asked]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda record: ask(client, model, chat(record), salt), asked))
    assert [answer.choices[0].message.content for answer in answers] == alone
    for answer in answers:
        check_accounts(answer.usage, answer.hypic)


def test_eight_at_once_share_cold_segments(client, model, records, salt):
    record = records["medium"][20]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(client, model, chat(record), salt), range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert is_right(record, answers[0].choices[0].message.content)
