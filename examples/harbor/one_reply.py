"""An agent of Harbor, without a line of stretto: it asks the model once, and writes the reply into a file."""

import asyncio
import base64
import json
import urllib.request
from typing import Any

from harbor.agents.base import BaseAgent


class OneReply(BaseAgent):
    @staticmethod
    def name() -> str:
        return "one-reply"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        reply = await asyncio.to_thread(self.ask, instruction)
        text = base64.b64encode(reply.encode()).decode()
        await environment.exec(f"echo {text} | base64 -d > answer")

    def ask(self, instruction: str) -> str:
        body = {"model": self.model_name, "messages": [{"role": "user", "content": instruction}]}
        headers = {"Authorization": f"Bearer {self._extra_env['OPENAI_API_KEY']}"}
        url = f"{self._extra_env['OPENAI_BASE_URL']}/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as http:
            return json.load(http)["choices"][0]["message"]["content"] or ""
