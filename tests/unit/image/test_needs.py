"""What an image needs of a backend goes wherever the image goes."""

import msgspec
import pytest

from barchan.errors import InvalidSpec
from barchan.image.compose import compose, config_of
from barchan.image.oci import ImageConfig, image_config, template_config
from barchan.image.template import Layer, Template, TemplateConfig, template_digest
from barchan.model.sandbox import Need

LAYER = Layer("a" * 64, "erofs")


def template(name: str, *needs: Need) -> Template:
    return Template(
        name=name,
        digest="b" * 64,
        layers=(LAYER,),
        size_bytes=1,
        created_unix_s=0.0,
        user="root",
        workdir="/",
        env={},
        source="",
        needs=needs,
    )


def test_it_counts_in_the_digest() -> None:
    """Two images that ask for different isolation are two; one that asks for nothing is what it was before."""
    plain, needy = TemplateConfig(name="x"), TemplateConfig(name="x", needs=("own_kernel",))
    assert template_digest(plain, (LAYER,)) != template_digest(needy, (LAYER,))
    assert config_of(template("x", "own_kernel")).needs == ("own_kernel",)


def test_composed_images_need_what_each_needs() -> None:
    """In order, and each once."""
    made = compose(template("x", "own_kernel"), [template("y", "fork", "own_kernel"), template("z")])
    assert made.needs == ("fork", "own_kernel")


def test_it_goes_through_the_form_of_other_tools() -> None:
    """As a label, there and back; a label that says what nobody has is refused."""
    written = image_config(template("x", "own_kernel", "screen"), [])
    read = msgspec.json.decode(written, type=ImageConfig)
    assert template_config(read, name="x", source="x").needs == ("own_kernel", "screen")
    assert b"barchan.needs" not in image_config(template("x"), [])
    wrong = msgspec.json.decode(written.replace(b"own_kernel", b"own_kernal"), type=ImageConfig)
    with pytest.raises(InvalidSpec, match=r"there\.tar: barchan\.needs is of own_kernel"):
        template_config(wrong, name="x", source="there.tar")
