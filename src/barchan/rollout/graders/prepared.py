"""The image that holds what a script grader's command installs: its name, made from all that the run depends on."""

import hashlib

import msgspec

from barchan.model.image import VERIFIER_PREFIX
from barchan.rollout.task import ScriptGrader

PREFIX = VERIFIER_PREFIX
FORMAT = 1  # of the names
# Installers then say at once what they have and what not, instead of asking a network that is not there.
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_OFFLINE": "1"}


def image_name(spec: ScriptGrader, base: str) -> str:
    """Name of the image with what a grader's command installs. Reads the grader's files.

    Args:
        base: Name of the image that the grader's sandboxes start from.

    Raises:
        InvalidSpec: One of its files can't be read.
    """
    from barchan.sdk.put import put_digest  # with its hashing, which most graders don't need

    files = [[item.path, item.mode, item.user, put_digest(item)] for item in spec.files]
    asked = [spec.command, spec.user, spec.cwd, sorted(spec.env.items()), spec.network, spec.allow_hosts]
    content = msgspec.json.encode([FORMAT, base, asked, files])
    return PREFIX + hashlib.sha256(content).hexdigest()[:24]
