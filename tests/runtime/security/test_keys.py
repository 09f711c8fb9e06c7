"""Where keys come from, what is refused, and that none of them is shown."""

import pickle
import subprocess
import time
from pathlib import Path

import pytest

from runtime.config.serving import RouterConfig, ServingConfig, WorkersConfig, dump_config
from runtime.config.surroundings import NatsConfig, SecurityConfig
from runtime.errors import ConfigError
from runtime.processes.launch import launch_command
from runtime.security import bearer_keys
from runtime.security.bearer_keys import BearerKeys
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.security.keys import Keys, check_reach, handed_on, load_keys, load_or_make_keys
from runtime.security.nats_login import NatsLogin, find_login, split_url
from runtime.security.secret import Secret

CLUSTER = "c" * 32
ONE, TWO, THREE = "1" * 32, "2" * 32, "3" * 32
URL = "nats://127.0.0.1:4222"


def config(**security: str) -> ServingConfig:
    return ServingConfig(security=SecurityConfig(**security), nats=NatsConfig(url=URL))


def written(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_secret_is_shown_by_nothing_but_reveal() -> None:
    secret = Secret("hush")
    keys = Keys(ClusterKey(Secret(CLUSTER)), BearerKeys.plain([secret]), NatsLogin("u", secret))
    assert secret.reveal() == "hush"
    for shown in (repr(secret), str(secret), f"{secret}", repr([secret]), repr(keys), str(keys)):
        assert "hush" not in shown
        assert CLUSTER not in shown
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_keys_come_from_files_and_else_from_variables(tmp_path: Path) -> None:
    api, cluster = written(tmp_path / "api", f"{ONE}\n\n {TWO} \n"), written(tmp_path / "cluster", CLUSTER)
    variables = {"BATON_API_KEY": THREE, "BATON_CLUSTER_KEY": "d" * 32}
    from_files = load_keys(config(api_key_file=api, cluster_key_file=cluster), variables)
    assert from_files.cluster is not None
    assert from_files.cluster.secret.reveal() == CLUSTER
    assert from_files.api is not None
    assert [from_files.api.accepts(f"Bearer {key}".encode()) for key in (ONE, TWO, THREE)] == [True, True, False]
    from_variables = load_keys(config(), variables)
    assert from_variables.api is not None
    assert from_variables.api.accepts(f"bearer {THREE}".encode())
    assert load_keys(config(), {}) == Keys()


@pytest.mark.parametrize(
    "shown", [b"", b"one", b"Basic one", b"Bearer", b"Bearer ", b"Bearer on", b"Bearer one two", b"Bearer \xff"]
)
def test_what_is_no_key_of_ours_is_not_taken(shown: bytes) -> None:
    assert not BearerKeys.plain([Secret("one")]).accepts(shown)


@pytest.mark.parametrize(
    ("field", "content", "problem"),
    [
        ("api_key_file", "\n \n", "holds no key"),
        ("api_key_file", f"{ONE}\n{TWO} words", "line 2 holds more than one word"),
        ("api_key_file", "schlüssel", "characters other than ASCII"),
        *(
            (
                field,
                f"{ONE}\ntooshort",
                "line 2 has 8 characters; at least 32 are needed, made by `openssl rand -hex 32`",
            )
            for field in ("api_key_file", "operator_key_file", "cluster_key_file")
        ),
        ("cluster_key_file", None, "No such file"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_named_and_not_shown(
    tmp_path: Path, field: str, content: str | None, problem: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        written(path, content)
    with pytest.raises(ConfigError) as caught:
        load_keys(config(**{field: str(path)}), {})
    assert f"security.{field}" in str(caught.value)
    assert problem in str(caught.value)
    assert not content or content.strip() == "" or content.splitlines()[-1] not in str(caught.value)


def test_keys_are_changed_in_the_file_while_they_are_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    keys = load_keys(config(api_key_file=written(path, ONE)), {}).api
    assert keys is not None
    now_s = time.monotonic()

    def later_accepted(key: str) -> bool:
        nonlocal now_s
        now_s += bearer_keys.RELOAD_S + 1
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        return keys.accepts(f"Bearer {key}".encode())

    path.write_text(f"{ONE}\n{TWO}")
    assert later_accepted(TWO)
    assert later_accepted(ONE)
    path.write_text(THREE + "-")
    assert later_accepted(f"{THREE}-")
    assert not later_accepted(ONE)
    assert keys.first().reveal() == f"{THREE}-"
    path.unlink()
    assert later_accepted(f"{THREE}-"), "the last ones that were there hold"


@pytest.mark.parametrize("field", ["api_key_file", "operator_key_file", "cluster_key_file"])
def test_a_key_that_every_user_of_the_machine_can_read_is_none(tmp_path: Path, field: str) -> None:
    path = tmp_path / "key"
    for mode, refused in ((0o600, False), (0o640, False), (0o644, True), (0o602, True)):
        written(path, ONE)
        path.chmod(mode)
        if not refused:
            assert load_keys(config(**{field: str(path)}), {}) != Keys()
            continue
        with pytest.raises(ConfigError, match=f"security.{field}: .*: chmod 600 {path}"):
            load_keys(config(**{field: str(path)}), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1"])
def test_beyond_this_machine_clients_show_a_key_or_somebody_says_that_they_need_none(host: str) -> None:
    router = RouterConfig(host=host)
    wide = ServingConfig(router=router)
    with pytest.raises(ConfigError, match=r"router\.host: .* BATON_API_KEY, made by `openssl.*, or security.insecure"):
        load_or_make_keys(wide, {})
    assert load_or_make_keys(wide, {"BATON_API_KEY": ONE}).api is not None
    assert load_or_make_keys(ServingConfig(router=router, security=SecurityConfig(insecure=True)), {}).api is None


def test_only_who_starts_the_others_makes_a_cluster_key_and_hands_it_on() -> None:
    assert load_keys(config(), {}).cluster is None
    first, second = load_or_make_keys(config(), {}), load_or_make_keys(config(), {})
    assert first.cluster is not None
    assert handed_on(first, {})["BATON_CLUSTER_KEY"] != handed_on(second, {})["BATON_CLUSTER_KEY"]
    child = load_keys(config(), handed_on(first, {}))
    assert child.cluster is not None
    assert child.cluster.secret.reveal() == first.cluster.secret.reveal()
    assert child.nats.options() == first.nats.options()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1"])
def test_beyond_this_machine_nothing_listens_without_a_cluster_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"workers\.host: .* security\.cluster_key_file or BATON_CLUSTER_KEY"):
        check_reach("workers.host", host, Keys())
    check_reach("workers.host", host, Keys(new_cluster_key()))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost", WorkersConfig().host])
def test_on_this_machine_a_process_runs_without(host: str) -> None:
    check_reach("workers.host", host, Keys())


@pytest.mark.parametrize(("program", "name"), [("router", "--router-id"), ("decode_worker", "--worker-id")])
def test_a_process_started_by_hand_says_which_key_it_lacks(tmp_path: Path, program: str, name: str) -> None:
    path = written(
        tmp_path / "serving.yaml",
        "{model: mock, nats: {url: 'nats://127.0.0.1:1'}, router: {host: 0.0.0.0}, workers: {host: 0.0.0.0}}",
    )
    command = [*launch_command(program), "--config", path, name, "one"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 1
    assert "asks for a cluster key: security.cluster_key_file or BATON_CLUSTER_KEY" in ended.stderr


# --- NATS -------------------------------------------------------------------------------------------------------------


def test_a_login_is_taken_from_the_place_that_is_nearest_to_the_url(tmp_path: Path) -> None:
    key = new_cluster_key()
    token_file = written(tmp_path / "token", "t0ken\n")
    creds = written(tmp_path / "user.creds", "-----BEGIN NATS USER JWT-----")
    user = {"BATON_NATS_USER": "u", "BATON_NATS_PASSWORD": "p w"}
    found = [
        find_login(NatsConfig(url="nats://a:b%40@h:1", credentials_file=token_file), key, user),
        find_login(NatsConfig(url="nats://t@h:1"), key, user),
        find_login(NatsConfig(url=URL, credentials_file=token_file), key, user),
        find_login(NatsConfig(url=URL, credentials_file=creds), key, user),
        find_login(NatsConfig(url=URL), key, user | {"BATON_NATS_CREDENTIALS_FILE": creds}),
        find_login(NatsConfig(url=URL), key, user | {"BATON_NATS_TOKEN": "t"}),
        find_login(NatsConfig(url=URL), key, user),
        find_login(NatsConfig(url=URL), key, {}),
        find_login(NatsConfig(url=URL), None, {}),
    ]
    assert [login.options() for login in found] == [
        {"user": "a", "password": "b@"},
        {"token": "t"},
        {"token": "t0ken"},
        {"user_credentials": creds},
        {"user_credentials": creds},
        {"token": "t"},
        {"user": "u", "password": "p w"},
        {"user": "baton", "password": key.derive("nats").reveal()},
        {},
    ]


def test_logins_that_contradict_each_other_or_lead_nowhere_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "file", "text")
    with pytest.raises(ConfigError, match=r"nats\.credentials_file"):
        find_login(NatsConfig(url=URL, credentials_file=str(tmp_path / "none")), None, {})
    with pytest.raises(ConfigError, match=r"nats\.url"):
        load_or_make_keys(ServingConfig(nats=NatsConfig(credentials_file=file)), {})


def test_a_url_is_shown_without_its_login() -> None:
    assert split_url("nats://user:hush@h:4222")[0] == "nats://h:4222"
    assert split_url("tls://token@h")[0] == "tls://h"
    assert split_url(URL) == (URL, None)
    shown, login = split_url("nats://h:1, nats://user:hush@i:2,nats://j:3")
    assert (shown, login and login.user) == ("nats://h:1,nats://i:2,nats://j:3", "user")


def test_a_dump_of_the_configuration_names_files_alone(tmp_path: Path) -> None:
    shown = dump_config(config(api_key_file=written(tmp_path / "api", "hush")))
    assert str(tmp_path / "api") in shown
    assert "hush" not in shown
