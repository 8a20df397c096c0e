"""The golden examples of a bundle, asked through every door."""

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
    return data_url((bundle / "golden" / "traffic-0.png").read_bytes())


def text(words):
    return {"type": "text", "text": words}


def turns(image, *parts):
    """A conversation whose last turn says these parts, after others about an image."""
    picture = {"type": "image_url", "image_url": {"url": image}}
    return [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": [text("Describe this."), picture]},
        {"role": "assistant", "content": "A street."},
        {"role": "user", "content": [picture if part is image else text(part) for part in parts]},
    ]


def test_golden_boxes_hold_through_every_door(client, process, bundle):
    examples = json.loads((bundle / GOLDEN).read_text())
    assert len(examples) == 2 and all(example["expected"] for example in examples)
    for example in examples:
        url, model = data_url((bundle / example["image"]).read_bytes()), example["domain"]
        body = {"images": [url], "prompt": "What is it?"}
        looked = httpx.post(f"{process.url}/v1/vision/{model}", json=body, timeout=60).json()
        asked = {"model": model, "messages": turns(url, "What is it?", url, "Thank you.")}
        content = [{"type": "input_text", "text": "What is it?"},
                   {"type": "input_image", "image_url": url, "detail": "auto"}]  # fmt: skip
        responses = client.responses.create(
            model=model, input=[{"role": "user", "content": content}], instructions="Be kind."
        )
        for said in (
            looked | {"images": looked["results"]},
            responses.valora,
            client.chat.completions.create(**asked).valora,
            [*client.chat.completions.create(**asked, stream=True)][-1].valora,
        ):
            (seen,) = said["images"]
            assert BoxesResult.matches(seen["detections"], example["expected"], 0.2)
            assert said["warnings"]


@pytest.mark.parametrize(
    ("domain", "question", "words"),
    [("facts", "is it red?", "is it red?"), ("find", "locate the star", "the star")],
)
def test_a_question_is_kept(client, process, domain, question, words, image):
    body = {"images": [image], "prompt": question}
    looked = httpx.post(f"{process.url}/v1/vision/{domain}", json=body, timeout=60).json()
    expected = pytest.approx(looked["results"][0]["confidences"], abs=1e-4)
    for parts in ((words, image), (image, words), (words,), ("is it blue?", image)):
        answer = client.chat.completions.create(model=domain, messages=turns(image, *parts))
        assert (answer.valora["confidences"] == expected) == (words in parts), parts


def test_a_caption_does_not_depend_on_the_order(client, image):
    picture, said = {"type": "image_url", "image_url": {"url": image}}, text("Describe the image.")
    answers = [
        client.chat.completions.create(
            model="caption", messages=[{"role": "user", "content": parts}], max_tokens=12
        )
        for parts in ([picture], [said, picture], [picture, said])
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert [answer.valora["warnings"] for answer in answers] == [[]] * 3


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
