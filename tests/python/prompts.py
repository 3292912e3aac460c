"""Prompts in OpenAI's shape, and what must hold for every answer."""


def chat(record, documents=None, system=None):
    """Messages: system text, then the documents, each a segment, and the question."""
    documents = record["documents"] if documents is None else documents
    parts = [{"type": "text", "text": text, "hypic": {"segment": True}} for text in documents]
    return [
        {"role": "system", "content": record["system"] if system is None else system},
        {"role": "user", "content": [*parts, {"type": "text", "text": record["question"]}]},
    ]


def is_right(record, text):
    return any(answer in text for answer in record["answers"])


KINDS = ("exact", "composed", "seam", "computed")


def check_accounts(usage, hypic):
    """Every prompt token counts once, both reports say the same, and nothing is missing or of another type."""
    assert set(hypic) == {"usage", "segments", "timings_ms"}
    kinds = hypic["usage"]
    assert set(kinds) == {f"{kind}_tokens" for kind in ("prompt", *KINDS, "completion")}
    assert all(type(count) is int for count in kinds.values())
    total = sum(kinds[f"{kind}_tokens"] for kind in KINDS)
    assert total == kinds["prompt_tokens"] == usage.prompt_tokens
    assert kinds["completion_tokens"] == usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == kinds["exact_tokens"] + kinds["composed_tokens"]
    for segment in hypic["segments"]:
        assert set(segment) == {"tokens", "reused", "source", "worker"}
        assert 0 <= segment["reused"] <= segment["tokens"]
        # Rows of its own are the combiner's work, whatever segment they belong to.
        assert segment["source"] in ("computed", "memory", "remote", "prefix", "seam_only")
        assert (segment["worker"] is None) == (segment["source"] == "seam_only"), segment
    # What follows the last segment is the query, and it has at least one token.
    assert sum(segment["tokens"] for segment in hypic["segments"]) < kinds["prompt_tokens"]
    timings = hypic["timings_ms"]
    assert set(timings) == {"queue", "prefill", "compose", "first_token", "total"}
    assert all(type(time) is float and time >= 0 for time in timings.values())
    assert 0 < timings["first_token"] <= timings["total"]
