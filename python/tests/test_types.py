"""Arguments that cannot work, results, configuration."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import libdsec
from libdsec import CommandFailed, DSecContainerRunArgs, DSecError, ExecResult, InvalidError, _config
from libdsec import _convert as c
from libdsec._proto.dsec.v1 import sandbox_pb2, types_pb2

ARGS = DSecContainerRunArgs(container_image="base")


def result(**change: Any) -> ExecResult:
    whole: dict[str, Any] = {
        "exit_code": 0,
        "signal": None,
        "oom": False,
        "timed_out": False,
        "output_limit": False,
        "claimed": False,
        "started": datetime.now(timezone.utc),
        "duration": 1.5,
        "cpu": 0.5,
        "max_rss_bytes": 1 << 20,
        "stdout": b"out",
        "stderr": b"err",
    }
    return ExecResult(**(whole | change))


def test_files_that_are_not_counted_are_not_zero() -> None:
    counted = sandbox_pb2.UsageResponse(usage=types_pb2.Usage(disk_bytes=1, disk_inodes=0))
    assert c.usage(counted).disk_inodes == 0
    counted.usage.ClearField("disk_inodes")
    assert c.usage(counted).disk_inodes is None


def test_published_shape_is_encoded() -> None:
    args = DSecContainerRunArgs(
        container_image="registry/ubuntu:22.04",
        memory_limit_mb=4096,
        cpu_cores_limit=1.5,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": False},
        init_user="root",
    )
    r = c.create_request(args, "id")
    assert list(r.layers) == ["registry/ubuntu:22.04"]
    assert (r.limits.memory_bytes, r.limits.milli_cpu) == (4096 << 20, 1500)
    assert (r.idle_timeout.seconds, r.idle_timeout.nanos, r.HasField("max_lifetime")) == (300, 0, False)
    assert dict(r.network_rules) == {"npm": False, "pypi": False}
    assert (r.user, r.request_id) == ("root", "id")


def test_layers_are_sent_lowest_first() -> None:
    args = DSecContainerRunArgs(container_image="b", workspace="w", toolkits=["t1", "t2"], layers=["l"])
    assert list(c.create_request(args, "id").layers) == ["b", "w", "t1", "t2", "l"]


def test_what_is_left_out_is_the_servers_default() -> None:
    r = c.create_request(ARGS, "id")
    assert not r.HasField("idle_timeout")
    assert r.limits.ByteSize() == 0
    assert c.create_request(replace(ARGS, ttl_running_stop=0), "id").HasField("idle_timeout")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container_image", 3),
        ("container_image", "\udc80"),
        ("layers", "base"),
        ("toolkits", "tools"),
        ("workspace", 3),
        ("memory_limit_mb", 0),
        ("memory_limit_mb", -1),
        ("memory_limit_mb", 1.5),
        ("memory_limit_mb", 1 << 60),
        ("cpu_cores_limit", 0),
        ("cpu_cores_limit", 0.0004),
        ("cpu_cores_limit", math.nan),
        ("cpu_cores_limit", math.inf),
        ("cpu_cores_limit", "2"),
        ("disk_limit_mb", 0),
        ("disk_inodes_limit", 0),
        ("pids_limit", 0),
        ("ttl_running_stop", math.nan),
        ("ttl_running_stop", 1e18),
        ("ttl_running_stop", 1e-12),
        ("max_lifetime", math.inf),
        ("init_user", "\udc80"),
    ],
)
def test_impossible_argument_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidError) as caught:
        c.create_request(replace(ARGS, **{field: value}), "id")  # type: ignore[arg-type]
    assert caught.value.field == field


def test_network_rule_that_is_no_bool() -> None:
    with pytest.raises(InvalidError) as caught:
        c.create_request(replace(ARGS, network_rules={"pypi": "no"}), "id")  # type: ignore[dict-item]
    assert caught.value.field == "network_rules.pypi"


COMMANDS: list[tuple[str, Callable[[Any], Any]]] = [
    ("argv", lambda s: s.exec("ls -l")),
    ("argv", lambda s: s.exec(b"ls")),
    ("argv", lambda s: s.exec([])),
    ("argv[1]", lambda s: s.exec(["ls", 3])),
    ("command", lambda s: s.run_shell("")),
    ("command", lambda s: s.run_shell(["ls"])),
    ("command", lambda s: s.run_shell("\udc80")),
    ("timeout", lambda s: s.exec(["ls"], timeout=math.nan)),
    ("output_limit", lambda s: s.exec(["ls"], output_limit=-1)),
    ("env.A", lambda s: s.exec(["ls"], env={"A": 1})),
    ("stdin", lambda s: s.start(["ls"], stdin=b"x" * ((1 << 20) + 1))),
    ("pty.rows", lambda s: s.start(["ls"], pty=(0, 80))),
    ("pty.cols", lambda s: s.start(["ls"], pty=(24, 65536))),
    ("signal", lambda s: s.process(1).send_signal("KILL")),
    ("path", lambda s: s.files.read("")),
    ("path", lambda s: s.files.stat(3)),
    ("mode", lambda s: s.files.mkdir("/x", mode=0o10000)),
    ("offset", lambda s: s.files.stream("/x", offset=-1)),
]


@pytest.mark.parametrize(("field", "call"), COMMANDS)
async def test_impossible_call_names_its_field_and_sends_nothing(
    unused_url: str, field: str, call: Callable[[Any], Any]
) -> None:
    client = libdsec.DSecClient(unused_url, "e2b_00", retries=0)
    with pytest.raises(InvalidError) as caught:
        await call(libdsec.Sandbox(client._rpc, "x"))
    assert caught.value.field == field
    await client.close()


def test_argv_that_is_no_utf8_goes_raw() -> None:
    def command(*argv: str | bytes) -> Any:
        return c.command(argv, None, env=None, cwd="", user="", timeout=None, output_limit=0)

    assert list(command("echo", b"caf\xc3\xa9").argv) == ["echo", "café"]
    raw = command("echo", b"\xff", os.fsdecode(b"\xfe"))
    assert (list(raw.argv), list(raw.raw_argv)) == ([], [b"echo", b"\xff", b"\xfe"])
    assert c.path(b"/a\xff").raw == b"/a\xff"
    assert c.path(Path("/é")).path == "/é"


@pytest.mark.parametrize("seconds", [0, 1, 1.5, 0.000000001, 3600.25, 1e9 + 0.125, -2.5])
def test_duration_round_trip(seconds: float) -> None:
    assert c.seconds(c.duration(seconds, "x")) == seconds


def test_success_and_failure() -> None:
    good = result()
    assert good.ok
    assert good.check() is good
    assert (good.text, good.stderr_text, good.shell_status) == ("out", "err", 0)
    for change, status in (
        ({"exit_code": 3}, 3),
        ({"exit_code": None, "signal": 9}, 137),
        ({"oom": True}, 0),
        ({"timed_out": True}, 0),
        ({"output_limit": True}, 0),
    ):
        bad = result(**change)
        assert not bad.ok
        assert bad.shell_status == status
        with pytest.raises(CommandFailed) as caught:
            bad.check()
        assert caught.value.result is bad
        assert not isinstance(caught.value, DSecError)


def test_failure_tells_how_and_shows_stderr() -> None:
    e = CommandFailed(result(exit_code=None, signal=9, oom=True, stderr=b"no memory\n"))
    assert str(e) == "command was ended by SIGKILL (out of memory): no memory"
    copy = pickle.loads(pickle.dumps(e))
    assert copy.result == e.result
    assert (
        str(CommandFailed(result(exit_code=None, signal=64, stderr=b""))) == "command was ended by SIGRTMAX"
    )


def test_secret_of_a_new_key_is_not_shown() -> None:
    key = libdsec.Key(id="1", project="p", created=datetime.now(timezone.utc), expires=None, admin=False)
    assert "e2b_5ec2e7" not in repr(libdsec.NewKey(key=key, secret="e2b_5ec2e7"))


def test_expiry_needs_a_time_zone() -> None:
    with pytest.raises(InvalidError):
        c.timestamp(datetime(2030, 1, 1), "expires")


@pytest.fixture
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_KEY_FILE", "DSEC_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_environment")
def test_argument_wins_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("e2b_0f\n")
    monkeypatch.setattr(_config, "DEFAULT_KEY_FILE", str(file))
    assert _config.resolve() == _config.Config("http://127.0.0.1:7321", "e2b_0f")
    (tmp_path / "other").write_text("e2b_0f0f")
    monkeypatch.setenv("DSEC_KEY_FILE", str(tmp_path / "other"))
    assert _config.resolve().api_key == "e2b_0f0f"
    monkeypatch.setenv("DSEC_API_KEY", "e2b_e0")
    monkeypatch.setenv("DSEC_URL", "https://host:1/base/")
    assert _config.resolve() == _config.Config("https://host:1/base", "e2b_e0")
    assert _config.resolve(key_file=file).api_key == "e2b_0f"
    assert _config.resolve("http://other", "e2b_a0", file) == _config.Config("http://other", "e2b_a0")


@pytest.mark.usefixtures("_no_environment")
def test_no_key_says_what_to_do(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(libdsec.UnauthenticatedError, match="DSEC_API_KEY"):
        libdsec.DSecClient("http://host", key_file=missing)
    missing.write_bytes(b"\xff\xff")
    with pytest.raises(libdsec.UnauthenticatedError):
        libdsec.DSecClient("http://host", key_file=missing)
    for bad in ("", "a b", "a\r\nX: y", "é"):
        with pytest.raises(libdsec.UnauthenticatedError):
            libdsec.DSecClient("http://host", bad)


@pytest.mark.parametrize("url", ["host:80", "ftp://host", "http://", "http://h/?q=1", "http://h:99999"])
def test_bad_url(url: str) -> None:
    with pytest.raises(InvalidError) as caught:
        libdsec.DSecClient(url, "e2b_00")
    assert caught.value.field == "url"


async def test_bad_ca_file(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    client = libdsec.DSecClient("https://127.0.0.1:1", "e2b_00", ca_file=tmp_path / "ca")
    with pytest.raises(InvalidError) as caught:
        await client.open()
    assert caught.value.field == "ca_file"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ("client", libdsec.DSecClient),
        ("sandbox", libdsec.Sandbox),
        ("job", libdsec.Job),
        ("process", libdsec.Process),
        ("session", libdsec.Session),
        ("files", libdsec.Files),
    ],
)
def test_the_readme_names_every_method(row: str, kind: type) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    table = text.split("## What there is")[1].split("\n\n- ")[0]
    [cell] = [line.split("|")[2] for line in table.splitlines() if line.startswith(f"| {row} |")]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", cell))))
    methods = {name for name in dir(kind) if not name.startswith("_")}
    assert methods - named == set()
