"""The rows of `swe:ROWS.jsonl`: what each field must be, and how the layouts of public data sets say the same. Pure,
but for reading the file.

A row of ours says how its environment is made, by `image` or `environment`. Rows as data sets publish them name an
image of theirs and other fields by other words; where that leaves one meaning only, it is taken.
"""

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from barchan.errors import TaskError
from barchan.model.sandbox import Env, Name, Network

WORKDIR = "/testbed"
IMAGE_USER = "root"  # whose the repository is in the images that data sets publish
TEST_COMMAND = "python3 -m pytest -q -p no:cacheprovider --junitxml={junit} {tests}"
SCRIPT_FILE = "test_fail_to_pass.py"  # where Scale-SWE puts a row's `f2p_script`
COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
REPO = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_PYTEST_LAST = re.compile(r"\bpytest\b[^;&|\n]*$")
_CHECKOUT = re.compile(r"\bgit checkout ([0-9a-f]{40})\b")

AbsolutePath = Annotated[str, Meta(pattern=r"^/[^\x00]")]


class SweFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file or folder that installing needs: `source` is relative to the file of rows."""

    path: AbsolutePath
    source: Annotated[str, Meta(min_length=1)]


class SweEnvironment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a row's environment is made.

    Attributes:
        base: Name of an image that the node has, with git and whatever the installs use.
        install: Commands of a shell, run by `user` in the repository, with `network`.
        env: Of the installs, the agent and the tests.
        test_command: `{tests}` is replaced by the tests' files, `{junit}` by the path of the report.
        user: Who owns the repository, works in it and runs the tests: one that `base` has.
    """

    base: Name = ""
    files: tuple[SweFile, ...] = ()
    install: tuple[str, ...] = ()
    network: Network = "none"
    allow_hosts: tuple[str, ...] = ()
    env: Env = {}
    test_command: str = ""
    workdir: AbsolutePath = WORKDIR
    user: Annotated[str, Meta(min_length=1)] = "agent"
    memory_mib: Annotated[int, Meta(ge=16)] = 1024
    cpus: Annotated[float, Meta(gt=0)] | None = None
    disk_mib: Annotated[int, Meta(ge=1)] | None = None
    install_s_max: Annotated[float, Meta(gt=0)] = 1800.0
    test_s_max: Annotated[float, Meta(gt=0)] = 1800.0


class SweRow(Struct, frozen=True, kw_only=True):
    """One row, checked as far as that needs no repository. Exactly one of `image` and `environment` is set."""

    place: str
    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    version: str
    image: str | None
    environment: SweEnvironment | None
    workdir: str
    user: str
    test_command: str

    @property
    def mirror(self) -> str:
        return f"{self.repo.replace('/', '__')}.git"

    def error(self, field: str, what: str) -> TaskError:
        return TaskError(f"{self.place}: {field}: {what}")


def read_rows(path: Path) -> list[SweRow]:
    """All rows of a file.

    Raises:
        TaskError: It can't be read, or a row is not what it has to be; line and field are named.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror}") from error
    rows: list[SweRow] = []
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_row(line, f"{path}:{number}")
        if row.instance_id in lines_of:
            raise row.error("instance_id", f"{row.instance_id} is already on line {lines_of[row.instance_id]}")
        lines_of[row.instance_id] = number
        rows.append(row)
    if not rows:
        raise TaskError(f"{path}: there is no row in it")
    return rows


def parse_row(line: bytes, place: str) -> SweRow:
    """One row; `place` is its file and line, for errors."""
    try:
        fields = msgspec.json.decode(line)
    except msgspec.MsgspecError as error:
        raise TaskError(f"{place}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TaskError(f"{place}: a row is an object, not {type(fields).__name__}")
    return _Reader(fields, place).row()


class _Reader:
    """The fields of one row."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        self._fields = fields
        self._place = place

    def row(self) -> SweRow:
        environment, image = self._environment(), self._optional("image")
        if environment is not None and image:
            raise self._error("image", "a row has an image or an environment, not both")
        if environment is None:
            image = image or self._optional("image_name", "image_url", "image_ref", "docker_image")
            if not image:
                raise self._error("environment", "is missing, and so is image")
            self._check_name(image)
        fail_to_pass = self._ids("FAIL_TO_PASS", "fail_to_pass")
        if not fail_to_pass:
            raise self._error("FAIL_TO_PASS", "is empty: nothing would tell a solution from none")
        test_patch = self._test_patch(fail_to_pass)
        return SweRow(
            place=self._place,
            instance_id=self._text("instance_id"),
            repo=self._repo(),
            base_commit=self._base_commit(),
            problem_statement=self._text("problem_statement"),
            patch=self._text("patch"),
            test_patch=test_patch,
            fail_to_pass=self._located("FAIL_TO_PASS", fail_to_pass, test_patch),
            pass_to_pass=self._located("PASS_TO_PASS", self._ids("PASS_TO_PASS", "pass_to_pass"), test_patch),
            version=self._optional("version"),
            image=image or None,
            environment=environment,
            workdir=environment.workdir if environment else self._optional("workdir") or WORKDIR,
            user=environment.user if environment else self._optional("user") or IMAGE_USER,
            test_command=self._test_command(environment),
        )

    def _error(self, field: str, what: str) -> TaskError:
        return TaskError(f"{self._place}: {field}: {what}")

    def _optional(self, *names: str) -> str:
        """The first field that is there and not empty."""
        for name in names:
            value = self._fields.get(name)
            if value is not None and not isinstance(value, str):
                raise self._error(name, f"is text, not {type(value).__name__}")
            if value:
                return value
        return ""

    def _text(self, *names: str) -> str:
        found = self._optional(*names)
        if not found.strip():
            raise self._error(names[0], "is empty" if any(name in self._fields for name in names) else "is missing")
        return found

    def _check_name(self, image: str) -> None:
        try:
            msgspec.convert(image, Name)
        except msgspec.ValidationError as error:
            raise self._error("image", f"{image!r} is no name of an image") from error

    def _environment(self) -> SweEnvironment | None:
        given = self._fields.get("environment")
        if given is None:
            return None
        try:
            environment = msgspec.convert(given, SweEnvironment)
        except msgspec.ValidationError as error:
            raise self._error("environment", str(error)) from error
        if not environment.base:
            raise self._error("environment", "`base` is missing")
        return environment

    def _repo(self) -> str:
        """OWNER/NAME. Where the row has the name alone, its id begins with both: `OWNER_NAME_...`."""
        repo, instance_id = self._text("repo"), self._text("instance_id")
        if "/" not in repo:
            owner, separator, _ = instance_id.partition(f"_{repo}_")
            repo = f"{owner}/{repo}" if separator else repo
        if not REPO.fullmatch(repo):
            raise self._error("repo", f"{repo!r} is not OWNER/NAME")
        return repo

    def _base_commit(self) -> str:
        """`base_commit`, or the one commit that Scale-SWE's set-up commands check out."""
        commit = self._optional("base_commit")
        checked_out = set(_CHECKOUT.findall(self._optional("pre_commands")))
        if not commit and len(checked_out) == 1:
            (commit,) = checked_out
        commit = commit or self._text("base_commit")
        if not COMMIT.fullmatch(commit):
            raise self._error("base_commit", f"{commit[:80]!r} is no commit: 7 or more hexadecimal digits")
        return commit

    def _ids(self, *names: str) -> tuple[str, ...]:
        """Test ids: a list, or its text in JSON or Python's own form."""
        name = next((name for name in names if name in self._fields), None)
        if name is None:
            raise self._error(names[0], "is missing")
        value = self._fields[name]
        if isinstance(value, str):
            try:
                value = ast.literal_eval(value) if "'" in value[:2] else json.loads(value)
            except (ValueError, SyntaxError, RecursionError) as error:
                raise self._error(name, "is text that holds no list") from error
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self._error(name, "is a list of test ids")
        return tuple(dict.fromkeys(value))

    def _test_patch(self, fail_to_pass: tuple[str, ...]) -> str:
        """`test_patch`; or Scale-SWE's patch, with the script as a file of its own where a test is in it."""
        if "f2p_script" not in self._fields:
            return self._text("test_patch")
        patch, script = self._optional("test_patch", "f2p_patch"), self._optional("f2p_script")
        if any(test.startswith(f"{SCRIPT_FILE}::") for test in fail_to_pass):
            patch = f"{patch}\n" if patch and not patch.endswith("\n") else patch
            patch += new_file_patch(SCRIPT_FILE, script)
        return patch or self._text("test_patch")

    def _located(self, field: str, ids: tuple[str, ...], test_patch: str) -> tuple[str, ...]:
        """Ids with their file: some data sets have bare names, which mean the one file that the tests' patch has."""
        if all(_has_path(test) for test in ids):
            return ids
        touched = sorted(set(re.findall(r"^\+\+\+ b/(.+?)\s*$", test_patch, re.MULTILINE)))
        if len(touched) != 1:
            bare = next(test for test in ids if not _has_path(test))
            raise self._error(field, f"{bare!r} names no file, and test_patch has {len(touched)} of them")
        return tuple(test if _has_path(test) else f"{touched[0]}::{test}" for test in ids)

    def _test_command(self, environment: SweEnvironment | None) -> str:
        """The row's command, made to write a report where it is one of pytest's."""
        published = self._fields.get("install_config")
        given = published.get("test_cmd") if isinstance(published, dict) else None
        given = (environment.test_command if environment else "") or given or TEST_COMMAND
        command = " && ".join(given) if isinstance(given, list) else given
        if not isinstance(command, str):
            raise self._error("install_config.test_cmd", "is a command or a list of them")
        if "{junit}" in command:
            return command
        if not _PYTEST_LAST.search(command):
            raise self._error("test_command", "has no {junit}: where to write the report as JUnit XML")
        return f"{command} --junitxml={{junit}}"


def _has_path(test: str) -> bool:
    path, separator, _ = test.partition("[")[0].partition("::")
    return bool(separator) and ("/" in path or path.endswith(".py"))


def new_file_patch(path: str, text: str) -> str:
    """A patch that makes one file."""
    lines = text.splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
        + body
    )
