"""A resources server of NeMo Gym on its own, without Gym's head server, agent and model. It runs in Gym's Python.

    python serve_resources.py NAME JSON PORT

NAME is a directory below `resources_servers` of the package, JSON has settings of the server.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import uvicorn
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

HOST = "127.0.0.1"
_HEAD_PORT = 11000  # nothing listens there: a resources server asks the head server for other servers only


def main(name: str, settings: dict[str, Any], port: int) -> None:
    module = import_module(f"resources_servers.{name}.app")
    classes: list[Any] = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, SimpleResourcesServer) and each.__module__ == module.__name__
    ]
    if not classes:
        sys.exit(f"resources_servers.{name}.app has no resources server")
    kind = classes[-1]
    config = kind.model_fields["config"].annotation(name=name, host=HOST, port=port, entrypoint="app.py", **settings)
    head = BaseServerConfig(host=HOST, port=_HEAD_PORT)
    server = kind(
        config=config, server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(app, host=HOST, port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
