"""What ten clients are asked, each as its own documentation shows."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal

import agents
import autogen_core
import instructor
import litellm
import openai
import pydantic_ai
from autogen_core.models import ModelFamily, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from instructor.core import InstructorRetryException
from instructor.processing.multimodal import Image
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from llama_index.core.llms import ChatMessage as LlamaMessage
from llama_index.core.llms import ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool as LlamaTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "Find the red square, please."
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SCRIPT = Path(__file__).with_name("vercel.mjs").read_text()
PICTURE = f"data:image/png;base64,{DOT}"
LIMIT = 96  # most tokens of an answer
wait = asyncio.new_event_loop().run_until_complete  # one loop for all that a client leaves


class Find(BaseModel, extra="forbid"):  # the arguments of `find`
    colour: Literal["red", "green", "blue"]
    most: Literal[1, 2, 3]


def find(colour: Literal["red", "green", "blue"], most: Literal[1, 2, 3]) -> str:
    """Find the things of a colour."""
    return f"{most} {colour} things"


TOOL = {"type": "function", "function": {"name": "find", "parameters": Find.model_json_schema()}}


class Client:
    """A client; `call` returns functions with their arguments, or a text."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.url, self.key, self.model = url, key, model
        self.openai = openai.OpenAI(base_url=url, api_key=key, max_retries=0)

    def asked(self, *, image: bool = False, **more: Any) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": QUESTION, **more},
                 {"type": "image_url", "image_url": {"url": PICTURE}}]  # fmt: skip
        return [{"role": "user", "content": parts[: 1 + image]}]


class OpenAI(Client):
    def _ask(self, *, image=False, **more):
        completions = self.openai.chat.completions
        ask = completions.parse if "response_format" in more else completions.create
        return ask(model=self.model, messages=self.asked(image=image), max_tokens=LIMIT, **more)

    def text(self, **more):
        return self._ask(**more).choices[0].message.content

    def stream(self):
        chunks = self._ask(stream=True, stream_options={"include_usage": True})
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]

    def call(self, choice):
        message = self._ask(tools=[TOOL], tool_choice=choice).choices[0].message
        calls = [call.function for call in message.tool_calls or ()]
        return {one.name: json.loads(one.arguments) for one in calls} or message.content

    def schema(self):
        return self._ask(response_format=Find).choices[0].message.parsed

    def embeddings(self):
        return self.openai.embeddings.create(model=self.model, input=QUESTION).data[0].embedding


class LiteLLM(OpenAI):  # whose answers have the same form
    def _ask(self, *, image=False, **more):
        asked = self.asked(image=image, cache_control={"type": "ephemeral"})  # as for Anthropic
        place = {"api_base": self.url, "api_key": self.key, "max_tokens": LIMIT}
        return litellm.completion(f"hosted_vllm/{self.model}", asked, **place, **more)

    def schema(self):
        return json.loads(self.text(response_format=Find))

    def embeddings(self):
        place = {"api_base": self.url, "api_key": self.key}
        made = litellm.embedding(f"hosted_vllm/{self.model}", [QUESTION], **place)
        return made.data[0]["embedding"]


class LangChain(Client):
    def _model(self, kind=ChatOpenAI, **more):
        return kind(model=self.model, base_url=self.url, api_key=self.key, max_retries=0, **more)

    def text(self, **more):
        return self._model(max_tokens=LIMIT).invoke(self.asked(**more)).content

    def stream(self):
        return [chunk.content for chunk in self._model(max_tokens=LIMIT).stream(QUESTION)]

    def call(self, choice):
        choice = None if choice == "auto" else choice
        answer = self._model().bind_tools([find], tool_choice=choice).invoke(QUESTION)
        return {call["name"]: call["args"] for call in answer.tool_calls} or answer.content

    def schema(self):
        return self._model().with_structured_output(Find).invoke(QUESTION)

    def embeddings(self):
        # Otherwise it downloads OpenAI's tokenizer, for the length of texts.
        return self._model(OpenAIEmbeddings, check_embedding_ctx_length=False).embed_query(QUESTION)


class LlamaIndex(Client):
    def _model(self, kind=OpenAILike, **more):
        return kind(api_base=self.url, api_key=self.key, max_retries=0, **more)

    def _chat(self, **more):
        can = {"is_chat_model": True, "is_function_calling_model": True, **more}
        return self._model(model=self.model, max_tokens=LIMIT, **can)

    def text(self, *, image=False):
        blocks = [TextBlock(text=QUESTION), *[ImageBlock(url=PICTURE)] * image]
        return self._chat().chat([LlamaMessage(blocks=blocks)]).message.content

    def stream(self):
        return [chunk.delta for chunk in self._chat().stream_chat([LlamaMessage(QUESTION)])]

    def call(self, choice):
        tools, model = [LlamaTool.from_defaults(find)], self._chat()
        answer = model.chat_with_tools(tools, QUESTION, tool_required=choice == "required")
        calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
        return {call.tool_name: call.tool_kwargs for call in calls} or answer.message.content or ""

    def schema(self):
        model = self._chat(should_use_structured_outputs=True)
        return model.as_structured_llm(Find).chat([LlamaMessage(QUESTION)]).raw

    def embeddings(self):
        model = self._model(OpenAILikeEmbedding, model_name=self.model)
        return model.get_query_embedding(QUESTION)


class OpenAIAgents(Client):
    def _agent(self, choice=None, **more):
        client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=0)
        model = agents.OpenAIChatCompletionsModel(self.model, client)
        settings = agents.ModelSettings(max_tokens=LIMIT, tool_choice=choice)
        return agents.Agent("finder", model=model, model_settings=settings, **more)

    def text(self, *, image=False):
        parts = [{"type": "input_text", "text": QUESTION},
                 {"type": "input_image", "image_url": PICTURE}]  # fmt: skip
        asked = [{"role": "user", "content": parts[: 1 + image]}]
        return wait(agents.Runner.run(self._agent(), asked)).final_output

    def stream(self):
        async def pieces():
            events = agents.Runner.run_streamed(self._agent(), QUESTION).stream_events()
            raw = [event.data async for event in events if event.type == "raw_response_event"]
            return [data.delta for data in raw if data.type == "response.output_text.delta"]

        return wait(pieces())

    def call(self, choice):
        options = {"tools": [agents.function_tool(find)], "tool_use_behavior": "stop_on_first_tool"}
        agent = self._agent(None if choice == "auto" else choice, **options)
        done = wait(agents.Runner.run(agent, QUESTION))
        calls = [item.raw_item for item in done.new_items if item.type == "tool_call_item"]
        return {call.name: json.loads(call.arguments) for call in calls} or done.final_output

    def schema(self):
        return wait(agents.Runner.run(self._agent(output_type=Find), QUESTION)).final_output


class PydanticAI(Client):
    def _model(self, kind=OpenAIChatModel):
        return kind(self.model, provider=OpenAIProvider(base_url=self.url, api_key=self.key))

    def _agent(self, **more):
        return pydantic_ai.Agent(self._model(), model_settings={"max_tokens": LIMIT}, **more)

    def text(self, *, image=False):
        return self._agent().run_sync([QUESTION, pydantic_ai.ImageUrl(PICTURE)][: 1 + image]).output

    def stream(self):
        return [*self._agent().run_stream_sync(QUESTION).stream_text(delta=True, debounce_by=None)]

    def call(self, choice):
        if choice == "required":
            output = pydantic_ai.ToolOutput(Find, name="find")
            return {"find": dict(self._agent(output_type=output).run_sync(QUESTION).output)}
        done = self._agent(tools=[find]).run_sync(QUESTION)
        parts = [part for message in done.all_messages() for part in message.parts]
        calls = [part for part in parts if part.part_kind == "tool-call"]
        return {call.tool_name: call.args_as_dict() for call in calls} or done.output

    def schema(self):
        return self._agent(output_type=pydantic_ai.NativeOutput(Find)).run_sync(QUESTION).output

    def embeddings(self):
        embedder = pydantic_ai.Embedder(self._model(OpenAIEmbeddingModel))
        return embedder.embed_query_sync(QUESTION).embeddings[0]


class AutoGen(Client):
    def _model(self):
        can = ("vision", "function_calling", "json_output", "structured_output")
        facts = {**dict.fromkeys(can, True), "family": ModelFamily.UNKNOWN}
        place = {"model": self.model, "base_url": self.url, "api_key": self.key}
        return OpenAIChatCompletionClient(model_info=facts, max_tokens=LIMIT, **place)

    def text(self, *, image=False, **more):
        content = [QUESTION, autogen_core.Image.from_uri(PICTURE)] if image else QUESTION
        asked = [UserMessage(content=content, source="me")]
        return wait(self._model().create(asked, **more)).content

    def stream(self):
        async def pieces():
            made = self._model().create_stream([UserMessage(content=QUESTION, source="me")])
            return [piece async for piece in made if isinstance(piece, str)]

        return wait(pieces())

    def call(self, choice):
        tools = [FunctionTool(find, description="Find things.")]
        found = self.text(tools=tools, tool_choice=choice)
        calls = [] if isinstance(found, str) else found
        return {call.name: json.loads(call.arguments) for call in calls} or found

    def schema(self):
        return json.loads(self.text(json_output=Find))


class Instructor(Client):
    def _ask(self, mode="JSON_SCHEMA", answer=Find, content=QUESTION, **more):
        options = {"response_model": answer, "max_tokens": LIMIT, "max_retries": 0, **more}
        asked = [{"role": "user", "content": content}]
        made = instructor.from_openai(self.openai, mode=instructor.Mode[mode])
        return made.create(model=self.model, messages=asked, **options)

    def text(self, *, image=False):
        asked = [QUESTION, Image.autodetect(PICTURE)][: 1 + image]
        return self._ask(content=asked, answer=None).choices[0].message.content

    def stream(self):
        return list(self._ask(answer=instructor.Partial[Find], stream=True))

    def call(self, choice):
        if choice == "required":
            return {"find": dict(self._ask("TOOLS"))}
        try:
            return {"find": dict(next(self._ask("PARALLEL_TOOLS", Iterable[Find])))}
        except InstructorRetryException as error:  # there is no call
            return error.last_completion.choices[0].message.content

    schema = _ask


class Haystack(Client):
    def _model(self, kind=OpenAIChatGenerator, **more):
        key = Secret.from_token(self.key)
        return kind(api_key=key, api_base_url=self.url, model=self.model, max_retries=0, **more)

    def _ask(self, *, image=False, settings=None, **more):
        picture = ImageContent(DOT, mime_type="image/png")
        asked = [ChatMessage.from_user(content_parts=[QUESTION, *[picture] * image])]
        settings = {"max_completion_tokens": LIMIT, **(settings or {})}
        return self._model(**more).run(asked, generation_kwargs=settings)["replies"][0]

    def text(self, **more):
        return self._ask(**more).text

    def stream(self):
        pieces = []
        self._ask(streaming_callback=lambda chunk: pieces.append(chunk.content))
        return pieces

    def call(self, choice):
        settings = {} if choice == "auto" else {"tool_choice": choice}
        answer = self._ask(settings=settings, tools=[create_tool_from_function(find)])
        return {call.tool_name: call.arguments for call in answer.tool_calls} or answer.text

    def schema(self):
        return Find.model_validate_json(self.text(settings={"response_format": Find}))

    def embeddings(self):
        return self._model(OpenAITextEmbedder).run(QUESTION)["embedding"]


class VercelAI(Client):  # its packages lie in the folder of this environment
    def _ask(self, cell):
        facts = {"baseURL": self.url, "apiKey": self.key, "model": self.model, "cell": cell,
                 "picture": DOT, "prompt": QUESTION, "limit": LIMIT}  # fmt: skip
        command = ["node", "--input-type=module", "-", json.dumps(facts)]
        options = {"cwd": sys.prefix, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(command, input=SCRIPT, check=False, **options)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout)

    def text(self, *, image=False):
        return self._ask("image" if image else "chat")

    call = _ask
    stream = partialmethod(_ask, "stream")
    schema = partialmethod(_ask, "schema")
    embeddings = partialmethod(_ask, "embeddings")


CLIENTS = (OpenAI, LiteLLM, LangChain, LlamaIndex, OpenAIAgents, PydanticAI, AutoGen, Instructor,
           Haystack, VercelAI)  # fmt: skip
