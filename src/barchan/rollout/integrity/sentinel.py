"""A test that must fail, run with a task's own: a runner that was made to let everything pass says so by it."""

import posixpath
import re
import secrets

from msgspec import Struct

_PYTEST = re.compile(r"(?:^|[\s/;&|])(?:pytest|py\.test)(?:\s|$)")
# With these a command chooses among the tests, and would leave this one out.
_CHOOSES = re.compile(
    r"\s(?:-k|--deselect|--ignore|--pyargs|--lf|--last-failed|--ff)\b|(?:pytest|py\.test)\b[^;&|]*\s-m\b"
)


class Sentinel(Struct, frozen=True):
    """A file with one test, named so that nobody can know it beforehand."""

    path: str
    name: str

    @classmethod
    def beside(cls, test_file: str) -> "Sentinel":
        """One in the folder of a test file, whose settings and hooks it so shares."""
        words = secrets.token_hex(4), secrets.token_hex(4)
        return cls(posixpath.join(posixpath.dirname(test_file), f"test_{words[0]}.py"), f"test_{words[1]}")

    @property
    def test_id(self) -> str:
        return f"{self.path}::{self.name}"

    @property
    def source(self) -> bytes:
        """Compares plain numbers, so that no class of the code under test has a say in it."""
        value = secrets.randbelow(1 << 16)
        return f"def {self.name}():\n    value = {value}\n    assert value == {value + 1}\n".encode()


def takes_sentinel(command: str) -> bool:
    """Whether a command runs the files that it is given by pytest, all of their tests."""
    return "{tests}" in command and _PYTEST.search(command) is not None and _CHOOSES.search(command) is None
