"""Posts over kept connections: they give what aiohttp gives, and a cancelled or broken one is not used again."""

import asyncio
import contextlib
import gzip
import threading
import zlib

import pytest

from stretto.base.errors import EngineError
from stretto.transports.engine import connection, http
from stretto.transports.engine.connection import Pool, target_of
from stretto.transports.engine.http import Connections

BODY = b'{"choices": [%s]}' % (b"1, " * 40)


class RawServer:
    """Answers every request with the next of the given bytes; None closes the connection without an answer."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = self.num_closed = 0
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> "RawServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/generate"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._serving.values():
            writer.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._serving[asyncio.current_task()] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                self.requests.append(head + await reader.readexactly(int(lengths[0].split()[1]) if lengths else 0))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer == b"wait":
                    await reader.read()
                    break
                writer.write(answer or b"")
                await writer.drain()
                if answer is None or b"connection: close" in answer.lower() or b"ength" not in answer:
                    break
        self.num_closed += 1
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def answer(body: bytes, status: str = "200 OK", *lines: bytes) -> bytes:
    head = (f"HTTP/1.1 {status}".encode(), *lines, b"Content-Length: %d" % len(body))
    return b"\r\n".join((*head, b"", body))


def chunked(body: bytes) -> bytes:
    pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
    data = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (*pieces, b""))
    return b"HTTP/1.1 200 OK\r\nX-Length: chunks\r\nTransfer-Encoding: chunked\r\n\r\n" + data


ANSWERS = {
    "whole": answer(BODY),
    "empty": answer(b""),
    "in chunks": chunked(BODY),
    "packed": answer(gzip.compress(BODY), "200 OK", b"Content-Encoding: gzip"),
    "packed, another spelling": answer(gzip.compress(BODY), "200 OK", b"Content-Encoding: GZip "),
    "packed in two pieces": answer(gzip.compress(BODY) + gzip.compress(BODY), "200 OK", b"Content-Encoding: gzip"),
    "packed, but empty": answer(b"", "503 Unavailable", b"Content-Encoding: gzip", b"Retry-After: 2"),
    "packed until the end": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(BODY),
    "with a trailer": chunked(BODY)[:-2] + b"Content-Encoding: gzip\r\n\r\n",
    "another protocol offered": answer(BODY, "200 OK", b"Connection: Upgrade, Keep-Alive", b"Upgrade: h2,h2c"),
    "until the end": b"HTTP/1.1 200 OK\r\nServer: old\r\n\r\n" + BODY,
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(BODY),
    "last of it": answer(BODY, "200 OK", b"Connection: close"),
    "full": answer(b'{"error": {"message": "too many"}}', "429 Too Many", b"Retry-After: 2.5"),
    "unavailable": answer(b"", "503 Unavailable"),
    "refused": answer(b'{"error": {"message": "no"}}', "400 Bad Request"),
    "forbidden": answer(b"who are you", "401 Unauthorized"),
    "broken": answer(b"", "500 Internal"),
    "too late": answer(b"", "408 Timeout"),
    "no answer": None,
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "half a body": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\nabc",
    "half a chunk": b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nabc",
}


async def outcome(connections: Connections, url: str, headers: dict[str, str] | None = None) -> object:
    """The body, or what the failure is; texts of broken connections are each client's own."""
    try:
        return await connections.request("POST", url, b"x" * 10, headers)
    except http.Lost as error:
        assert str(error).startswith(url)
        return http.Lost
    except (http.Transient, EngineError) as error:
        return type(error), str(error), getattr(error, "wait_s", None)


@pytest.fixture
def without_aiohttp(monkeypatch):
    async def forbidden(*_: object) -> None:
        raise AssertionError("aiohttp was asked")

    return lambda: monkeypatch.setattr(Connections, "_ask_session", forbidden)


@pytest.mark.parametrize("name", ANSWERS)
async def test_every_answer_means_what_it_means_to_aiohttp(name, monkeypatch, without_aiohttp):
    async with RawServer(ANSWERS[name]) as server, asyncio.timeout(20):
        with monkeypatch.context() as patch:
            patch.setattr(http, "target_of", lambda url, headers: None)
            slow = Connections({}, has_router=True)
            expected = await outcome(slow, server.url)
            await slow.close()
        without_aiohttp()
        fast = Connections({}, has_router=True)
        assert [await outcome(fast, server.url) for _ in range(2)] == [expected] * 2
        await fast.close()


NOT_READ = {
    "deflate": answer(zlib.compress(BODY), "200 OK", b"Content-Encoding: deflate"),
    "spaces after a size": chunked(BODY).replace(b"\r\n7\r\n", b"\r\n7  \r\n"),
    "lines that end otherwise": b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
    "a folded line": answer(BODY, "200 OK", b"X-Name: a\r\n b"),
    "no http at all": b"SSH-2.0-OpenSSH Content-Length\r\n",
    "another protocol": b"HTTP/1.1 101 Switching\r\nX-Length: 0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("name", NOT_READ)
async def test_after_an_answer_that_cannot_be_read_aiohttp_is_asked(name, monkeypatch):
    async with RawServer(NOT_READ[name]) as server, asyncio.timeout(20):
        with monkeypatch.context() as patch:
            patch.setattr(http, "target_of", lambda url, headers: None)
            slow = Connections({}, has_router=True)
            expected = await outcome(slow, server.url)
            await slow.close()
        connections = Connections({}, has_router=True)
        assert [await outcome(connections, server.url) for _ in range(3)] == [http.Lost, expected, expected]
        await connections.close()


async def test_a_packed_answer_that_is_cut_is_lost(caplog):
    cut = gzip.compress(BODY)[:-9]
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    for data in (answer(cut, "200 OK", b"Content-Encoding: gzip"), head + cut):
        async with RawServer(data) as server:
            connections = Connections({}, has_router=False)
            with pytest.raises(http.Lost, match="cannot be unpacked"):
                await connections.request("POST", server.url, b"a")
            await connections.close()
    assert not caplog.records  # of asyncio, which calls the protocol


async def test_an_address_in_numbers_needs_no_thread_which_a_users_code_may_occupy():
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    jobs = [loop.run_in_executor(None, go_on.wait) for _ in range(40)]  # Python's default is at most 32 threads
    try:
        async with RawServer(answer(BODY)) as server, asyncio.timeout(10):
            connections = Connections({}, has_router=False)
            assert await connections.request("POST", server.url, b"a") == BODY
            await connections.close()
    finally:
        go_on.set()
        await asyncio.gather(*jobs)


@pytest.mark.parametrize("length", [1, 15, 40])
async def test_the_beginning_of_an_answer_that_nobody_asked_for_is_not_the_next_one(length):
    async with RawServer(answer(BODY) + answer(b"of nobody")[:length], answer(b"next")) as server, asyncio.timeout(10):
        connections = Connections({}, has_router=False)
        assert await connections.request("POST", server.url, b"a") == BODY
        assert await connections.request("POST", server.url, b"a") == b"next"
        assert server.num_connections == 2
        await connections.close()


async def test_a_connection_whose_server_has_not_read_the_whole_request_is_not_used_again():
    writers, is_over = [], asyncio.Event()

    async def refuse(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"", "429 Too Many"))
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    connections = Connections({}, has_router=False)
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(http.Full):
                await connections.request("POST", url, b"a" * (10 << 20))
    assert len(writers) == 2
    is_over.set()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
    await connections.close()
    server.close()


async def test_a_connection_is_used_again_until_it_was_idle_for_too_long(monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.2)
    async with RawServer(answer(BODY)) as server:
        connections = Connections({}, has_router=False)
        for _ in range(5):
            assert await connections.request("POST", server.url, b"a") == BODY
        assert server.num_connections == 1
        await asyncio.gather(*(connections.request("POST", server.url, b"a") for _ in range(3)))
        assert server.num_connections == 3
        async with asyncio.timeout(10):
            while server.num_closed < 3:
                await asyncio.sleep(0.01)
        assert await connections.request("POST", server.url, b"a") == BODY and server.num_connections == 4
        await connections.close()


async def test_a_connection_that_the_server_closed_meanwhile_is_not_used():
    async with RawServer(answer(BODY, "200 OK", b"Connection: close")) as server:
        connections = Connections({}, has_router=False)
        for _ in range(3):
            assert await connections.request("POST", server.url, b"a") == BODY
        assert server.num_connections == 3
        await connections.close()


async def test_a_cancelled_request_ends_its_connection_and_nobody_gets_its_answer():
    async with RawServer(answer(BODY), b"wait", answer(b"next")) as server:
        connections = Connections({}, has_router=False)
        await connections.request("POST", server.url, b"a")
        running = asyncio.create_task(connections.request("POST", server.url, b"b" * (1 << 20)))
        async with asyncio.timeout(10):
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            while not server.num_closed:
                await asyncio.sleep(0.01)
        assert await connections.request("POST", server.url, b"c") == b"next"
        assert server.num_connections == 2 and server.requests[1].endswith(b"\r\n\r\n" + b"b" * (1 << 20))
        await connections.close()


async def test_an_answer_that_nobody_asked_for_ends_the_connection():
    async with RawServer(answer(BODY) + answer(b"more")) as server:
        connections = Connections({}, has_router=False)
        for _ in range(2):
            assert await connections.request("POST", server.url, b"a") == BODY
            await asyncio.sleep(0.05)
        assert server.num_connections == 2
        await connections.close()


async def test_headers_are_sent_once_and_those_of_a_request_win():
    async with RawServer(answer(BODY)) as server:
        connections = Connections({"Authorization": "Bearer \u00e9", "X-Session-ID": "run"}, has_router=False)
        await connections.request("POST", server.url + "?a=b", b"abc", {"Content-Type": "application/json"})
        await connections.request("POST", server.url, b"abc", {"x-session-id": "of this request"})
        for value in ("a\r\nX-Other: b", "a\nX-Other: b", "a\0", "a\x0b", "a\x7f"):
            with pytest.raises(ValueError, match="header"):
                await connections.request("POST", server.url, b"abc", {"X-Name": value})
        await connections.close()
    lines = server.requests[0].decode().split("\r\n")
    assert lines[0] == "POST /generate?a=b HTTP/1.1" and lines[-1] == "abc"
    assert {"Authorization: Bearer \u00e9", "Content-Type: application/json", "Content-Length: 3"} <= {*lines}
    assert len({line.split(":")[0].lower() for line in lines[1:-2]}) == len(lines[1:-2])
    sessions = [x for x in server.requests[1].decode().lower().split("\r\n") if x.startswith("x-session-id")]
    assert sessions == ["x-session-id: of this request"] and len(server.requests) == 2


async def test_a_server_that_moved_or_sets_cookies_gets_what_aiohttp_sends():
    cookie = answer(BODY, "200 OK", b"Set-Cookie: place=3; Path=/")
    async with RawServer(answer(b"moved here")) as new, RawServer(cookie) as sticky:
        moved = answer(b"", "307 Temporary Redirect", f"Location: {new.url}".encode())
        async with RawServer(moved) as old:
            connections = Connections({}, has_router=True)
            for _ in range(2):
                assert await connections.request("POST", old.url, b"abc") == b"moved here"
            assert [each[-3:] for each in new.requests] == [b"abc", b"abc"]
            name = sticky.url.replace("127.0.0.1", "localhost")  # aiohttp keeps no cookies of bare addresses
            for _ in range(3):
                assert await connections.request("POST", name, b"abc") == BODY
            assert b"place=3" not in sticky.requests[1] and b"place=3" in sticky.requests[2]
            await connections.close()


@pytest.mark.parametrize(
    "url",
    ["https://host/generate", "http://user:secret@host/", "http:///generate", "http://host:port/", "http://h\u00e4user/",
     "http://host/a b", "unix://socket"],
)  # fmt: skip
def test_other_addresses_are_left_to_aiohttp(url):
    assert target_of(url, {}) is None


async def test_an_idle_connection_holds_no_answer():
    async with RawServer(answer(BODY)) as server:
        pool, target = Pool(), target_of(server.url, {})
        assert target is not None
        for _ in range(2):
            assert (await pool.post(target, {}, b"abc")).body == BODY
            [idle] = pool._open
            assert idle.is_reusable and idle._answer is None
        pool.close()
    assert server.num_connections == 1


async def test_all_addresses_of_a_name_get_connections(monkeypatch):
    asked = []

    async def addresses(host, port, **_):
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port)), (2, 1, 6, "", ("127.0.0.2", port))]

    hosts = []

    async def serve(reader, writer):
        hosts.append(writer.get_extra_info("sockname")[0])
        await reader.readuntil(b"abc")
        writer.write(answer(b"", "200 OK", b"Connection: close"))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "0.0.0.0", 0)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    monkeypatch.setattr(connection, "_RACE_S", 60.0)  # else a slow machine asks the second address, too
    pool = Pool()
    target = target_of(f"http://engines:{server.sockets[0].getsockname()[1]}/", {})
    assert target is not None
    await asyncio.gather(*(pool.post(target, {}, b"abc") for _ in range(6)))
    assert sorted(hosts) == ["127.0.0.1"] * 3 + ["127.0.0.2"] * 3 and asked == ["engines"]
    pool.close()
    server.close()
