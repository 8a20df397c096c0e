"""The responses endpoint, asked with OpenAI's client, over the fake engine."""

from tests.support.fake_engine import WORDS


def ask(client, **more):
    return client.responses.create(**({"model": "tiny", "input": "describe"} | more))


def test_an_answer_has_text_usage_and_status(server, client):
    answer = ask(client, max_output_tokens=3, temperature=0.5, metadata={"a": "b"},
                 instructions="Be brief.")  # fmt: skip
    assert answer.output_text == " ".join(WORDS[:3])
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, 3)
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert (answer.model, answer.metadata, answer.instructions) == ("tiny", {"a": "b"}, "Be brief.")
    asked = server.engine.asked[-1]
    assert asked.sampling.temperature == 0.5
    assert asked.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "describe"},
    ]  # fmt: skip
    whole = ask(client)
    assert (whole.status, whole.output_text) == ("completed", " ".join(WORDS))
    assert list(ask(client, stream=True))[-1].response.usage == whole.usage
    assert list(ask(client, stream=True, max_output_tokens=2))[-1].type == "response.incomplete"
    assert whole.output[0].role == "assistant"


def test_an_earlier_answer_is_part_of_the_next_input(server, client):
    first = ask(client)
    ask(client, input=[{"role": "user", "content": "describe"}, *first.output,
                       {"type": None, "role": "user", "content": "More."}])  # fmt: skip
    turns = server.engine.asked[-1].messages
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"][0]["text"] == first.output_text


def test_earlier_calls_belong_to_the_assistants_turn_before_them(server, client):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "5"}
    said = {"role": "assistant", "content": "Wait."}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "x"}]}
    for items, roles in (([said, call, call, result], "au"), ([thought, call, result], "au"),
                         ([call, said, result], "aau")):  # fmt: skip
        ask(client, input=items)
        turns = server.engine.asked[-1].messages
        assert "".join(turn["role"][0] for turn in turns) == roles
        calls = "".join(str(turn["content"]) for turn in turns).count("<tool_call>")
        assert calls == items.count(call)
        assert "".join(part["text"] for part in turns[-1]["content"]) == (
            "<tool_response>\n5\n</tool_response>"
        )


def test_as_many_items_as_may_be(server, client):
    ask(client, instructions="Be brief.", input=[{"role": "user", "content": "x"}] * 10_000)
    assert len(server.engine.asked[-1].messages) == 10_001


def test_logprobs(client):
    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    found = answer.output[0].content[0].logprobs
    assert [item.token for item in found[:2]] == ["a", " red"]
    assert len(found[0].top_logprobs) == 2
    schema = {"type": "object", "properties": {"logprobs": {"enum": [[]]}}, "logprobs": []}
    asked = {
        "include": ["message.output_text.logprobs"], "metadata": {"logprobs": "[]"},
        "instructions": 'say "logprobs":[]', "text": {"format": {
            "type": "json_schema", "name": "x", "schema": {"default": schema}}},
    }  # fmt: skip
    whole, events = ask(client, **asked), list(ask(client, **asked, stream=True))
    found = whole.output[0].content[0].logprobs
    assert len(found) >= 2
    assert whole.text.format.schema_ == {"default": schema}
    deltas = [one for event in events for one in getattr(event, "logprobs", None) or ()]
    said = [one.token for one in found]
    assert [one.token for one in deltas[: len(found)]] == said
    text, part, item, last = events[-4:]
    places = [
        text.logprobs, part.part.logprobs, item.item.content[0].logprobs,
        last.response.output[0].content[0].logprobs,
    ]  # fmt: skip
    assert [[one.token for one in place] for place in places] == [said] * 4
    assert last.response.text.format.schema_ == {"default": schema}


def test_fields_that_change_nothing_are_taken(client):
    answer = ask(
        client, tools=[], tool_choice="none", store=True, truncation="auto", user="u",
        reasoning={"effort": "low"}, parallel_tool_calls=True, previous_response_id=None,
        background=False, service_tier="auto", prompt_cache_key="k",
        text={"format": {"type": "text"}, "verbosity": "low"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
    )  # fmt: skip
    assert answer.status == "completed"
    assert not answer.store
