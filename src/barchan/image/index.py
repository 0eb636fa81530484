"""The template files of one store, as one process knows them: read again only when they have changed."""

import os
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from barchan.errors import BlobCorrupt
from barchan.image.template import FORMAT, Layer, Template

SUFFIX = ".json"


def template_file(name: str) -> str:
    """The name of a template's file; other names than templates can have give one, too."""
    return quote(name, safe="@+:") + SUFFIX


def layer_file(layer: Layer) -> str:
    return f"{layer.digest}.{layer.kind}"


class TemplateIndex:
    """Reads templates, and counts how many of them name each layer.

    A file counts as unchanged while inode, time and size are: one stat each. That is still too much for a count that
    every commit wants, so the count is good for as long as the store's generation is the same, and the directory's
    own time, which also tells of files that were put there by other means. Only who holds the store's lock may count.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[tuple[int, int, int], Template]] = {}
        self._by_digest: dict[str, str] = {}  # one of the known files with that digest
        self._counted: dict[str, tuple[str, ...]] = {}
        self._uses: Counter[str] = Counter()
        self._counted_at: tuple[bytes, int] | None = None

    def get(self, file: str) -> Template | None:
        """The template of that file, if there is one.

        Raises:
            BlobCorrupt: The file is damaged, or of a newer release.
        """
        path = f"{self._directory}/{file}"
        try:
            found = os.stat(path)
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            known = self._known.get(file)
            if known is None or known[0] != version:
                self._forget(file)
                known = self._known[file] = (version, _decode(Path(path)))
                self._by_digest[known[1].digest] = file
        except FileNotFoundError:
            self._forget(file)
            return None
        return known[1]

    def all(self) -> list[Template]:
        """Every template that can be read, by name."""
        files = self._files()
        self._forget_others(files)
        found = []
        for file in files:
            with suppress(BlobCorrupt):  # `verify` tells of it, and so does whoever asks for it by name
                found.append(self.get(file))
        return sorted((template for template in found if template is not None), key=lambda template: template.name)

    def names(self) -> list[str]:
        """The name of every template, whether it can be read or not."""
        return sorted(unquote(file.removesuffix(SUFFIX)) for file in self._files())

    def of_digest(self, digest: str) -> list[Template]:
        """Those whose digest begins like this; of a whole one any will do, and a known one is looked at alone."""
        file = self._by_digest.get(digest)
        template = self.get(file) if file is not None else None
        if template is not None and template.digest == digest:
            return [template]
        return [template for template in self.all() if template.digest.startswith(digest)]

    def _forget(self, file: str) -> None:
        known = self._known.pop(file, None)
        if known is not None and self._by_digest.get(known[1].digest) == file:
            self._by_digest.pop(known[1].digest, None)

    def _forget_others(self, files: Container[str]) -> None:
        """What other processes have removed."""
        for file in list(self._known):
            if file not in files:
                self._forget(file)

    def _files(self) -> set[str]:
        try:
            return {file for file in os.listdir(self._directory) if file.endswith(SUFFIX)}
        except FileNotFoundError:
            return set()

    def uses(self, generation: bytes) -> Mapping[str, int]:
        """How many templates name each layer, by the layer's file; one that none names may be missing or 0."""
        at = (generation, os.stat(self._directory).st_mtime_ns)
        if at != self._counted_at:
            self._counted_at = None
            files = self._files()
            self._forget_others(files)
            for file in files | self._counted.keys():
                self._count(file, self.get(file) if file in files else None)
            self._counted_at = at
        return self._uses

    def changed(self, file: str, template: Template | None, before: bytes, after: bytes) -> None:
        """This process itself has changed one file; `before`, `after`: the generations."""
        if template is None:
            self._forget(file)
        if self._counted_at is not None and self._counted_at[0] == before:
            self._count(file, template)
            self._counted_at = (after, os.stat(self._directory).st_mtime_ns)

    def _count(self, file: str, template: Template | None) -> None:
        now = _layer_files(template.layers) if template is not None else ()
        known = self._counted.get(file, ())
        if known == now:
            return
        self._uses.subtract(known)
        self._uses.update(now)
        for gone in known:
            if not self._uses[gone]:
                del self._uses[gone]
        if now:
            self._counted[file] = now
        else:
            self._counted.pop(file, None)


def _layer_files(layers: Iterable[Layer]) -> tuple[str, ...]:
    return tuple(layer_file(layer) for layer in layers)


def _remedy(path: Path) -> str:
    name = unquote(path.name.removesuffix(SUFFIX))
    return f"(try: barchan image remove {name}, then build or pull it again)"


def _decode(path: Path) -> Template:
    try:
        template = msgspec.json.decode(path.read_bytes(), type=Template)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(f"template {path.name} can't be read: {error} {_remedy(path)}") from error
    if template.format != FORMAT:
        raise BlobCorrupt(
            f"template {path.name} has format {template.format}; this release reads {FORMAT} {_remedy(path)}"
        )
    return template
