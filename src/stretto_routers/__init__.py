"""Routers in front of engines: vllm-router with the engines' key, its registrar, and Dynamo's frontend."""
