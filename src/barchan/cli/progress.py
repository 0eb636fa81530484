"""What goes on, shown on stderr while it does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal, else a line a stage."""
    if not sys.stderr.isatty():
        yield lambda stage: print(f"{title}: {stage}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda stage: bar.update(task, description=f"{title}: {stage}")
