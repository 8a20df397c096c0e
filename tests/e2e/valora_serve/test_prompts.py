"""The golden examples of a bundle, asked through every door and in every form of a request."""

import json

import httpx
import openai
import pytest

from tests.e2e.valora_serve.serving import Process, bundle_with_golden
from tests.support.http_helpers import data_url
from tests.support.serve_helpers import DOMAINS as COMMON
from tests.support.serve_helpers import DomainSpec
from valora_data.contract.bundle import GOLDEN
from valora_data.contract.results import BoxesResult

pytestmark = pytest.mark.slow

DOMAINS = COMMON | {
    "facts": DomainSpec("adapter-1", "yes_no", ["no", "yes"], "visual_mean", "{}"),
    "find": DomainSpec("adapter-1", "classification", ["left", "right"], "last", "locate {}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_with_golden(tmp_path_factory.mktemp("bundles") / "prompts", domains=DOMAINS)


@pytest.fixture(scope="module")
def process(bundle, tmp_path_factory):
    with Process(bundle, cwd=tmp_path_factory.mktemp("serve")) as process:
        yield process


@pytest.fixture(scope="module")
def client(process):
    return openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def image(bundle):
    return url_of(bundle / "golden" / "traffic-0.png")


def url_of(file):
    return data_url(file.read_bytes())


def text(words):
    return {"type": "text", "text": words}


def forms(image, words):
    """Conversations about an image with other words than the domain's, by name."""
    picture = {"type": "image_url", "image_url": {"url": image}}
    other = {"role": "user", "content": [text("Describe this."), picture]}
    return {
        "alone": [{"role": "user", "content": [picture]}],
        "text first": [{"role": "user", "content": [text(words), picture]}],
        "image first": [{"role": "user", "content": [picture, text(words)]}],
        "around": [{"role": "user", "content": [text(words), picture, text("Thank you.")]}],
        "system": [{"role": "system", "content": "You are a pirate."},
                   {"role": "user", "content": [picture, text(words)]}],
        "developer": [{"role": "developer", "content": "Answer in JSON."},
                      {"role": "user", "content": [picture]}],
        "turns": [other, {"role": "assistant", "content": "A street."},
                  {"role": "user", "content": [text(words), picture]}],
        "follow-up": [{"role": "user", "content": [picture]},
                      {"role": "assistant", "content": None},
                      {"role": "user", "content": words}],
    }  # fmt: skip


def test_golden_boxes_hold_in_every_form_of_a_chat(client, bundle):
    examples = json.loads((bundle / GOLDEN).read_text())
    assert len(examples) == 2
    assert all(example["expected"] for example in examples)
    for example in examples:
        found = forms(url_of(bundle / example["image"]), "What do you see in this picture?")
        for name, messages in found.items():
            for stream in (False, True):
                answer = client.chat.completions.create(
                    model=example["domain"], messages=messages, stream=stream
                )
                block = list(answer)[-1].valora if stream else answer.valora
                (seen,) = block["images"]
                assert BoxesResult.matches(seen["detections"], example["expected"], 0.2), name
                assert bool(block["warnings"]) == (name != "alone"), name


def test_golden_boxes_hold_through_the_other_doors(client, process, bundle):
    for example in json.loads((bundle / GOLDEN).read_text()):
        url, expected = url_of(bundle / example["image"]), example["expected"]
        body = httpx.post(
            f"{process.url}/v1/vision/{example['domain']}",
            json={"images": [url], "prompt": "What is it?"}, timeout=60,
        ).json()  # fmt: skip
        assert BoxesResult.matches(body["results"][0]["detections"], expected, 0.2)
        assert body["warnings"]
        content = [{"type": "input_text", "text": "What is it?"},
                   {"type": "input_image", "image_url": url, "detail": "auto"}]  # fmt: skip
        answer = client.responses.create(
            model=example["domain"], input=[{"role": "user", "content": content}],
            instructions="You are a pirate.",
        )  # fmt: skip
        (seen,) = answer.valora["images"]
        assert BoxesResult.matches(seen["detections"], expected, 0.2)


@pytest.mark.parametrize(
    ("domain", "question", "words"),
    [("facts", "is it red?", "is it red?"), ("find", "locate the star", "the star")],
)
def test_a_question_is_kept_in_every_form(client, process, domain, question, words, image):
    body = httpx.post(
        f"{process.url}/v1/vision/{domain}", json={"images": [image], "prompt": question},
        timeout=60,
    ).json()  # fmt: skip
    expected = body["results"][0]["confidences"]
    found = forms(image, words)
    for name in ("text first", "image first", "system", "turns", "follow-up"):
        answer = client.chat.completions.create(model=domain, messages=found[name])
        assert answer.valora["confidences"] == pytest.approx(expected, abs=1e-4), name
    other = client.chat.completions.create(
        model=domain, messages=forms(image, "is it a blue ring?")["text first"]
    )
    assert other.valora["confidences"] != pytest.approx(expected, abs=1e-4)
    for name in ("alone", "developer"):
        with pytest.raises(openai.BadRequestError, match="send the question as text"):
            client.chat.completions.create(model=domain, messages=found[name])


def test_a_caption_does_not_depend_on_the_order(client, image):
    picture = {"type": "image_url", "image_url": {"url": image}}

    def ask(*parts, **more):
        return client.chat.completions.create(
            model="caption", messages=[{"role": "user", "content": list(parts)}], max_tokens=12,
            **more,
        )  # fmt: skip

    alone = ask(picture).choices[0].message.content
    assert ask(text("Describe the image."), picture).choices[0].message.content == alone
    answer = ask(picture, text("Describe the image."))
    assert answer.choices[0].message.content == alone
    assert answer.valora["warnings"] == []
    assert "another text" in ask(text("Say it."), picture).valora["warnings"][0]


def test_embeddings_and_tools_of_the_real_engine(client, image):
    one, two = client.embeddings.create(model="sample/adapter-1", input=["a star", "a ring"]).data
    assert len(one.embedding) == len(two.embedding) > 16
    assert sum(value**2 for value in one.embedding) == pytest.approx(1, abs=1e-5)
    assert one.embedding != two.embedding
    tool = {"type": "function", "function": {"name": "move", "parameters": {
        "type": "object", "properties": {"to": {"enum": ["left", "right"]}}, "required": ["to"],
        "additionalProperties": False}}}  # fmt: skip
    picture = {"type": "image_url", "image_url": {"url": image}}
    messages = [{"role": "user", "content": [text("go"), picture]}]
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, tools=[tool], tool_choice="required", stream=stream,
        )  # fmt: skip
        if stream:
            deltas = [d for c in answer for d in c.choices[0].delta.tool_calls or ()]
            name = deltas[0].function.name
            arguments = "".join(delta.function.arguments for delta in deltas)
        else:
            function = answer.choices[0].message.tool_calls[0].function
            name, arguments = function.name, function.arguments
        assert name == "move"
        assert json.loads(arguments)["to"] in {"left", "right"}
