"""What API processes keep together, with the pipe between them played by pickled messages in one loop."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from pagoda.hal.errors import NotFoundError, RequestError
from pagoda.serving.api.config import ServerConfig
from pagoda.serving.api.desk import LocalDesk, SharedDesk
from pagoda.serving.api.desk_remote import Abort, Cancel, RemoteDesk, answer
from pagoda.serving.api.errors import OverloadedError, RateLimitedError
from pagoda.serving.api.openai.responses_protocol import ResponseRequest
from pagoda.serving.api.openai.responses_replies import new_record
from pagoda.serving.api.openai.responses_store import Stored
from pagoda.serving.engine.params import SamplingParams


class Server:
    """The desk of the first process (row 0), and those of further ones."""

    def __init__(self, rows: int = 3, **flags: Any) -> None:
        self.shared = SharedDesk(ServerConfig(**flags))
        self.first = self.shared.at(0)
        self.remote = [self._remote(row) for row in range(1, rows)]
        self._answers: set[asyncio.Future[None]] = set()

    @property
    def all(self) -> list[LocalDesk | RemoteDesk]:
        return [self.first, *self.remote]

    def _remote(self, row: int) -> RemoteDesk:
        loop = asyncio.get_running_loop()

        def send(asked: Any) -> None:
            told = lambda message: loop.call_soon(desk.told, pickle.loads(pickle.dumps(message)))  # noqa: E731
            self._answers.add(task := asyncio.ensure_future(answer(self.shared.at(row), pickle.loads(pickle.dumps(asked)), told)))
            task.add_done_callback(self._answers.discard)

        desk = RemoteDesk(send)
        self.shared.tell_cancel[row] = lambda response_id: desk.told(Cancel(response_id))
        self.shared.ask_abort[row] = lambda names, client: self.shared.abort_at(row, lambda n: desk.told(Abort(n, names, client)))
        return desk


def stored(name: str, **fields: Any) -> Stored:
    return Stored("key", new_record(ResponseRequest(input="x"), name, "toy", SamplingParams(max_tokens=1), True), (), **fields)


async def test_a_clients_requests_are_counted_over_all_processes() -> None:
    server = Server(key_max_requests=3)
    for desk in server.all:
        await desk.enter("a")
    for desk in server.all:
        with pytest.raises(RateLimitedError, match="3 requests of this key are under way"):
            await desk.enter("a")
        await desk.enter("b")
    server.remote[1].leave("a")
    await asyncio.sleep(0)
    await server.first.enter("a")
    with pytest.raises(RateLimitedError):
        await server.remote[0].enter("a")


async def test_requests_a_minute_are_counted_over_all_processes() -> None:
    server = Server(key_requests_per_minute=4)
    for desk in (*server.all, server.first):
        await desk.enter("a")
        desk.leave("a")
    for desk in server.all:
        with pytest.raises(RateLimitedError, match="4 requests a minute") as refused:
            await desk.enter("a")
        assert refused.value.retry_after == 15


async def test_what_a_dead_process_counted_is_given_back() -> None:
    server = Server(key_max_requests=2)
    for _ in range(2):
        await server.remote[0].enter("a")
    server.shared.gone(1)
    for _ in range(2):
        await server.remote[1].enter("a")
    with pytest.raises(RateLimitedError):
        await server.first.enter("a")


async def test_a_request_cancelled_while_it_enters_is_not_counted() -> None:
    server = Server(key_max_requests=1)
    entering = asyncio.ensure_future(server.remote[0].enter("a"))
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)
    await server.first.enter("a")


async def test_a_response_is_found_through_any_process_by_its_key_alone() -> None:
    server = Server()
    await server.remote[0].keep(stored("resp_1"))
    for desk in server.all:
        assert (await desk.find("key", "resp_1")).record.id == "resp_1"
        with pytest.raises(NotFoundError):
            await desk.find("stranger", "resp_1")
        with pytest.raises(RequestError, match="background=true can be cancelled"):
            await desk.cancel("key", "resp_1")
    await server.remote[1].forget("key", "resp_1")
    for desk in server.all:
        with pytest.raises(NotFoundError) as gone:
            await desk.find("key", "resp_1")
        assert gone.value.param == "response_id"


@pytest.mark.parametrize("maker", [0, 1, 2])
async def test_any_process_cancels_what_another_makes(maker: int) -> None:
    server = Server(max_stored_responses=1)
    making, made = server.all[maker], stored("resp_1", background=True, running=True)
    told: list[str] = []

    def end(response_id: str) -> None:
        told.append(response_id)
        made.running, made.record.status = False, "cancelled"
        ending.append(asyncio.ensure_future(making.renew(made)))

    ending: list[asyncio.Future[None]] = []
    for desk in server.remote:
        desk.on_cancel = end
    server.first.on_cancel = end
    await making.keep(made)
    with pytest.raises(OverloadedError, match="run in the background"):
        await server.all[maker - 1].keep(stored("resp_2", background=True, running=True))
    ended = await server.all[maker - 1].cancel("key", "resp_1")
    assert (ended.status, told) == ("cancelled", ["resp_1"])
    assert (await server.all[maker - 2].cancel("key", "resp_1")).status == "cancelled"
    assert told == ["resp_1"]
    await asyncio.gather(*ending)


async def test_what_a_dead_process_was_making_has_failed() -> None:
    server = Server()
    await server.remote[0].keep(stored("resp_1", background=True, running=True))
    waiting = asyncio.ensure_future(server.first.cancel("key", "resp_1"))
    await asyncio.sleep(0)
    server.shared.gone(1)
    record = await waiting
    assert record.status == "failed"
    assert record.error is not None and record.error.code == "server_error"


@pytest.mark.parametrize("asker", [0, 1, 2])
async def test_any_process_ends_requests_of_all(asker: int) -> None:
    server = Server()
    for row, desk in enumerate(server.all):
        desk.on_abort = lambda names, client, row=row: [*({f"{client}{row}", "shared"} & set(names or ()))]
    names = ["k0", "k2", "other", "shared"]
    assert sorted(await server.all[asker].abort(names, "k")) == ["k0", "k2", "shared"]
    server.shared.gone(2)
    assert sorted(await server.all[asker and 1].abort(names, "k")) == ["k0", "shared"]


async def test_a_process_that_dies_while_it_is_asked_has_ended_none() -> None:
    server = Server()
    for desk in server.all:
        desk.on_abort = lambda names, client: ["a"]
    server.shared.ask_abort[1] = lambda names, client: server.shared.abort_at(1, lambda number: None)
    asking = asyncio.ensure_future(server.first.abort(["a"], ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    server.shared.gone(1)
    assert await asking == ["a"]
