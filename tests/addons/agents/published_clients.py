"""Agents with one tool over published clients, as their documents show: python published_clients.py NAME "47*86="."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

TEXT = "The value of an expression of whole numbers, + - * and brackets."
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculate", "description": TEXT, "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": False, **FUNCTION}]
MESSAGES_TOOLS: Any = [{"name": "calculate", "description": TEXT, "input_schema": SCHEMA}]


def calculate(expression: str) -> str:
    """The value of an expression of whole numbers, + - * and brackets."""
    first, second = expression.split("*")
    return str(int(first) * int(second))


def openai_chat(prompt: str, *, is_streamed: bool = False) -> str:
    import openai

    client = openai.OpenAI()
    history: Any = [{"role": "user", "content": prompt}]
    while True:
        asked = {"model": "gpt-4o", "messages": history, "tools": CHAT_TOOLS}
        if is_streamed:
            with client.chat.completions.stream(**asked) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        history.append(message.to_dict())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = calculate(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def openai_responses(prompt: str, *, is_streamed: bool = False) -> str:
    import openai

    client = openai.OpenAI()
    history: Any = [{"role": "user", "content": prompt}]
    while True:
        asked = {"model": "gpt-5", "input": history, "tools": RESPONSES_TOOLS}
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        history += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = calculate(**json.loads(call.arguments))
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def anthropic(prompt: str, *, is_streamed: bool = False) -> str:
    import anthropic as published

    client = published.Anthropic()
    history: Any = [{"role": "user", "content": prompt}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    while True:
        asked: Any = {"model": "claude-sonnet-4-5", "max_tokens": 4096, "messages": history, "thinking": thinking}
        if is_streamed:
            with client.messages.stream(**asked, tools=MESSAGES_TOOLS) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked, tools=MESSAGES_TOOLS)
        history.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": calculate(**c.input)} for c in calls]
        history.append({"role": "user", "content": results})


def openai_agents(prompt: str, *, is_streamed: bool = False, api: str = "responses") -> str:
    import agents

    agents.set_default_openai_api(api)  # type: ignore[arg-type]
    agent = agents.Agent(name="Calculator", tools=[agents.function_tool(calculate)])
    if not is_streamed:
        return agents.Runner.run_sync(agent, prompt).final_output

    async def run() -> str:
        result = agents.Runner.run_streamed(agent, prompt)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def litellm(prompt: str, *, is_streamed: bool = False, model: str = "openai/gpt-4o") -> str:
    import litellm as published

    history: Any = [{"role": "user", "content": prompt}]
    while True:
        answer = published.completion(model=model, messages=history, tools=CHAT_TOOLS, stream=is_streamed)
        if is_streamed:
            answer = published.stream_chunk_builder(list(answer), messages=history)
        message = answer.choices[0].message
        history.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = calculate(**json.loads(call.function.arguments))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


CLIENTS = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic,
    "openai-agents": openai_agents,
    "openai-agents-chat": lambda *args, **more: openai_agents(*args, **more, api="chat_completions"),
    "litellm": litellm,
    "litellm-anthropic": lambda *args, **more: litellm(*args, **more, model="anthropic/claude-sonnet-4-5"),
    "litellm-responses": lambda *args, **more: litellm(*args, **more, model="openai/responses/gpt-5"),
}

if __name__ == "__main__":
    client, prompt, *streamed = sys.argv[1:]
    print(CLIENTS[client](prompt, is_streamed=bool(streamed)))
