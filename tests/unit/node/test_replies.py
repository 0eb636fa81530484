"""What a body that does not fit is answered with."""

from typing import Any

import msgspec
import pytest

from barchan.model.sandbox import SandboxSpec, Zygote
from barchan.node.replies import known


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"template": "debian", "zygote": {"import": ["json"]}}, Zygote.__struct_fields__),
        ({"template": "debian", "memory": 1}, SandboxSpec.__struct_fields__),
        ({"template": 1}, ()),
    ],
)
def test_an_unknown_field_is_answered_with_those_there_are(body: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Those of the part that it is in."""
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, SandboxSpec)
    assert known(SandboxSpec, str(caught.value)) == (f" (there are: {', '.join(fields)})" if fields else "")
