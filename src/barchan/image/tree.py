"""Images as trees of layers: what stands on what, and what they share."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from barchan.image.template import Layer, Template


class LayerNode(Struct, kw_only=True):
    """A layer in one place of the forest, under it the layers that lie on it.

    Attributes:
        images: Names of those of which it is the topmost layer.
    """

    digest: str
    kind: str
    size_bytes: int
    images: list[str] = []
    children: "list[LayerNode]" = []


def forest(templates: Iterable[Template], sizes: Mapping[Layer, int]) -> list[LayerNode]:
    """The lowest layers of all images, in the order of the images' names, with everything that stands on them.

    Args:
        sizes: Bytes of every layer that the templates name.
    """
    roots: list[LayerNode] = []
    known: dict[tuple[Layer, ...], LayerNode] = {}
    for template in templates:
        siblings, node = roots, None
        stack = template.layers[::-1]
        for height in range(1, len(stack) + 1):
            node = known.get(stack[:height])
            if node is None:
                layer = stack[height - 1]
                node = LayerNode(digest=layer.digest, kind=layer.kind, size_bytes=sizes[layer])
                known[stack[:height]] = node
                siblings.append(node)
            siblings = node.children
        if node is not None:
            node.images.append(template.name)
    return roots
