"""The compatibility table of docs/tinker.md: every public method of the installed client, called on a live service."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from services import Service, sentence

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class Calls:
    """How each method is called; methods ending in _async are called like those without."""

    def __init__(self, service: Service) -> None:
        import tinker
        from tinker import types

        self.types, self.service = types, service
        self.client = service.client("alice")
        self.rest = service.rest("alice")
        self.admin = tinker.AdminClient(base_url=service.url, api_key=service.token("admin"))
        self.training = self.client.create_lora_training_client(service.model, rank=4).result()
        self.data = [sentence(0)]
        self.training.forward_backward(self.data, "cross_entropy")
        self.training.optim_step(types.AdamParams()).result()
        self.state = self.training.save_state("table").result().path
        self.sampler_path = self.training.save_weights_for_sampler("table").result().path
        self.external = self.training.save_weights_external("table").result().path
        self.sampler = self.client.create_sampling_client(model_path=self.sampler_path).result()
        self.prompt = types.ModelInput.from_ints([5, 6, 7])
        self.few = types.SamplingParams(max_tokens=2)
        self.numbers = iter(range(10_000))
        self.session = self.training.model_id.partition(":")[0]

    def new_name(self) -> str:
        return f"name-{next(self.numbers)}"

    def doomed(self) -> str:
        return self.training.save_state(self.new_name()).result().path

    def passed(self) -> Any:
        """A gradient to step with."""
        return self.training.forward_backward(self.data, "cross_entropy").result()

    def nll(self, data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {}

    def table(self) -> dict[str, Callable[[Any], Any]]:
        """By class and method: a call, given the method."""
        model, rest_args = self.service.model, (self.training.model_id,)
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        window = (hour - timedelta(hours=2), hour)
        adam = self.types.AdamParams()
        import tinker

        def closing(_: Any) -> Any:
            other = tinker.ServiceClient(base_url=self.service.url, api_key=self.service.token("alice"))
            other.create_sampling_client(base_model=model).result()
            return other.close("success")

        handle = self.sampler.get_sampler_handle
        return {
            "ServiceClient.copy_weights": lambda f: _with_project(lambda: self.rest.copy_weights(self.state, "p")),
            "ServiceClient.create_lora_training_client": lambda f: f(model, rank=4),
            "ServiceClient.create_training_client_from_state": lambda f: f(self.state),
            "ServiceClient.create_training_client_from_state_with_optimizer": lambda f: f(self.state),
            "ServiceClient.create_sampling_client": lambda f: f(model_path=self.sampler_path),
            "ServiceClient.create_custom_loss": lambda f: f(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}),
            "ServiceClient.close": closing,
            "TrainingClient.forward": lambda f: f(self.data, "cross_entropy"),
            "TrainingClient.forward_backward": lambda f: f(self.data, "cross_entropy"),
            "TrainingClient.forward_backward_custom": lambda f: f(self.data, self.nll),
            "TrainingClient.optim_step": lambda f: self.passed() and f(adam),
            "TrainingClient.save_state": lambda f: f(self.new_name()),
            "TrainingClient.load_state": lambda f: f(self.state),
            "TrainingClient.load_state_with_optimizer": lambda f: f(self.state),
            "TrainingClient.save_weights_for_sampler": lambda f: f(self.new_name()),
            "TrainingClient.save_weights_external": lambda f: f(self.new_name()),
            "TrainingClient.create_sampling_client": lambda f: f(self.sampler_path),
            "SamplingClient.create": lambda f: f(self.client.holder, base_model=model),
            "SamplingClient.sample": lambda f: f(
                self.prompt, 1, self.few, include_prompt_logprobs=True, topk_prompt_logprobs=2
            ),
            "SamplingClient.compute_logprobs": lambda f: f(self.prompt),
            "SamplingClient.from_sampler_handle": lambda f: f(handle(), api_key=self.service.token("alice")),
            "SamplingClient.on_queue_state_change": lambda f: f(_queue_state(), None),
            "RestClient.get_training_run": lambda f: f(*rest_args),
            "RestClient.get_training_run_by_tinker_path": lambda f: f(self.state),
            "RestClient.get_weights_info_by_tinker_path": lambda f: f(self.state),
            "RestClient.list_checkpoints": lambda f: f(*rest_args),
            "RestClient.get_external_weights_urls": lambda f: f(self.external),
            "RestClient.delete_checkpoint": lambda f: f(*rest_args, self.doomed().partition(":train:0/")[2]),
            "RestClient.delete_checkpoint_from_tinker_path": lambda f: f(self.doomed()),
            "RestClient.copy_weights": lambda f: f(self.state, "project"),
            "RestClient.publish_checkpoint_from_tinker_path": lambda f: f(self.state),
            "RestClient.unpublish_checkpoint_from_tinker_path": lambda f: f(self.state),
            "RestClient.set_checkpoint_ttl_from_tinker_path": lambda f: f(self.state, 3600),
            "RestClient.get_session": lambda f: f(self.session),
            "RestClient.assign_session_project": lambda f: f(self.session, "project"),
            "RestClient.export_session_trace": lambda f: f(self.session),
            "RestClient.get_sampler": lambda f: f(self.sampler._sampling_session_id),
            "RestClient.search_sessions": lambda f: f(self.types.SessionSearchRequest()),
            "RestClient.get_billing_usage": lambda f: f(*window),
            "AdminClient.get_billing_usage": lambda f: f(*window),
        }

    def rows(self) -> Iterator[tuple[str, str, str | None]]:
        """Class, method and, if it does not work, why."""
        calls = self.table()
        for instance in (self.client, self.training, self.sampler, self.rest, self.admin):
            kind = type(instance).__name__
            for name, _ in inspect.getmembers(type(instance)):
                if name.startswith("_"):
                    continue
                call = calls.get(f"{kind}.{name.removesuffix('_async')}", lambda f: f())
                yield kind, name, self._try(instance, name, call)

    def _try(self, instance: Any, name: str, call: Callable[[Any], Any]) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                method = getattr(instance, name)
                result = call(method) if callable(method) else method
                if inspect.isawaitable(result) and inspect.iscoroutine(result):
                    result = asyncio.run(result)
                for _ in range(2):
                    if hasattr(result, "result") and callable(result.result):
                        result = result.result(timeout=120)
                return None
            except Exception as error:
                return _reason(error)


def _with_project(call: Callable[[], Any]) -> Any:
    return call()


def _queue_state() -> Any:
    from tinker.lib.api_future_impl import QueueState

    return QueueState.ACTIVE


def _reason(error: Exception) -> str:
    body = getattr(error, "body", None)
    detail = body.get("detail") if isinstance(body, dict) else None
    return " ".join(str(detail or error).split())[:160]


def markdown(rows: list[tuple[str, str, str | None]]) -> str:
    """The table, with how many methods work."""
    good = sum(why is None for *_, why in rows)
    lines = [
        BEGIN,
        "",
        f"{good} of {len(rows)} public methods work ({100 * good / len(rows):.0f} %).",
        "",
        "| class | methods that work | refused, and why |",
        "|---|---|---|",
    ]
    for kind in dict.fromkeys(kind for kind, *_ in rows):
        works = ", ".join(f"`{name}`" for k, name, why in rows if k == kind and why is None)
        refused = "; ".join(f"`{name}`: {why}" for k, name, why in rows if k == kind and why is not None)
        lines.append(f"| {kind} | {works} | {refused} |")
    return "\n".join([*lines, "", END])
