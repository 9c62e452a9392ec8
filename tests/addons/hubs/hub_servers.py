"""Servers that speak as those of OpenEnv and NeMo Gym do, for tests without their packages.

python hub_servers.py openenv-text | openenv-tools | openenv-form | gym-tools | gym-steps PORT
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import WSMsgType, web

SESSIONS = 2  # at the same time


def action_schema(fields: dict, title: str) -> dict:
    return {"title": title, "type": "object", "properties": fields, "required": list(fields)}


SCHEMAS = {
    "openenv-text": action_schema({"word": {"type": "string"}}, "WordAction"),
    "openenv-form": action_schema({"row": {"type": "integer"}, "column": {"type": "integer"}}, "MoveAction"),
    "openenv-tools": action_schema({"type": {"type": "string"}}, "CallToolAction"),
}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}}
TOOLS = [{"name": "guess", "description": "Guess it.", "input_schema": NUMBER}]


class Game:
    """Each session: the secret is the seed; three steps at most."""

    def __init__(self, kind: str) -> None:
        self.kind, self.secret, self.num_steps = kind, 0, 0

    def answer(self, message: dict) -> dict:
        data = message.get("data") or {}
        if message["type"] == "state":
            return {"type": "state", "data": {"step_count": self.num_steps}}
        if message["type"] == "reset":
            self.secret, self.num_steps = data.get("seed", 7), 0
            return self.observation({"prompt": f"seed {self.secret}"}, None)
        if data.get("type") == "list_tools":
            return self.observation({"tools": TOOLS}, None)
        if data.get("crash"):
            return {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}}
        if self.kind == "openenv-tools":
            self.num_steps += 1
            guess = data["arguments"].get("number")
            content = [{"type": "text", "text": "right" if guess == self.secret else "wrong"}]
            return self.observation({"tool_name": "guess", "result": {"content": content}}, guess == self.secret)
        if set(data) - {"metadata"} != set(SCHEMAS[self.kind]["required"]):
            errors = [{"loc": ["row"], "msg": "Field required"}]
            return {"type": "error", "data": {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": errors}}
        self.num_steps += 1
        return self.observation({"seen": data, "steps": self.num_steps}, 0.5)

    def observation(self, observation: dict, reward: float | bool | None) -> dict:
        done = reward is True or self.num_steps >= 3
        reward = None if reward is None else float(reward)
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def openenv(kind: str) -> web.Application:
    app, num_open = web.Application(), 0

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMAS[kind], "observation": {}, "state": {}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        nonlocal num_open
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if num_open >= SESSIONS:
            await socket.send_json({"type": "error", "data": {"message": "full.", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        num_open += 1
        game = Game(kind)
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await asyncio.sleep(0.02)
                    await socket.send_json(game.answer(json.loads(message.data)))
        finally:
            num_open -= 1
        return socket

    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", session)
    return app


def gym(kind: str) -> web.Application:
    app, totals = web.Application(), {}

    async def seed(request: web.Request) -> web.Response:
        row = await request.json()
        answer = web.json_response({"observation": "begin"} if kind == "gym-steps" else {})
        name = str(len(totals))
        totals[name] = row["start"]
        answer.set_cookie("session", name)
        return answer

    async def add(request: web.Request) -> web.Response:
        body = await request.json()
        if "number" not in body:
            return web.json_response({"detail": "number is needed"}, status=422)
        totals[request.cookies["session"]] += body["number"]
        return web.json_response({"total": totals[request.cookies["session"]]})

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        kinds = [item["type"] for item in body["response"]["output"]]
        is_right = totals[request.cookies["session"]] == body["wanted"]
        return web.json_response(body | {"reward": float(is_right), "num_items": len(kinds), "kinds": ",".join(kinds)})

    async def step(request: web.Request) -> web.Response:
        text = (await request.json())["response"]["output"][0]["content"][0]["text"]
        return web.json_response({"observation": f"after {text}", "reward": 0.25, "terminated": text == "end"})

    async def schema(_: web.Request) -> web.Response:
        return web.json_response({"paths": {route.path: {} for route in routes}})

    routes = [web.post("/reset", seed), web.post("/step", step)]
    if kind == "gym-tools":
        routes = [web.post("/seed_session", seed), web.post("/add", add), web.post("/verify", verify)]
    elif kind == "gym-agent":
        routes = [web.post("/run", seed)]
    app.add_routes([*routes, web.get("/openapi.json", schema)])
    return app


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    app = openenv(kind) if kind in SCHEMAS else gym(kind)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)
