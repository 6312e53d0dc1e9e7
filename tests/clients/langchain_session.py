"""What a program with langchain-openai does, against the server whose URL and model it is given. Run by
test_langchain.py in the environment that has it; prints what came of it as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]
from openai import BadRequestError
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


class Dog(BaseModel):
    """A dog."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=20)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


def main(url: str, model: str) -> dict[str, Any]:
    where: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": model}
    chat = ChatOpenAI(**where, temperature=0, max_tokens=60)
    told: dict[str, Any] = {"invoke": chat.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)]).content}
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    told["stream"] = "".join(chunk.text for chunk in chunks)
    told["usage"] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    told["batch"] = [answer.content for answer in chat.batch([QUESTION] * 3)]
    told["dog"] = chat.with_structured_output(Dog).invoke("Invent a dog.").model_dump()
    called = chat.bind_tools([weather], tool_choice="weather").invoke("How is the weather in Rome?")
    (call,) = called.tool_calls
    told["call"] = call["name"], list(call["args"])
    back = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    told["after the call"] = chat.bind_tools([weather]).invoke(["How is the weather in Rome?", called, back]).type
    responses = ChatOpenAI(**where, temperature=0, use_responses_api=True, use_previous_response_id=True)
    first = responses.invoke(QUESTION)
    second = responses.invoke([HumanMessage(QUESTION), first, HumanMessage("And of Italy?")])
    told["responses"] = first.text, second.text
    told["previous"] = second.response_metadata.get("previous_response_id") or first.response_metadata["id"]
    told["completion"] = OpenAI(**where, temperature=0, max_tokens=8).invoke("The capital of France is")
    vectors = OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    told["embeddings"] = [len(vector) for vector in vectors]
    told["refused"] = refusal(chat)
    return told


def refusal(chat: Any) -> list[str]:
    try:
        chat.invoke("word " * 20_000)
    except BadRequestError as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
