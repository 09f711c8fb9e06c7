"""`baton ui` leads to the live page of a real service."""

import stat
from pathlib import Path

import httpx
import pytest

from baton.cli import ui
from baton.cli.terminal.exit_codes import ExitCode
from tests.baton.cli.test_running_service import baton_up, run, temporary

__all__ = ["temporary"]


def test_the_link_leads_to_the_page_and_brings_its_key(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with baton_up(tmp_path) as service:
        link = service.run("ui").stdout.strip()
        page, _, fragment = link.partition("#")
        assert page == f"http://{service.told['http']}/ui"
        assert "Baton" in httpx.get(page).text
        key = fragment.removeprefix("key=")
        assert httpx.get(f"{page}/tree", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.get(f"{page}/tree").status_code == 401

        # What a browser is given: a file that only this user can read, and no key on its command line.
        seen, browser = tmp_path / "seen", tmp_path / "browser"
        browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\ncat "${{1#file://}}" >> {seen}\n')
        browser.chmod(stat.S_IRWXU)
        monkeypatch.setattr(ui, "READING_S", 0.0)
        opened = service.run("ui", "--open", BROWSER=f"{browser} %s")
        assert opened.stdout.strip() == f"opened {page}"
        command, _, file = seen.read_text().partition("\n")
        assert key not in command
        assert f'content="0;url={link}"' in file

        wrong = service.run("ui", BATON_OPERATOR_KEY="w" * 32)
        assert wrong.exit_code == ExitCode.USAGE
        assert "this is not the operator key" in wrong.stderr


def test_a_router_elsewhere_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "ui", "--url", "https://there:8000/", BATON_OPERATOR_KEY="o" * 32)
    assert result.stdout.strip() == f"https://there:8000/ui#key={'o' * 32}"
