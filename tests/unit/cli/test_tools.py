"""`barchan tools`."""

from pathlib import Path

import msgspec
import pytest

from barchan.backends import tools
from barchan.backends.container import criu
from barchan.cli.main import main


@pytest.mark.requires("criu")
def test_what_is_installed_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At once, without root or a mirror; the answer says where it is and that it runs."""
    command = criu.installed(tools.SHARED_STATE_DIR / tools.FOLDER / "criu")
    if not command:
        pytest.skip("criu: none was installed by barchan")
    (tmp_path / "tools").symlink_to(tools.SHARED_STATE_DIR / tools.FOLDER)
    assert main(["tools", "install", "criu", "--state-dir", str(tmp_path), "--json"]) == 0
    said = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])
    assert said["path"] == str(tmp_path / "tools/criu")
    assert int(said["version"].split(".")[0]) >= criu.MAJOR_MIN


def test_a_tool_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With those that are."""
    assert main(["tools", "install", "docker"]) == 2
    assert "criu" in capsys.readouterr().err
