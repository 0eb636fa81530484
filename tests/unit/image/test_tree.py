"""Images as trees of layers."""

import msgspec

from barchan.image.template import Layer, Template
from barchan.image.tree import LayerNode, forest


def template(name: str, *layers: str) -> Template:
    stored = tuple(Layer(digest, "erofs") for digest in layers)
    return Template(
        name=name,
        digest=name,
        layers=stored,
        size_bytes=0,
        created_unix_s=0,
        user="root",
        workdir="/",
        env={},
        source="",
    )


def drawn(nodes: list[LayerNode]) -> list[object]:
    return [(node.digest, node.images, drawn(node.children)) for node in nodes]


def test_images_stand_on_their_bases() -> None:
    """Each layer once for each thing it lies on; names where an image ends, also in the middle, also several."""
    templates = [
        template("base", "b"),
        template("one", "1", "m", "b"),
        template("same", "1", "m", "b"),
        template("other", "m", "x"),
        template("two", "2", "m", "b"),
        template("empty"),
    ]
    sizes = {layer: 10 for item in templates for layer in item.layers}
    roots = forest(templates, sizes)
    on_b = [("m", [], [("1", ["one", "same"], []), ("2", ["two"], [])])]
    assert drawn(roots) == [("b", ["base"], on_b), ("x", [], [("m", ["other"], [])])]
    assert msgspec.json.decode(msgspec.json.encode(roots))[0]["children"][0]["size_bytes"] == 10
    assert forest([], {}) == []
