"""`flowfabric submit` and `result`: from a shell to a worker and back."""

from __future__ import annotations

import json

import pytest

from flowfabric.core.ids import ExecutionId
from flowfabric.sdk.client import Client
from tests.support.command import Cli, Done
from tests.support.engine import Engine

APP = """
import flowfabric as ff

app = ff.Fabric()


@app.task(lane="images", retry=3)
async def resize(path: str, width: int = 80, *, keep: bool = False) -> dict[str, object]:
    return {"path": path, "width": width, "keep": keep}


@app.task
async def fail() -> None:
    raise ValueError("no")
"""


@pytest.fixture
def shop(cli: Cli) -> Cli:
    (cli.folder / "shop.py").write_text(APP)
    return cli


async def stored(engine: Engine, done: Done) -> tuple[str, str, object]:
    """Task, lane and arguments of what a command submitted."""
    assert (done.code, done.err) == (0, "")
    execution_id = ExecutionId.parse(done.out.strip())
    assert done.out == f"{execution_id.compact}\n"
    info = await engine.backend.reads.read_execution_info(execution_id)
    context = await engine.backend.reads.read_execution_context(execution_id)
    payload = json.loads(context.input_payload) if context.input_payload else None
    return info.execution_kind, info.lane_id, payload


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ((), None),
        (("cat.png", "300"), ["cat.png", 300]),
        (
            ("path=cat.png", "width=300", "keep=true"),
            {"path": "cat.png", "width": 300, "keep": True},
        ),
        (('"300"', "null", '{"a": [1]}'), ["300", None, {"a": [1]}]),
        (("https://x.org/?a=1", "--", "-1"), ["https://x.org/?a=1", -1]),
        (("--payload", '{"path": "cat.png"}'), {"path": "cat.png"}),
        (("--payload", "[1, 2]"), [1, 2]),
        (("--payload", "@call.json"), [3]),
    ],
)
async def test_arguments(
    cli: Cli, engine: Engine, words: tuple[str, ...], arguments: object
) -> None:
    (cli.folder / "call.json").write_text("[3]")
    assert await stored(engine, await cli("submit", "resize", *words)) == (
        "resize",
        "default",
        arguments,
    )


async def test_options(cli: Cli, engine: Engine) -> None:
    options = ("--lane", "mails", "--priority", "5", "--delay", "1h", "--tag", "app.team=x")
    key = ("--idempotency-key", "once", "--namespace", "shop")
    (said,) = (await cli("submit", "send", "to=ada", *options, *key, "--json")).objects
    execution_id = ExecutionId.parse(said.pop("execution_id"))
    told = {"task": "send", "lane": "mails", "namespace": "shop", "duplicate": False}
    assert said == told
    info = await engine.backend.reads.read_execution_info(execution_id)
    assert (info.lane_id, info.priority, info.namespace) == ("mails", 5, "shop")
    assert info.public_state == "delayed"
    assert await engine.backend.reads.get_execution_tags(execution_id) == {"app.team": "x"}
    (again,) = (await cli("submit", "send", "to=ada", *options, *key, "--json")).objects
    assert (ExecutionId.parse(again["execution_id"]), again["duplicate"]) == (execution_id, True)


async def test_an_application_checks_the_call_and_sets_the_options(
    shop: Cli, engine: Engine
) -> None:
    done = await shop("submit", "shop:app", "resize", "cat.png", "width=300")
    assert await stored(engine, done) == ("resize", "images", {"path": "cat.png", "width": 300})
    policy = await engine.backend.reads.read_execution_policy(ExecutionId.parse(done.out.strip()))
    assert policy.retry_policy is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("shop:app",), "usage: name a task of shop:app\nhint: its tasks: fail, resize"),
        (("shop:app", "risize"), "unknown_task: shop:app has no task 'risize'\nhint: did you mean"),
        (("shop:app", "resize"), "invalid_input: arguments: resize() is missing the argument"),
        (("shop:app", "resize", "a", "size=1"), "resize() has no parameter 'size'"),
        (("shop:app", "resize", "a", "width=wide"), "invalid_input: "),
        (("shop:app", "resize", "300"), "hint: a value is JSON if it can be"),
        (("resize", "a", "--payload", "[1]"), "pass either arguments or --payload, not both"),
        (("resize", "--payload", "a b"), "invalid_input: --payload: not JSON"),
        (("nope:app", "x"), "import: no module named 'nope'"),
        (
            ("shop:app:resize", "a"),
            "hint: put a space between them: flowfabric submit shop:app resize",
        ),
    ],
)
async def test_mistakes_store_nothing(
    shop: Cli, engine: Engine, words: tuple[str, ...], said: str
) -> None:
    done = await shop("submit", *words)
    assert done.code in (1, 2)
    assert said in done.err
    assert "Traceback" not in done.err
    assert (await engine.backend.listings.list_executions()).executions == ()


async def test_from_the_shell_to_a_worker_and_back(shop: Cli) -> None:
    good = (await shop("submit", "shop:app", "resize", "cat.png", "keep=true")).out.strip()
    bad = (await shop("submit", "shop:app", "fail")).out.strip()
    async with shop.start("worker", "shop:app") as worker:
        await worker.line("Ready.")
        done = await shop("result", good, "--timeout", "30s")
        assert (done.code, done.err) == (0, "")
        expected = {"path": "cat.png", "width": 80, "keep": True}
        assert json.loads(done.out) == expected
        (said,) = (await shop("result", good, "--json")).objects
        assert (said["state"], said["attempts"], said["result"]) == ("completed", 1, expected)
        failed = await shop("result", bad, "--timeout", "30s", "--json")
    assert (failed.code, failed.out) == (1, "")
    assert failed.error["code"] == "execution_failed"
    assert "ValueError: no" in failed.error["message"]


@pytest.mark.parametrize(
    ("stored", "encoding", "printed"),
    [
        (None, "", "null\n"),
        (b'{"a":1.10}', "json", '{"a":1.10}\n'),
        (b"text \x1b", "", '"text \\u001b"\n'),
        (b"\xff\x00", "", '"/wA="\n'),
    ],
)
async def test_every_result_is_one_line_of_json(
    cli: Cli, engine: Engine, stored: bytes | None, encoding: str, printed: str
) -> None:
    handle = await engine.running()
    await engine.backend.executions.complete(handle, stored, encoding)
    done = await cli("result", handle.execution_id)
    assert (done.code, done.out, done.err) == (0, printed, "")


async def test_a_result_that_does_not_come(cli: Cli, client: Client) -> None:
    waiting = (await client.submit("resize")).execution_id
    done = await cli("result", waiting, "--timeout", "1s", "--json")
    assert (done.code, done.out) == (1, "")
    assert done.error["code"] == "timeout"
    assert "did not finish within 1 s" in done.error["message"]
    assert f"`flowfabric show {waiting.compact}`" in done.error["hint"]


async def test_the_first_submission_creates_the_embedded_deployment(cli: Cli) -> None:
    del cli.environment["FF_URL"]
    done = await cli("submit", "resize", "cat.png")
    assert (done.code, done.err) == (0, "")
    (row,) = (await cli("ps", "--json")).objects
    assert (row["task"], row["state"]) == ("resize", "waiting")
