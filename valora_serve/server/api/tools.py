"""Tools of a chat request: which functions must be called, and the calls in an answer.

The answer is held to a JSON schema, ``{"name": …, "arguments": …}`` of one of the functions, so
that any model can call them. No model is asked to choose between words and a call, as that takes
training.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valora_serve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.server.api.schema import ChatRequest, Function, Message

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\S)')
_REFUSED = {
    "functions": "is OpenAI's old form of tools: send tools",
    "web_search_options": "is not served, as this server searches nothing: leave it out",
    "moderation": "is not served: leave it out",
    "audio": "is not served, as answers are text: leave it out",
}


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """Functions of which an answer must call one.

    Attributes:
        functions: The functions.
    """

    functions: Sequence[Function]

    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer.

        Raises:
            RequestError: The parameters of a function are no object.
        """
        calls, parameters = [], {}
        for number, function in enumerate(self.functions):
            key = f"parameters-{number}"
            parameters[key] = _parameters(function, key)
            calls.append(
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": function.name},
                        "arguments": {"$ref": f"#/$defs/{key}"},
                    },
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
            )
        return {"$defs": parameters, "anyOf": calls}

    def instruction(self) -> str:
        """What the model is told of the functions."""
        lines = [
            json.dumps(one.model_dump(exclude_none=True, exclude={"strict"}), ensure_ascii=False)
            for one in self.functions
        ]
        told = 'Call one of these functions. Answer only with {"name": …, "arguments": …}.'
        return "\n".join([told, *lines])


class CallReader:
    """Reads a call out of the growing text of an answer."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return what follows of the arguments. `name` is set once it is known."""
        self._held += text
        if self.name is None:
            found = _HEAD.match(self._held)
            if found is None:
                return ""
            self.name = str(json.loads(found[1]))
            self._held = self._held[found.end() :]
        # The last brace closes the call, not the arguments.
        end = len(self._held.rstrip()) - 1
        if end <= 0:
            return ""
        new, self._held = self._held[:end], self._held[end:]
        return new

    def rest(self, *, complete: bool) -> str:
        """What is left of the arguments.

        Args:
            complete: Whether the answer ended by itself, so that its last brace is the call's.
        """
        return "" if complete or self.name is None else self._held


def forced_call(body: ChatRequest) -> ForcedCall | None:
    """The functions that an answer must call; None if it is to be text.

    Raises:
        RequestError: The tools, or how they are to be chosen, are not served.
    """
    _refuse_others(body)
    choice = body.tool_choice
    functions = [_function(tool.type, tool.function, n) for n, tool in enumerate(body.tools or ())]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        doubled = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"tools holds the function {doubled} twice: leave one out")
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            functions, choice = _allowed(choice, functions)
        else:
            return ForcedCall([_named(choice, functions, "tool_choice")])
    if choice == "none" or (not functions and choice in (None, "auto")):
        return None
    if choice == "required":
        if not functions:
            raise RequestError("tool_choice is required, but there are no tools: send tools")
        return ForcedCall(functions)
    if choice in (None, "auto"):
        raise RequestError(
            "tool_choice auto is not served, as the model was not trained to choose between words "
            "and tools: set tool_choice to required, to a function, or to none"
        )
    raise RequestError(
        f"tool_choice is {choice[:50]!a}: send none, required, or a function as "
        '{"type": "function", "function": {"name": …}}'
    )


def calls_as_text(message: Message) -> str:
    """The calls of an assistant's earlier message as the model writes them, one a line."""
    calls = [call.function for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(message.function_call)
    return "\n".join(
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in calls
    )


def _refuse_others(body: ChatRequest) -> None:
    """Refuse fields of OpenAI's that ask for what is not served."""
    for name, said in _REFUSED.items():
        if getattr(body, name) not in (None, []):
            raise RequestError(f"{name} {said}")
    if body.function_call not in (None, "none", "auto"):
        raise RequestError("function_call is OpenAI's old form of tool_choice: send tool_choice")
    others = [one for one in body.modalities or () if one != "text"]
    if others:
        raise RequestError(f'modalities holds {others[0][:50]!a}: answers are text, send ["text"]')


def _function(kind: str, function: Function | None, number: int) -> Function:
    if kind != "function":
        raise RequestError(
            f"tools.{number}.type is {kind[:50]!a}: only tools of type function are served"
        )
    if function is None:
        raise RequestError(f"tools.{number} lacks its function: send name and parameters")
    return function


def _named(choice: dict[str, Any], functions: Sequence[Function], place: str) -> Function:
    named = choice.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f'{place} names no function: send {{"type": "function", "function": {{"name": …}}}}'
        )
    for function in functions:
        if function.name == name:
            return function
    listed = ", ".join(function.name for function in functions) or "none: send tools"
    raise RequestError(
        f"{place} names {name[:64]!a}, which is none of the tools: they are {listed}"
    )


def _allowed(
    choice: dict[str, Any], functions: Sequence[Function]
) -> tuple[list[Function], str | None]:
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise RequestError("tool_choice.allowed_tools lacks its mode or tools: send both")
    found = [
        _named(one if isinstance(one, dict) else {}, functions, "tool_choice.allowed_tools")
        for one in listed
    ]
    return found, mode


def _parameters(function: Function, key: str) -> Any:
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"the parameters of function {function.name} are of type {schema['type']!a}: the "
            "arguments of a function are an object"
        )
    return {"type": "object", **_moved(schema, f"#/$defs/{key}")}


def _moved(schema: Any, to: str) -> Any:
    """A JSON schema whose references to itself work below another path."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = to + value[1:]
        elif name in ("const", "enum", "default", "examples"):
            moved[name] = value  # values, which are no schemas
        else:
            moved[name] = _moved(value, to)
    return moved
