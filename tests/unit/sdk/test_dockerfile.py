"""A Dockerfile becomes the recipe that Docker would carry out, or an error that names its line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.sdk.dockerfile import PATH, BaseConfig, load_dockerfile, where_named
from barchan.sdk.dockerwords import expand, split_words
from barchan.sdk.recipe import Put, Recipe, Run, Take

Load = Callable[..., Recipe]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a text as the Dockerfile of a context with a few files."""
    (tmp_path / "src").mkdir()
    for name in ("a.txt", "b.txt", "src/main.py", "data.tar.gz"):
        (tmp_path / name).write_text(name)

    def loaded(text: str, **options: object) -> Recipe:
        (tmp_path / "Dockerfile").write_text(text)
        return load_dockerfile(tmp_path / "Dockerfile", **options)  # type: ignore[arg-type]

    return loaded


def commands(recipe: Recipe) -> list[str | tuple[str, ...]]:
    return [step.command for step in recipe.steps if isinstance(step, Run)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "1"),
        ("${A}b", "1b"),
        ("$AB", ""),
        ("\\$A", "$A"),
        ("'$A'", "$A"),
        ('"$A c"', "1 c"),
        ('"\\$A \\n"', "$A \\n"),
        ("${NO:-x$A}", "x1"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY-x}", ""),
        ("${A:+set}", "set"),
        ("${NO:+set}", ""),
        ("${NO:-${A}}", "1"),
        ("a$", "a$"),
        ("a\\", "a\\"),
        ("a b", "a b"),
    ],
)
def test_a_word_is_expanded(text: str, expected: str) -> None:
    """Quotes, escapes and every supported form of a variable, as Docker reads them."""
    assert expand(text, {"A": "1", "EMPTY": ""}) == expected


@pytest.mark.parametrize("text", ["'a", '"a', "${A", "${A:?no}", "${A%x}", "${}"])
def test_a_word_that_can_t_be_read(text: str) -> None:
    """An open quote or brace, and a form that is not supported, are errors."""
    with pytest.raises(ValueError, match=r"not closed|supported|no variable"):
        expand(text, {"A": "1"})


def test_words_are_split_outside_quotes() -> None:
    """Blanks between quotes and in values don't split; an empty word in quotes is one."""
    assert split_words("a  \"b c\" d\\ e '' $A", {"A": "x y"}) == ["a", "b c", "d e", "", "x y"]


def test_continued_lines_and_comments(load: Load) -> None:
    """A backslash joins lines, comments and empty lines between them go, a tab separates as a blank does."""
    recipe = load("# a comment\nFROM debian\nRUN a && \\\n# why\n\n  b\nRUN\tc\n")
    assert commands(recipe) == [("/bin/sh", "-c", "a &&   b"), ("/bin/sh", "-c", "c")]


def test_both_forms_of_run(load: Load) -> None:
    """A list is a program and its arguments, anything else is the shell's, also if it begins with a bracket."""
    recipe = load('FROM debian\nSHELL ["/bin/bash", "-ec"]\nRUN ["a", "$B"]\nRUN [ -f x ] && y\n')
    assert commands(recipe) == [("a", "$B"), ("/bin/bash", "-ec", "[ -f x ] && y")]


def test_what_a_run_sees(load: Load) -> None:
    """A command has the user, folder and variables of the lines before it; arguments are not kept in the image."""
    recipe = load(
        "ARG BASE=debian\nFROM $BASE\nARG V=1\nARG W\nENV A=$V B='x y'\nENV C old form\nWORKDIR /w\nWORKDIR sub\n"
        "USER agent\nENV PATH=/opt/bin:$PATH\nRUN x\nUSER root:root\n",
        args={"V": "2", "W": "w"},
        timeout_s=60.0,
    )
    env = {"A": "2", "B": "x y", "C": "old form", "PATH": f"/opt/bin:{PATH}"}
    run = recipe.steps[-1]
    assert isinstance(run, Run)
    assert (run.user, run.cwd, run.timeout_s) == ("agent", "/w/sub", 60.0)
    assert run.env == {**env, "V": "2", "W": "w"}
    assert (recipe.base, recipe.env, recipe.user, recipe.workdir) == ("debian", env, "root:root", "/w/sub")


def test_a_base_of_which_nothing_is_known(load: Load) -> None:
    """Without USER and WORKDIR it is root in /; what others start is kept, labels and ports are not."""
    recipe = load('FROM debian\nCMD x\nLABEL a=b\nEXPOSE 80\nENTRYPOINT ["y"]\n')
    assert recipe == Recipe(base="debian", user="root", workdir="/", entrypoint=("y",), cmd=("/bin/sh", "-c", "x"))


def test_what_a_base_starts_with(load: Load) -> None:
    """User, folder, variables, entry point and command go on from the base; an ENTRYPOINT ends the base's CMD."""
    known = BaseConfig("app", "/srv", {"HOME_OF": "/opt", "PATH": "/p"}, ("run",), ("all",))
    recipe = load("FROM x\nENV A=$HOME_OF:$PATH\nWORKDIR in\nRUN y\n", base_config={"x": known}.get)
    run = recipe.steps[-1]
    assert isinstance(run, Run) and (run.user, run.cwd) == ("app", "/srv/in")
    assert (recipe.env, recipe.user, recipe.workdir) == ({"A": "/opt:/p"}, "app", "/srv/in")
    assert (recipe.entrypoint, recipe.cmd) == (("run",), ("all",))
    recipe = load('FROM x\nENTRYPOINT ["z"]\n', base_config={"x": known}.get)
    assert (recipe.entrypoint, recipe.cmd) == (("z",), ())
    recipe = load('FROM x\nCMD ["w"]\nENTRYPOINT []\n', base_config={"x": known}.get)
    assert (recipe.entrypoint, recipe.cmd) == ((), ("w",))


def test_stages(load: Load) -> None:
    """A stage goes on from an earlier one, and takes files out of one, by name or number, or out of an image."""
    recipe = load(
        "ARG V=1\nFROM debian AS One\nARG V\nENV A=a\nUSER agent\nWORKDIR /w\nRUN make $V\n"
        "FROM one AS two\nRUN test $A\nFROM debian\n"
        "COPY --from=one --chown=agent --chmod=755 /w/out* /w/x in/\nCOPY --from=1 w/y /z\nCOPY --from=tools /t /t\n"
    )
    one = load("ARG V=1\nFROM debian\nARG V\nENV A=a\nUSER agent\nWORKDIR /w\nRUN make $V\n")
    run = one.steps[-1]
    assert isinstance(run, Run) and run.env == {"V": "1", "A": "a"}
    two = Recipe(
        base=one,
        steps=(
            Run(command=("/bin/sh", "-c", "test $A"), user="agent", cwd="/w", network="open", place="Dockerfile:9"),
        ),
        user="agent",
        workdir="/w",
        entrypoint=(),
        cmd=(),
    )
    assert recipe.base == "debian" and recipe.steps == (
        Take(image=one, source="/w/out*", path="/in/", mode=0o755, user="agent"),
        Take(image=one, source="/w/x", path="/in/", mode=0o755, user="agent"),
        Take(image=two, source="/w/y", path="/z"),
        Take(image="tools", source="/t", path="/t"),
    )


def test_what_is_ignored_is_not_sent(load: Load, tmp_path: Path) -> None:
    """By .dockerignore, or by the file that bears the Dockerfile's name: from folders, from patterns, by name."""
    (tmp_path / ".dockerignore").write_text("b.txt\nsrc/*.py\n")
    put = load("FROM a\nCOPY . /c\n").steps[0]
    assert isinstance(put, Put) and put.without == ("b.txt", "src/main.py")
    assert [step.source for step in load("FROM a\nCOPY *.txt /c/\n").steps if isinstance(step, Put)] == [
        str(tmp_path / "a.txt")
    ]
    with pytest.raises(InvalidSpec, match=r"2: COPY: b.txt: there is no such file in .*, or it is ignored"):
        load("FROM a\nCOPY b.txt /c\n")
    (tmp_path / "Dockerfile.dockerignore").write_text("data*\nDockerfile*\n.dockerignore\n")
    put = load("FROM a\nCOPY . /c\n").steps[0]
    assert isinstance(put, Put)
    assert put.without == (".dockerignore", "Dockerfile", "Dockerfile.dockerignore", "data.tar.gz")


def test_from_by_another_name(load: Load) -> None:
    """What FROM names can stand for an image of another name; a platform and a stage's name change nothing."""
    recipe = load("FROM --platform=linux/amd64 python:3.12-slim AS main\n", bases={"python:3.12-slim": "debian"})
    assert recipe.base == "debian"


def test_the_network_of_commands(load: Load) -> None:
    """Commands have a network, as in a Docker build; where there is no RUN, nothing needs one."""
    with_run = load("FROM debian\nWORKDIR /w\nRUN x\n")
    assert [step.network for step in with_run.steps if isinstance(step, Run)] == ["open", "open"]
    allowed = load("FROM debian\nRUN x\n", network="allow", allow_hosts=("example.org",)).steps[0]
    assert isinstance(allowed, Run) and (allowed.network, allowed.allow_hosts) == ("allow", ("example.org",))
    without = load("FROM debian\nWORKDIR /w\n").steps[0]
    assert isinstance(without, Run) and without.network == "none"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY a.txt /x", [("/x", "a.txt")]),
        ("COPY a.txt x/", [("/w/x/a.txt", "a.txt")]),
        ("COPY a.txt .", [("/w/a.txt", "a.txt")]),
        ("COPY *.txt /x/", [("/x/a.txt", "a.txt"), ("/x/b.txt", "b.txt")]),
        ("COPY a.txt src /x/", [("/x/a.txt", "a.txt"), ("/x", "src")]),
        ("COPY . /x", [("/x", "")]),
        ('COPY ["a.txt", "/with blank"]', [("/with blank", "a.txt")]),
        ("COPY $NAME.txt /x", [("/x", "b.txt")]),
        ("COPY /src/main.py /x", [("/x", "src/main.py")]),
        ("ADD src /x", [("/x", "src")]),
        ("COPY data.tar.gz /x/", [("/x/data.tar.gz", "data.tar.gz")]),
    ],
)
def test_where_copies_go(load: Load, tmp_path: Path, line: str, expected: list[tuple[str, str]]) -> None:
    """Files and folders, patterns, several sources, lists and variables, to the place that Docker would choose."""
    puts = [step for step in load(f"FROM debian\nENV NAME=b\nWORKDIR /w\n{line}\n").steps if isinstance(step, Put)]
    assert [(put.path, put.source) for put in puts] == [(path, str(tmp_path / name)) for path, name in expected]


def test_owner_and_mode_of_copies(load: Load) -> None:
    """They are root's with their own modes, unless the line says otherwise."""
    recipe = load("FROM debian\nCOPY a.txt /x\nCOPY --link --chown=1000:1000 --chmod=0750 a.txt /y\n")
    first, second = (step for step in recipe.steps if isinstance(step, Put))
    assert (first.user, first.mode) == ("root", None)
    assert (second.user, second.mode) == ("1000:1000", 0o750)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("RUN x", "1: RUN: comes before FROM"),
        ("", "1: FROM: is missing"),
        ("FROM scratch", "1: FROM: an empty base"),
        ("FROM $NO", "1: FROM: '\\$NO' names no image"),
        ("FROM a b", "1: FROM: give IMAGE"),
        ("FROM a AS b\nFROM c AS B", "2: FROM: there is a stage B already"),
        ("FROM a AS b\nCOPY --from=b /x /y", "2: COPY: --from=b: that is this stage itself"),
        ("FROM a\nCOPY --from=b /x /z /y", "2: COPY: several sources need a folder"),
        ("FROM a\nADD --from=b /x /y", "2: ADD: --from is not supported"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", "2: RUN: --mount is not supported"),
        ("FROM a\nRUN <<EOF\nx\nEOF", "2: RUN: here-documents"),
        ("FROM a\nRUN cat <<'E' > x\nE", "2: RUN: here-documents"),
        ("FROM a\n\nHEALTHCHECK NONE", "3: HEALTHCHECK: is not supported"),
        ("FROM a\nVOLUME /x", "2: VOLUME: is not supported"),
        ("FROM a\nNONSENSE", "2: NONSENSE: is not supported"),
        ("FROM a\nRUN", "2: RUN: give a command"),
        ("FROM a\nCOPY a.txt", "2: COPY: give SOURCE"),
        ("FROM a\nCOPY no.txt /x", "2: COPY: no.txt: there is no such file"),
        ("FROM a\nCOPY *.no /x", "2: COPY: \\*.no: there is no such file"),
        ("FROM a\nCOPY a.txt b.txt /x", "2: COPY: 2 sources need a folder"),
        ("FROM a\nCOPY --chmod=u+x a.txt /x", "2: COPY: --chmod=u\\+x"),
        ("FROM a\nADD https://example.org/x /x", "2: ADD: https://example.org/x: only files"),
        ("FROM a\nADD data.tar.gz /x", "2: ADD: data.tar.gz: unpacking"),
        ("FROM a\nARG", "2: ARG: give NAME"),
        ("FROM a\nENV A", "2: ENV: give NAME=VALUE"),
        ("FROM a\nENV A=1 B", "2: ENV: give NAME=VALUE"),
        ("FROM a\nENV A='1", "2: ENV: a single quote is not closed"),
        ("FROM a\nWORKDIR $NO", "2: WORKDIR: give a path"),
        ("FROM a\nUSER", "2: USER: give a user"),
        ("FROM a\nSHELL bash", "2: SHELL: give a list"),
        ("# escape=`\nFROM a", "1: escape: only the backslash"),
    ],
)
def test_what_is_refused(load: Load, tmp_path: Path, text: str, where: str) -> None:
    """What is wrong or not supported is said with file, line and instruction."""
    with pytest.raises(InvalidSpec, match=f"^{tmp_path}/Dockerfile:{where}"):
        load(text + "\n")


def test_steps_and_images_know_their_lines(load: Load, tmp_path: Path) -> None:
    """So that an error of the build can name them."""
    recipe = load("FROM a AS x\n\nWORKDIR /w\nRUN one \\\n two\nCOPY --from=b:1 /x /y\n")
    assert [step.place for step in recipe.steps if isinstance(step, Run)] == ["Dockerfile:3", "Dockerfile:4"]
    file = tmp_path / "Dockerfile"
    named = {image: where_named(file, image) for image in ("a", "b:1", "c")}
    assert named == {"a": f"{file}:1: FROM", "b:1": f"{file}:6: COPY", "c": ""}


def test_a_source_outside_the_context(load: Load, tmp_path: Path) -> None:
    """A path that climbs is the context's, as in Docker; a link that leads out is refused."""
    (tmp_path / "out").symlink_to("/etc")
    with pytest.raises(InvalidSpec, match="2: COPY: out/hosts leads out of the context"):
        load("FROM a\nCOPY out/hosts /x\n")
    put = load("FROM a\nCOPY ../../a.txt /x\n").steps[0]
    assert isinstance(put, Put) and put.source == str(tmp_path / "a.txt")


def test_an_argument_that_nothing_declares(load: Load) -> None:
    """A build argument by a wrong name is an error, not a build without it."""
    with pytest.raises(InvalidSpec, match="nothing declares the argument VERSON"):
        load("FROM a\nARG VERSION\n", args={"VERSON": "1"})


def test_a_dockerfile_that_can_t_be_read(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(InvalidSpec, match="no/Dockerfile can't be read"):
        load_dockerfile(tmp_path / "no/Dockerfile")


def test_a_label_says_what_the_image_needs(load: Load) -> None:
    """Of a stage and of those that go on from it; other labels are notes, and a word that nobody has is refused."""
    assert load('FROM debian AS a\nLABEL x=y barchan.needs="screen own_kernel"\nFROM a\n').needs == (
        "own_kernel",
        "screen",
    )
    assert load("FROM debian\nLABEL x=y\n").needs == ()
    with pytest.raises(InvalidSpec, match=r"Dockerfile:2: .*own_kernel"):
        load("FROM debian\nLABEL barchan.needs=gpu\n")
