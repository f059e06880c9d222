"""`genlm serve` passes its options to the plugin, and names missing ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from genlm import ModelLoadError, UnknownBackendError, get_backend
from genlm.cli import app
from genlm.core.plugins import lookup
from genlm.core.plugins.registry import Registry


class Server:
    """Records the calls of the command."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.at_exit: list[Callable[[], None]] = []
        self.answers = True

    def join(self, address: str | None, *, is_local: bool) -> str:
        self.calls.append(("join", address, is_local))
        return address or "here:1"

    def leaver(self) -> Callable[[], bool]:
        return lambda: self.answers

    def serve(self, *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        self.calls.append(("serve", arguments, options))
        return self.served("auto")[:1]

    def served(self, address: str) -> list[dict[str, Any]]:
        self.calls.append(("served", address))
        drivers = {"a": 3, "b": 4}
        return [
            {"name": name, "replica": 0, "state": "up", "model": "m", "drivers": drivers}
            for name in ("chat", "code")
        ]

    def stop(self, name: str, address: str) -> int:
        self.calls.append(("stop", name, address))
        return 2


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    fake = Server()
    monkeypatch.setattr("genlm.cli.serve.get_backend", {"ray": fake}.__getitem__)
    monkeypatch.setattr("atexit.register", fake.at_exit.append)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def run(*arguments: str, cluster: tuple[str, ...] = ("--local",)) -> Result:
    return CliRunner().invoke(app, ["serve", *cluster, *arguments])


def test_a_model_is_served_with_the_requested_options(server: Server) -> None:
    options = ("--options", '{"dtype": "bf16"}', "--resources", '{"num_gpus": 1}')
    result = run("--name", "chat", "--model", "m", "--replicas", "3", *options, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[0]["name"] == "chat"
    assert server.calls[1] == (
        "serve",
        ("chat", "m", "hf"),
        {
            "replicas": 3,
            "engine_opts": {"dtype": "bf16"},
            "resources": {"num_gpus": 1},
            "address": "here:1",
        },
    )


def test_status_lists_all_models_or_one(server: Server) -> None:
    all_models, one_model = run("--status").output, run("--status", "--name", "code").output
    assert "chat" in all_models
    assert "code" in all_models
    assert "chat" not in one_model
    assert " 7 " in one_model  # what both programs wait for


def test_a_model_is_ended_by_name(server: Server) -> None:
    result = run("--stop", "--name", "chat", cluster=("--address", "x:1"))
    assert "stopped chat (2 replicas)" in result.output
    assert server.calls == [("join", "x:1", False), ("stop", "chat", "x:1")]


@pytest.mark.parametrize("command", [("--status",), ("--stop", "--name", "a"), ("--name", "a")])
def test_no_cluster_is_joined_that_was_not_named(
    server: Server, command: tuple[str, ...]
) -> None:
    result = run(*command, cluster=())
    assert result.exit_code == 2
    assert "--local" in result.output
    assert run(*command, cluster=("--local", "--address", "x:1")).exit_code == 2
    assert server.calls == []


def test_the_command_says_which_cluster_it_joined(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "joined the Ray cluster at here:1" in run("--status").stderr
    monkeypatch.setenv("RAY_ADDRESS", "there:2")
    assert run("--status", cluster=()).exit_code == 0
    joined = [call for call in server.calls if call[0] == "join"]
    assert joined == [("join", None, True), ("join", None, False)]


@pytest.mark.parametrize(("arguments", "status"), [(("--status",), 0), (("--name", "a"), 1)])
def test_the_command_ends_although_the_cluster_does_not_answer(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    status: int,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(server, "serve", refuse)
    run(*arguments)
    [leave] = server.at_exit
    leave()
    assert ended == []
    server.answers = False
    leave()
    assert ended == [status]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--stop",),
        ("--stop", "--status"),
        ("--name", "a", "--options", "[]"),
        ("--name", "a", "--resources", "{"),
    ],
)
def test_what_makes_no_sense_is_refused(server: Server, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
    assert server.calls == []


def test_a_name_that_cannot_be_served_is_an_invalid_argument(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("expected a name without '/'")

    monkeypatch.setattr(server, "serve", refuse)
    done = run("--name", "a/b", "--local")
    assert done.exit_code == 2
    assert "expected a name without '/'" in done.output


def test_a_model_that_cannot_be_loaded_is_no_invalid_argument(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelLoadError("other programs still use the resources")

    monkeypatch.setattr(server, "serve", refuse)
    assert isinstance(run("--name", "a").exception, ModelLoadError)  # `main` returns 1


def test_the_plugin_that_serves_is_named_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "_registry", lambda: Registry([]))
    with pytest.raises(UnknownBackendError, match="provided by genlm-ray: pip install"):
        get_backend("ray")
