"""`barchan pause`, `barchan hibernate` and `barchan resume`."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated

from cyclopts import Parameter
from msgspec.structs import replace

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, human_bytes, key_values, one_line, print_error, print_json
from barchan.cli.run import Words
from barchan.errors import BarchanError, InvalidSpec
from barchan.model.tiers import TierChange

All = Annotated[bool, Parameter(name="--all")]


def pause(
    *sandboxes: str,
    label: Words = (),
    all_: All = False,
    page_out: bool = False,
    common: Common = DEFAULTS,
) -> int:
    """Stop sandboxes until they are needed: their memory stays, and any request wakes them.

    For example:

        barchan pause sb_x1
        barchan pause --label job=eval
        barchan pause --all --page-out

    Args:
        sandboxes: Their ids.
        label: KEY=VALUE: those that have it; may be repeated, then all must match.
        all_: Every sandbox of the node.
        page_out: Give their cold memory away, too, to swap where the host has some.
    """
    with barchan.connect(**common.connection) as client:
        labels = _labels(sandboxes, label, all_=all_)
        many = client.page_out_many if page_out else client.pause_many
        return _summed(many(labels=labels, sandbox_ids=sandboxes, progress=_told(common)), common)


def hibernate(
    *sandboxes: str, label: Words = (), all_: All = False, push: bool = False, common: Common = DEFAULTS
) -> int:
    """Put sandboxes on disk with their processes and memory; any request brings them back.

    One that holds what can't be stored, as a connection to the outside, stays paused.

    For example:

        barchan hibernate sb_x1
        barchan hibernate --all --push

    Args:
        sandboxes: Their ids.
        label: KEY=VALUE: those that have it; may be repeated, then all must match.
        all_: Every sandbox of the node.
        push: Send them to the node's blob store, too, from where another node may take them (barchan resume --adopt).
    """
    with barchan.connect(**common.connection) as client:
        labels = _labels(sandboxes, label, all_=all_)
        hibernated = partial(client.hibernate_many, labels=labels, sandbox_ids=sandboxes)
        if not push:
            return _summed(hibernated(progress=_told(common)), common)
        sent: list[Future[TierChange]] = []
        sending = ThreadPoolExecutor(1)  # each as it is on disk; who tells of that can't ask the node
        try:
            hibernated(progress=lambda change: sent.append(sending.submit(_pushed, client, change, common)))
            return _summed([one.result() for one in sent], common)
        finally:
            sending.shutdown(cancel_futures=True)


def _pushed(client: barchan.Client, change: TierChange, common: Common) -> TierChange:
    """One of them, sent to the store, or told why not."""
    if not change.refused:
        try:
            client.attach(change.sandbox_id).push()
        except BarchanError as error:
            change = replace(change, refused=str(error))
    _told(common)(change)
    return change


def resume(
    *sandboxes: str, label: Words = (), all_: All = False, adopt: bool = False, common: Common = DEFAULTS
) -> int:
    """Wake sandboxes. Nobody has to: any request does.

    For example:

        barchan resume sb_x1
        barchan resume --all

    Args:
        sandboxes: Their ids.
        label: KEY=VALUE: those that have it; may be repeated, then all must match.
        all_: Every sandbox of the node.
        adopt: First take those with these ids from the node's blob store, where another node has sent them.
    """
    if adopt and not sandboxes:
        raise InvalidSpec("--adopt goes with ids")
    with barchan.connect(**common.connection) as client:
        labels = _labels(sandboxes, label, all_=all_)
        for sandbox in sandboxes if adopt else ():
            client.adopt(sandbox, detach=True)
        return _summed(client.resume_many(labels=labels, sandbox_ids=sandboxes, progress=_told(common)), common)


def _labels(sandboxes: tuple[str, ...], label: Words, *, all_: bool) -> dict[str, str]:
    if sum((bool(sandboxes), bool(label), all_)) != 1:
        raise InvalidSpec("give either ids, or --label, or --all")
    return key_values(label, "--label")


def _told(common: Common) -> Callable[[TierChange], None]:
    """What shows each of them as it comes."""
    return print_json if common.json else _show


def _show(change: TierChange) -> None:
    what = one_line(change.refused) or f"{human_bytes(change.freed_bytes)} freed"
    sys.stdout.write(f"{change.sandbox_id}  {change.tier}  {what}\n")
    sys.stdout.flush()


def _summed(changes: Sequence[TierChange], common: Common) -> int:
    """The exit code: it fails if one of them is not where it should be."""
    refused = sum(bool(change.refused) for change in changes)
    if not changes and not common.json:
        sys.stdout.write("no sandboxes (try: barchan ps)\n")
    if refused:
        print_error(f"{refused} of {len(changes)} are not where they were asked to be", "barchan ps")
    return FAILED if refused else OK
