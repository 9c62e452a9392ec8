"""Plans of routers, what is known of them before a run starts, and the list that a registrar keeps."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from processes.add_ons import needs

from stretto.base.errors import ConfigError, EngineError
from stretto.base.ports import address_towards
from stretto.check.nodes import check_reachable
from stretto.config.sections.inference import InferenceSection
from stretto.launch.plan import routers
from stretto.launch.plan.engines import EnginesPlan, plan_engines, plan_replicas
from stretto.launch.plan.routers import check_router, with_reachable_host
from stretto_routers import register
from stretto_routers.register import Registrar, RouterList

CHECK = """
import sys
from stretto_routers.router import start_key_check
print(start_key_check("ключ"), flush=True)
sys.stdin.read()
"""
TWO_NODES = {"deployment": {"type": "multi_node", "num_nodes": 2}}


def section(**data) -> InferenceSection:
    return InferenceSection.model_validate({"model": "m", **data})


def planned(hosts: list[str], **data) -> EnginesPlan:
    return plan_engines(section(**data), hosts)


# -- plans --


@needs("vllm")
def test_each_node_enters_its_own_engines_in_a_router_that_runs_elsewhere():
    plan = planned(["a", "b"], router={"address": "http://r:9000"}, **TWO_NODES)
    assert not plan.routers and plan.base_urls == ("http://r:9000",)
    assert [(spec.node, spec.argv[-2:], spec.port) for spec in plan.registrars] == [
        (0, ("http://r:9000", "http://a:8100"), None),
        (1, ("http://r:9000", "http://b:8100"), None),
    ]
    replicas = plan_replicas(section(router={"address": "http://r:9000"}), ["a", "b", "c"], 3)
    assert replicas.base_urls == ("http://r:9000",) and [spec.node for spec in replicas.registrars] == [0, 1, 2]


@pytest.mark.parametrize(
    "data",
    [
        {"router": {"type": "llm-d", "address": "http://r:9000"}},
        pytest.param(
            {"router": {"address": "http://r:9000"}, "deployment": {"type": "disaggregated", "is_local": True}},
            marks=needs("vllm"),
        ),
    ],
)
def test_engines_that_a_router_finds_itself_or_only_at_its_start_do_not_enter_it(data):
    plan = planned(["h"], **data)
    assert not plan.registrars and not plan.routers and plan.base_urls == ("http://r:9000",)


@needs("vllm")
def test_dynamos_frontend_listens_at_loopback_whatever_the_nodes_are_called():
    router = {
        "type": "dynamo",
        "interpreter": "/opt/py",
        "extra": {"migration_limit": 2, "strip_anthropic_preamble": False},
    }
    plan = planned(["a", "b"], router=router, server={"host": "0.0.0.0"}, **TWO_NODES)
    [spec] = plan.routers
    words = " ".join(spec.argv)
    assert spec.argv[0] == "/opt/py" and "--engines http://a:8100 http://b:8100 --" in words
    assert "--http-host 127.0.0.1 --http-port 8000 --router-mode kv --no-router-kv-events" in words
    assert words.endswith("--migration-limit 2 --no-strip-anthropic-preamble")
    assert plan.base_urls == ("http://127.0.0.1:8000",) and len(plan.admin_urls) == 2
    replicas = plan_replicas(section(router={"type": "dynamo"}, **TWO_NODES), ["a", "b", "c", "d"], 2)
    assert replicas.base_urls == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("session_affinity", "--router-mode round-robin --router-session-affinity-ttl-secs 86400"),
        ("round_robin", "--router-mode round-robin"),
        ("power_of_two", "--router-mode power-of-two"),
        ("least_loaded", "--router-mode least-loaded"),
    ],
)
def test_policies_of_dynamo(policy, flags):
    [spec] = planned(["h"], router={"type": "dynamo", "policy": policy}).routers
    assert " ".join(spec.argv).endswith(flags)


def test_engines_listen_where_a_router_on_another_machine_reaches_them(monkeypatch):
    monkeypatch.setattr(
        routers, "address_towards", lambda host, port: {"r": "10.0.0.7", "127.0.0.1": "127.0.0.1"}.get(host)
    )
    reached = with_reachable_host(section(router={"address": "http://r:9000"}))
    assert reached.server.host == "10.0.0.7"
    for data in (
        {},
        {"router": None},
        {"router": {"address": "http://127.0.0.1:9000"}},
        {"router": {"address": "http://unknown:9000"}},
        {"router": {"address": "http://r:9000"}, "server": {"host": "10.9.9.9"}},
    ):
        given = section(**data)
        assert with_reachable_host(given) is given
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("no.such.name.invalid", 9) is None


@needs("vllm")
def test_hosts_of_ipv6_stand_in_brackets():
    plan = planned(["fd00::1", "fd00::2"], **TWO_NODES)
    assert plan.admin_urls == ("http://[fd00::1]:8100", "http://[fd00::2]:8100")
    assert plan.engines[1].section.server.host == "fd00::2"


@needs("vllm")
def test_an_engine_that_is_alone_with_an_offload_may_choose_its_address():
    """inference/server.py lets an engine with a key and without `host` listen at all addresses."""
    offload = {"type": "native", "cpu": {"num_bytes": 1 << 20}}
    [engine] = planned(["127.0.0.1"], kv_cache_offload=offload).engines
    assert "host" not in engine.section.server.model_fields_set
    assert engine.section.vllm_extra["kv_transfer_config"]["kv_connector"] == "OffloadingConnector"


@pytest.mark.parametrize(
    ("addresses", "is_refused"),
    [
        (["::1"], True),
        (["fd00::1"], False),
        (["127.0.1.1", "fd00::1"], True),
        (["10.0.0.1", "::1"], False),
        (["127.0.1.1"], True),
    ],
)
def test_a_name_that_leads_to_this_machine_alone_is_refused(monkeypatch, addresses, is_refused):
    def resolve(*_, **__):
        family = lambda address: socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family(each), socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    if not is_refused:
        return check_reachable(["first", "second"], 1)
    with pytest.raises(ConfigError, match=r"node 1, second: .*cannot reach"):
        check_reachable(["first", "second"], 1)


# -- servers --


class Router:
    """The routes of vllm-router that a registrar uses, with its list in a set; `key`: required."""

    def __init__(self, key: str | None = None, *, has_list: bool = True) -> None:
        self.workers: set[str] = set()
        self.calls: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_list = self.path == "/list_workers" and has_list
                self.answer(200 if is_list else 404, json.dumps({"urls": sorted(outer.workers)}))

            def do_POST(self) -> None:
                parts = urlsplit(self.path)
                [url] = parse_qs(parts.query)["url"]
                change = outer.workers.add if parts.path == "/add_worker" else outer.workers.discard
                if self.answer(200, "done"):
                    outer.calls.append(parts.path)
                    change(url)

            def answer(self, status: int, text: str) -> bool:
                is_let_in = key is None or self.headers.get("Authorization") == f"Bearer {key}"
                self.send_response(status if is_let_in else 401)
                self.end_headers()
                self.wfile.write(text.encode())
                return is_let_in

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def running(router: Router) -> Iterator[Router]:
    thread = threading.Thread(target=router.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield router
    finally:
        router.server.shutdown()
        router.server.server_close()
        thread.join()


def test_the_list_is_corrected_where_it_differs_and_nowhere_else(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    one, two = "http://a:1", "http://b:2"
    with running(Router("k")) as router:
        registrar = Registrar(router.url + "/", [one, two])
        router.workers.add("http://stranger:3")
        registrar.correct({one: True, two: False})
        registrar.correct({one: True, two: False})
        assert router.workers == {one, "http://stranger:3"} and router.calls == ["/add_worker"]
        registrar.correct({one: False, two: True})
        assert router.workers == {two, "http://stranger:3"}
        router.workers.clear()  # it was started anew
        registrar.correct({one: False, two: True})
        assert router.workers == {two}
        monkeypatch.setenv("VLLM_API_KEY", "wrong")
        registrar = Registrar(router.url, [one, two])
        registrar.correct({one: True, two: True})
        registrar.correct({one: True, two: True})
    assert router.workers == {two}
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "HTTP 401" in warnings[0]
    registrar.correct({one: True, two: True})  # nobody answers: no error


def test_a_router_without_a_list_is_one_message_and_the_key_is_its_own():
    with running(Router(has_list=False)) as router, pytest.raises(EngineError, match=r"/list_workers: HTTP 404"):
        RouterList(router.url, None).engines()
    with running(Router("k")) as router, pytest.raises(OSError, match="401"):
        RouterList(router.url, "wrong").engines()


def test_one_engine_by_two_names_is_entered_once_and_taken_out_by_the_name_on_the_list():
    with running(Router()) as router:
        router.workers.add("http://localhost:1")
        entries = RouterList(router.url, None)
        entries.correct({"http://127.0.0.1:1": True})
        assert router.workers == {"http://localhost:1"} and router.calls == []
        entries.correct({"http://127.0.0.1:1": False})
    assert router.workers == set()


def test_engines_leave_the_list_at_the_end(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(register, "POLL_S", 0.01)
    monkeypatch.setattr(register, "is_admitted", lambda engine: True)
    stop = threading.Event()
    with running(Router()) as router:
        entered = threading.Thread(target=Registrar(router.url, ["http://a:1"]).run, args=(stop,))
        entered.start()
        for _ in range(6000):
            if router.workers or stop.wait(0.01):
                break
        assert router.workers == {"http://a:1"}
        stop.set()
        entered.join(60)
    assert router.workers == set() and router.calls == ["/add_worker", "/remove_worker"]


# -- before the start --


@pytest.mark.parametrize(
    ("kind", "way"),
    [("vllm", "start the router first"), ("llm-d", "start llm-d's gateway, which must see these engines")],
)
def test_a_router_is_looked_at_before_anything_is_started(monkeypatch, kind, way):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert check_router(None) is None and check_router(section()) is None
    with running(Router()) as router:
        there = section(router={"address": router.url, "type": kind})
        assert check_router(there) is None
    with pytest.raises(
        ConfigError, match=rf"router.address = {router.url}: nothing answers there .*{way}.*vllm-router is started"
    ):
        check_router(there)
    assert "nothing answers there" in (check_router(there, is_dry_run=True) or "")


@pytest.mark.parametrize(
    ("router", "why"), [({"has_list": False}, "HTTP 404"), ({"key": "k"}, "HTTP 401")], ids=["other", "key"]
)
def test_what_takes_no_engines_is_refused_in_a_dry_run_too(monkeypatch, router, why):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    message = f"/list_workers: {why}.*give the address of one"
    with running(Router(**router)) as there, pytest.raises(ConfigError, match=message):
        check_router(section(router={"address": there.url}), is_dry_run=True)


def test_dynamo_that_is_not_installed_is_one_message(tmp_path):
    missing = section(router={"type": "dynamo", "interpreter": str(tmp_path / "python")})
    with pytest.raises(ConfigError, match=r"no .*/python.*`make dynamo`"):
        check_router(missing)
    assert "make dynamo" in (check_router(missing, is_dry_run=True) or "")


# -- the router's key --


@pytest.mark.heavy
def test_a_key_of_any_letters_is_itself_alone():
    """And the process that knows it ends with the router."""
    router = subprocess.Popen([sys.executable, "-c", CHECK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert router.stdin is not None and router.stdout is not None
    try:
        port = urlsplit(router.stdout.readline().decode().strip()).port

        def answer(key: bytes) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/", headers={"Authorization": b"Bearer " + key} if key else {})
            try:
                return connection.getresponse().status
            finally:
                connection.close()

        assert answer("ключ".encode()) == 200
        assert [answer(key) for key in (b"????", b"", "ключи".encode(), b"\xff\xfe")] == [401] * 4
    finally:
        router.stdin.close()
        router.wait(60)
    with router.stdout:
        assert router.stdout.read() == b"", "nobody holds the other end any more"
