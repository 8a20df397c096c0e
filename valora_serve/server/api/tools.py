"""Tools of a request: the functions that the model may call, and the calls in its answer.

Calls have the form of Hermes and Qwen, `<tool_call>` around a JSON object. A grammar over text and
calls holds the answer, so that the calls of any model are valid.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from valora_serve.errors import RequestError
from valora_serve.server.api import schema
from valora_serve.server.constrain import Grammar
from valora_serve.server.json_schema import JOINED
from valora_serve.server.telemetry.logs import new_id

MAX_CALLS = 32  # in an answer
_BEGIN, _END = "<tool_call>", "}\n</tool_call>"
_HEAD = re.compile(r'\s*<tool_call>\n\{"name": "([^"]*)", "arguments": ')
_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may call."""

    functions: Sequence[schema.Function]
    text: bool
    several: bool

    def grammar(self, answer: Grammar | None, *, strict: bool) -> Grammar:
        """The grammar of an answer, whose text has a grammar of its own or none."""
        answer = answer if self.text else None
        schemas = {} if answer is None else dict(answer.schemas)
        closed, begins = ([], []) if answer is None else ([*answer.strict], [""])
        calls = []
        for number, function in enumerate(self.functions):
            rule, name = f"arguments{number}", f'{function.name}", "arguments": '
            schemas[rule] = _parameters(function)
            closed += [rule] * bool(function.strict or strict)
            calls.append(f"{json.dumps(name)} {rule}")
            begins.append(f'{_BEGIN}\n{{"name": "{name}')
        first = f'"{_BEGIN}" call'
        more = f' ("\\n{_BEGIN}" call){{0,{MAX_CALLS - 1}}}' if self.several else ""
        rules = [f'call: "\\n{{\\"name\\": \\"" ({" | ".join(calls)}) {json.dumps(_END)}']
        if answer is not None:
            first = f"json | {first}"
        elif self.text:
            first = "TEXT | begin call"
            # A lazy rule ends where it first can, so that a call always begins at its mark.
            rules += ["TEXT: /(.|\\n)*/", f'begin[lazy]: TEXT "{_BEGIN}"']
        text = "\n".join([f"start: {first}{more}", *rules])
        return Grammar(schemas, text, tuple(closed), tuple(begins))

    def instruction(self) -> str:
        """What the model is told of the functions."""
        told = []
        for one in self.functions:
            fields = {"description": one.description, "parameters": one.parameters}
            said = {name: value for name, value in fields.items() if value is not None}
            told.append({"type": "function", "function": {"name": one.name, **said}})
        return _TOLD.format("\n".join(json.dumps(one, ensure_ascii=False) for one in told))


class AnswerReader:
    """Takes the growing text of an answer apart into text and calls; without tools it is text."""

    def __init__(self, tools: Tools | None) -> None:
        self.calls = 0
        self._tools = tools
        self._held = ""  # what may still become something else
        self._inside = False  # the arguments of a call

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Add text; return what is new as deltas of OpenAI's API."""
        if self._tools is None:
            return [{"content": text}] if text else []
        self._held += text
        deltas = []
        while True:
            if self._inside:
                at = _before(self._held, _END)
                if at:
                    deltas.append(self._call(function={"arguments": self._held[:at]}))
                self._inside = not self._held.startswith(_END, at)
                self._held = self._held[at:].removeprefix(_END)
                if self._inside:
                    return deltas
            said = self._held
            if not last or _BEGIN in said:
                said = said[: _before(said, _BEGIN)].rstrip()
            self._held = self._held[len(said) :]
            if said and self._tools.text and not self.calls:
                deltas.append({"content": said})
            head = _HEAD.match(self._held)
            if head is None:
                return deltas
            self.calls, self._inside, self._held = self.calls + 1, True, self._held[head.end() :]
            function = {"name": head[1], "arguments": ""}
            deltas.append(self._call(id=f"call_{new_id()}", type="function", function=function))

    def _call(self, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.calls - 1, **fields}]}

    def message(self, text: str) -> schema.AnswerMessage:
        """The message of a whole answer."""
        said, calls = "", []
        for delta in self.push(text, last=True):
            said += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append(call)
                else:
                    calls[-1]["function"] |= call["function"]
        made = [schema.AnswerToolCall.model_validate(call) for call in calls]
        empty = None if made or (self._tools and not self._tools.text) else ""
        return schema.AnswerMessage(content=said or empty, tool_calls=made or None)


def tools_of(body: schema.ChatRequest) -> Tools | None:
    """What an answer may or must call; None if it is to be text."""
    functions: dict[str, schema.Function] = {}
    for function in (tool.function for tool in body.tools or ()):
        if function.name in functions:
            raise RequestError(f"tools holds the function {function.name} twice: leave one out")
        functions[function.name] = function
    choice, one = body.tool_choice, isinstance(body.tool_choice, schema.NamedTool)
    if isinstance(choice, schema.NamedTool | schema.AllowedTools):
        named = [choice] if isinstance(choice, schema.NamedTool) else choice.tools
        for name in (tool.name for tool in named):
            if name not in functions:
                raise RequestError(
                    f"tool_choice names {name[:64]!a}, which is none of the tools: they are "
                    f"{', '.join(functions) or 'none: send tools'}"
                )
        functions = {tool.name: functions[tool.name] for tool in named}
        choice = "required" if isinstance(choice, schema.NamedTool) else choice.mode
    if choice == "required" and not functions:
        raise RequestError("tool_choice is required, but there are no tools: send tools")
    if choice == "none" or not functions:
        return None
    several = body.parallel_tool_calls is not False and not one
    return Tools(list(functions.values()), text=choice != "required", several=several)


def calls_as_text(message: schema.Message) -> str:
    """The calls of an assistant's earlier message as the model writes them."""
    calls = [call.function for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(message.function_call)
    return "\n".join(
        f'{_BEGIN}\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}{_END}'
        for call in calls
    )


def _parameters(function: schema.Function) -> dict[str, Any]:
    wanted = {"properties": {}} if function.parameters is None else function.parameters
    if wanted.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of function {function.name} are of type {wanted['type']!a}: the "
            "arguments of a function are an object"
        )
    closed = "properties" in wanted and function.strict is not False
    # Without this, a model may invent parameters for ever.
    more = {"additionalProperties": False} if closed and not wanted.keys() & JOINED else {}
    return {"type": "object", **more, **wanted, "title": f"function {function.name}"}


def _before(text: str, mark: str) -> int:
    """Length of the text before a mark, or before what may be the beginning of one at its end."""
    at = text.find(mark)
    if at >= 0:
        return at
    return len(text) - next(n for n in range(len(mark) - 1, -1, -1) if text.endswith(mark[:n]))
