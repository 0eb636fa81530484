"""Tasks that a Python file or module of the user's own makes."""

import importlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from barchan.errors import BarchanError, InvalidSpec, TaskError
from barchan.rollout.graders import grader_of
from barchan.rollout.task import Task

FUNCTION = "tasks"


def load_plain(spec: str) -> list[Task]:
    """The tasks of `path/to/file.py` (made by its function `tasks`), of `module:function`, or of `file.py:function`.

    A file's folder is put on the module search path, as Python does for a program, so that the file can be imported by
    its name: that is how its graders and tools are found. Modules are found from the current directory, too.

    Raises:
        InvalidSpec: There is no such file, module or function, or importing it fails.
        TaskError: It makes no tasks: it raises, or gives something else, nothing, or two of one id.
    """
    source, _, name = spec.partition(":")
    name = name or FUNCTION
    if source.endswith(".py"):
        module = _file(Path(source), spec)
    else:
        _search(Path.cwd())
        module = _module(source, spec)
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidSpec(f"{module.__file__ or source}: no function {name}(): a task set's gives its tasks")
    return _checked(function, _made(function, module), _line_of(function, module))


def _file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise InvalidSpec(f"no task set {spec!r}: there is no file {path}")
    path = path.resolve()
    _search(path.parent)
    module = _module(path.stem, spec)
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise InvalidSpec(f"{path}: another module is called {path.stem}, too; give the file another name")
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise InvalidSpec(f"task set {spec}: {error.filename}:{error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        place = _place(error, Path(importlib.__file__ or "").parent)
        raise InvalidSpec(f"task set {spec}: {place}{type(error).__name__}: {error}") from error


def _made(function: Callable[[], Any], module: ModuleType) -> list[Any]:
    try:
        made = function()
        if isinstance(made, Iterable):
            return list(made)
    except BarchanError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"{_place(error) or _line_of(function, module)}{type(error).__name__}: {error}") from error
    raise TaskError(f"{_line_of(function, module)}it gives {type(made).__name__}, and no tasks")


def _checked(function: Callable[[], Any], made: list[Any], line: str) -> list[Task]:
    if not made:
        raise TaskError(f"{line}it gives no task")
    for index, task in enumerate(made):
        if not isinstance(task, Task):
            raise TaskError(f"{line}item {index} is no Task but {type(task).__name__}")
        try:
            msgspec.convert(msgspec.to_builtins(task), Task)  # a constructor checks no types
        except msgspec.ValidationError as error:
            raise TaskError(f"{line}task {task.task_id}: {error}") from error
        if not task.task_id:
            raise TaskError(f"{line}item {index} has no task_id")
    task_id, count = Counter(task.task_id for task in made).most_common(1)[0]
    if count > 1:
        raise TaskError(f"{line}{count} tasks are called {task_id}")
    for task in made:
        try:
            grader_of(task.grader)  # what can be known to be wrong with it before anything runs
        except TaskError as error:
            raise TaskError(f"{line}task {task.task_id}: {error}") from error
    return made


def _line_of(function: Callable[[], Any], module: ModuleType) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else f"{module.__file__}: "


def _place(error: BaseException, *hidden: Path) -> str:
    """The line that raised, but not one of the import machinery's: what fails there is the name itself."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_machinery = frame.filename.startswith("<") or Path(frame.filename).parent in hidden
        if not is_machinery and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}: "
    return ""
